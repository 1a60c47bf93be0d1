"""Admit calls against rate leases, and top up each lease before a call has to wait for it.

START HERE: `RateLeaseManager.try_admit` (no I/O) and `admit`. A call that finds enough tokens in its caller's lease
never waits. There is at most one top-up in flight for a caller, however many calls wait for it. A call waits at most
`STORE_TIMEOUT_SECONDS`; after that, and while the store is unavailable, `OfflineLimiter` decides, or the call fails
with Busy. Callers whose limits are in mode `exact` use `ExactLimiter`: one write for each call.

Every admitted `RateDecision` must be settled exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from price_keeper.clock import Clock
from price_keeper.errors import Busy, StoreError, StoreThrottled, TransactionFailed
from price_keeper.rates.bucket_client import RETRY, BucketClient, Grant
from price_keeper.rates.rate_lease import (
    NEEDS_TOP_UP,
    TAKEN,
    TAKEN_BUT_LOW,
    Costs,
    RateLease,
    TopUpPlan,
    select_slowest_refill,
)
from price_keeper.rates.token_bucket import RateBucket
from price_keeper.single_flight import SingleFlight
from price_keeper.tasks import Tasks

Buckets = Sequence[RateBucket]
Amounts = Mapping[str, int]

LOCAL, WAITED, EXACT, ALONE, REFUSED = "local", "waited", "exact", "alone", "refused"

MAX_CALLERS: Final = 20_000
STORE_TIMEOUT_SECONDS = 2.0  # how long one call waits for the store
STORE_RETRY_SECONDS: Final = 1.0  # after a request that the store did not answer; until then no call waits for it
SWEEP_SECONDS: Final = 1.0
FORGET_AFTER_SECONDS: Final = 60.0  # after a caller's last call, once its lease is empty
EVICTION_SAMPLE: Final = 64  # oldest callers among which one is evicted to make room
SWEEP_BATCH: Final = 500  # callers per loop turn of a sweep, so that other tasks can run
STOP_CONCURRENCY: Final = 16  # callers whose leases are returned to the store at the same time
MAX_WAIT_MS = 60_000
LOG_INTERVAL_SECONDS: Final = 60.0  # between two lines about callers whose leases cannot be topped up

_log = logging.getLogger("price_keeper.limits")


@dataclass(slots=True)
class RateLimitCounts:
    """Calls by decision, and the requests to the store."""

    local: int = 0
    waited: int = 0
    exact: int = 0
    alone: int = 0
    refused_locally: int = 0
    refused_by_store: int = 0
    refused_alone: int = 0
    given_back: int = 0
    failed: int = 0  # top-ups that the store did not answer or was too busy for
    top_ups: Counter[str] = field(default_factory=Counter)  # by path


class LeaseHolder:
    """One caller's lease, and what is under way for it."""

    __slots__ = ("buckets", "is_evicted", "lease", "offline_limiter", "store_away_until", "unsettled")

    def __init__(self, buckets: Buckets, lease: RateLease) -> None:
        self.buckets = buckets
        self.lease = lease
        self.offline_limiter: OfflineLimiter | None = None
        self.store_away_until = 0.0
        self.unsettled = 0  # calls that wait for a top-up or are not settled yet
        self.is_evicted = False  # if set, returned tokens go to the store instead of the lease


class RateDecision:
    """The decision on one call. An admitted one must be settled exactly once. `wait_ms` None: waiting does not help."""

    __slots__ = ("buckets", "costs", "decided_by", "holder", "is_admitted", "names", "wait_ms")

    def __init__(
        self,
        decided_by: str,
        buckets: Buckets,
        names: tuple[str, ...],
        costs: Costs,
        holder: LeaseHolder | None,
        wait_ms: int | None = 0,
    ) -> None:
        self.decided_by = decided_by
        self.is_admitted = decided_by is not REFUSED
        self.buckets = buckets
        self.names = names
        self.costs = costs
        self.holder = holder
        self.wait_ms = wait_ms


def order_costs(names: tuple[str, ...], amounts: Amounts) -> Costs:
    """Return the amounts in the order of `names`; a missing one is 0."""
    if len(names) == 2:  # the usual case, and three times as fast as the general one
        return amounts.get(names[0], 0), amounts.get(names[1], 0)
    return tuple(amounts.get(name, 0) for name in names)


def actual_usage(admission: RateDecision, actual: Amounts | None) -> Costs:
    """Return the usage to charge. What `actual` does not name, or all if it is None, counts as estimated."""
    names, costs = admission.names, admission.costs
    if actual is None:
        return costs
    if len(names) == 2:
        return actual.get(names[0], costs[0]), actual.get(names[1], costs[1])
    return tuple(actual.get(name, cost) for name, cost in zip(names, costs, strict=True))


