"""Money that this process leased from hard budgets, and may spend without asking the store.

    SharedBudgetBucket   the bucket of one hard budget that all processes share: created, kept to its quota
    BudgetLeaseWriter    moves money between the bucket and this process's row; each write counts once at most
    BudgetLease          the leased money of one budget; calls reserve their cost ceiling from it
    BudgetLeases         the leases of all hard budgets, and their background work
    CostReservation      the reserved ceiling of one call, settled by its receipt or released if it is never sent

No call waits for the store while the lease has enough. If it has not, all waiting calls share one top-up. If the
bucket has not enough either, what is left in the lease is released, so that small remainders of many processes come
together.

A write whose answer was lost counts neither as done nor as undone. The next write finds out by the row's sequence
number; until then, leased money of that write is not spent, and released money is not used again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import ConditionFailed, ReasonCode, StoreError, TransactionFailed
from price_keeper.ledger import lease_rows
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.stores.contract import Item, Store, Write, iterate_rows
from price_keeper.tasks import Tasks

TOP_UP_TIMEOUT_SECONDS = 2.0  # of a call, for a top-up
HORIZON_SECONDS = 3  # for so long a chunk lasts, by the worst cases of late
MAX_CHUNK_SHARE = 8  # of what is in the bucket, at most one part in so many is taken for later
TOP_UP_ATTEMPTS = 6  # of one top-up, while others move the bucket
BUCKET_STALE_SECONDS = 10.0  # what the bucket was known to hold is of no use any more
CONTENTION_PAUSE_SECONDS = 0.25  # until a bucket that others keep moving is asked again
MIN_PAUSE_SECONDS = 1.0  # one that is dry at first, and a store that is away
MAX_PAUSE_SECONDS = 30.0  # at the most
IDLE_SECONDS = 5.0
BURN_SMOOTHING_SHARE = 4  # of what is known of the burn, each second replaces one part
NEVER = float("inf")

_log = logging.getLogger("price_keeper.hard")


class RefusalReason(Enum):
    """A call is refused."""

    INSUFFICIENT = "the bucket has not as much"
    STORE_UNAVAILABLE = "the store cannot be asked"
    DISK_FAILED = "the journal's disk takes no name"
    LEASE_CLOSED = "the journal of this process was replayed elsewhere"
    CONTENTION = "others keep moving the bucket"


class BucketStatus(NamedTuple):
    """What is known of the bucket: when it was last heard of, by the wall clock. None: never."""

    unleased: int | None  # that nobody holds
    quota: int | None
    read_at: float | None
    reason: RefusalReason | None  # it refuses
    retry_after: float


class ChargedReceipt(Protocol):
    """A receipt."""

    @property
    def counts(self) -> Sequence[int]: ...  # the last of them pico-dollars


class CostReservation:
    """One call's worst case, taken. To be settled once: by what its receipt says, or let go if it is never sent."""

    __slots__ = ("_lease", "ceiling", "key")

    def __init__(self, lease: BudgetLease, ceiling: int) -> None:
        self._lease: BudgetLease | None = lease
        self.key = lease.key
        self.ceiling = ceiling

    def on_completed(self, receipt: ChargedReceipt | None) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.settle(self.ceiling, 0 if receipt is None else receipt.counts[-1])

    def on_cancelled(self) -> None:
        self.on_completed(None)


