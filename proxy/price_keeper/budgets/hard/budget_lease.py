"""Money that this process leased from hard budgets, and may spend without asking the store.

    SharedBudgetBucket   the bucket of one hard budget that all processes share: created, kept to its quota
    BudgetLeaseWriter    moves money between the bucket and this process's row; each write counts once at most
    BudgetLease          the leased money of one budget; calls reserve their cost ceiling from it
    BudgetLeases         the leases of all hard budgets, and their background work
    CostReservation      the reserved ceiling of one call, settled by its receipt or released if it is never sent

No call waits for the store while the lease has enough. If it has not, all waiting calls share one top-up. If the
bucket has not enough either, what is left in the lease is released once no call is in flight, so that small remainders
of many processes come together.

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
from price_keeper.domain import PICO_PER_USD
from price_keeper.errors import ConditionFailed, ReasonCode, StoreError, TransactionFailed
from price_keeper.ledger import lease_rows
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.price_dimensions import UsageCounts
from price_keeper.single_flight import SingleFlight
from price_keeper.stores.contract import Item, Store, Write, iterate_rows
from price_keeper.tasks import Tasks

TOP_UP_TIMEOUT_SECONDS = 2.0  # for which a call waits for a top-up
HORIZON_SECONDS = 3  # for so long a chunk should last, by the recent rate of reserved ceilings
MAX_CHUNK_SHARE = 8  # at most one part in so many of the bucket is leased beyond what is needed now
TOP_UP_ATTEMPTS = 6  # of one top-up, while other processes change the bucket
BUCKET_STALE_SECONDS = 10.0  # after which the last known bucket is too old to use
CONTENTION_PAUSE_SECONDS = 0.25  # before a bucket that others keep changing is tried again
MIN_PAUSE_SECONDS = 1.0  # after the first refusal of an empty bucket, or while the store does not answer
MAX_PAUSE_SECONDS = 30.0  # the pause doubles up to this
IDLE_SECONDS = 5.0  # without a call, after which all free money is released
BURN_SMOOTHING_SHARE = 4  # exponential smoothing: each second replaces one part in so many of the burn rate
TICK_SECONDS = 1.0
JITTER = 0.2
RECONCILE_SECONDS = 60.0
BUCKET_ATTEMPTS = 8  # each failed one means that another process changed the bucket
MIN_RECONCILE_SECONDS = 45  # a reconciliation this recent is not repeated
RECONCILE_READS = 3
NEVER = float("inf")

_log = logging.getLogger("price_keeper.hard")


class RefusalReason(Enum):
    """Why a call is refused."""

    INSUFFICIENT = "the bucket does not have enough"
    STORE_UNAVAILABLE = "the store does not answer"
    DISK_FAILED = "the lease file cannot be written to the journal's disk"
    LEASE_CLOSED = "the journal of this process was replayed elsewhere"
    CONTENTION = "other processes keep changing the bucket"


class BucketStatus(NamedTuple):
    """What is known of the bucket, and why calls are refused. The first three fields are None before the bucket was
    ever read."""

    unleased: int | None  # leased by no process
    quota: int | None
    read_at: float | None  # by the wall clock
    reason: RefusalReason | None  # of the last refusal; None if there is none
    retry_after: float


class ChargedReceipt(Protocol):
    """The part of a receipt that settles a reservation."""

    @property
    def counts(self) -> UsageCounts: ...


class CostReservation:
    """One call's reserved cost ceiling. It is settled once: by the receipt, or with zero if the call is never sent.
    Later calls of either method do nothing."""

    __slots__ = ("_lease", "ceiling", "key")

    def __init__(self, lease: BudgetLease, ceiling: int) -> None:
        self._lease: BudgetLease | None = lease
        self.key = lease.key
        self.ceiling = ceiling

    def on_completed(self, receipt: ChargedReceipt | None) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.settle(self.ceiling, 0 if receipt is None else receipt.counts.pico)

    def on_never_sent(self) -> None:
        self.on_completed(None)


class BudgetLease:
    """Money of one hard budget that this process leased. `quota` and `version` are those of the settings that this
    process knows."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        key: HardBudgetKey,
        lease_file: BudgetLeaseFile,
        read_spent: ReadSpent,
        quota: int,
        version: int,
    ) -> None:
        self.key = key
        self.free = 0  # below zero if a call cost more than its ceiling
        self.reserved = self.settled = 0  # sums of cost ceilings since the start
        self.quota, self.version = quota, version
        self.top_ups = self.refusals = 0
        self._clock, self._lease_file = clock, lease_file
        self._shared_bucket = SharedBudgetBucket(store, clock, key, read_spent)
        self._writer = BudgetLeaseWriter(store, key, lease_file.holder, self._on_gained)
        self._writing = asyncio.Lock()
        self._top_up_flight = SingleFlight[None, None]()
        self._is_top_up_slow = False  # a call has waited for the top-up in progress until its timeout
        self._waiting_amounts: list[int] = []
        self._low_mark = -NEVER  # a reservation that leaves less than this starts a top-up in the background
        self._bucket: HardBudgetBucket | None = None
        self._has_reconciled = False  # since this process knows the bucket
        self._unleased = 0  # in the bucket, as far as is known
        self._bucket_read_at, self._bucket_read_epoch = -NEVER, 0.0
        self._last_chunk, self._last_chunk_at = 0, -NEVER
        self._refusal_reason: RefusalReason | None = None
        self._pause, self._paused_until, self._may_cut_pause = MIN_PAUSE_SECONDS, -NEVER, False
        self._last_reserved, self._burn_rate = 0, 0.0
        self._ticked_at = self._used_at = clock.monotonic()
        self._has_logged_excess = False

    # Calls.

    def try_reserve(self, ceiling: int) -> bool:
        """Reserve the ceiling if the lease has enough. Never waits."""
        free = self.free - ceiling
        if free < 0 or self._writer.is_closed:  # money of a closed lease is back in the bucket
            return False
        self.free = free
        self.reserved += ceiling
        if free < self._low_mark:
            self._low_mark = -NEVER  # until this top-up has ended
            self._start_top_up()
        return True

    def settle(self, ceiling: int, actual: int) -> None:
        """Replace a reserved ceiling by the actual cost."""
        self.free += ceiling - actual
        self.settled += ceiling
        if actual > ceiling:
            self._log_excess(ceiling, actual)

    async def reserve(self, ceiling: int) -> CostReservation | None:
        """Reserve the ceiling, and wait for a top-up if necessary. None: not possible, or not soon; `status` has the
        reason."""
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
                    self._start_top_up()
                    await self._top_up_flight.wait(None)
            return True
        except TimeoutError:
            self._is_top_up_slow = None in self._top_up_flight
            self._refusal_reason = RefusalReason.STORE_UNAVAILABLE if self._is_top_up_slow else RefusalReason.CONTENTION
            return False
        finally:
            self._waiting_amounts.remove(ceiling)

    def apply_quota(self, quota: int, version: int) -> None:
        """Apply changed settings. The first process that knows them changes the bucket."""
        if version > self.version:
            self.quota, self.version = quota, version
            self._bucket_read_at, self._paused_until = -NEVER, -NEVER
            self._start_top_up()

    @property
    def in_flight(self) -> int:
        """Ceilings reserved for calls in flight."""
        return self.reserved - self.settled

    @property
    def status(self) -> BucketStatus:
        """What is known of the bucket, and why the last call was refused."""
        wait = max(0.0, self._paused_until - self._clock.monotonic())
        if self._bucket is None:
            return BucketStatus(None, None, None, self._refusal_reason, wait)
        return BucketStatus(self._unleased, self._bucket.quota, self._bucket_read_epoch, self._refusal_reason, wait)

    # Top-ups.

    def _may_top_up(self, ceiling: int) -> bool:
        if self._writer.is_closed:
            self._refusal_reason = RefusalReason.LEASE_CLOSED
            return False
        if self._is_top_up_slow:
            return False
        if self._clock.monotonic() >= self._paused_until:
            return True
        return self._may_cut_pause and ceiling - self.free <= self._unleased

    def _start_top_up(self) -> None:
        """Start a top-up in the background, unless one is in progress."""
        self._top_up_flight.start(None, self._top_up)

    async def _top_up(self) -> None:
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
            # Without a pause all waiting calls would try again at once.
            self._pause_top_ups(RefusalReason.STORE_UNAVAILABLE, MIN_PAUSE_SECONDS)
            raise
        finally:
            self._is_top_up_slow = False

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
                # More than needed is leased only from a bucket that still has plenty.
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
        """How much to lease. Soon after a chunk, at least twice that chunk, as the burn rate is reliable only after a
        while."""
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
        """Pause top-ups; calls that end may cut the pause short once. The lease keeps its money while calls are in
        flight, since they may release enough. Otherwise it releases the rest, which may be enough for another
        process."""
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
            _log.error(
                "no money can be leased from hard budget %s; calls that the lease cannot pay are refused: %s",
                " ".join(self.key),
                failure,
            )
        self._pause_top_ups(
            RefusalReason.DISK_FAILED if isinstance(failure, OSError) else RefusalReason.STORE_UNAVAILABLE,
            MIN_PAUSE_SECONDS,
        )

    def _on_gained(self, pico: int) -> None:
        self.free += pico

    # The last known bucket.

    async def _read_bucket(self) -> None:
        self._apply_bucket(await self._shared_bucket.read_or_create(self.quota, self.version))
        if not self._has_reconciled:  # no process may have used this hard budget for a long time
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
        """Take spend that no lease pays for out of the bucket. `ignores_interval` does so even if it was done recently.
        Raises StoreError."""
        bucket = await self._shared_bucket.reconcile(ignores_interval=ignores_interval)
        if bucket is not None:
            self._apply_bucket(bucket)
            self._has_reconciled = True

    # Releasing.

    async def tick(self) -> None:
        """Call it about once a second: releases money that this process does not need. Raises StoreError."""
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
        # there may be no further call here, and others lack the money of that write
        elif self._writer.has_unconfirmed_write:
            async with self._writing:
                await self._writer.confirm()

    def _compute_spare(self, now: float) -> int:
        """What to release: all of it if the quota is spent or no call has come for IDLE_SECONDS; else what exceeds the
        need by far."""
        if self._unleased < 0 or now - self._used_at >= IDLE_SECONDS:
            return self.free
        needed = int(2 * HORIZON_SECONDS * self._burn_rate)
        return self.free - needed if self.free > 2 * needed and self.free * MAX_CHUNK_SHARE > self._unleased else 0

    async def release_all(self) -> None:
        async with self._writing:
            await self._release(self.free)

    async def _release(self, pico: int) -> None:
        """Release money. It is not spent here from the moment it is sent, whatever the outcome."""
        if pico <= 0:
            return
        self.free -= pico
        self._low_mark = -NEVER
        try:
            await self._writer.release(pico)
        except (EarlierWriteApplied, InsufficientBudget):
            return  # the writer has added it to the lease again, until the next release
        self._unleased += pico

    def _log_excess(self, ceiling: int, actual: int) -> None:
        if not self._has_logged_excess:
            self._has_logged_excess = True
            message = (
                "a call of hard budget %s cost %.12f USD, more than its ceiling of %.12f USD; "
                "the excess is charged to the budget, and further cases of it are not logged"
            )
            _log.error(message, " ".join(self.key), actual / PICO_PER_USD, ceiling / PICO_PER_USD)


