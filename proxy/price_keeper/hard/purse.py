"""What this process may spend of one hard budget without asking anybody: money that is taken from the bucket already.

A call's worst case is taken from it before the call is sent, and what that did not cost comes back with its receipt.
Nobody waits for the store while there is enough. When there is not, all who wait share one top-up; when the bucket is
dry too, what is left here goes back, so that what many processes cannot use for lack of a little comes together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from price_keeper.clock import Clock
from price_keeper.errors import ConditionFailed, StoreError, TransactionFailed
from price_keeper.hard.hold import BudgetLeaseWriter, EarlierWriteApplied, InsufficientBudget, LeaseClosed
from price_keeper.hard.holds import BudgetLeaseFile
from price_keeper.hard.rows import HardBudgetBucket, HardBudgetKey
from price_keeper.hard.shared import ReadSpent, SharedBudgetBucket
from price_keeper.stores.contract import Item, Store
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