class BudgetLease:
    """`quota` and `version` are those of the settings that this process knows."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        key: HardBudgetKey,
        lease_file: BudgetLeaseFile,
        read_spent: ReadSpent,
        quota: int,
        version: int,
    ) -> None:
        self.key = key
        self.free = 0  # below zero where a call cost more than its worst case
        self.reserved = self.settled = 0  # worst cases, ever
        self.quota, self.version = quota, version
        self.top_ups = self.refusals = 0
        self._clock, self._tasks, self._lease_file = clock, tasks, lease_file
        self._shared_bucket = SharedBudgetBucket(store, clock, key, read_spent)
        self._writer = BudgetLeaseWriter(store, key, lease_file.holder, self._on_gained)
        self._writing = asyncio.Lock()
        self._top_up_done: asyncio.Event | None = None
        self._is_top_up_slow = False  # what is under way: somebody waited for it long enough
        self._waiting_amounts: list[int] = []
        self._low_mark = -NEVER  # a take that leaves less than this asks for more in the background
        self._bucket: HardBudgetBucket | None = None
        self._has_reconciled = False  # since this process knows it
        self._unleased = 0  # in the bucket, as far as is known
        self._bucket_read_at, self._bucket_read_epoch = -NEVER, 0.0
        self._last_chunk, self._last_chunk_at = 0, -NEVER
        self._refusal_reason: RefusalReason | None = None
        self._pause, self._paused_until, self._may_cut_pause = MIN_PAUSE_SECONDS, -NEVER, False
        self._last_reserved, self._burn_rate = 0, 0.0
        self._ticked_at = self._used_at = clock.monotonic()
        self._has_logged_excess = False

    # For the calls.

    def try_reserve(self, ceiling: int) -> bool:
        free = self.free - ceiling
        if free < 0 or self._writer.is_closed:  # then what is free here is back in the bucket
            return False
        self.free = free
        self.reserved += ceiling
        if free < self._low_mark:
            self._low_mark = -NEVER  # until that has come to something
            self._start_top_up()
        return True

    def settle(self, ceiling: int, actual: int) -> None:
        self.free += ceiling - actual
        self.settled += ceiling
        if actual > ceiling:
            self._log_excess(ceiling, actual)

    async def reserve(self, ceiling: int) -> CostReservation | None:
        """None: it cannot be had, or not soon; `told` says why."""
        if not self.try_reserve(ceiling) and not await self._wait_to_reserve(ceiling):
            self.refusals += 1
            return None
        return CostReservation(self, ceiling)

    async def _wait_to_reserve(self, ceiling: int) -> bool:
        self._waiting_amounts.append(ceiling)
        try:
            async with asyncio.timeout(TOP_UP_TIMEOUT_SECONDS):
                while not self.try_reserve(ceiling):
                    if not self._may_top_up(ceiling):
                        return False
                    await self._start_top_up().wait()
            return True
        except TimeoutError:
            self._is_top_up_slow = self._top_up_done is not None
            self._refusal_reason = RefusalReason.STORE_UNAVAILABLE if self._is_top_up_slow else RefusalReason.CONTENTION
            return False
        finally:
            self._waiting_amounts.remove(ceiling)

    def apply_quota(self, quota: int, version: int) -> None:
        """The settings have changed. The bucket follows them whoever hears of it first."""
        if version > self.version:
            self.quota, self.version = quota, version
            self._bucket_read_at, self._paused_until = -NEVER, -NEVER
            self._start_top_up()

    @property
    def in_flight(self) -> int:
        """Worst cases of calls under way."""
        return self.reserved - self.settled

    @property
    def status(self) -> BucketStatus:
        wait = max(0.0, self._paused_until - self._clock.monotonic())
        if self._bucket is None:
            return BucketStatus(None, None, None, self._refusal_reason, wait)
        return BucketStatus(self._unleased, self._bucket.quota, self._bucket_read_epoch, self._refusal_reason, wait)

    # Topping up.

    def _may_top_up(self, ceiling: int) -> bool:
        if self._writer.is_closed:
            self._refusal_reason = RefusalReason.LEASE_CLOSED
            return False
        if self._is_top_up_slow:
            return False
        if self._clock.monotonic() >= self._paused_until:
            return True
        return self._may_cut_pause and ceiling - self.free <= self._unleased

    def _start_top_up(self) -> asyncio.Event:
        if self._top_up_done is None:
            self._top_up_done = asyncio.Event()
            self._tasks.spawn(self._top_up(self._top_up_done))
        return self._top_up_done

    async def _top_up(self, done: asyncio.Event) -> None:
        try:
            async with self._writing:
                await self._lease_more()
        except LeaseClosed:
            self._refusal_reason = RefusalReason.LEASE_CLOSED
        except (ConditionFailed, TransactionFailed):
            self._pause_top_ups(RefusalReason.CONTENTION, CONTENTION_PAUSE_SECONDS)
        except (StoreError, OSError) as failure:
            self._on_failure(failure)
        except Exception:
            self._pause_top_ups(
                RefusalReason.STORE_UNAVAILABLE, MIN_PAUSE_SECONDS
            )  # or all who wait would try again at once
            raise
        finally:
            self._top_up_done, self._is_top_up_slow = None, False
            done.set()

    async def _lease_more(self) -> None:
        if self._clock.monotonic() - self._bucket_read_at >= BUCKET_STALE_SECONDS:
            await self._read_bucket()
        for attempt in range(TOP_UP_ATTEMPTS):
            need = min(self._waiting_amounts, default=0) - self.free
            chunk = max(
                need,
                min(self._compute_wanted(), self._unleased // MAX_CHUNK_SHARE) if attempt < TOP_UP_ATTEMPTS // 2 else 0,
            )
            if chunk <= 0:
                return
            await self._lease_file.add(self.key)
            try:
                # More than is needed is taken only from a bucket that still has plenty.
                await self._writer.acquire(chunk, chunk * MAX_CHUNK_SHARE if chunk > need else chunk)
            except EarlierWriteApplied:
                continue
            except InsufficientBudget as insufficient:
                await self._apply_bucket_item(insufficient.bucket_item)
                if need > self._unleased:
                    await self._on_insufficient()
                    return
                continue
            self._on_leased(chunk)
            return
        self._pause_top_ups(RefusalReason.CONTENTION, CONTENTION_PAUSE_SECONDS)

    def _compute_wanted(self) -> int:
        """Twice as much as the last time if that is no time ago: the burn is only known after a while."""
        is_soon = self._clock.monotonic() - self._last_chunk_at < HORIZON_SECONDS
        wanted = max(
            sum(self._waiting_amounts), int(self._burn_rate * HORIZON_SECONDS), 2 * self._last_chunk if is_soon else 0
        )
        return wanted - max(0, self.free)

    def _on_leased(self, chunk: int) -> None:
        self.top_ups += 1
        self._unleased -= chunk
        self._last_chunk, self._last_chunk_at = chunk, self._clock.monotonic()
        self._low_mark = min(self.free // 2, int(self._burn_rate))
        self._refusal_reason, self._pause, self._paused_until = None, MIN_PAUSE_SECONDS, -NEVER

    async def _on_insufficient(self) -> None:
        """There is a pause, cut short at most once for what comes back to us. While more of that is under way what we
        have is kept; else it is too little here, and goes to where others may find it enough."""
        is_in_pause = self._clock.monotonic() < self._paused_until
        if not is_in_pause:
            self._pause_top_ups(RefusalReason.INSUFFICIENT, self._pause)
            self._pause = min(MAX_PAUSE_SECONDS, 2 * self._pause)
        self._may_cut_pause = not is_in_pause
        if not self.in_flight:
            await self._release(self.free)

    def _pause_top_ups(self, reason: RefusalReason, seconds: float) -> None:
        self._refusal_reason, self._paused_until, self._low_mark = reason, self._clock.monotonic() + seconds, -NEVER
        self._may_cut_pause = False

    def _on_failure(self, failure: StoreError | OSError) -> None:
        if self._refusal_reason not in (RefusalReason.STORE_UNAVAILABLE, RefusalReason.DISK_FAILED):
            _log.error("nothing can be taken of the hard budget %s: %s", " ".join(self.key), failure)
        self._pause_top_ups(
            RefusalReason.DISK_FAILED if isinstance(failure, OSError) else RefusalReason.STORE_UNAVAILABLE,
            MIN_PAUSE_SECONDS,
        )

    def _on_gained(self, pico: int) -> None:
        self.free += pico

    # What is known of the bucket.

    async def _read_bucket(self) -> None:
        self._apply_bucket(await self._shared_bucket.read_or_create(self.quota, self.version))
        if not self._has_reconciled:  # perhaps nobody has called under a hard budget for long
            await self.reconcile()

    async def _apply_bucket_item(self, item: Item | None) -> None:
        if item is None or (bucket := HardBudgetBucket.from_item(item)).version < self.version:
            await self._read_bucket()
        else:
            self._apply_bucket(bucket)

    def _apply_bucket(self, bucket: HardBudgetBucket) -> None:
        self._bucket, self._unleased = bucket, bucket.unleased
        self._bucket_read_at, self._bucket_read_epoch = self._clock.monotonic(), self._clock.now()

    async def reconcile(self, *, ignores_interval: bool = False) -> None:
        """Takes out what was spent without a hold. `is_forced`: though somebody did so of late. Raises StoreError."""
        bucket = await self._shared_bucket.reconcile(ignores_interval=ignores_interval)
        if bucket is not None:
            self._apply_bucket(bucket)
            self._has_reconciled = True

    # Giving back.

    async def tick(self) -> None:
        """Every second or so: what this process has no use for goes back. Raises StoreError."""
        now = self._clock.monotonic()
        seconds, self._ticked_at = now - self._ticked_at, now
        newly_reserved, self._last_reserved = self.reserved - self._last_reserved, self.reserved
        self._burn_rate += (newly_reserved / max(seconds, MIN_PAUSE_SECONDS) - self._burn_rate) / BURN_SMOOTHING_SHARE
        if newly_reserved:
            self._used_at = now
        spare = self._compute_spare(now)
        if self._writer.is_closed or self._waiting_amounts or self._writing.locked():
            return
        if spare > 0:
            async with self._writing:
                await self._release(min(spare, self.free))
        elif self._writer.has_unconfirmed_write:  # perhaps nobody calls here any more, and others lack what it took
            async with self._writing:
                await self._writer.confirm()

    def _compute_spare(self, now: float) -> int:
        """All, where the quota turns out to be spent or nobody calls; else what would last for long and is much."""
        if self._unleased < 0 or now - self._used_at >= IDLE_SECONDS:
            return self.free
        needed = int(2 * HORIZON_SECONDS * self._burn_rate)
        return self.free - needed if self.free > 2 * needed and self.free * MAX_CHUNK_SHARE > self._unleased else 0

    async def release_all(self) -> None:
        async with self._writing:
            await self._release(self.free)

    async def _release(self, pico: int) -> None:
        """Before it is sent it is ours no more, whatever becomes of the answer."""
        if pico <= 0:
            return
        self.free -= pico
        self._low_mark = -NEVER
        try:
            await self._writer.release(pico)
        except (EarlierWriteApplied, InsufficientBudget):
            return  # it is ours again, until the next time
        self._unleased += pico

    def _log_excess(self, ceiling: int, actual: int) -> None:
        if not self._has_logged_excess:
            self._has_logged_excess = True
            message = "a call of %s cost %d pico-dollars, and was taken to cost %d at most; the next are not told of"
            _log.error(message, " ".join(self.key), actual, ceiling)


TICK_SECONDS = 1.0
JITTER = 0.2
RECONCILE_SECONDS = 60.0


class BudgetLeases:
    """`holds` are those of this run; `spent` reads what a budget's shards say."""

    def __init__(
        self, store: Store, clock: Clock, tasks: Tasks, lease_file: BudgetLeaseFile, read_spent: ReadSpent
    ) -> None:
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._lease_file = lease_file
        self._read_spent = read_spent
        self._leases: dict[HardBudgetKey, BudgetLease] = {}
        self._reconcile_due_at: dict[HardBudgetKey, float] = {}  # to be reconciled, by the monotonic clock
        self._changed_keys: set[HardBudgetKey] = (
            set()
        )  # of other settings than before: there may have been no quota for a while

    @property
    def holder(self) -> str:
        """The name that accounts of calls give to what is spent here."""
        return self._lease_file.holder

    def get(self, key: HardBudgetKey, quota: int, version: int) -> BudgetLease:
        """By the newest settings that anybody named."""
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = BudgetLease(
                self._store, self._clock, self._tasks, key, self._lease_file, self._read_spent, quota, version
            )
            self._schedule_reconcile(key, random.uniform(0, RECONCILE_SECONDS))
        elif version > lease.version:
            lease.apply_quota(quota, version)
            self._changed_keys.add(key)
            self._reconcile_due_at[key] = self._clock.monotonic()
        return lease

    @property
    def leased_pico(self) -> int:
        """Taken from buckets, and not spent as far as is known here."""
        return sum(lease.free + lease.in_flight for lease in self._leases.values())

    @property
    def top_ups(self) -> int:
        return sum(lease.top_ups for lease in self._leases.values())

    @property
    def refusals(self) -> int:
        return sum(lease.refusals for lease in self._leases.values())

    def start(self) -> None:
        self._tasks.run_every("hard budgets", TICK_SECONDS, self.tick, jitter=JITTER)

    async def tick(self) -> None:
        """What nobody needs goes back, what was spent without a hold is looked for, and what is over is forgotten."""
        for key, lease in tuple(self._leases.items()):
            if key.is_long_past(self._clock.now()) and not lease.in_flight:
                del self._leases[key], self._reconcile_due_at[key]
                self._changed_keys.discard(key)
                continue
            with suppress(StoreError, LeaseClosed):  # whoever needs money is told
                await lease.tick()
            await self._reconcile_if_due(key, lease)

    async def _reconcile_if_due(self, key: HardBudgetKey, lease: BudgetLease) -> None:
        if self._clock.monotonic() < self._reconcile_due_at[key]:
            return
        self._schedule_reconcile(key, RECONCILE_SECONDS * random.uniform(1 - JITTER, 1 + JITTER))
        try:
            await lease.reconcile(ignores_interval=key in self._changed_keys)
            self._changed_keys.discard(key)
        except StoreError as failure:
            _log.warning("what is spent of the hard budget %s is not known: %s", " ".join(key), failure)

    def _schedule_reconcile(self, key: HardBudgetKey, seconds: float) -> None:
        self._reconcile_due_at[key] = self._clock.monotonic() + seconds

    def note_spend_elsewhere(self, key: HardBudgetKey) -> None:
        """Something was counted that nobody held: the next tick looks for it."""
        if key in self._reconcile_due_at:
            self._reconcile_due_at[key] = self._clock.monotonic()


