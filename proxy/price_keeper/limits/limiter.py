"""Taking from the buckets of a scope, and giving back, with as few writes as the fleet's contention allows.

A bucket that nobody else writes to is written to on what is known of it. One that others refill all the time is taken
from without refill, which nobody is in the way of. Otherwise it is looked at first. What comes back from a write whose
condition does not hold is what the next attempt goes by.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from price_keeper.clock import Clock
from price_keeper.errors import StoreError, is_condition_failure
from price_keeper.limits.bucket import RateBucket, StoredBucket, compute_available, resolve_bucket, get_refill_start, compute_wait_ms
from price_keeper.limits.known import MAX_FRESH_MS, RefillCompetition, BucketCache, CachedBucket
from price_keeper.limits.owed import PendingAdjustments
from price_keeper.limits.sending import TransactionSender, BucketTransaction
from price_keeper.limits.writes import build_create, build_refill_and_take, build_take_only
from price_keeper.stores.contract import Put, Store, Update

ATTEMPTS = 8  # at one grant; each but a look means that somebody else was faster
EXACT_ATTEMPTS = 3  # after these a little refill may be lost rather than the grant
CONTENTION_WAIT_MS = 100

CREATE, NORMAL, RETRY, REFUSED, ADJUST = "create", "normal", "retry", "refused", "adjust"
_MOST_FIRST = (CREATE, NORMAL, RETRY)

Amounts = Mapping[str, int]


class Grant(NamedTuple):
    """`taken` by limit; empty when refused. `wait_ms`: None when waiting does not help.

    `left`: the last known tokens by limit, the least over all levels. `limiting`: scope and limit that refused.
    `path`: of all levels the one that asked most of the store.
    """

    taken: Amounts
    wait_ms: int | None
    left: Amounts
    path: str
    writes: int
    limiting: str = ""

    @property
    def is_refused(self) -> bool:
        return self.path == REFUSED


class _Step(NamedTuple):
    """One level's part in a transaction."""

    bucket: RateBucket
    path: str
    write: Put | Update
    refills: StoredBucket | None = None


