"""Rate and concurrency limits of the control API.

Each caller has a token bucket. Buckets of authenticated callers are shared by all processes on one store; those of
anonymous callers are local, because otherwise each address could make the store write a row.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol

from price_keeper.errors import Busy
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.rates.token_bucket import MILLI, RateBucket, RateLimit
from price_keeper.stores import schema

MAX_CALLERS = 10_000

ANONYMOUS_PREFIX = "@"  # begins the name of an anonymous caller, which is followed by its network
_REQUESTS = "calls"
_NANOS = 10**9


class ApiRateDecision(NamedTuple):
    """`wait_seconds` is 0 if the request is admitted; after `reset_seconds` the bucket is full again."""

    limit: int
    remaining: int
    reset_seconds: float
    wait_seconds: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        return {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(math.ceil(self.reset_seconds)),
        }


class ApiRateLimiter(Protocol):
    """Limits the rate of requests of each caller."""

    async def take(self, caller: str) -> ApiRateDecision:
        """Takes one token for a request of this caller."""


class LocalApiRateLimiter:
    """Token buckets in memory, with `burst` tokens and a refill of `per_second`. One number is kept for each caller:
    the time at which its bucket is full."""

    def __init__(self, monotonic: Callable[[], float], burst: int, per_second: float) -> None:
        self._monotonic = monotonic
        self._burst = burst
        self._nanos_per_request = round(_NANOS / per_second)
        self._full_at: dict[str, int] = {}

    async def take(self, caller: str) -> ApiRateDecision:
        return self.take_now(caller)

    def take_now(self, caller: str) -> ApiRateDecision:
        now = round(self._monotonic() * _NANOS)
        full_at = max(self._full_at.get(caller, now), now)
        debt = full_at + self._nanos_per_request - now - self._burst * self._nanos_per_request
        if debt > 0:
            return ApiRateDecision(self._burst, 0, (full_at - now) / _NANOS, debt / _NANOS)
        self._evict(caller, now)
        self._full_at[caller] = full_at = full_at + self._nanos_per_request
        remaining = self._burst - -(-(full_at - now) // self._nanos_per_request)
        return ApiRateDecision(self._burst, remaining, (full_at - now) / _NANOS)

    def _evict(self, caller: str, now: int) -> None:
        """Make room for a new caller: drop full buckets, then the oldest ones."""
        if caller in self._full_at or len(self._full_at) < MAX_CALLERS:
            return
        self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        for oldest in list(self._full_at)[: max(0, len(self._full_at) - MAX_CALLERS // 2)]:
            del self._full_at[oldest]


class SharedApiRateLimiter:
    """Token buckets shared by all processes on one store, through rate leases. Anonymous callers use the local limiter,
    because otherwise each of their addresses could make the store write a row."""

    def __init__(
        self, leasing: RateLeaseManager, anonymous: LocalApiRateLimiter, burst: int, per_second: float
    ) -> None:
        self._leasing = leasing
        self._anonymous = anonymous
        self._burst = burst
        self._per_second = per_second
        self._limit = RateLimit(_REQUESTS, burst * MILLI, round(per_second * MILLI), 1000)
        self._buckets: dict[str, tuple[RateBucket]] = {}

    async def take(self, caller: str) -> ApiRateDecision:
        if caller.startswith(ANONYMOUS_PREFIX):
            return self._anonymous.take_now(caller)
        admission = await self._leasing.admit(f"control {caller}", self._get_buckets(caller), {_REQUESTS: MILLI})
        remaining = dict(self._leasing.estimate_remaining(admission)).get(_REQUESTS, 0) // MILLI
        remaining = max(0, min(remaining, self._burst - 1))
        reset = (self._burst - remaining) / self._per_second
        if not admission.is_admitted:
            return ApiRateDecision(self._burst, 0, reset, (admission.wait_ms or MILLI) / 1000)
        self._leasing.settle(admission, None)
        return ApiRateDecision(self._burst, remaining, reset)

    def _get_buckets(self, caller: str) -> tuple[RateBucket]:
        """The caller's bucket: the same object each time, because its lease is found by it."""
        buckets = self._buckets.get(caller)
        if buckets is None:
            if len(self._buckets) >= MAX_CALLERS:
                self._buckets.clear()
            buckets = self._buckets[caller] = (RateBucket(schema.control_bucket_key(caller), (self._limit,), 1),)
        return buckets


class BoundedConcurrency:
    """Lets `max_running` blocks run at once and `max_waiting` more wait."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._running = asyncio.Semaphore(max_running)
        self._free_places = max_running + max_waiting

    async def __aenter__(self) -> None:
        """Waits for a free place. Raises Busy if too many wait already."""
        if self._free_places <= 0:
            raise Busy("too many requests of this kind at once; try again", retry_after=2)
        self._free_places -= 1
        try:
            await self._running.acquire()
        except BaseException:
            self._free_places += 1
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free_places += 1
        self._running.release()