class EarlierWriteApplied(Exception):
    """An earlier write had arrived after all, and counts now; this one did not happen."""


class InsufficientBudget(Exception):
    """The bucket has not as much, or is not there; carries its item. `maybe_applied`: it was sent before, and that may
    still arrive and find enough."""

    def __init__(self, bucket_item: Item | None, *, maybe_applied: bool) -> None:
        self.bucket_item = bucket_item
        self.maybe_applied = maybe_applied


class LeaseClosed(Exception):
    """Somebody brought this journal to the store as that of a process that is no more: nothing may be spent of it."""


class BudgetLeaseWriter:
    """One write at a time. `gained` hears of what may be spent from now on."""

    def __init__(self, store: Store, key: HardBudgetKey, holder: str, on_gained: Callable[[int], None]) -> None:
        self._store = store
        self._key = key
        self._holder = holder
        self._on_gained = on_gained
        self._sequence = 0  # of the last write that is known to be in the store
        self._leased = 0  # as of that
        self._claimed = 0  # of it: what was handed to `gained`, less what is being given back
        self.has_unconfirmed_write = (
            False  # something was sent with the next number, and what becomes of it is not known
        )
        self.is_closed = False

    async def acquire(self, pico: int, minimum: int) -> None:
        """Raises Moved, Lacking, Closed and StoreError."""
        await self._write(lease_rows.build_take(self._key, self._holder, self._sequence, pico, minimum), pico)

    async def release(self, pico: int) -> None:
        """To be asked for by who has already let go of it. Raises as `take`; what certainly is not given is gained."""
        self._claimed -= pico
        try:
            await self._write(lease_rows.build_release(self._key, self._holder, self._sequence, pico), -pico)
        except (InsufficientBudget, StoreError) as failure:
            if not failure.maybe_applied:
                self._claimed += pico
                self._on_gained(pico)
            raise

    async def confirm(self) -> None:
        """Of what was sent and not answered. Raises Closed and StoreError."""
        with suppress(EarlierWriteApplied):
            await self._write(lease_rows.build_sequence_advance(self._key, self._holder, self._sequence), 0)

    async def _write(self, writes: Sequence[Write], change: int) -> None:
        if self.is_closed:
            raise LeaseClosed
        had_unconfirmed_write, self.has_unconfirmed_write = (
            self.has_unconfirmed_write,
            True,
        )  # also when this is cancelled half way
        try:
            await self._store.transact(writes)
        except StoreError as failure:
            self.has_unconfirmed_write = had_unconfirmed_write or failure.maybe_applied
            if isinstance(failure, TransactionFailed):
                self._raise_conflict(failure)
            raise
        self._confirm_sequence(self._leased + change)

    def _raise_conflict(self, failure: TransactionFailed) -> None:
        """Raises Moved, Lacking and Closed."""
        lease_reason, *bucket_reasons = failure.reasons
        if lease_reason.code is ReasonCode.CONDITION_FAILED:
            self._adopt_row(lease_reason.item)
            raise EarlierWriteApplied from None
        if bucket_reasons and bucket_reasons[0].code is ReasonCode.CONDITION_FAILED:
            raise InsufficientBudget(bucket_reasons[0].item, maybe_applied=failure.maybe_applied) from None

    def _confirm_sequence(self, leased: int) -> None:
        """All that was sent with this number has arrived now or never will."""
        gained = leased - self._claimed
        self._sequence += 1
        self.has_unconfirmed_write = False
        self._leased = self._claimed = leased
        if gained:
            self._on_gained(gained)

    def _adopt_row(self, item: Item | None) -> None:
        """Raises Closed."""
        row = lease_rows.BudgetLeaseRow.from_item(item)
        if row.sequence != self._sequence + 1:
            self.is_closed = True
            _log.error("the hold of %s on %s %s is closed", self._holder, self._key.label, self._key.period)
            raise LeaseClosed from None
        self._confirm_sequence(row.leased)


