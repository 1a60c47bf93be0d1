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

from cachetools import LRUCache

from price_keeper.errors import Busy
from price_keeper.leaky_buckets import LeakyBuckets
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.rates.token_bucket import MILLI, RateBucket, RateLimit
from price_keeper.stores import schema

MAX_CALLERS = 10_000

ANONYMOUS_PREFIX = "@"  # begins the name of an anonymous caller, which is followed by its network
_REQUESTS = "calls"


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
    """Token buckets in memory, with `burst` tokens and a refill of `per_second`."""

    def __init__(self, monotonic: Callable[[], float], burst: int, per_second: float) -> None:
        self._burst = burst
        self._buckets = LeakyBuckets(monotonic, burst, 1 / per_second, MAX_CALLERS)

    async def take(self, caller: str) -> ApiRateDecision:
        return self.take_now(caller)

    def take_now(self, caller: str) -> ApiRateDecision:
        wait = self._buckets.add(caller)
        return ApiRateDecision(self._burst, self._buckets.room(caller), self._buckets.drain_seconds(caller), wait)


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
        self._buckets = LRUCache[str, tuple[RateBucket]](MAX_CALLERS)

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