class BudgetLeases:
    """The leases of all hard budgets that this process uses, and their background work. `lease_file` lists those of
    this run; `read_spent` sums a budget's shards."""

    def __init__(
        self, store: Store, clock: Clock, tasks: Tasks, lease_file: BudgetLeaseFile, read_spent: ReadSpent
    ) -> None:
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._lease_file = lease_file
        self._read_spent = read_spent
        self._leases: dict[HardBudgetKey, BudgetLease] = {}
        self._reconcile_due_at: dict[HardBudgetKey, float] = {}  # on the monotonic clock
        # Budgets whose settings changed: they may have had no quota for a while, and spend without a lease.
        self._changed_keys: set[HardBudgetKey] = set()

    @property
    def holder(self) -> str:
        """The name of this run in the counters of what is spent from its leases."""
        return self._lease_file.holder

    def get(self, key: HardBudgetKey, quota: int, version: int) -> BudgetLease:
        """The lease of a budget, with the newest settings that a caller has named."""
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = BudgetLease(
                self._store, self._clock, key, self._lease_file, self._read_spent, quota, version
            )
            self._schedule_reconcile(key, random.uniform(0, RECONCILE_SECONDS))
        elif version > lease.version:
            lease.apply_quota(quota, version)
            self._changed_keys.add(key)
            self._reconcile_due_at[key] = self._clock.monotonic()
        return lease

    @property
    def leased_pico(self) -> int:
        """Leased from buckets, and not spent as far as is known here."""
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
        """Release money that is not needed, reconcile budgets that are due, and remove budgets of past periods."""
        for key, lease in tuple(self._leases.items()):
            if key.is_long_past(self._clock.now()) and not lease.in_flight:
                del self._leases[key], self._reconcile_due_at[key]
                self._changed_keys.discard(key)
                continue
            with suppress(StoreError, LeaseClosed):  # calls that need money report the failure
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
            _log.warning(
                "hard budget %s cannot be reconciled with its spend, so usage that no lease paid for counts as left; "
                "the next attempt is in about a minute: %s",
                " ".join(key),
                failure,
            )

    def _schedule_reconcile(self, key: HardBudgetKey, seconds: float) -> None:
        self._reconcile_due_at[key] = self._clock.monotonic() + seconds

    def note_spend_elsewhere(self, key: HardBudgetKey) -> None:
        """Spend was counted that no lease paid for; the next tick reconciles it."""
        if key in self._reconcile_due_at:
            self._reconcile_due_at[key] = self._clock.monotonic()