class RateLeaseManager:
    """Holds one lease per caller and admits calls against it."""

    def __init__(
        self,
        bucket_client: BucketClient,
        clock: Clock,
        tasks: Tasks,
        random_fraction: Callable[[], float] = random.random,
        max_callers: int = MAX_CALLERS,
    ) -> None:
        """Create a manager without leases. Call `sweep` every SWEEP_SECONDS, and `stop` before the process ends."""
        self._bucket_client = bucket_client
        self._exact_limiter = ExactLimiter(bucket_client, tasks)
        self._now = clock.monotonic
        self._tasks = tasks
        self._random = random_fraction
        self._max_callers = max_callers
        self._holders: dict[str, LeaseHolder] = {}
        self._top_ups = SingleFlight[LeaseHolder, None]()
        self._is_stopping = False
        self._next_log_at = 0.0
        self.counts = RateLimitCounts()

    def __len__(self) -> int:
        return len(self._holders)

    def held_by_limit(self) -> Counter[str]:
        """Return the tokens held in leases, by limit, over all callers."""
        sums: Counter[str] = Counter()
        for holder in self._holders.values():
            sums.update(dict(zip(holder.lease.names, holder.lease.held, strict=True)))
        return sums

    def estimate_remaining(self, admission: RateDecision) -> Sequence[tuple[str, int]]:
        """Return the tokens in the lease plus those last seen in the store, by limit."""
        holder = admission.holder
        return () if holder is None else holder.lease.estimate_remaining()

    # Admission and settlement.

    async def admit(
        self,
        name: str,
        buckets: Buckets,
        costs: Amounts,
        *,
        is_exact: bool = False,
        serves_offline: bool = True,
        is_demand_counted: bool = False,
    ) -> RateDecision:
        """Decide on a call, and wait for the store if the lease has not enough tokens.

        `name` identifies the caller, and `buckets` are its limits on all levels. `serves_offline`: admit calls while
        the store is unavailable; otherwise Busy is raised then. `is_demand_counted`: `try_admit` has already counted
        this call as demand and had not enough tokens for it.
        """
        if is_exact:
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        decision = None if is_demand_counted else self.try_admit(name, buckets, costs)
        return decision or await self._admit_via_store(name, buckets, costs, serves_offline)

    def try_admit(self, name: str, buckets: Buckets, costs: Amounts) -> RateDecision | None:
        """Decide without I/O, or return None if the store must be asked. A low lease starts a top-up."""
        cached, now = self._holders.get(name), self._now()
        holder = (
            cached
            if cached is not None and cached.buckets is buckets
            else self._find_or_create_holder(name, cached, buckets, now)
        )
        if holder is None or holder.is_evicted:
            return None
        lease = holder.lease
        wanted = order_costs(lease.names, costs)
        taken = lease.take(wanted, now)
        if taken == TAKEN_BUT_LOW:
            if now >= holder.store_away_until:
                self._start_top_up(holder, None)
            taken = TAKEN
        if taken == TAKEN:
            holder.unsettled += 1
            self.counts.local += 1
            return RateDecision(LOCAL, buckets, lease.names, wanted, holder)
        if taken == NEEDS_TOP_UP:
            return None
        self.counts.refused_locally += 1
        return _build_refusal(holder, wanted, None if lease.exceeds_capacity(wanted) else taken)

    def settle(self, admission: RateDecision, actual: Amounts | None) -> None:
        """Replace the estimate by the actual usage; what `actual` does not name, or all if None, stays as it is."""
        used_costs, holder = actual_usage(admission, actual), admission.holder
        if holder is None:
            self._exact_limiter.settle(admission, used_costs)
            return
        holder.unsettled -= 1
        taken = admission.costs
        if admission.decided_by is ALONE:
            if holder.offline_limiter is not None and holder.lease.names == admission.names:
                holder.offline_limiter.settle(taken, used_costs)
            taken = used_costs  # these tokens were never taken from the store, so only the usage is reported
        if holder.is_evicted or holder.lease.names != admission.names:
            rows = list(zip(admission.names, taken, used_costs, strict=True))
            self._adjust_soon(admission.buckets, {name: used - cost for name, cost, used in rows}, _sum_used(rows))
        else:
            holder.lease.settle(taken, used_costs)

    # Calls that wait for the store.

    async def _admit_via_store(self, name: str, buckets: Buckets, costs: Amounts, serves_offline: bool) -> RateDecision:
        holder = self._holders.get(name)
        if holder is None or holder.is_evicted:
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        if holder.lease.exceeds_capacity(order_costs(holder.lease.names, costs)):
            self.counts.refused_by_store += 1
            return _build_refusal(holder, order_costs(holder.lease.names, costs), None)
        holder.unsettled += 1  # so that the holder is not evicted while the call waits
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                while self._now() >= holder.store_away_until and not holder.is_evicted:
                    if (admission := await self._admit_after_top_up(holder, costs)) is not None:
                        return admission
        except TimeoutError:
            holder.store_away_until = self._now() + STORE_RETRY_SECONDS  # so that the next call does not wait as long
        finally:
            holder.unsettled -= 1
        if holder.is_evicted and not self._is_stopping:  # the limits changed while the call waited
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        return self._admit_offline(holder, costs, serves_offline)

    async def _admit_after_top_up(self, holder: LeaseHolder, costs: Amounts) -> RateDecision | None:
        """Wait for one top-up and take. None: try again, unless the store is away."""
        wanted = order_costs(holder.lease.names, costs)
        self._start_top_up(holder, wanted)
        await self._top_ups.wait(holder)
        if holder.is_evicted:
            return None
        wanted = order_costs(holder.lease.names, costs)  # computed again because the settings may have changed
        taken = holder.lease.take(wanted, self._now(), is_counted=True)
        if taken == NEEDS_TOP_UP:
            return None
        if taken not in (TAKEN, TAKEN_BUT_LOW):
            self.counts.refused_by_store += 1
            return _build_refusal(holder, wanted, taken)
        holder.unsettled += 1
        self.counts.waited += 1
        return RateDecision(WAITED, holder.buckets, holder.lease.names, wanted, holder)

    def _start_top_up(self, holder: LeaseHolder, need: Costs | None) -> None:
        """Start a top-up, unless one is in flight."""
        if holder in self._top_ups:
            return
        if (debt := holder.lease.find_unpayable_debt(need)) is not None:
            self._pay_debt(holder, debt)
        plan = holder.lease.plan_top_up(self._now(), need)
        self._top_ups.start(holder, lambda: self._top_up(holder, plan))

    async def _top_up(self, holder: LeaseHolder, plan: TopUpPlan) -> None:
        lease, conflicts_before, is_away = holder.lease, self._bucket_client.conflicts, True
        grant: Grant | None = None
        try:
            grant = await self._bucket_client.lease(holder.buckets, plan.wants, plan.needs, plan.used, plan.share)
        except (StoreThrottled, TransactionFailed):
            is_away = False
        except StoreError as failure:
            if self._now() >= self._next_log_at:
                self._next_log_at = self._now() + LOG_INTERVAL_SECONDS
                _log.warning(
                    "cannot top up the rate lease of %s (other callers are not logged for %g s): %s; its calls use the "
                    "offline limits or fail with 503 until the store answers again",
                    ", ".join(bucket.scope for bucket in holder.buckets),
                    LOG_INTERVAL_SECONDS,
                    failure,
                )
        finally:
            if grant is not None:
                holder.store_away_until = 0.0
                self._apply_grant(lease, plan, grant, self._bucket_client.conflicts > conflicts_before)
            else:  # after any failure, also cancellation: without this pause its callers would ask again at once
                self.counts.failed += 1
                lease.on_failed(plan, self._now(), had_conflicts=not is_away)
                holder.store_away_until = self._now() + STORE_RETRY_SECONDS if is_away else 0.0

    def _apply_grant(self, lease: RateLease, plan: TopUpPlan, grant: Grant, had_conflicts: bool) -> None:
        self.counts.top_ups[grant.path] += 1
        if grant.is_refused:
            lease.on_refused(plan, grant.wait_ms, grant.remaining, self._now())
        else:
            is_level_exact = grant.path != RETRY or any(grant.taken[name] < plan.wants[name] for name in grant.taken)
            lease.on_granted(
                plan,
                grant.taken,
                grant.remaining,
                self._now(),
                is_level_exact=is_level_exact,
                had_conflicts=had_conflicts,
            )

    # Decisions without a lease: exact limits, and while the store is away.

    async def _admit_exactly(self, name: str, buckets: Buckets, costs: Amounts, serves_offline: bool) -> RateDecision:
        try:
            admission = await self._exact_limiter.admit(buckets, costs)
        except (StoreError, TimeoutError):
            holder = self._holders.get(name) or self._find_or_create_holder(name, None, buckets, self._now())
            if holder is None:
                raise Busy("limits cannot be looked up", retry_after=STORE_RETRY_SECONDS) from None
            return self._admit_offline(holder, costs, serves_offline)
        if admission.is_admitted:
            self.counts.exact += 1
        else:
            self.counts.refused_by_store += 1
        return admission

    def _admit_offline(self, holder: LeaseHolder, costs: Amounts, serves_offline: bool) -> RateDecision:
        if not serves_offline:
            raise Busy("limits cannot be looked up", retry_after=STORE_RETRY_SECONDS)
        now, wanted = self._now(), order_costs(holder.lease.names, costs)
        if holder.offline_limiter is None or holder.offline_limiter.buckets is not holder.buckets:
            holder.offline_limiter = OfflineLimiter(holder.buckets, now)
        wait_ms = holder.offline_limiter.take(wanted, now)
        if wait_ms:
            self.counts.refused_alone += 1
            return _build_refusal(holder, wanted, wait_ms)
        holder.unsettled += 1
        self.counts.alone += 1
        return RateDecision(ALONE, holder.buckets, holder.lease.names, wanted, holder)

    # Lease holders: creation, eviction, return of tokens.

    def _find_or_create_holder(
        self, name: str, holder: LeaseHolder | None, buckets: Buckets, now: float
    ) -> LeaseHolder | None:
        """Return the caller's holder with the current settings, created if needed. None: there is no room."""
        if holder is not None and [bucket.key for bucket in holder.buckets] == [bucket.key for bucket in buckets]:
            if holder.buckets != buckets:
                holder.lease.apply_buckets(buckets)
            holder.buckets = buckets
            return holder
        if holder is not None:
            self._evict(name)
        if self._is_stopping or (len(self._holders) >= self._max_callers and not self._evict_one()):
            return None
        holder = self._holders[name] = LeaseHolder(buckets, RateLease(buckets, now, self._random))
        return holder

    def _evict_one(self) -> bool:
        oldest = islice(self._holders.items(), EVICTION_SAMPLE)
        evictable = [
            (holder.lease.last_call, name)
            for name, holder in oldest
            if not holder.unsettled and holder not in self._top_ups
        ]
        if evictable:
            self._evict(min(evictable)[1])
        return bool(evictable)

    def _evict(self, name: str) -> None:
        holder = self._holders.pop(name)
        holder.is_evicted = True
        self._tasks.spawn(self._return_after_top_up(holder))

    async def _return_after_top_up(self, holder: LeaseHolder) -> None:
        await self._top_ups.wait(holder)
        await self._return_tokens(holder)

    async def sweep(self) -> None:
        """Return what idle callers hold, forget callers that are idle for long, and send pending adjustments."""
        for number, (name, holder) in enumerate(list(self._holders.items())):
            if not number % SWEEP_BATCH:
                await asyncio.sleep(0)
            if holder not in self._top_ups and not holder.is_evicted:
                await self._sweep_holder(name, holder, self._now())
        if self._bucket_client.pending:
            with suppress(StoreError):
                await self._bucket_client.flush_pending()

    async def _sweep_holder(self, name: str, holder: LeaseHolder, now: float) -> None:
        lease = holder.lease
        if not lease.is_idle(now):
            surplus = lease.find_surplus(now)
            if any(surplus):
                await self._return_tokens(holder, surplus)
        elif not lease.is_empty:
            await self._return_tokens(holder)
        elif not holder.unsettled and now - lease.last_call > FORGET_AFTER_SECONDS:
            del self._holders[name]

    async def _return_tokens(self, holder: LeaseHolder, amounts: Costs | None = None) -> None:
        if amounts is None and holder.lease.is_empty:
            return
        returned, used = holder.lease.take_out(amounts)
        self.counts.given_back += 1
        await self._bucket_client.adjust(holder.buckets, {name: -amount for name, amount in returned.items()}, used)

    def _pay_debt(self, holder: LeaseHolder, debt: Costs) -> None:
        """Write a debt to the bucket as an adjustment, which is never refused. What the bucket earns next pays it.

        As part of a top-up it could be refused, because the store would have to grant the debt and the new tokens at
        once.
        """
        returned, used = holder.lease.take_out(debt)
        self._adjust_soon(holder.buckets, {name: -amount for name, amount in returned.items()}, used)

    def _adjust_soon(self, buckets: Buckets, taken: Amounts, used: Amounts) -> None:
        self._tasks.spawn(self._bucket_client.adjust(buckets, taken, used))

    async def stop(self) -> None:
        """Return all leases to the store. Calls that are admitted or settled later are written one by one."""
        self._is_stopping = True
        holders = list(self._holders.values())
        for holder in holders:
            holder.is_evicted = True
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                for holder in holders:
                    await self._top_ups.wait(holder)
        slots = asyncio.Semaphore(STOP_CONCURRENCY)

        async def return_tokens(holder: LeaseHolder) -> None:
            async with slots:
                await self._return_tokens(holder)

        for holder in holders:
            if holder in self._top_ups:  # still in flight after the timeout, so stop does not wait for it
                self._tasks.spawn(self._return_after_top_up(holder))
        await asyncio.gather(*(return_tokens(holder) for holder in holders if holder not in self._top_ups))
        await asyncio.sleep(0)  # lets the adjustments of calls that just ended start
        if self._bucket_client.pending:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                    await self._bucket_client.flush_pending(is_last=True)


