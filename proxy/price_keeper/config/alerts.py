"""The keys of alerts: at which shares of a quota one is raised, and where it is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from price_keeper.config import checks as must_be
from price_keeper.config.reader import RuleViolation, constraints

MAX_THRESHOLDS = 20  # each is a marker in the store for every label and day
MAX_THRESHOLD_PCT = 999  # as wide as a marker's key

_WEBHOOK_URL = re.compile(r"(?P<origin>https://[^/?#@\\\s]+)(?P<rest>[/?][!\"$-~]*)?", re.ASCII)
_MAX_WEBHOOK_URL = 2048


def _check_thresholds(thresholds: tuple[int, ...]) -> str | None:
    if len(thresholds) > MAX_THRESHOLDS:
        return f"expected at most {MAX_THRESHOLDS} thresholds"
    if any(not 1 <= pct <= MAX_THRESHOLD_PCT for pct in thresholds):
        return f"expected percentages of 1 to {MAX_THRESHOLD_PCT}"
    return None if len(set(thresholds)) == len(thresholds) else "expected each threshold once"


def _check_webhook_url(text: str) -> str | None:
    match = _WEBHOOK_URL.fullmatch(text) if len(text) <= _MAX_WEBHOOK_URL else None
    if match is None or must_be.url(match["origin"]) is not None:
        return "expected https://host[:port][/path][?query], without a user or a fragment"
    return None


def exactly_one_secret(secret_env: str | None, secret_file: str | None) -> Iterator[RuleViolation]:
    if (secret_env is None) is (secret_file is None):
        found = "none" if secret_env is None else "both"
        yield (), f"exactly one of secret_env and secret_file is needed, found {found}"


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """What is sent there is signed with the secret, so that the receiver can tell it from anybody else's."""

    rules = (exactly_one_secret,)

    # Many receivers take whoever knows the whole address for a friend, so it is told to nobody.
    url: str = field(repr=False, metadata=constraints(_check_webhook_url, private=True))
    secret_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    secret_file: str | None = field(default=None, metadata=constraints(must_be.path))


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    thresholds_pct: tuple[int, ...] = field(default=(50, 80, 95, 100), metadata=constraints(_check_thresholds))
    webhook: WebhookConfig | None = None