class EarlierWriteApplied(Exception):
    """An earlier write of unknown outcome was applied, and counts from now on; this write did not happen."""


class InsufficientBudget(Exception):
    """The bucket does not have enough money, or does not exist; carries its item. `maybe_applied`: the write was sent
    before, and that attempt may still arrive and find enough."""

    def __init__(self, bucket_item: Item | None, *, maybe_applied: bool) -> None:
        self.bucket_item = bucket_item
        self.maybe_applied = maybe_applied


class LeaseClosed(Exception):
    """Another process replayed this journal as that of a dead process, and closed the lease: nothing may be spent from
    it."""


class BudgetLeaseWriter:
    """Moves money between the bucket and this process's row, one write at a time. `on_gained` is called with money that
    may be spent from now on."""

    def __init__(self, store: Store, key: HardBudgetKey, holder: str, on_gained: Callable[[int], None]) -> None:
        self._store = store
        self._key = key
        self._holder = holder
        self._on_gained = on_gained
        self._sequence = 0  # of the last write that is known to be in the store
        self._leased = 0  # as of that write
        self._claimed = 0  # the part of it that was passed to `on_gained`, less what is being released
        self.has_unconfirmed_write = False  # a write with the next number was sent, and its outcome is unknown
        self.is_closed = False

    async def acquire(self, pico: int, minimum: int) -> None:
        """Lease money. Raises EarlierWriteApplied, InsufficientBudget, LeaseClosed and StoreError."""
        await self._write(lease_rows.build_take(self._key, self._holder, self._sequence, pico, minimum), pico)

    async def release(self, pico: int) -> None:
        """Release money that the caller does not use any more. Raises as `acquire`; what was certainly not released is
        passed to `on_gained` again."""
        self._claimed -= pico
        try:
            await self._write(lease_rows.build_release(self._key, self._holder, self._sequence, pico), -pico)
        except (InsufficientBudget, StoreError) as failure:
            if not failure.maybe_applied:
                self._claimed += pico
                self._on_gained(pico)
            raise

    async def confirm(self) -> None:
        """Settle the outcome of a write whose answer was lost. Raises LeaseClosed and StoreError."""
        with suppress(EarlierWriteApplied):
            await self._write(lease_rows.build_sequence_advance(self._key, self._holder, self._sequence), 0)

    async def _write(self, writes: Sequence[Write], change: int) -> None:
        if self.is_closed:
            raise LeaseClosed
        # Set before the write, so that it also holds if this coroutine is cancelled half way.
        had_unconfirmed_write, self.has_unconfirmed_write = self.has_unconfirmed_write, True
        try:
            await self._store.transact(writes)
        except StoreError as failure:
            self.has_unconfirmed_write = had_unconfirmed_write or failure.maybe_applied
            if isinstance(failure, TransactionFailed):
                self._raise_conflict(failure)
            raise
        self._confirm_sequence(self._leased + change)

    def _raise_conflict(self, failure: TransactionFailed) -> None:
        """Raises EarlierWriteApplied, InsufficientBudget and LeaseClosed."""
        lease_reason, *bucket_reasons = failure.reasons
        if lease_reason.code is ReasonCode.CONDITION_FAILED:
            self._adopt_row(lease_reason.item)
            raise EarlierWriteApplied from None
        if bucket_reasons and bucket_reasons[0].code is ReasonCode.CONDITION_FAILED:
            raise InsufficientBudget(bucket_reasons[0].item, maybe_applied=failure.maybe_applied) from None

    def _confirm_sequence(self, leased: int) -> None:
        """Go on to the next sequence number: no write with this one can be applied any more. `leased` is in the row."""
        gained = leased - self._claimed
        self._sequence += 1
        self.has_unconfirmed_write = False
        self._leased = self._claimed = leased
        if gained:
            self._on_gained(gained)

    def _adopt_row(self, item: Item | None) -> None:
        """Adopt the row that an earlier write has left. Raises LeaseClosed."""
        row = lease_rows.BudgetLeaseRow.from_item(item)
        if row.sequence != self._sequence + 1:
            self.is_closed = True
            _log.error(
                "the lease of hard budget %s, holder %s, was closed by another process that replayed this journal; "
                "calls under this hard budget are refused until this process is restarted",
                " ".join(self._key),
                self._holder,
            )
            raise LeaseClosed from None
        self._confirm_sequence(row.leased)


