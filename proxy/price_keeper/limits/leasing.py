"""Keeps a lease for each caller who is limited, and asks the store for more before a call has to wait for it.

A call that finds enough waits for nobody. What is asked of the store for one caller is asked once, however many calls
wait for the answer, and no call waits for long: then the policy says what becomes of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from price_keeper.clock import Clock
from price_keeper.errors import Busy, StoreError, StoreThrottled, TransactionFailed
from price_keeper.limits.admission import (
    ALONE,
    LOCAL,
    REFUSED,
    WAITED,
    Amounts,
    Buckets,
    LeaseHolder,
    RateDecision,
    RateLimitCounts,
    actual_usage,
    order_costs,
)
from price_keeper.limits.alone import OfflineLimiter
from price_keeper.limits.exactly import ExactLimiter
from price_keeper.rates.bucket_client import RETRY, BucketClient, Grant
from price_keeper.rates.rate_lease import NEEDS_TOP_UP, TAKEN, TAKEN_BUT_LOW, Costs, RateLease, TopUpPlan
from price_keeper.tasks import Tasks

MAX_CALLERS: Final = 20_000
STORE_TIMEOUT_SECONDS = 2.0  # of a call, for the store
STORE_RETRY_SECONDS: Final = 1.0  # after a question that the store did not answer: until then no call waits for it
SWEEP_SECONDS: Final = 1.0
FORGET_AFTER_SECONDS: Final = 60.0  # after its last call, when nothing of a caller is left
EVICTION_SAMPLE: Final = 64  # callers, for one that can make room
SWEEP_BATCH: Final = 500  # callers in a sweep, before others have a turn
STOP_CONCURRENCY: Final = 16  # callers, whose rest goes back to the store

_log = logging.getLogger("price_keeper.limits")


class RateLeaseManager:
    def __init__(
        self,
        bucket_client: BucketClient,
        clock: Clock,
        tasks: Tasks,
        random_fraction: Callable[[], float] = random.random,
        max_callers: int = MAX_CALLERS,
    ) -> None:
        """`sweep` is to be called every SWEEP_SECONDS, and `stop` before the process ends."""
        self._bucket_client = bucket_client
        self._exact_limiter = ExactLimiter(bucket_client, tasks)
        self._now = clock.monotonic
        self._tasks = tasks
        self._random = random_fraction
        self._max_callers = max_callers
        self._holders: dict[str, LeaseHolder] = {}
        self._is_stopping = False
        self.counts = RateLimitCounts()

    def __len__(self) -> int:
        return len(self._holders)

    def held_by_limit(self) -> Counter[str]:
        """By limit, over all callers."""
        sums: Counter[str] = Counter()
        for holder in self._holders.values():
            sums.update(dict(zip(holder.lease.names, holder.lease.held, strict=True)))
        return sums

    def estimate_remaining(self, admission: RateDecision) -> Sequence[tuple[str, int]]:
        """What is here and, as far as is known, in the store; by limit."""
        holder = admission.holder
        return () if holder is None else holder.lease.estimate_remaining()

    # For the calls.

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
        """`name` is the caller's, and `buckets` its limits on all levels. `serves_alone`: also while the store is away.
        `is_counted`: of a call that `at_once` had not enough for.

        Raises Busy where the store is away and it does not.
        """
        if is_exact:
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        found = None if is_demand_counted else self.try_admit(name, buckets, costs)
        return found or await self._admit_via_store(name, buckets, costs, serves_offline)

    def try_admit(self, name: str, buckets: Buckets, costs: Amounts) -> RateDecision | None:
        """As far as nobody has to be waited for."""
        found, now = self._holders.get(name), self._now()
        holder = (
            found
            if found is not None and found.buckets is buckets
            else self._find_or_create_holder(name, found, buckets, now)
        )
        if holder is None or holder.is_evicted:
            return None
        lease = holder.lease
        wanted = order_costs(lease.names, costs)
        taken = lease.take(wanted, now)
        if taken == TAKEN_BUT_LOW:
            if holder.top_up is None and now >= holder.store_away_until:
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
        """What the call really used; what is not named is as estimated. None: nobody knows, so all of it is."""
        used_costs, holder = actual_usage(admission, actual), admission.holder
        if holder is None:
            self._exact_limiter.settle(admission, used_costs)
            return
        holder.unsettled -= 1
        taken = admission.costs
        if admission.decided_by is ALONE:
            if holder.offline_limiter is not None and holder.lease.names == admission.names:
                holder.offline_limiter.settle(taken, used_costs)
            taken = used_costs  # nothing of it was the store's: it is told, and that is all
        if holder.is_evicted or holder.lease.names != admission.names:
            rows = list(zip(admission.names, taken, used_costs, strict=True))
            self._adjust_soon(admission.buckets, {name: used - cost for name, cost, used in rows}, _sum_used(rows))
        else:
            holder.lease.settle(taken, used_costs)

    # The way by the store.

    async def _admit_via_store(self, name: str, buckets: Buckets, costs: Amounts, serves_offline: bool) -> RateDecision:
        holder = self._holders.get(name)
        if holder is None or holder.is_evicted:
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        if holder.lease.exceeds_capacity(order_costs(holder.lease.names, costs)):
            self.counts.refused_by_store += 1
            return _build_refusal(holder, order_costs(holder.lease.names, costs), None)
        holder.unsettled += 1  # so that it is not dropped meanwhile
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                while self._now() >= holder.store_away_until and not holder.is_evicted:
                    if (admission := await self._admit_after_top_up(holder, costs)) is not None:
                        return admission
        except TimeoutError:
            holder.store_away_until = self._now() + STORE_RETRY_SECONDS  # so that the next one does not wait as long
        finally:
            holder.unsettled -= 1
        if holder.is_evicted and not self._is_stopping:  # the limits have changed while it waited
            return await self._admit_exactly(name, buckets, costs, serves_offline)
        return self._admit_offline(holder, costs, serves_offline)

    async def _admit_after_top_up(self, holder: LeaseHolder, costs: Amounts) -> RateDecision | None:
        """None: ask again, unless the store is away."""
        wanted = order_costs(holder.lease.names, costs)
        await (holder.top_up or self._start_top_up(holder, wanted)).wait()
        if holder.is_evicted:
            return None
        wanted = order_costs(holder.lease.names, costs)  # the settings may have changed
        taken = holder.lease.retake(wanted, self._now())
        if taken == NEEDS_TOP_UP:
            return None
        if taken not in (TAKEN, TAKEN_BUT_LOW):
            self.counts.refused_by_store += 1
            return _build_refusal(holder, wanted, taken)
        holder.unsettled += 1
        self.counts.waited += 1
        return RateDecision(WAITED, holder.buckets, holder.lease.names, wanted, holder)

    def _start_top_up(self, holder: LeaseHolder, need: Costs | None) -> asyncio.Event:
        if (debt := holder.lease.find_unpayable_debt(need)) is not None:
            self._pay_debt(holder, debt)
        done = holder.top_up = asyncio.Event()
        self._tasks.spawn(self._top_up(holder, holder.lease.plan_top_up(self._now(), need), done))
        return done

    async def _top_up(self, holder: LeaseHolder, plan: TopUpPlan, done: asyncio.Event) -> None:
        lease, conflicts_before, is_away = holder.lease, self._bucket_client.conflicts, True
        grant: Grant | None = None
        try:
            grant = await self._bucket_client.lease(holder.buckets, plan.wants, plan.needs, plan.used, plan.share)
        except (StoreThrottled, TransactionFailed):
            is_away = False
        except StoreError as failure:
            _log.warning("the limits of a caller cannot be looked up: %s", type(failure).__name__)
        finally:
            if grant is not None:
                holder.store_away_until = 0.0
                self._apply_grant(lease, plan, grant, self._bucket_client.conflicts > conflicts_before)
            else:  # for whatever reason: or its callers would ask again at once, for ever
                self.counts.failed += 1
                lease.on_failed(plan, self._now(), had_conflicts=not is_away)
                holder.store_away_until = self._now() + STORE_RETRY_SECONDS if is_away else 0.0
            holder.top_up = None
            done.set()

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

    # While the store is away, and where every call is written.

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

    # Who is there.

    def _find_or_create_holder(
        self, name: str, holder: LeaseHolder | None, buckets: Buckets, now: float
    ) -> LeaseHolder | None:
        """By the settings as they are now. None: there is no room."""
        if holder is not None and [each.key for each in holder.buckets] == [each.key for each in buckets]:
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
            (holder.lease.last_call, name) for name, holder in oldest if not holder.unsettled and holder.top_up is None
        ]
        if evictable:
            self._evict(min(evictable)[1])
        return bool(evictable)

    def _evict(self, name: str) -> None:
        holder = self._holders.pop(name)
        holder.is_evicted = True
        self._tasks.spawn(self._return_after_top_up(holder))

    async def _return_after_top_up(self, holder: LeaseHolder) -> None:
        if holder.top_up is not None:
            await holder.top_up.wait()
        await self._return_tokens(holder)

    async def sweep(self) -> None:
        """What idle callers hold goes back; who is idle for long is forgotten; what could not be sent is sent."""
        for number, (name, holder) in enumerate(list(self._holders.items())):
            if not number % SWEEP_BATCH:
                await asyncio.sleep(0)
            if holder.top_up is None and not holder.is_evicted:
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
        """A debt is never refused, as more would be that had to come with it: what the bucket earns next pays it."""
        returned, used = holder.lease.take_out(debt)
        self._adjust_soon(holder.buckets, {name: -amount for name, amount in returned.items()}, used)

    def _adjust_soon(self, buckets: Buckets, taken: Amounts, used: Amounts) -> None:
        self._tasks.spawn(self._bucket_client.adjust(buckets, taken, used))

    async def stop(self) -> None:
        """Everything goes back. Calls that are settled later, or admitted, write each for itself."""
        self._is_stopping = True
        holders = list(self._holders.values())
        for holder in holders:
            holder.is_evicted = True
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                for holder in holders:
                    if holder.top_up is not None:
                        await holder.top_up.wait()
        slots = asyncio.Semaphore(STOP_CONCURRENCY)

        async def return_tokens(holder: LeaseHolder) -> None:
            async with slots:
                await self._return_tokens(holder)

        for holder in holders:
            if holder.top_up is not None:  # nobody waits for it any longer
                self._tasks.spawn(self._return_after_top_up(holder))
        await asyncio.gather(*(return_tokens(holder) for holder in holders if holder.top_up is None))
        await asyncio.sleep(0)  # what calls that just ended used begins to be told
        if self._bucket_client.pending:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                    await self._bucket_client.flush_pending(is_last=True)


def _build_refusal(holder: LeaseHolder, costs: Costs, wait_ms: int | None) -> RateDecision:
    return RateDecision(REFUSED, holder.buckets, holder.lease.names, costs, holder, wait_ms)


def _sum_used(rows: list[tuple[str, int, int]]) -> dict[str, int]:
    return {name: used for name, _, used in rows}