def _build_refusal(holder: LeaseHolder, costs: Costs, wait_ms: int | None) -> RateDecision:
    return RateDecision(REFUSED, holder.buckets, holder.lease.names, costs, holder, wait_ms)


def _sum_used(rows: list[tuple[str, int, int]]) -> dict[str, int]:
    return {name: used for name, _, used in rows}


class ExactLimiter:
    """Writes every call to the store: an acquire before it, and an adjustment after it if the usage differs."""

    def __init__(self, bucket_client: BucketClient, tasks: Tasks) -> None:
        self._bucket_client = bucket_client
        self._tasks = tasks

    async def admit(self, buckets: Buckets, costs: Amounts) -> RateDecision:
        """Take the costs from the store. Raises StoreError or TimeoutError."""
        result: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._tasks.spawn(self._acquire(buckets, costs, result))
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            grant = await result
        names = tuple(select_slowest_refill(buckets))
        how = REFUSED if grant.is_refused else EXACT
        return RateDecision(how, buckets, names, order_costs(names, costs), None, grant.wait_ms)

    async def _acquire(self, buckets: Buckets, costs: Amounts, result: asyncio.Future[Grant]) -> None:
        """Take the costs, and give them back if no call waits any more.

        This task is not cancelled with the call that waits for it; otherwise it would not be known what was written.
        """
        try:
            grant = await self._bucket_client.acquire(buckets, costs)
        except Exception as failure:  # every kind: a call waits for the result
            if not result.done():
                result.set_exception(failure)
            return
        if not result.done():
            result.set_result(grant)
        elif not grant.is_refused:
            refund = {name: -amount for name, amount in costs.items()}
            await self._bucket_client.adjust(buckets, refund, refund)

    def settle(self, admission: RateDecision, actual: Costs) -> None:
        """Write the difference between actual and estimated usage; `acquire` reported the estimate as used."""
        rows = zip(admission.names, admission.costs, actual, strict=True)
        differences = {name: used - cost for name, cost, used in rows if used != cost}
        if differences:
            self._tasks.spawn(self._bucket_client.adjust(admission.buckets, differences, differences))


