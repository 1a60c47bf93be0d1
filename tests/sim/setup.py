"""What a seed gives: a fleet, its budgets and limits, the time of day, and how much goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from price_keeper.domain import Caller
from price_keeper.org_calendar import Period, find_span, load_zone

from tests.sim import bedrock, network

ORG = "550e8400-e29b-41d4-a716-446655440000"
LABELS = ("premium", "standard", "economy")
FOCUSES = ("mixed", "mixed", "soft", "sticky", "hard", "hard", "limits", "journal", "calm")
ZONES = ("UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Auckland")
# Ordinary days, the last of a week and of a month, and those on which clocks are changed.
DAYS = ((2026, 11, 18), (2026, 11, 22), (2026, 11, 30), (2026, 11, 1), (2026, 3, 8), (2026, 4, 5), (2026, 9, 27))


@dataclass(frozen=True)
class Setup:
    seed: int
    focus: str
    sidecars: int
    callers: Sequence[Caller]
    zone: str
    period: str
    quota_scope: str
    enforcement: str
    quotas: dict[str, int]  # micro-USD
    is_sticky: bool
    shards: int
    normal_secs: int
    limits: dict[str, int | str] | None
    app_limits: bool
    starts_at: float
    steps: int
    odds: dict[str, float]  # of faults of the store
    ways: dict[str, float]  # of troubles of Bedrock
    tells_time: bool  # the store, with each answer
    wrong_by: Sequence[float]  # the clocks, by sidecar
    max_unflushed_usd: int
    on_store_down: str
    room: tuple[int, int]  # that a segment takes beforehand: least and most
    calls_at_most: int  # in one step
    aggregate_secs: float
    asked: Sequence[str]  # labels that callers ask for

    @property
    def is_one_machine(self) -> bool:
        """What tells no time is a file, and all who can open that go by one clock."""
        return self.limits is not None and not self.tells_time


def setup_of(seed: int, focus: str | None = None) -> Setup:
    chance = random.Random(f"{seed} of the simulator")
    drawn = chance.choice(FOCUSES)
    focus = focus or drawn  # also when it is the requested one, or a failure would be reported with another world
    some = chance.choice
    zone, period = some(ZONES), some(("day", "day", "day", "week", "month"))
    is_calm = focus == "calm"
    enforcement = {"hard": "hard", "soft": "soft", "sticky": "soft", "calm": "soft"}.get(focus) or some(
        ("soft", "soft", "hard", "shadow")
    )
    sidecars = some((1, 2, 2, 3, 3, 4))
    limited = focus == "limits" or (focus == "mixed" and chance.random() < 0.4)
    rpm, burst = some((12, 60, 240)), some((5, 20, 60))
    limits: dict[str, int | str] = {"rpm": rpm, "tpm": rpm * some((500, 2000)), "burst_secs": burst}
    if chance.random() < 0.15:
        limits["mode"] = "exact"
    found = Setup(
        seed=seed,
        focus=focus,
        sidecars=sidecars,
        callers=tuple(Caller(ORG, app, f"client of {app}") for app in ("web", "batch")[: some((1, 2))]),
        zone=zone,
        period=period,
        quota_scope=some(("APP", "ORG")),
        enforcement=enforcement,
        quotas=_quotas(chance, enforcement) if focus != "sticky" else _quickly_spent(chance),
        is_sticky=focus == "sticky" or chance.random() < 0.8,
        shards=some((8, 8, 16)),
        normal_secs=62 if is_calm else some((20, 62, 300)),
        limits=limits if limited else None,
        app_limits=chance.random() < 0.5,
        starts_at=_starts_at(chance, zone, period),
        steps=70 if focus == "sticky" else some((20, 30, 45, 70)),
        odds={} if is_calm else _some_of(chance, network.FAULTS, (0.02, 0.1, 0.3)),
        ways=_some_of(chance, bedrock.WAYS[1:], (0.05, 0.2)),
        tells_time=limited and chance.random() < 0.9,
        wrong_by=_wrong_by(chance, sidecars, 0.0 if is_calm else 0.4 if focus == "limits" else 0.15),
        max_unflushed_usd=some((1, 100, 100)),
        on_store_down=some(("serve", "serve", "refuse")),
        room=some(((0, 0), (300, 300), (5000, 5000), (4096, 65536))),
        calls_at_most=some((3, 6, 12)) if limited else some((1, 3, 6)),
        aggregate_secs=some((0.5, 1, 5, 60, 300)) if focus in ("soft", "mixed", "hard") else 60,
        asked=LABELS[:1] if focus == "sticky" else LABELS,
    )
    return replace(found, wrong_by=found.wrong_by[:1] * sidecars) if found.is_one_machine else found


def _quotas(chance: random.Random, enforcement: str) -> dict[str, int]:
    """A call of the dearest label costs some cents, and may cost ten times that under a hard budget."""
    top = (200_000, 600_000, 3_000_000) if enforcement == "hard" else (2_000, 10_000, 60_000)
    first = chance.choice(top)
    chain = {
        "premium": first,
        "standard": chance.choice((0, first // 4, first)),
        "economy": chance.choice((100, first)),
    }
    return dict(list(chain.items())[: chance.choice((1, 2, 3, 3, 3))])


def _quickly_spent(chance: random.Random) -> dict[str, int]:
    """One label after the other, within a minute or two."""
    return {"premium": chance.choice((2_000, 10_000)), "standard": chance.choice((5_000, 10_000)), "economy": 10**6}


def _starts_at(chance: random.Random, zone: str, period: str) -> float:
    """At noon, or a little before something ends."""
    noon = datetime(*chance.choice(DAYS), 12, tzinfo=UTC).timestamp()
    if chance.random() < 0.5:
        return noon
    which = chance.choice((Period.DAY, Period(period)))
    return find_span(which, noon, load_zone(zone)).end - chance.uniform(1, 60)


def _some_of(chance: random.Random, names: Sequence[str], odds: Sequence[float]) -> dict[str, float]:
    """One or two troubles of many, so that one of them does not hide what another one shows."""
    found = chance.sample(list(names), chance.choice((0, 1, 2, 3)))
    return {name: chance.choice(list(odds)) for name in found}


def _wrong_by(chance: random.Random, sidecars: int, odds: float) -> list[float]:
    """A fleet's clocks differ by a second or two; sometimes one is altogether wrong."""
    found = [chance.choice((-2.0, -0.7, 0.0, 0.0, 1.3, 2.0)) for _ in range(sidecars)]
    if chance.random() < odds:
        found[chance.randrange(sidecars)] = chance.choice((-86_400.0, -3600.0, -30.0, 30.0, 3600.0, 86_400.0))
    return found