# Sums all shards of the scope, label and period, however many there ever were, in pico-dollars; reads consistently.
ReadSpent: TypeAlias = Callable[[HardBudgetKey], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class SharedBudgetBucket:
    """The bucket of one hard budget, shared by all processes. Each method raises StoreError."""

    store: Store
    clock: Clock
    key: HardBudgetKey
    read_spent: ReadSpent

    async def read_or_create(self, quota: int, version: int) -> HardBudgetBucket:
        """The bucket, created if it does not exist, with this quota or that of newer settings."""
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
        """Take spend that no lease pays for out of the bucket: one process does it for all, and not often. None: there
        is no bucket."""
        item = await self.store.get(self.key.bucket_key, consistent=True)
        if item is None:
            return None
        bucket = HardBudgetBucket.from_item(item)
        # A time in the future comes from a wrong clock.
        if not ignores_interval and 0 <= self.clock.now() - bucket.reconciled_at < MIN_RECONCILE_SECONDS:
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
        """A flush between the two reads is in the second only, and makes the result too high. So a result above the
        known value is measured again, and the lowest one holds. Each result was at least the true value when its
        measurement began, and that only grows."""
        least = None
        for _ in range(RECONCILE_READS):
            leases = await self._read_leases()
            excess = lease_rows.compute_spent_without_lease(leases, await self.read_spent(self.key))
            least = excess if least is None else min(least, excess)
            if least <= known:
                break
        return least or 0

    async def _read_leases(self) -> list[BudgetLeaseRow]:
        return [BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(self.store, self.key.lease_query)]