class OfflineLimiter:
    """One caller's limits while the store is away. Each process applies the whole limit, so a fleet that is cut off
    admits up to the limit times the number of its sidecars."""

    __slots__ = ("_capacity", "_rate", "_refilled_at", "_tokens", "buckets")

    def __init__(self, buckets: Sequence[RateBucket], now: float) -> None:
        limits = select_slowest_refill(buckets).values()
        self.buckets = buckets
        self._capacity = [limit.capacity for limit in limits]
        self._rate = [limit.amount * 1000 / limit.period_ms for limit in limits]
        self._tokens = [float(limit.capacity) for limit in limits]
        self._refilled_at = now

    def take(self, costs: Costs, now: float) -> int:
        """Take the costs and return 0, or return how many milliseconds to wait."""
        elapsed, self._refilled_at = now - self._refilled_at, now
        wait = 0.0
        for place, cost in enumerate(costs):
            rate = self._rate[place]
            self._tokens[place] = tokens = min(self._capacity[place], self._tokens[place] + elapsed * rate)
            if cost > tokens:
                wait = max(wait, (cost - tokens) / rate * 1000 if rate > 0 else MAX_WAIT_MS)
        if wait:
            return min(MAX_WAIT_MS, int(wait) + 1)
        for place, cost in enumerate(costs):
            self._tokens[place] -= cost
        return 0

    def settle(self, estimate: Costs, actual: Costs) -> None:
        """Give back what the call did not use, or take what it used in addition."""
        for place, cost in enumerate(estimate):
            self._tokens[place] += cost - actual[place]
