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
from price_keeper.limits.known import MAX_FRESH_MS, BucketCache, CachedBucket, RefillCompetition
from price_keeper.limits.owed import PendingAdjustments
from price_keeper.limits.sending import BucketTransaction, TransactionSender
from price_keeper.rates.bucket_writes import build_create, build_refill_and_take, build_take_only
from price_keeper.rates.token_bucket import (
    RateBucket,
    StoredBucket,
    compute_available,
    compute_wait_ms,
    get_refill_start,
    resolve_bucket,
)
from price_keeper.stores.contract import Put, Store, Update

GRANT_ATTEMPTS = 8  # at one grant; each but a look means that somebody else was faster
EXACT_ATTEMPTS = 3  # after these a little refill may be lost rather than the grant
CONTENTION_WAIT_MS = 100

CREATE, NORMAL, RETRY, REFUSED, ADJUST = "create", "normal", "retry", "refused", "adjust"
_PATHS_BY_COST = (CREATE, NORMAL, RETRY)

Amounts = Mapping[str, int]


class Grant(NamedTuple):
    """`taken` by limit; empty when refused. `wait_ms`: None when waiting does not help.

    `left`: the last known tokens by limit, the least over all levels. `limiting`: scope and limit that refused.
    `path`: of all levels the one that asked most of the store.
    """

    taken: Amounts
    wait_ms: int | None
    remaining: Amounts
    path: str
    writes: int
    limiting: str = ""

    @property
    def is_refused(self) -> bool:
        return self.path == REFUSED


class _PlannedWrite(NamedTuple):
    """One level's part in a transaction."""

    bucket: RateBucket
    path: str
    write: Put | Update
    refilled_from: StoredBucket | None = None


