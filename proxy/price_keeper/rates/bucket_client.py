"""Take tokens from the shared buckets in the store, and give them back, with as few writes as contention allows.

START HERE: `BucketClient.acquire`, `lease` and `adjust`. A grant is decided on the cached state of the buckets
(`BucketCache`) and written with conditions. When a condition fails, the state that comes back with the failure is
cached and the next attempt uses it. If no other process refills a bucket, the cache is trusted; if others refill it all
the time, tokens are taken without refill, which cannot conflict; otherwise the bucket is read first.

`TransactionSender` retries one transaction under one idempotency token. `PendingAdjustments` keeps what could not be
written yet, and undoes writes that reported failure but may still have been applied.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import NamedTuple
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import (
    InvalidStoreRequest,
    ReasonCode,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
    is_condition_failure,
)
from price_keeper.rates.bucket_writes import (
    TAKE_ONLY_WINDOW_MS,
    build_adjustment,
    build_create,
    build_refill_and_take,
    build_take_only,
)
from price_keeper.rates.token_bucket import (
    REFILLED_AT,
    TOKENS,
    RateBucket,
    StoredBucket,
    compute_available,
    compute_wait_ms,
    encode_stored_bucket,
    get_refill_start,
    parse_stored_bucket,
    resolve_bucket,
)
from price_keeper.stores.contract import Item, Key, Put, Store, Update, Write
from price_keeper.stores.item_values import apply_update

GRANT_ATTEMPTS = 8  # per grant; every failed attempt but a read means that another process was faster
EXACT_ATTEMPTS = 3  # after this many, losing a little refill is better than losing the grant
CONTENTION_WAIT_MS = 100

MAX_CACHED_BUCKETS = 10_000  # a few hundred bytes each; an evicted one costs a read
MAX_FRESH_MS = 500  # a state this young is not read again before a refusal or before a share is computed

MAX_UNANSWERED = 3  # attempts of one `send` whose responses are lost
MAX_CONFLICTS = 6  # attempts of one `send` that conflict with other writers
FIRST_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 0.5

# The store remembers an idempotency token for ten minutes; this stays below that despite clock and network delays.
TOKEN_TTL_SECONDS = 570.0

# A request without a response may still be carried out up to this much later, long after its sender gave it up.
MAX_IN_FLIGHT_SECONDS = 300.0

MAX_PENDING_BUCKETS = 10_000
MAX_UNKNOWN_OUTCOMES = 1_000
FLUSH_ROUNDS = 10  # per flush; each round sends what was added during the one before
ADJUST_ATTEMPTS = 8  # per adjustment; each failed one means that another process was faster

CREATE, NORMAL, RETRY, REFUSED, ADJUST = "create", "normal", "retry", "refused", "adjust"
_PATHS_BY_COST = (CREATE, NORMAL, RETRY)

Amounts = Mapping[str, int]


class Grant(NamedTuple):
    """The result of `acquire` or `lease`.

    `taken`: tokens by limit, empty when refused. `wait_ms`: None when waiting does not help. `remaining`: the last
    known tokens by limit, the least over all levels. `limiting`: scope and limit that refused. `path`: the most
    expensive path for the store among all levels.
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
    """The write for one level (one bucket) in a transaction."""

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
        """Return the tokens that must be there so that `taken`, except for what is needed, is at most the share."""
        part, whole = self.share
        return {
            name: amount if amount <= self.needs.get(name, 0) else -(-amount * whole // part)
            for name, amount in taken.items()
        }


class BucketClient:
    """Takes tokens from buckets in the store and gives them back.

    Raises StoreError when the store cannot be reached. Then nothing was taken or reported as used, or it will be
    undone: a write with an unknown outcome is kept until `flush_pending` settles it. Call `flush_pending` regularly.
    """

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
        """Grants by path, refusals and adjustments."""
        return self._paths + Counter({ADJUST: self._adjustments.written})

    @property
    def conflicts(self) -> int:
        """Number of transactions that the store rejected because other writers were at the same items."""
        return self._sender.conflicts

    @property
    def pending(self) -> int:
        """Number of buckets with an unwritten adjustment, plus writes whose outcome is unknown."""
        return len(self._adjustments)

    @property
    def dropped(self) -> int:
        """Pending entries that were given up: for lack of room, or because their outcome can no longer be known."""
        return self._adjustments.dropped

    async def acquire(self, buckets: Sequence[RateBucket], costs: Amounts, used: Amounts | None = None) -> Grant:
        """Take all `costs` from all buckets, or nothing. `used` is reported with it and defaults to the costs."""
        return await self._grant(_TakeRequest(buckets, costs, costs, costs if used is None else used, (1, 1)))

    async def lease(
        self,
        buckets: Sequence[RateBucket],
        wants: Amounts,
        needs: Amounts,
        used: Amounts,
        share: tuple[int, int] = (1, 2),
    ) -> Grant:
        """Take of each limit what is wanted, but at most `share` of what is there, and at least what is needed.

        `used` is reported in the same write, unless the grant is refused.
        """
        return await self._grant(_TakeRequest(buckets, wants, needs, used, share))

    async def adjust(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        """Apply a correction; negative amounts in `taken` are given back. It is never refused and raises no StoreError:
        what cannot be sent is kept for `flush_pending`."""
        self._adjustments.add(buckets, taken, used)
        if self._adjustments.is_flushing:
            return  # the running flush sends this too
        with suppress(StoreError):  # `pending` shows what was not sent
            await self._adjustments.flush()

    async def flush_pending(self, *, is_last: bool = False) -> None:
        """Send what is kept; with `is_last` also what should rather wait. Raises StoreError if some of it still cannot
        be sent."""
        await self._adjustments.flush(is_last=is_last)

    async def _grant(self, request: _TakeRequest) -> Grant:
        if any(amount < 0 for amounts in (request.wants, request.needs) for amount in amounts.values()):
            raise ValueError("amounts to take must not be negative; use adjust() to give tokens back")
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
        """Return the time and how much may be taken; None refuses. A refusal is always based on a fresh state."""
        await self._read_buckets([bucket for bucket in request.buckets if self._needs_read(bucket, request)], request)
        if self._compute_amounts(request, self._now_ms()) is None:
            await self._read_buckets([bucket for bucket in request.buckets if not self._is_fresh(bucket)], request)
        now_ms = self._now_ms()
        return now_ms, self._compute_amounts(request, now_ms)

    async def _read_buckets(self, due: Sequence[RateBucket], request: _TakeRequest) -> None:
        while due:
            await self._cache.read([bucket.key for bucket in due])
            # Entries can be evicted from the cache during the read.
            due = [bucket for bucket in request.buckets if self._cache.get(bucket.key) is None]

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
        """Whether to take without reading first: the last known state would do, and others refill all the time."""
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
        """Return the cached state. If there is no item, all limits count as new, that is full."""
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
        except BaseException as failure:  # also CancelledError when the caller is gone: the write may be applied
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
        """Reset a refill time in the future, which a wrong clock wrote.

        This writes without taking anything; otherwise no process could take tokens until that time.
        """
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
    """Whether the stored tokens suffice without refill, and the item has the settings that are in force."""
    names = [limit.name for limit in effective.limits]
    if state.version != effective.version or not all(name in state.limits for name in names):
        return False
    return all(state.limits[name].tokens >= amounts[name] for name in names if amounts.get(name, 0) > 0)


class RefillCompetition(Enum):
    """How often other processes refill a bucket, as seen by this one; it decides whether its cached state is used."""

    NONE = "the cached state holds until this process changes it"
    SOME = "the cached state is out of date: read first"
    MANY = "the bucket was refilled a moment ago whenever it was read"


@dataclass(frozen=True, slots=True)
class CachedBucket:
    """The last known state of a bucket; `state` is None if there was no item."""

    state: StoredBucket | None
    at_ms: int
    competition: RefillCompetition = RefillCompetition.NONE

    def is_fresh(self, now_ms: int) -> bool:
        return abs(now_ms - self.at_ms) <= MAX_FRESH_MS


class BucketCache:
    """The last known states of buckets, at most MAX_CACHED_BUCKETS; the oldest is evicted first."""

    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store, self._now_ms = store, now_ms
        self._buckets: dict[Key, CachedBucket] = {}

    def get(self, key: Key) -> CachedBucket | None:
        return self._buckets.get(key)

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._buckets.pop(key, None)

    async def read(self, keys: Sequence[Key]) -> list[CachedBucket]:
        items = await self._store.get_many(keys, consistent=True)
        return [self._update(key, item) for key, item in zip(keys, items, strict=True)]

    def update_from_failure(self, failure: TransactionFailed, keys: Sequence[Key]) -> None:
        """Cache the items that a failed transaction on these keys returned; forget keys without a returned item."""
        for key, reason in zip(keys, failure.reasons, strict=True):
            if reason.code is not ReasonCode.CONDITION_FAILED:
                continue
            if reason.item is not None:
                self._update(key, reason.item)
            else:
                self.forget([key])

    def record_created(self, put: Put) -> None:
        self._store_entry(put.key, CachedBucket(parse_stored_bucket(put.item), self._now_ms()))

    def record_refill(self, write: Update, state: StoredBucket) -> None:
        """Apply this process's successful refill of `state`. A newer cached state is kept."""
        cached = self._buckets.get(write.key)
        if cached is None or cached.state is None:
            return
        if (cached.state.refilled_at, cached.state.version) == (state.refilled_at, state.version):
            after = parse_stored_bucket(apply_update(write, encode_stored_bucket(cached.state)))
            self._store_entry(write.key, CachedBucket(after, self._now_ms(), cached.competition))

    def record_take(self, write: Update) -> None:
        """Apply this process's successful write without refill. Other changes of the bucket stay unknown."""
        cached = self._buckets.get(write.key)
        if cached is None or cached.state is None:
            return
        limits = {
            name: kept._replace(tokens=kept.tokens + int(write.add.get(name + TOKENS, 0)))
            for name, kept in cached.state.limits.items()
        }
        self._buckets[write.key] = replace(cached, state=replace(cached.state, limits=limits))

    def _update(self, key: Key, item: Item | None) -> CachedBucket:
        state = parse_stored_bucket(item) if item is not None else None
        return self._store_entry(key, CachedBucket(state, self._now_ms(), self._classify_competition(key, state)))

    def _classify_competition(self, key: Key, state: StoredBucket | None) -> RefillCompetition:
        before = self._buckets.get(key)
        if before is None or before.state is None or state is None:
            return RefillCompetition.NONE
        if state.refilled_at == before.state.refilled_at:
            return RefillCompetition.NONE
        return (
            RefillCompetition.MANY
            if state.refilled_at >= self._now_ms() - TAKE_ONLY_WINDOW_MS
            else RefillCompetition.SOME
        )

    def _store_entry(self, key: Key, cached: CachedBucket) -> CachedBucket:
        self._buckets.pop(key, None)
        self._buckets[key] = cached
        while len(self._buckets) > MAX_CACHED_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return cached


@dataclass(slots=True)
class BucketTransaction:
    """One transaction with its idempotency token. A retry sends the same writes, so they are applied at most once."""

    writes: Sequence[Write]
    idempotency_token: str = field(default_factory=lambda: str(uuid4()))
    first_sent_at: float | None = None  # by the monotonic clock
    attempts: int = 0
    has_unknown_outcome: bool = False  # it was sent and may or may not have been applied
    may_arrive_until: float = -inf  # by the monotonic clock: an attempt without a response may still arrive


class TransactionSender:
    """Sends transactions, with retries. Unlike `stores.conflict_retry` it records what may still be applied."""

    def __init__(self, store: Store, clock: Clock, random_between: Callable[[float, float], float]) -> None:
        self._store, self._clock, self._random_between = store, clock, random_between
        self.conflicts = 0

    def may_arrive(self, transaction: BucketTransaction) -> bool:
        return self._clock.monotonic() < transaction.may_arrive_until

    def is_token_expired(self, transaction: BucketTransaction) -> bool:
        return (
            transaction.first_sent_at is not None
            and self._clock.monotonic() - transaction.first_sent_at > TOKEN_TTL_SECONDS
        )

    async def send(self, transaction: BucketTransaction) -> None:
        """Send until it succeeds. Raises TransactionFailed when a condition does not hold, or another StoreError when
        the attempts are used up; `transaction.has_unknown_outcome` then says whether it may have been applied."""
        unanswered = conflicts = 0
        while True:
            try:
                return await self._attempt(transaction)
            except StoreUnavailable as failure:
                unanswered += 1
                if not failure.maybe_applied or unanswered == MAX_UNANSWERED or self.is_token_expired(transaction):
                    raise
            except (StoreThrottled, TransactionFailed) as failure:
                conflicts += 1
                if is_condition_failure(failure) or conflicts == MAX_CONFLICTS or self.is_token_expired(transaction):
                    raise
            await self.back_off(unanswered + conflicts)

    async def _attempt(self, transaction: BucketTransaction) -> None:
        now, was_unknown, may_arrive_before = (
            self._clock.monotonic(),
            transaction.has_unknown_outcome,
            transaction.may_arrive_until,
        )
        if transaction.first_sent_at is None:
            transaction.first_sent_at = now
        # This stays set if the task is cancelled during the call.
        transaction.has_unknown_outcome, transaction.may_arrive_until = (True, now + MAX_IN_FLIGHT_SECONDS)
        transaction.attempts += 1
        try:
            await self._store.transact(transaction.writes, token=transaction.idempotency_token)
        except StoreError as failure:
            self.conflicts += not is_condition_failure(failure) and isinstance(
                failure, (StoreThrottled, TransactionFailed)
            )
            if not failure.maybe_applied:
                transaction.may_arrive_until = may_arrive_before
            # The store answers a remembered token with success, so a failed condition means that no earlier attempt
            # was applied. But one may still be on its way, and its condition may hold when it arrives.
            settles = is_condition_failure(failure) and not self.may_arrive(transaction)
            transaction.has_unknown_outcome = failure.maybe_applied or (was_unknown and not settles)
            raise
        transaction.has_unknown_outcome = False

    async def back_off(self, attempts: int) -> None:
        longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**attempts)
        await self._clock.sleep(self._random_between(0, longest))


@dataclass(slots=True, eq=False)
class _PendingAdjustment:
    """The unwritten adjustment of one bucket, summed up. `sent` is the part that is in the transaction in flight."""

    bucket: RateBucket
    taken: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    in_flight: BucketTransaction | None = None
    sent: tuple[Amounts, Amounts] = ({}, {})

    def add(self, taken: Amounts, used: Amounts) -> None:
        for counts, more in ((self.taken, taken), (self.used, used)):
            for name, amount in more.items():
                counts[name] += amount

    @property
    def is_settled(self) -> bool:
        return self.in_flight is None and not any(self.taken.values()) and not any(self.used.values())


@dataclass(slots=True, eq=False)
class _UnknownOutcome:
    """A write that was reported as failed but may have been applied."""

    transaction: BucketTransaction
    buckets: Sequence[RateBucket]
    taken: Amounts
    used: Amounts
    is_refused: bool  # on its last attempt; an earlier attempt may still be applied


class PendingAdjustments:
    """What could not be written yet: adjustments by bucket, and writes with an unknown outcome that must be undone."""

    def __init__(self, cache: BucketCache, sender: TransactionSender, now_ms: Callable[[], int]) -> None:
        self._cache, self._sender, self._now_ms = cache, sender, now_ms
        self._adjustments: dict[Key, _PendingAdjustment] = {}
        self._unknown_outcomes: list[_UnknownOutcome] = []
        self._flush_lock = asyncio.Lock()
        self.written = 0
        self.dropped = 0  # for lack of room, or because the outcome can no longer be known

    def __len__(self) -> int:
        return len(self._adjustments) + len(self._unknown_outcomes)

    def add(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        for bucket in buckets:
            adjustment = self._adjustments.setdefault(bucket.key, _PendingAdjustment(bucket))
            adjustment.bucket = max(adjustment.bucket, bucket, key=lambda candidate: candidate.version)
            adjustment.add(taken, used)
            if adjustment.is_settled:
                del self._adjustments[bucket.key]
        while len(self._adjustments) > MAX_PENDING_BUCKETS:
            del self._adjustments[next(iter(self._adjustments))]
            self.dropped += 1

    def add_unknown_outcome(
        self,
        transaction: BucketTransaction,
        buckets: Sequence[RateBucket],
        taken: Amounts,
        used: Amounts,
        *,
        is_refused: bool,
    ) -> None:
        """Keep a write that was reported as failed. If it was applied after all, `flush` undoes it."""
        self._unknown_outcomes.append(_UnknownOutcome(transaction, buckets, taken, used, is_refused))
        if len(self._unknown_outcomes) > MAX_UNKNOWN_OUTCOMES:
            del self._unknown_outcomes[0]
            self.dropped += 1

    @property
    def is_flushing(self) -> bool:
        return self._flush_lock.locked()

    async def flush(self, *, is_last: bool = False) -> None:
        """Send everything that is due. Raises a StoreError if something had to be left for later.

        `is_last`: there is no later flush, so writes that may still be on their way are settled now.
        """
        last_error: StoreError | None = None
        postponed: dict[int, _UnknownOutcome | _PendingAdjustment] = {}
        async with self._flush_lock:
            for _ in range(FLUSH_ROUNDS):
                due_outcomes = [
                    outcome for outcome in self._unknown_outcomes if is_last or not self._must_wait(outcome)
                ]
                pending: list[_UnknownOutcome | _PendingAdjustment] = [*due_outcomes, *self._adjustments.values()]
                due = [work for work in pending if id(work) not in postponed]
                if not due:
                    break
                for work in due:
                    try:
                        await (
                            self._undo(work, is_last)
                            if isinstance(work, _UnknownOutcome)
                            else self._write_adjustment(work)
                        )
                    except (StoreUnavailable, StoreThrottled):
                        raise  # the others would fail too, and each would wait for its timeout
                    except StoreError as failure:
                        last_error, postponed[id(work)] = failure, work
        if last_error is not None:
            raise last_error

    def _must_wait(self, outcome: _UnknownOutcome) -> bool:
        """Whether an attempt may still be on its way, so that the outcome cannot be settled yet."""
        return outcome.is_refused and self._sender.may_arrive(outcome.transaction)

    async def _undo(self, outcome: _UnknownOutcome, is_last: bool) -> None:
        """Find out whether a write was applied, by sending it again under its token, and give its tokens back if so."""
        if self._sender.is_token_expired(outcome.transaction):
            self.dropped += 1  # the tokens count as taken
        else:
            try:
                await self._sender.send(outcome.transaction)
            except TransactionFailed as failure:
                if not is_condition_failure(failure):
                    raise
                outcome.is_refused = True
                if self._must_wait(outcome) and not is_last:
                    return
            else:
                self.add(outcome.buckets, _negate(outcome.taken), _negate(outcome.used))
        if outcome in self._unknown_outcomes:
            self._unknown_outcomes.remove(outcome)

    async def _write_adjustment(self, adjustment: _PendingAdjustment) -> None:
        attempts = 0
        while not adjustment.is_settled:
            if adjustment.in_flight is None:
                cached = self._cache.get(adjustment.bucket.key)
                effective = resolve_bucket(adjustment.bucket, cached.state if cached is not None else None)
                self._prepare_write(
                    adjustment, build_adjustment(effective, None, adjustment.taken, adjustment.used, self._now_ms())
                )
            else:
                attempts += 1
                await self._send_in_flight(adjustment, is_last=attempts >= ADJUST_ATTEMPTS)
        if self._adjustments.get(adjustment.bucket.key) is adjustment:
            del self._adjustments[adjustment.bucket.key]

    def _prepare_write(self, adjustment: _PendingAdjustment, write: Put | Update) -> None:
        """Put `write` in flight; an update that adds nothing (nothing fits, or no limit is left) is not sent."""
        adjustment.in_flight = None if isinstance(write, Update) and not write.add else BucketTransaction([write])
        adjustment.sent, adjustment.taken, adjustment.used = (adjustment.taken, adjustment.used), Counter(), Counter()

    async def _send_in_flight(self, adjustment: _PendingAdjustment, *, is_last: bool) -> None:
        """Send the transaction that was prepared as `in_flight`. If its condition fails, prepare another."""
        assert adjustment.in_flight is not None
        if self._sender.is_token_expired(adjustment.in_flight):
            self.dropped += 1
            adjustment.in_flight = None
            return
        try:
            await self._sender.send(adjustment.in_flight)
        except StoreError as failure:
            if adjustment.in_flight.has_unknown_outcome:
                if not is_condition_failure(failure):
                    raise
                # The failed transaction may still be applied, besides the next one.
                self.add_unknown_outcome(adjustment.in_flight, [adjustment.bucket], *adjustment.sent, is_refused=True)
            self._restore_sent(adjustment)
            if isinstance(failure, InvalidStoreRequest):
                self._adjustments.pop(adjustment.bucket.key, None)  # the store would reject it every time
                self.dropped += 1
            if is_last or not is_condition_failure(failure):
                raise
            await self._rebuild_write(adjustment, failure)
        else:
            self._on_written(adjustment)

    def _restore_sent(self, adjustment: _PendingAdjustment) -> None:
        adjustment.in_flight = None
        adjustment.add(*adjustment.sent)

    async def _rebuild_write(self, adjustment: _PendingAdjustment, failure: TransactionFailed) -> None:
        """Build the write again from the current item, which says whether it exists and how much fits."""
        key = adjustment.bucket.key
        self._cache.update_from_failure(failure, [key])
        cached = self._cache.get(key) or (await self._cache.read([key]))[0]
        if cached.state is None:
            self._prepare_write(
                adjustment, build_create(adjustment.bucket, adjustment.taken, adjustment.used, self._now_ms())
            )
        else:
            self._prepare_write(
                adjustment,
                build_adjustment(adjustment.bucket, cached.state, adjustment.taken, adjustment.used, self._now_ms()),
            )

    def _on_written(self, adjustment: _PendingAdjustment) -> None:
        assert adjustment.in_flight is not None
        (write,) = adjustment.in_flight.writes
        adjustment.in_flight = None
        self.written += 1
        if isinstance(write, Update) and REFILLED_AT not in write.set:
            self._cache.record_take(write)
        else:
            self._cache.forget([write.key])


def _negate(amounts: Amounts) -> dict[str, int]:
    return {name: -amount for name, amount in amounts.items()}