@dataclass(slots=True)
class _Ask:
    buckets: Sequence[RateBucket]
    wants: Amounts
    needs: Amounts
    used: Amounts
    share: tuple[int, int]
    writes: int = 0

    def least(self, taken: Amounts) -> dict[str, int]:
        """What must be there for `taken` to be no more than the share of it, but for what is needed."""
        part, whole = self.share
        return {
            name: amount if amount <= self.needs.get(name, 0) else -(-amount * whole // part)
            for name, amount in taken.items()
        }


class Limiter:
    """Raises StoreError when the store cannot be asked. Then nothing was taken and nothing told, or it will be taken
    back: a write whose outcome is not known is kept and settled by `settle`, which is to be called now and then."""

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._now_ms = now_ms
        self._cache = BucketCache(store, now_ms)
        self._sender = TransactionSender(store, clock, uniform)
        self._adjustments = PendingAdjustments(self._cache, self._sender, now_ms)
        self._paths: Counter[str] = Counter()

    @property
    def paths(self) -> Counter[str]:
        """Grants by path, refusals, and adjustments."""
        return self._paths + Counter({ADJUST: self._adjustments.written})

    @property
    def conflicts(self) -> int:
        """Transactions that the store put off, others being at the same items."""
        return self._sender.conflicts

    @property
    def pending(self) -> int:
        """Buckets with something to adjust, and writes whose outcome is not known."""
        return len(self._adjustments)

    @property
    def dropped(self) -> int:
        """Of what was pending: given up for want of room, or since nobody can know any more."""
        return self._adjustments.dropped

    async def acquire(self, buckets: Sequence[RateBucket], costs: Amounts, used: Amounts | None = None) -> Grant:
        """All of it from all buckets, or nothing. `used` is told with it: the costs, if nothing is said."""
        return await self._grant(_Ask(buckets, costs, costs, costs if used is None else used, (1, 1)))

    async def lease(
        self, buckets: Sequence[RateBucket], wants: Amounts, needs: Amounts, used: Amounts, share: tuple[int, int] = (1, 2)
    ) -> Grant:
        """Of each limit as much as is wanted, but at most a share of what is there, and at least what is needed.

        `used` is told with it; not if the grant is refused.
        """
        return await self._grant(_Ask(buckets, wants, needs, used, share))

    async def adjust(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        """Below zero in `taken`: given back. Never refused, and raises no StoreError: what cannot be sent is kept."""
        self._adjustments.add(buckets, taken, used)
        if self._adjustments.is_flushing:
            return  # whoever is at it sees to this too
        with suppress(StoreError):  # `pending` tells
            await self._adjustments.flush()

    async def settle(self, *, is_last: bool = False) -> None:
        """Sends what is kept; the last time also what would better wait. Raises StoreError when some of it still cannot
        be sent."""
        await self._adjustments.flush(is_last=is_last)

    async def _grant(self, ask: _Ask) -> Grant:
        if any(amount < 0 for amounts in (ask.wants, ask.needs) for amount in amounts.values()):
            raise ValueError("what is taken is not below zero; giving back is an adjustment")
        for attempt in range(ATTEMPTS):
            now_ms, taken = await self._decided(ask)
            if taken is None:
                break
            steps = [self._step(bucket, ask, taken, now_ms, attempt) for bucket in ask.buckets]
            if await self._written(steps, ask, taken):
                return self._granted(ask, steps, taken)
            if attempt:
                await self._sender.back_off(attempt)
        return await self._refused(ask)

    async def _decided(self, ask: _Ask) -> tuple[int, Amounts | None]:
        """When, and how much may be taken. Nothing is refused on what was seen long ago."""
        await self._look([bucket for bucket in ask.buckets if self._must_look(bucket, ask)], ask)
        if self._amounts(ask, self._now_ms()) is None:
            await self._look([bucket for bucket in ask.buckets if not self._is_fresh(bucket)], ask)
        now_ms = self._now_ms()
        return now_ms, self._amounts(ask, now_ms)

    async def _look(self, due: Sequence[RateBucket], ask: _Ask) -> None:
        while due:
            await self._cache.read([bucket.key for bucket in due])
            due = [bucket for bucket in ask.buckets if self._cache.get(bucket.key) is None]  # forgotten meanwhile

    def _is_fresh(self, bucket: RateBucket) -> bool:
        seen = self._cache.get(bucket.key)
        return seen is not None and seen.is_fresh(self._now_ms())

    def _must_look(self, bucket: RateBucket, ask: _Ask) -> bool:
        seen = self._cache.get(bucket.key)
        if seen is None:
            return True
        if seen.competition is RefillCompetition.NONE or self._is_fresh(bucket):
            return False
        return not self._is_blind(seen, bucket, ask)

    def _is_blind(self, seen: CachedBucket, bucket: RateBucket, ask: _Ask) -> bool:
        """Whether to take without looking: what was there when last seen would do, and others refill all the time."""
        if seen.competition is not RefillCompetition.MANY or seen.state is None or seen.is_fresh(self._now_ms()):
            return False
        least = ask.least({name: max(want, ask.needs.get(name, 0)) for name, want in ask.wants.items()})
        force = resolve_bucket(bucket, seen.state)
        return _has(seen.state, force, least)

    def _amounts(self, ask: _Ask, now_ms: int) -> dict[str, int] | None:
        there, (part, whole) = self._there(ask.buckets, now_ms), ask.share
        taken: dict[str, int] = {}
        for name in {**ask.wants, **ask.needs}:
            want, need = ask.wants.get(name, 0), ask.needs.get(name, 0)
            if 0 < need > there.get(name, need):
                return None
            most = max(0, there[name] * part // whole) if name in there else want
            taken[name] = max(need, min(want, most))
        return taken

    def _there(self, buckets: Sequence[RateBucket], now_ms: int) -> dict[str, int]:
        least: dict[str, int] = {}
        for bucket in buckets:
            for name, tokens in compute_available(self._state(bucket, now_ms), bucket, now_ms).items():
                least[name] = min(tokens, least.get(name, tokens))
        return least

    def _state(self, bucket: RateBucket, now_ms: int) -> StoredBucket:
        """Where there is no item all limits are as new ones: full."""
        seen = self._cache.get(bucket.key)
        return seen.state if seen is not None and seen.state is not None else StoredBucket(now_ms, bucket.version, {})

    def _step(self, bucket: RateBucket, ask: _Ask, taken: Amounts, now_ms: int, attempt: int) -> _Step:
        seen = self._cache.get(bucket.key)
        if seen is None or seen.state is None:
            return _Step(bucket, CREATE, build_create(bucket, taken, ask.used, now_ms))
        force = resolve_bucket(bucket, seen.state)
        if self._is_blind(seen, bucket, ask):
            return _Step(bucket, RETRY, build_take_only(force, taken, ask.used, now_ms, ask.least(taken)))
        if _was_just_refilled(seen.state, now_ms) and _has(seen.state, force, taken):
            return _Step(bucket, RETRY, build_take_only(force, taken, ask.used, now_ms))
        is_exact = attempt < EXACT_ATTEMPTS
        write = build_refill_and_take(bucket, seen.state, taken, ask.used, now_ms, is_exact=is_exact)
        return _Step(bucket, NORMAL, write, seen.state)

    async def _written(self, steps: Sequence[_Step], ask: _Ask, taken: Amounts) -> bool:
        keys = [step.bucket.key for step in steps]
        transaction = BucketTransaction([step.write for step in steps])
        try:
            await self._sender.send(transaction)
        except BaseException as failure:  # also when whoever asked went away
            if transaction.has_unknown_outcome:
                self._cache.forget(keys)
                self._adjustments.add_unknown_outcome(transaction, ask.buckets, taken, ask.used, is_refused=is_condition_failure(failure))
            if is_condition_failure(failure):
                self._cache.update_from_failure(failure, keys)
                return False
            raise
        finally:
            ask.writes += transaction.attempts
        for step in steps:
            self._learn_of(step)
        return True

    def _learn_of(self, step: _Step) -> None:
        if isinstance(step.write, Put):
            self._cache.record_created(step.write)
        elif step.refills is not None:
            self._cache.record_refill(step.write, step.refills)
        else:
            self._cache.record_take(step.write)

    def _granted(self, ask: _Ask, steps: Sequence[_Step], taken: Amounts) -> Grant:
        path = min((step.path for step in steps), key=_MOST_FIRST.index, default=RETRY)
        self._paths[path] += 1
        left = self._there(ask.buckets, self._now_ms())
        return Grant(taken, 0, left, path, ask.writes)

    async def _refused(self, ask: _Ask) -> Grant:
        now_ms = self._now_ms()
        waits = {
            f"{bucket.scope}/{limit.name}": compute_wait_ms(state, bucket, {limit.name: ask.needs.get(limit.name, 0)}, now_ms)
            for bucket in ask.buckets
            for state in [self._state(bucket, now_ms)]
            for limit in resolve_bucket(bucket, state).limits
        }
        limiting = max(waits, key=lambda name: math.inf if (wait := waits[name]) is None else wait, default="")
        wait = waits.get(limiting)
        left = self._there(ask.buckets, now_ms)
        for bucket in ask.buckets:
            await self._mend(bucket, now_ms)
        self._paths[REFUSED] += 1
        wait = CONTENTION_WAIT_MS if wait == 0 else wait  # there is enough, but others were faster each time
        return Grant({}, wait, left, REFUSED, ask.writes, limiting)

    async def _mend(self, bucket: RateBucket, now_ms: int) -> None:
        """A wrong clock wrote a time to come. Without a write that takes nothing, nobody could take until then."""
        state = self._state(bucket, now_ms)
        if get_refill_start(state, now_ms) == state.refilled_at:
            return
        write = build_refill_and_take(bucket, state, {}, {}, now_ms)
        try:
            await self._sender.send(BucketTransaction([write]))
        except StoreError:
            self._cache.forget([bucket.key])
        else:
            self._cache.record_refill(write, state)


def _was_just_refilled(state: StoredBucket, now_ms: int) -> bool:
    return state.refilled_at >= now_ms - MAX_FRESH_MS and state.refilled_at == get_refill_start(state, now_ms)


def _has(state: StoredBucket, force: RateBucket, amounts: Amounts) -> bool:
    """By what is stored alone, refill left aside; and the item knows the settings that are in force."""
    names = [limit.name for limit in force.limits]
    if state.version != force.version or not all(name in state.limits for name in names):
        return False
    return all(state.limits[name].tokens >= amounts[name] for name in names if amounts.get(name, 0) > 0)
