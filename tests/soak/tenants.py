"""Who calls in a soak, at which prices, on which budgets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.hard_budget_processes import noon_time_zone
from tests.support.simulated import CLAUDE, NOVA

MODELS = {"premium": CLAUDE, "economy": NOVA}
FORMATS = {"premium": "anthropic", "economy": "nova"}
MOST_OUTPUT = 300
PICO = 10**6  # of a dollar for a million tokens, for one token
AMPLE = 10**12

# By version of the configuration: input, output, and of caches. No two are alike, so that each tells which held.
_KINDS = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h")
PRICES: tuple[dict[str, tuple[float, ...]], ...] = (
    {"premium": (3, 15, 0.3, 3.75, 6), "economy": (0.2, 0.8, 0.05, 0.2, 0.2)},
    {"premium": (3.1, 17, 0.31, 3.8, 6.1), "economy": (0.23, 0.9, 0.06, 0.3, 0.3)},
)


def pico(version: int, label: str, tokens: tuple[int, ...]) -> int:
    """By hand."""
    prices = PRICES[version % len(PRICES)][label]
    return sum(count * round(price * PICO) for count, price in zip(tokens, prices, strict=True))


def labels(version: int) -> dict[str, Any]:
    prices = PRICES[version % len(PRICES)]
    return {
        label: {
            "model": model,
            "format": FORMATS[label],
            "prices_usd_per_1m": dict(zip(_KINDS, prices[label], strict=True)),
            "price_source": "config",
            "max_output_tokens": MOST_OUTPUT,
        }
        for label, model in MODELS.items()
    }


def zone_of_the_next_midnight() -> str:
    """In which a day ends at the next full hour."""
    hour = (datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=1)).hour
    return f"Etc/GMT+{hour}" if hour <= 12 else f"Etc/GMT-{24 - hour}"  # those zones count westwards


@dataclass(frozen=True)
class App:
    org: str
    name: str
    labels: tuple[str, ...]
    weight: float  # how much of the load is its own

    @property
    def path(self) -> str:
        return f"/api/v1/orgs/{self.org}/apps/{self.name}"


TURNING = "50ac0000-0000-4000-8000-000000000001"  # whose day ends on the way
SHARED = "50ac0000-0000-4000-8000-000000000002"
HARD = "50ac0000-0000-4000-8000-000000000003"

STEADY = App(TURNING, "steady", ("premium", "economy"), 4)
FLIPPING = App(TURNING, "flipping", ("premium",), 2)  # until the quota of premium is spent
LIMITED = App(TURNING, "limited", ("economy",), 1)
SUBMITTED = App(TURNING, "told", (), 0)  # its usage is submitted
LEFT = App(SHARED, "left", ("premium", "economy"), 2)
RIGHT = App(SHARED, "right", ("economy",), 2)
SPENDING = App(HARD, "spending", ("premium", "economy"), 2)
APPS = (STEADY, FLIPPING, LIMITED, SUBMITTED, LEFT, RIGHT, SPENDING)

LIMITED_RPM = 120
A_CALL = {"premium": 1_250, "economy": 70}  # micro-USD, more or less


def orgs() -> dict[str, dict[str, Any]]:
    """Bodies of their puts."""
    turning, noon = zone_of_the_next_midnight(), noon_time_zone()
    return {
        TURNING: _org("turning", turning, "APP", AMPLE),
        SHARED: _org("shared", noon, "ORG", AMPLE),
        HARD: _org("hard", noon, "APP", AMPLE) | {"enforcement": "hard"},
    }


def _org(name: str, zone: str, scope: str, quota: int) -> dict[str, Any]:
    return {
        "org_name": name,
        "timezone": zone,
        "quota_scope": scope,
        "model_ordering": list(MODELS),
        "quotas": dict.fromkeys(MODELS, quota),
    }


def app_body(app: App, **more: Any) -> dict[str, Any]:
    limits = {"limits": {"rpm": LIMITED_RPM}} if app is LIMITED else {}
    return {"app_name": app.name, **limits, **more}
