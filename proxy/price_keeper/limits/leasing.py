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
    Admission,
    Amounts,
    Buckets,
    Counts,
    Holder,
    in_order,
    really,
)
from price_keeper.limits.alone import Alone
from price_keeper.limits.exactly import Exactly
from price_keeper.limits.lease import NEEDS_TOP_UP, TAKEN, TAKEN_BUT_LOW, Costs, RateLease, TopUpPlan
from price_keeper.limits.limiter import RETRY, Grant, BucketClient
from price_keeper.tasks import Tasks

MOST_CALLERS: Final = 20_000
WAIT_SECONDS = 2.0  # of a call, for the store
AWAY_SECONDS: Final = 1.0  # after a question that the store did not answer: until then no call waits for it
SWEEP_SECONDS: Final = 1.0
FORGOTTEN_SECONDS: Final = 60.0  # after its last call, when nothing of a caller is left
LOOKED_AT: Final = 64  # callers, for one that can make room
AT_A_TIME: Final = 500  # callers in a sweep, before others have a turn
STOPPED_AT_A_TIME: Final = 16  # callers, whose rest goes back to the store

_log = logging.getLogger("price_keeper.limits")


class Leasing:
    def __init__(
        self,
        limiter: BucketClient,
        clock: Clock,
        tasks: Tasks,
        chance: Callable[[], float] = random.random,
        most_callers: int = MOST_CALLERS,
    ) -> None:
        """`sweep` is to be called every SWEEP_SECONDS, and `stop` before the process ends."""
        self._limiter = limiter
        self._exactly = Exactly(limiter, tasks)
        self._now = clock.monotonic
        self._tasks = tasks
        self._chance = chance
        self._most = most_callers
        self._holders: dict[str, Holder] = {}
        self._is_stopping = False
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._holders)

    def held(self) -> Counter[str]:
        """By limit, over all callers."""
        sums: Counter[str] = Counter()
        for holder in self._holders.values():
            sums.update(dict(zip(holder.lease.names, holder.lease.held, strict=True)))
        return sums

    def remaining(self, admission: Admission) -> Sequence[tuple[str, int]]:
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
        serves_alone: bool = True,
        is_counted: bool = False,
    ) -> Admission:
        """`name` is the caller's, and `buckets` its limits on all levels. `serves_alone`: also while the store is away.
        `is_counted`: of a call that `at_once` had not enough for.

        Raises Busy where the store is away and it does not.
        """
        if is_exact:
            return await self._admitted_exactly(name, buckets, costs, serves_alone)
        found = None if is_counted else self.at_once(name, buckets, costs)
        return found or await self._asked(name, buckets, costs, serves_alone)

    def at_once(self, name: str, buckets: Buckets, costs: Amounts) -> Admission | None:
        """As far as nobody has to be waited for."""
        found, now = self._holders.get(name), self._now()
        holder = found if found is not None and found.buckets is buckets else self._fitted(name, found, buckets, now)
        if holder is None or holder.is_gone:
            return None
        lease = holder.lease
        wanted = in_order(lease.names, costs)
        answer = lease.take(wanted, now)
        if answer == TAKEN_BUT_LOW:
            if holder.asking is None and now >= holder.away_until:
                self._ask(holder, None)
            answer = TAKEN
        if answer == TAKEN:
            holder.open += 1
            self.counts.local += 1
            return Admission(LOCAL, buckets, lease.names, wanted, holder)
        if answer == NEEDS_TOP_UP:
            return None
        self.counts.refused_locally += 1
        return _refused(holder, wanted, None if lease.exceeds_capacity(wanted) else answer)

    def settle(self, admission: Admission, actual: Amounts | None) -> None:
        """What the call really used; what is not named is as estimated. None: nobody knows, so all of it is."""
        real, holder = really(admission, actual), admission.holder
        if holder is None:
            self._exactly.settle(admission, real)
            return
        holder.open -= 1
        taken = admission.costs
        if admission.how is ALONE:
            if holder.alone is not None and holder.lease.names == admission.names:
                holder.alone.give_back(taken, real)
            taken = real  # nothing of it was the store's: it is told, and that is all
        if holder.is_gone or holder.lease.names != admission.names:
            each = list(zip(admission.names, taken, real, strict=True))
            self._adjust_soon(admission.buckets, {name: used - cost for name, cost, used in each}, _named(each))
        else:
            holder.lease.settle(taken, real)

    # The way by the store.

    async def _asked(self, name: str, buckets: Buckets, costs: Amounts, serves_alone: bool) -> Admission:
        holder = self._holders.get(name)
        if holder is None or holder.is_gone:
            return await self._admitted_exactly(name, buckets, costs, serves_alone)
        if holder.lease.exceeds_capacity(in_order(holder.lease.names, costs)):
            self.counts.refused_by_store += 1
            return _refused(holder, in_order(holder.lease.names, costs), None)
        holder.open += 1  # so that it is not dropped meanwhile
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while self._now() >= holder.away_until and not holder.is_gone:
                    if (admission := await self._after_a_question(holder, costs)) is not None:
                        return admission
        except TimeoutError:
            holder.away_until = self._now() + AWAY_SECONDS  # so that the next one does not wait as long
        finally:
            holder.open -= 1
        if holder.is_gone and not self._is_stopping:  # the limits have changed while it waited
            return await self._admitted_exactly(name, buckets, costs, serves_alone)
        return self._alone(holder, costs, serves_alone)

    async def _after_a_question(self, holder: Holder, costs: Amounts) -> Admission | None:
        """None: ask again, unless the store is away."""
        wanted = in_order(holder.lease.names, costs)
        await (holder.asking or self._ask(holder, wanted)).wait()
        if holder.is_gone:
            return None
        wanted = in_order(holder.lease.names, costs)  # the settings may have changed
        answer = holder.lease.retake(wanted, self._now())
        if answer == NEEDS_TOP_UP:
            return None
        if answer not in (TAKEN, TAKEN_BUT_LOW):
            self.counts.refused_by_store += 1
            return _refused(holder, wanted, answer)
        holder.open += 1
        self.counts.waited += 1
        return Admission(WAITED, holder.buckets, holder.lease.names, wanted, holder)

    def _ask(self, holder: Holder, need: Costs | None) -> asyncio.Event:
        if (owed := holder.lease.find_unpayable_debt(need)) is not None:
            self._pay(holder, owed)
        over = holder.asking = asyncio.Event()
        self._tasks.spawn(self._top_up(holder, holder.lease.plan_top_up(self._now(), need), over))
        return over

    async def _top_up(self, holder: Holder, plan: TopUpPlan, over: asyncio.Event) -> None:
        lease, before, is_away = holder.lease, self._limiter.conflicts, True
        grant: Grant | None = None
        try:
            grant = await self._limiter.lease(holder.buckets, plan.wants, plan.needs, plan.used, plan.share)
        except (StoreThrottled, TransactionFailed):
            is_away = False
        except StoreError as failure:
            _log.warning("the limits of a caller cannot be looked up: %s", type(failure).__name__)
        finally:
            if grant is not None:
                holder.away_until = 0.0
                self._granted(lease, plan, grant, self._limiter.conflicts > before)
            else:  # for whatever reason: or its callers would ask again at once, for ever
                self.counts.failed += 1
                lease.on_failed(plan, self._now(), had_conflicts=not is_away)
                holder.away_until = self._now() + AWAY_SECONDS if is_away else 0.0
            holder.asking = None
            over.set()

    def _granted(self, lease: RateLease, plan: TopUpPlan, grant: Grant, was_in_the_way: bool) -> None:
        self.counts.top_ups[grant.path] += 1
        if grant.is_refused:
            lease.on_refused(plan, grant.wait_ms, grant.remaining, self._now())
        else:
            is_seen = grant.path != RETRY or any(grant.taken[name] < plan.wants[name] for name in grant.taken)
            lease.on_granted(plan, grant.taken, grant.remaining, self._now(), is_level_exact=is_seen, had_conflicts=was_in_the_way)

    # While the store is away, and where every call is written.

    async def _admitted_exactly(self, name: str, buckets: Buckets, costs: Amounts, serves_alone: bool) -> Admission:
        try:
            admission = await self._exactly.admit(buckets, costs)
        except (StoreError, TimeoutError):
            holder = self._holders.get(name) or self._fitted(name, None, buckets, self._now())
            if holder is None:
                raise Busy("limits cannot be looked up", retry_after=AWAY_SECONDS) from None
            return self._alone(holder, costs, serves_alone)
        if admission.is_admitted:
            self.counts.exact += 1
        else:
            self.counts.refused_by_store += 1
        return admission

    def _alone(self, holder: Holder, costs: Amounts, serves_alone: bool) -> Admission:
        if not serves_alone:
            raise Busy("limits cannot be looked up", retry_after=AWAY_SECONDS)
        now, wanted = self._now(), in_order(holder.lease.names, costs)
        if holder.alone is None or holder.alone.buckets is not holder.buckets:
            holder.alone = Alone(holder.buckets, now)
        wait_ms = holder.alone.take(wanted, now)
        if wait_ms:
            self.counts.refused_alone += 1
            return _refused(holder, wanted, wait_ms)
        holder.open += 1
        self.counts.alone += 1
        return Admission(ALONE, holder.buckets, holder.lease.names, wanted, holder)

    # Who is there.

    def _fitted(self, name: str, holder: Holder | None, buckets: Buckets, now: float) -> Holder | None:
        """By the settings as they are now. None: there is no room."""
        if holder is not None and [each.key for each in holder.buckets] == [each.key for each in buckets]:
            if holder.buckets != buckets:
                holder.lease.apply_buckets(buckets)
            holder.buckets = buckets
            return holder
        if holder is not None:
            self._let_go(name)
        if self._is_stopping or (len(self._holders) >= self._most and not self._made_room()):
            return None
        holder = self._holders[name] = Holder(buckets, RateLease(buckets, now, self._chance))
        return holder

    def _made_room(self) -> bool:
        each = islice(self._holders.items(), LOOKED_AT)
        free = [(holder.lease.last_call, name) for name, holder in each if not holder.open and holder.asking is None]
        if free:
            self._let_go(min(free)[1])
        return bool(free)

    def _let_go(self, name: str) -> None:
        holder = self._holders.pop(name)
        holder.is_gone = True
        self._tasks.spawn(self._given_back_at_last(holder))

    async def _given_back_at_last(self, holder: Holder) -> None:
        if holder.asking is not None:
            await holder.asking.wait()
        await self._give_back(holder)

    async def sweep(self) -> None:
        """What idle callers hold goes back; who is idle for long is forgotten; what could not be sent is sent."""
        for number, (name, holder) in enumerate(list(self._holders.items())):
            if not number % AT_A_TIME:
                await asyncio.sleep(0)
            if holder.asking is None and not holder.is_gone:
                await self._swept(name, holder, self._now())
        if self._limiter.pending:
            with suppress(StoreError):
                await self._limiter.flush_pending()

    async def _swept(self, name: str, holder: Holder, now: float) -> None:
        lease = holder.lease
        if not lease.is_idle(now):
            surplus = lease.find_surplus(now)
            if any(surplus):
                await self._give_back(holder, surplus)
        elif not lease.is_empty:
            await self._give_back(holder)
        elif not holder.open and now - lease.last_call > FORGOTTEN_SECONDS:
            del self._holders[name]

    async def _give_back(self, holder: Holder, amounts: Costs | None = None) -> None:
        if amounts is None and holder.lease.is_empty:
            return
        given, used = holder.lease.take_out(amounts)
        self.counts.given_back += 1
        await self._limiter.adjust(holder.buckets, {name: -amount for name, amount in given.items()}, used)

    def _pay(self, holder: Holder, owed: Costs) -> None:
        """A debt is never refused, as more would be that had to come with it: what the bucket earns next pays it."""
        given, used = holder.lease.take_out(owed)
        self._adjust_soon(holder.buckets, {name: -amount for name, amount in given.items()}, used)

    def _adjust_soon(self, buckets: Buckets, taken: Amounts, used: Amounts) -> None:
        self._tasks.spawn(self._limiter.adjust(buckets, taken, used))

    async def stop(self) -> None:
        """Everything goes back. Calls that are settled later, or admitted, write each for itself."""
        self._is_stopping = True
        holders = list(self._holders.values())
        for holder in holders:
            holder.is_gone = True
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                for holder in holders:
                    if holder.asking is not None:
                        await holder.asking.wait()
        gate = asyncio.Semaphore(STOPPED_AT_A_TIME)

        async def given_back(holder: Holder) -> None:
            async with gate:
                await self._give_back(holder)

        for holder in holders:
            if holder.asking is not None:  # nobody waits for it any longer
                self._tasks.spawn(self._given_back_at_last(holder))
        await asyncio.gather(*(given_back(holder) for holder in holders if holder.asking is None))
        await asyncio.sleep(0)  # what calls that just ended used begins to be told
        if self._limiter.pending:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._limiter.flush_pending(is_last=True)


def _refused(holder: Holder, costs: Costs, wait_ms: int | None) -> Admission:
    return Admission(REFUSED, holder.buckets, holder.lease.names, costs, holder, wait_ms)


def _named(each: list[tuple[str, int, int]]) -> dict[str, int]:
    return {name: used for name, _, used in each}