@dataclass(slots=True)
class _TakeRequest:
    buckets: Sequence[RateBucket]
    wants: Amounts
    needs: Amounts
    used: Amounts
    share: tuple[int, int]
    writes: int = 0

    def required_levels(self, taken: Amounts) -> dict[str, int]:
        """What must be there for `taken` to be no more than the share of it, but for what is needed."""
        part, whole = self.share
        return {
            name: amount if amount <= self.needs.get(name, 0) else -(-amount * whole // part)
            for name, amount in taken.items()
        }


class BucketClient:
    """Raises StoreError when the store cannot be asked. Then nothing was taken and nothing told, or it will be taken
    back: a write whose outcome is not known is kept and settled by `settle`, which is to be called now and then."""

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        clock: Clock,
        random_between: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._now_ms = now_ms
        self._cache = BucketCache(store, now_ms)
        self._sender = TransactionSender(store, clock, random_between)
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
        return await self._grant(_TakeRequest(buckets, costs, costs, costs if used is None else used, (1, 1)))

    async def lease(
        self,
        buckets: Sequence[RateBucket],
        wants: Amounts,
        needs: Amounts,
        used: Amounts,
        share: tuple[int, int] = (1, 2),
    ) -> Grant:
        """Of each limit as much as is wanted, but at most a share of what is there, and at least what is needed.

        `used` is told with it; not if the grant is refused.
        """
        return await self._grant(_TakeRequest(buckets, wants, needs, used, share))

    async def adjust(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        """Below zero in `taken`: given back. Never refused, and raises no StoreError: what cannot be sent is kept."""
        self._adjustments.add(buckets, taken, used)
        if self._adjustments.is_flushing:
            return  # whoever is at it sees to this too
        with suppress(StoreError):  # `pending` tells
            await self._adjustments.flush()

    async def flush_pending(self, *, is_last: bool = False) -> None:
        """Sends what is kept; the last time also what would better wait. Raises StoreError when some of it still cannot
        be sent."""
        await self._adjustments.flush(is_last=is_last)

    async def _grant(self, request: _TakeRequest) -> Grant:
        if any(amount < 0 for amounts in (request.wants, request.needs) for amount in amounts.values()):
            raise ValueError("what is taken is not below zero; giving back is an adjustment")
        for attempt in range(GRANT_ATTEMPTS):
            now_ms, taken = await self._plan_amounts(request)
            if taken is None:
                break
            steps = [self._build_write(bucket, request, taken, now_ms, attempt) for bucket in request.buckets]
            if await self._try_transaction(steps, request, taken):
                return self._build_grant(request, steps, taken)
            if attempt:
                await self._sender.back_off(attempt)
        return await self._build_refusal(request)

    async def _plan_amounts(self, request: _TakeRequest) -> tuple[int, Amounts | None]:
        """When, and how much may be taken. Nothing is refused on what was seen long ago."""
        await self._read_buckets([bucket for bucket in request.buckets if self._needs_read(bucket, request)], request)
        if self._compute_amounts(request, self._now_ms()) is None:
            await self._read_buckets([bucket for bucket in request.buckets if not self._is_fresh(bucket)], request)
        now_ms = self._now_ms()
        return now_ms, self._compute_amounts(request, now_ms)

    async def _read_buckets(self, due: Sequence[RateBucket], request: _TakeRequest) -> None:
        while due:
            await self._cache.read([bucket.key for bucket in due])
            due = [bucket for bucket in request.buckets if self._cache.get(bucket.key) is None]  # forgotten meanwhile

    def _is_fresh(self, bucket: RateBucket) -> bool:
        cached = self._cache.get(bucket.key)
        return cached is not None and cached.is_fresh(self._now_ms())

    def _needs_read(self, bucket: RateBucket, request: _TakeRequest) -> bool:
        cached = self._cache.get(bucket.key)
        if cached is None:
            return True
        if cached.competition is RefillCompetition.NONE or self._is_fresh(bucket):
            return False
        return not self._may_take_unread(cached, bucket, request)

    def _may_take_unread(self, cached: CachedBucket, bucket: RateBucket, request: _TakeRequest) -> bool:
        """Whether to take without looking: what was there when last seen would do, and others refill all the time."""
        if cached.competition is not RefillCompetition.MANY or cached.state is None or cached.is_fresh(self._now_ms()):
            return False
        least = request.required_levels(
            {name: max(want, request.needs.get(name, 0)) for name, want in request.wants.items()}
        )
        effective = resolve_bucket(bucket, cached.state)
        return _has_tokens(cached.state, effective, least)

    def _compute_amounts(self, request: _TakeRequest, now_ms: int) -> dict[str, int] | None:
        available, (part, whole) = self._compute_available(request.buckets, now_ms), request.share
        taken: dict[str, int] = {}
        for name in {**request.wants, **request.needs}:
            want, need = request.wants.get(name, 0), request.needs.get(name, 0)
            if 0 < need > available.get(name, need):
                return None
            most = max(0, available[name] * part // whole) if name in available else want
            taken[name] = max(need, min(want, most))
        return taken

    def _compute_available(self, buckets: Sequence[RateBucket], now_ms: int) -> dict[str, int]:
        least: dict[str, int] = {}
        for bucket in buckets:
            for name, tokens in compute_available(self._cached_state(bucket, now_ms), bucket, now_ms).items():
                least[name] = min(tokens, least.get(name, tokens))
        return least

    def _cached_state(self, bucket: RateBucket, now_ms: int) -> StoredBucket:
        """Where there is no item all limits are as new ones: full."""
        cached = self._cache.get(bucket.key)
        return (
            cached.state
            if cached is not None and cached.state is not None
            else StoredBucket(now_ms, bucket.version, {})
        )

    def _build_write(
        self, bucket: RateBucket, request: _TakeRequest, taken: Amounts, now_ms: int, attempt: int
    ) -> _PlannedWrite:
        cached = self._cache.get(bucket.key)
        if cached is None or cached.state is None:
            return _PlannedWrite(bucket, CREATE, build_create(bucket, taken, request.used, now_ms))
        effective = resolve_bucket(bucket, cached.state)
        if self._may_take_unread(cached, bucket, request):
            return _PlannedWrite(
                bucket, RETRY, build_take_only(effective, taken, request.used, now_ms, request.required_levels(taken))
            )
        if _is_just_refilled(cached.state, now_ms) and _has_tokens(cached.state, effective, taken):
            return _PlannedWrite(bucket, RETRY, build_take_only(effective, taken, request.used, now_ms))
        is_exact = attempt < EXACT_ATTEMPTS
        write = build_refill_and_take(bucket, cached.state, taken, request.used, now_ms, is_exact=is_exact)
        return _PlannedWrite(bucket, NORMAL, write, cached.state)

    async def _try_transaction(self, writes: Sequence[_PlannedWrite], request: _TakeRequest, taken: Amounts) -> bool:
        keys = [step.bucket.key for step in writes]
        transaction = BucketTransaction([step.write for step in writes])
        try:
            await self._sender.send(transaction)
        except BaseException as failure:  # also when whoever asked went away
            if transaction.has_unknown_outcome:
                self._cache.forget(keys)
                self._adjustments.add_unknown_outcome(
                    transaction, request.buckets, taken, request.used, is_refused=is_condition_failure(failure)
                )
            if is_condition_failure(failure):
                self._cache.update_from_failure(failure, keys)
                return False
            raise
        finally:
            request.writes += transaction.attempts
        for step in writes:
            self._record_write(step)
        return True

    def _record_write(self, planned: _PlannedWrite) -> None:
        if isinstance(planned.write, Put):
            self._cache.record_created(planned.write)
        elif planned.refilled_from is not None:
            self._cache.record_refill(planned.write, planned.refilled_from)
        else:
            self._cache.record_take(planned.write)

    def _build_grant(self, request: _TakeRequest, writes: Sequence[_PlannedWrite], taken: Amounts) -> Grant:
        path = min((step.path for step in writes), key=_PATHS_BY_COST.index, default=RETRY)
        self._paths[path] += 1
        remaining = self._compute_available(request.buckets, self._now_ms())
        return Grant(taken, 0, remaining, path, request.writes)

    async def _build_refusal(self, request: _TakeRequest) -> Grant:
        now_ms = self._now_ms()
        waits = {
            f"{bucket.scope}/{limit.name}": compute_wait_ms(
                state, bucket, {limit.name: request.needs.get(limit.name, 0)}, now_ms
            )
            for bucket in request.buckets
            for state in [self._cached_state(bucket, now_ms)]
            for limit in resolve_bucket(bucket, state).limits
        }
        limiting = max(waits, key=lambda name: math.inf if (wait := waits[name]) is None else wait, default="")
        wait = waits.get(limiting)
        remaining = self._compute_available(request.buckets, now_ms)
        for bucket in request.buckets:
            await self._repair_refill_time(bucket, now_ms)
        self._paths[REFUSED] += 1
        wait = CONTENTION_WAIT_MS if wait == 0 else wait  # there is enough, but others were faster each time
        return Grant({}, wait, remaining, REFUSED, request.writes, limiting)

    async def _repair_refill_time(self, bucket: RateBucket, now_ms: int) -> None:
        """A wrong clock wrote a time to come. Without a write that takes nothing, nobody could take until then."""
        state = self._cached_state(bucket, now_ms)
        if get_refill_start(state, now_ms) == state.refilled_at:
            return
        write = build_refill_and_take(bucket, state, {}, {}, now_ms)
        try:
            await self._sender.send(BucketTransaction([write]))
        except StoreError:
            self._cache.forget([bucket.key])
        else:
            self._cache.record_refill(write, state)


def _is_just_refilled(state: StoredBucket, now_ms: int) -> bool:
    return state.refilled_at >= now_ms - MAX_FRESH_MS and state.refilled_at == get_refill_start(state, now_ms)


def _has_tokens(state: StoredBucket, effective: RateBucket, amounts: Amounts) -> bool:
    """By what is stored alone, refill left aside; and the item knows the settings that are in force."""
    names = [limit.name for limit in effective.limits]
    if state.version != effective.version or not all(name in state.limits for name in names):
        return False
    return all(state.limits[name].tokens >= amounts[name] for name in names if amounts.get(name, 0) > 0)
