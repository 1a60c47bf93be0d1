"""Leases, and calls that take from them, for tests."""

from __future__ import annotations

from price_keeper.rates.rate_lease import RateLease, TopUpPlan
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores.contract import Key

CALL = (1000, 500_000)  # one request of 500 tokens, in thousandths
FULL = 10**9


def make_limit(name: str, per_minute: int, capacity: int | None = None) -> RateLimit:
    return RateLimit(name, (per_minute if capacity is None else capacity) * 1000, per_minute * 1000, 60_000)


def make_bucket(*limits: RateLimit, name: str = "app") -> RateBucket:
    return RateBucket(Key("rate-buckets", name, "BUCKET#RATE"), limits, 1)


APP = make_bucket(make_limit("rpm", 1200), make_limit("tpm", 1_200_000))


def make_lease(*buckets: RateBucket, held: tuple[int, ...] | None = None) -> RateLease:
    new_lease = RateLease(buckets or (APP,), 0.0, lambda: 0.5)
    if held is not None:
        new_lease.held = list(held)
    return new_lease


def top_up(held_lease: RateLease, got: float, now: float, level: int = FULL, took: float = 0.01) -> TopUpPlan:
    """It asks, and is given so large a part of what it wants."""
    plan = held_lease.plan_top_up(now - took)
    taken = {name: int(amount * got) for name, amount in plan.wants.items()}
    remaining = {name: level - taken[name] for name in taken}
    held_lease.on_granted(plan, taken, remaining, now)
    return plan


def take_steadily(held_lease: RateLease, until: float, interval: float = 0.05, since: float = 0.0) -> None:
    """Twenty calls a second, whatever becomes of them."""
    for number in range(round((until - since) / interval)):
        held_lease.take(CALL, since + number * interval)
