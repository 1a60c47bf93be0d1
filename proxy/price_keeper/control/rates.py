"""How often somebody may call: a bucket for each, which all processes share for those who are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from price_keeper.limits.bucket import MILLI, RateBucket, RateLimit
from price_keeper.limits.leasing import RateLeaseManager
from price_keeper.stores import schema

MOST_REMEMBERED = 10_000

NOBODY = "@"  # begins the name of whoever has shown nothing, which is his address
_CALLS = "calls"
_NANOS = 10**9


class Taken(NamedTuple):
    """`wait` is 0 where the call may go on; `reset` is in how many seconds the bucket is full again."""

    limit: int
    remaining: int
    reset: float
    wait: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        return {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(math.ceil(self.reset)),
        }


class Rates(Protocol):
    async def take(self, who: str) -> Taken:
        """One call of theirs."""


class LocalRates:
    """A bucket of `burst` calls that fills by `per_second`. Of each caller one number is kept: when his is full."""

    def __init__(self, monotonic: Callable[[], float], burst: int, per_second: float) -> None:
        self._monotonic = monotonic
        self._burst = burst
        self._each = round(_NANOS / per_second)
        self._full_at: dict[str, int] = {}

    async def take(self, who: str) -> Taken:
        return self.taken(who)

    def taken(self, who: str) -> Taken:
        now = round(self._monotonic() * _NANOS)
        full_at = max(self._full_at.get(who, now), now)
        over = full_at + self._each - now - self._burst * self._each
        if over > 0:
            return Taken(self._burst, 0, (full_at - now) / _NANOS, over / _NANOS)
        self._make_room(who, now)
        self._full_at[who] = full_at = full_at + self._each
        left = self._burst - -(-(full_at - now) // self._each)
        return Taken(self._burst, left, (full_at - now) / _NANOS)

    def _make_room(self, who: str, now: int) -> None:
        """Buckets that are full need not be remembered; past the bound the oldest go, full or not."""
        if who in self._full_at or len(self._full_at) < MOST_REMEMBERED:
            return
        self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        for oldest in list(self._full_at)[: max(0, len(self._full_at) - MOST_REMEMBERED // 2)]:
            del self._full_at[oldest]


class SharedRates:
    """As `LocalRates`, over all processes on one store. Whoever has shown nothing stays with this one: he could have a
    row written for each address."""

    def __init__(self, leasing: RateLeaseManager, strangers: LocalRates, burst: int, per_second: float) -> None:
        self._leasing = leasing
        self._strangers = strangers
        self._burst = burst
        self._per_second = per_second
        self._limit = RateLimit(_CALLS, burst * MILLI, round(per_second * MILLI), 1000)
        self._buckets: dict[str, tuple[RateBucket]] = {}

    async def take(self, who: str) -> Taken:
        if who.startswith(NOBODY):
            return self._strangers.taken(who)
        admission = await self._leasing.admit(f"control {who}", self._bucket_of(who), {_CALLS: MILLI})
        left = dict(self._leasing.estimate_remaining(admission)).get(_CALLS, 0) // MILLI
        left = max(0, min(left, self._burst - 1))
        reset = (self._burst - left) / self._per_second
        if not admission.is_admitted:
            return Taken(self._burst, 0, reset, (admission.wait_ms or MILLI) / 1000)
        self._leasing.settle(admission, None)
        return Taken(self._burst, left, reset)

    def _bucket_of(self, who: str) -> tuple[RateBucket]:
        """The same one each time, by which its lease is known."""
        found = self._buckets.get(who)
        if found is None:
            if len(self._buckets) >= MOST_REMEMBERED:
                self._buckets.clear()
            found = self._buckets[who] = (RateBucket(schema.control_bucket_key(who), (self._limit,), 1),)
        return found