BUCKET_ATTEMPTS = 8  # each lost one means that another process had its way
MIN_RECONCILE_SECONDS = 45  # a look so young is not repeated
RECONCILE_READS = 3

# Pico-dollars by all shards of the scope, label and period, however many there ever were; read consistently.
ReadSpent: TypeAlias = Callable[[HardBudgetKey], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class SharedBudgetBucket:
    """Each raises StoreError."""

    store: Store
    clock: Clock
    key: HardBudgetKey
    read_spent: ReadSpent

    async def read_or_create(self, quota: int, version: int) -> HardBudgetBucket:
        """As it stands, made if it is not there, by these settings or newer ones."""
        item = await self.store.get(self.key.bucket_key, consistent=True)
        for _ in range(BUCKET_ATTEMPTS):
            if item is None:
                item = await self._create(quota, version)
            else:
                bucket = HardBudgetBucket.from_item(item)
                if bucket.version >= version:
                    return bucket
                item = await self._change_quota(bucket, quota, version)
        raise ConditionFailed(item)

    async def _create(self, quota: int, version: int) -> Item | None:
        put = lease_rows.build_bucket(
            self.key, quota, version, await self._read_leases(), await self.read_spent(self.key), self.clock.now()
        )
        try:
            await self.store.put(put)
        except ConditionFailed as failure:
            return failure.item
        return put.item

    async def _change_quota(self, bucket: HardBudgetBucket, quota: int, version: int) -> Item | None:
        try:
            return await self.store.update(lease_rows.build_quota_change(self.key, bucket, quota, version))
        except ConditionFailed as failure:
            return failure.item

    async def reconcile(self, *, ignores_interval: bool = False) -> HardBudgetBucket | None:
        """What was spent without a hold is taken out; by one process for all, and not often. None: no bucket."""
        item = await self.store.get(self.key.bucket_key, consistent=True)
        if item is None:
            return None
        bucket = HardBudgetBucket.from_item(item)
        if (
            not ignores_interval and 0 <= self.clock.now() - bucket.reconciled_at < MIN_RECONCILE_SECONDS
        ):  # one in the future is somebody's wrong clock
            return bucket
        spent_without_lease = await self._measure_spent_without_lease(bucket.spent_without_lease)
        try:
            return HardBudgetBucket.from_item(
                await self.store.update(
                    lease_rows.build_reconcile(self.key, bucket, spent_without_lease, self.clock.now())
                )
            )
        except ConditionFailed as failure:
            return None if failure.item is None else HardBudgetBucket.from_item(failure.item)

    async def _measure_spent_without_lease(self, known: int) -> int:
        """What is flushed between the two readings is in the second only, and taken for too much: so what comes to more
        than was known is read again, and the least holds. Each was enough when it began, and it only grows."""
        least = None
        for _ in range(RECONCILE_READS):
            leases = await self._read_leases()
            found = lease_rows.compute_spent_without_lease(leases, await self.read_spent(self.key))
            least = found if least is None else min(least, found)
            if least <= known:
                break
        return least or 0

    async def _read_leases(self) -> list[BudgetLeaseRow]:
        return [BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(self.store, self.key.lease_query)]
