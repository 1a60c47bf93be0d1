"""A keeper of leases before a scripted limiter, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from price_keeper.rates.bucket_client import NORMAL, REFUSED, BucketClient, Grant
from price_keeper.rates.rate_lease_manager import RateDecision, RateLeaseManager
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores.contract import Key
from price_keeper.tasks import Tasks

from tests.support.rate_limit_fleet import LeapingLoop, LoopClock, run_leaping

COSTS = {"rpm": 1000, "tpm": 500_000}


def make_buckets(rpm: int = 1200, scope: str = "app", **more: int) -> list[RateBucket]:
    rates = {"rpm": rpm, "tpm": 1_200_000} | more
    limits = tuple(RateLimit(name, amount * 1000, amount * 1000, 60_000) for name, amount in rates.items())
    return [RateBucket(Key("rate-buckets", scope, "BUCKET#RATE"), limits, rpm)]


BUCKETS = make_buckets()


class ScriptedBucketClient:
    """A limiter that gives what is requested, unless set otherwise, and remembers its calls."""

    def __init__(self) -> None:
        self.latency = 0.01
        self.conflicts = 0
        self.failure: Exception | None = None
        self.grant_for: Callable[[Mapping[str, int]], Grant] | None = None
        self.requests: list[tuple[str, dict[str, int]]] = []
        self.used: dict[str, int] = {}
        self.adjusted: list[tuple[dict[str, int], dict[str, int]]] = []
        self.pending = 0
        self.flushes = 0

    async def _grant(self, what: str, wants: Mapping[str, int]) -> Grant:
        self.requests.append((what, dict(wants)))
        await asyncio.sleep(self.latency)
        if self.failure is not None:
            raise self.failure
        if self.grant_for is not None:
            return self.grant_for(wants)
        return Grant(dict(wants), 0, dict.fromkeys(wants, 10**9), NORMAL, 1)

    async def lease(self, buckets: Any, wants: Any, needs: Any, used: Any, share: Any = (1, 2)) -> Grant:
        grant = await self._grant("lease", wants)
        if not grant.is_refused:
            self._add_used(used)
        return grant

    async def acquire(self, buckets: Any, costs: Any, used: Any = None) -> Grant:
        grant = await self._grant("acquire", costs)
        if not grant.is_refused:
            self._add_used(costs)
        return grant

    async def adjust(self, buckets: Any, taken: Any, used: Any) -> None:
        self.adjusted.append((dict(taken), dict(used)))
        self._add_used(used)

    async def flush_pending(self, *, is_last: bool = False) -> None:
        self.flushes += 1
        self.pending *= not is_last

    def _add_used(self, used: Mapping[str, int]) -> None:
        for name, amount in used.items():
            self.used[name] = self.used.get(name, 0) + amount


def refuse_all(_: Mapping[str, int]) -> Grant:
    return Grant({}, 700, {"rpm": 0, "tpm": 0}, REFUSED, 1, "app/rpm")


class LeaseManagerHarness:
    def __init__(self, limiter: ScriptedBucketClient, leasing: RateLeaseManager) -> None:
        self.client, self.lease_manager = limiter, leasing

    async def admit(self, name: str = "web", of: list[RateBucket] | None = None, **policy: bool) -> RateDecision:
        return await self.lease_manager.admit(name, of or BUCKETS, COSTS, **policy)


def run_simulated(work: Callable[[LeaseManagerHarness], Awaitable[None]], max_callers: int = 100) -> None:
    async def within(loop: LeapingLoop) -> None:
        clock = LoopClock(loop)
        async with Tasks(clock) as tasks:
            limiter = ScriptedBucketClient()
            await work(
                LeaseManagerHarness(
                    limiter, RateLeaseManager(cast(BucketClient, limiter), clock, tasks, lambda: 0.5, max_callers)
                )
            )
            await asyncio.sleep(30)  # what was begun comes to its end

    run_leaping(within)
