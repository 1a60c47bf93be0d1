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
from price_keeper.hard.hold import Closed, Lacking, Moved, OwnHold
from price_keeper.hard.holds import Holds
from price_keeper.hard.rows import Bucket, Name
from price_keeper.hard.shared import SharedBucket, SpentSoFar
from price_keeper.stores.contract import Item, Store
from price_keeper.tasks import Tasks

WAIT_SECONDS = 2.0  # of a call, for a top-up
HORIZON_SECONDS = 3  # for so long a chunk lasts, by the worst cases of late
SHARE = 8  # of what is in the bucket, at most one part in so many is taken for later
TRIES = 6  # of one top-up, while others move the bucket
LOOK_SECONDS = 10.0  # what the bucket was known to hold is of no use any more
BRIEFLY_SECONDS = 0.25  # until a bucket that others keep moving is asked again
SOON_SECONDS = 1.0  # one that is dry at first, and a store that is away
LATE_SECONDS = 30.0  # at the most
IDLE_SECONDS = 5.0
BURN_SHARE = 4  # of what is known of the burn, each second replaces one part
NEVER = float("inf")

_log = logging.getLogger("price_keeper.hard")


class Why(Enum):
    """A call is refused."""

    DRY = "the bucket has not as much"
    AWAY = "the store cannot be asked"
    DISK = "the journal's disk takes no name"
    CLOSED = "the journal of this process was replayed elsewhere"
    SLOW = "others keep moving the bucket"


class Told(NamedTuple):
    """What is known of the bucket: when it was last heard of, by the wall clock. None: never."""

    left: int | None  # that nobody holds
    quota: int | None
    at: float | None
    why: Why | None  # it refuses
    retry_after: float


class Charged(Protocol):
    """A receipt."""

    @property
    def counts(self) -> Sequence[int]: ...  # the last of them pico-dollars


class Held:
    """One call's worst case, taken. To be settled once: by what its receipt says, or let go if it is never sent."""

    __slots__ = ("_purse", "name", "worst")

    def __init__(self, purse: Purse, worst: int) -> None:
        self._purse: Purse | None = purse
        self.name = purse.name
        self.worst = worst

    def ended(self, receipt: Charged | None) -> None:
        purse, self._purse = self._purse, None
        if purse is not None:
            purse.settle(self.worst, 0 if receipt is None else receipt.counts[-1])

    def on_cancelled(self) -> None:
        self.ended(None)


class Purse:
    """`quota` and `version` are those of the settings that this process knows."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        name: Name,
        holds: Holds,
        spent: SpentSoFar,
        quota: int,
        version: int,
    ) -> None:
        self.name = name
        self.free = 0  # below zero where a call cost more than its worst case
        self.taken = self.settled = 0  # worst cases, ever
        self.quota, self.version = quota, version
        self.top_ups = self.refusals = 0
        self._clock, self._tasks, self._holds = clock, tasks, holds
        self._shared = SharedBucket(store, clock, name, spent)
        self._own = OwnHold(store, name, holds.holder, self._gained)
        self._writing = asyncio.Lock()
        self._under_way: asyncio.Event | None = None
        self._is_slow = False  # what is under way: somebody waited for it long enough
        self._needs: list[int] = []
        self._low = -NEVER  # a take that leaves less than this asks for more in the background
        self._bucket: Bucket | None = None
        self._is_reconciled = False  # since this process knows it
        self._left = 0  # in the bucket, as far as is known
        self._heard_at, self._told_at = -NEVER, 0.0
        self._chunk, self._chunk_at = 0, -NEVER
        self._why: Why | None = None
        self._pause, self._quiet_until, self._is_cut_short = SOON_SECONDS, -NEVER, False
        self._seen_taken, self._burn = 0, 0.0
        self._ticked_at = self._used_at = clock.monotonic()
        self._has_told_of_excess = False

    # For the calls.

    def take(self, worst: int) -> bool:
        free = self.free - worst
        if free < 0 or self._own.is_closed:  # then what is free here is back in the bucket
            return False
        self.free = free
        self.taken += worst
        if free < self._low:
            self._low = -NEVER  # until that has come to something
            self._topped_up()
        return True

    def settle(self, worst: int, actual: int) -> None:
        self.free += worst - actual
        self.settled += worst
        if actual > worst:
            self._tell_excess(worst, actual)

    async def hold(self, worst: int) -> Held | None:
        """None: it cannot be had, or not soon; `told` says why."""
        if not self.take(worst) and not await self._waited(worst):
            self.refusals += 1
            return None
        return Held(self, worst)

    async def _waited(self, worst: int) -> bool:
        self._needs.append(worst)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not self.take(worst):
                    if not self._may_ask(worst):
                        return False
                    await self._topped_up().wait()
            return True
        except TimeoutError:
            self._is_slow = self._under_way is not None
            self._why = Why.AWAY if self._is_slow else Why.SLOW
            return False
        finally:
            self._needs.remove(worst)

    def heard(self, quota: int, version: int) -> None:
        """The settings have changed. The bucket follows them whoever hears of it first."""
        if version > self.version:
            self.quota, self.version = quota, version
            self._heard_at, self._quiet_until = -NEVER, -NEVER
            self._topped_up()

    @property
    def in_flight(self) -> int:
        """Worst cases of calls under way."""
        return self.taken - self.settled

    @property
    def told(self) -> Told:
        wait = max(0.0, self._quiet_until - self._clock.monotonic())
        if self._bucket is None:
            return Told(None, None, None, self._why, wait)
        return Told(self._left, self._bucket.quota, self._told_at, self._why, wait)

    # Topping up.

    def _may_ask(self, worst: int) -> bool:
        if self._own.is_closed:
            self._why = Why.CLOSED
            return False
        if self._is_slow:
            return False
        if self._clock.monotonic() >= self._quiet_until:
            return True
        return self._is_cut_short and worst - self.free <= self._left

    def _topped_up(self) -> asyncio.Event:
        if self._under_way is None:
            self._under_way = asyncio.Event()
            self._tasks.spawn(self._top_up(self._under_way))
        return self._under_way

    async def _top_up(self, over: asyncio.Event) -> None:
        try:
            async with self._writing:
                await self._ask()
        except Closed:
            self._why = Why.CLOSED
        except (ConditionFailed, TransactionFailed):
            self._wait(Why.SLOW, BRIEFLY_SECONDS)
        except (StoreError, OSError) as failure:
            self._failed(failure)
        except Exception:
            self._wait(Why.AWAY, SOON_SECONDS)  # or all who wait would try again at once
            raise
        finally:
            self._under_way, self._is_slow = None, False
            over.set()

    async def _ask(self) -> None:
        if self._clock.monotonic() - self._heard_at >= LOOK_SECONDS:
            await self._look()
        for tried in range(TRIES):
            need = min(self._needs, default=0) - self.free
            chunk = max(need, min(self._wanted(), self._left // SHARE) if tried < TRIES // 2 else 0)
            if chunk <= 0:
                return
            await self._holds.name(self.name)
            try:
                # More than is needed is taken only from a bucket that still has plenty.
                await self._own.take(chunk, chunk * SHARE if chunk > need else chunk)
            except Moved:
                continue
            except Lacking as lacking:
                await self._learn(lacking.bucket)
                if need > self._left:
                    await self._dry()
                    return
                continue
            self._took(chunk)
            return
        self._wait(Why.SLOW, BRIEFLY_SECONDS)

    def _wanted(self) -> int:
        """Twice as much as the last time if that is no time ago: the burn is only known after a while."""
        is_soon = self._clock.monotonic() - self._chunk_at < HORIZON_SECONDS
        wanted = max(sum(self._needs), int(self._burn * HORIZON_SECONDS), 2 * self._chunk if is_soon else 0)
        return wanted - max(0, self.free)

    def _took(self, chunk: int) -> None:
        self.top_ups += 1
        self._left -= chunk
        self._chunk, self._chunk_at = chunk, self._clock.monotonic()
        self._low = min(self.free // 2, int(self._burn))
        self._why, self._pause, self._quiet_until = None, SOON_SECONDS, -NEVER

    async def _dry(self) -> None:
        """There is a pause, cut short at most once for what comes back to us. While more of that is under way what we
        have is kept; else it is too little here, and goes to where others may find it enough."""
        is_in_pause = self._clock.monotonic() < self._quiet_until
        if not is_in_pause:
            self._wait(Why.DRY, self._pause)
            self._pause = min(LATE_SECONDS, 2 * self._pause)
        self._is_cut_short = not is_in_pause
        if not self.in_flight:
            await self._give_back(self.free)

    def _wait(self, why: Why, seconds: float) -> None:
        self._why, self._quiet_until, self._low = why, self._clock.monotonic() + seconds, -NEVER
        self._is_cut_short = False

    def _failed(self, failure: StoreError | OSError) -> None:
        if self._why not in (Why.AWAY, Why.DISK):
            _log.error("nothing can be taken of the hard budget %s: %s", " ".join(self.name), failure)
        self._wait(Why.DISK if isinstance(failure, OSError) else Why.AWAY, SOON_SECONDS)

    def _gained(self, pico: int) -> None:
        self.free += pico

    # What is known of the bucket.

    async def _look(self) -> None:
        self._heard(await self._shared.looked_at(self.quota, self.version))
        if not self._is_reconciled:  # perhaps nobody has called under a hard budget for long
            await self.reconcile()

    async def _learn(self, item: Item | None) -> None:
        if item is None or (bucket := Bucket.of(item)).version < self.version:
            await self._look()
        else:
            self._heard(bucket)

    def _heard(self, bucket: Bucket) -> None:
        self._bucket, self._left = bucket, bucket.left
        self._heard_at, self._told_at = self._clock.monotonic(), self._clock.now()

    async def reconcile(self, *, is_forced: bool = False) -> None:
        """Takes out what was spent without a hold. `is_forced`: though somebody did so of late. Raises StoreError."""
        bucket = await self._shared.reconciled(is_forced=is_forced)
        if bucket is not None:
            self._heard(bucket)
            self._is_reconciled = True

    # Giving back.

    async def tick(self) -> None:
        """Every second or so: what this process has no use for goes back. Raises StoreError."""
        now = self._clock.monotonic()
        seconds, self._ticked_at = now - self._ticked_at, now
        taken, self._seen_taken = self.taken - self._seen_taken, self.taken
        self._burn += (taken / max(seconds, SOON_SECONDS) - self._burn) / BURN_SHARE
        if taken:
            self._used_at = now
        spare = self._spare(now)
        if self._own.is_closed or self._needs or self._writing.locked():
            return
        if spare > 0:
            async with self._writing:
                await self._give_back(min(spare, self.free))
        elif self._own.is_unsure:  # perhaps nobody calls here any more, and others lack what it took
            async with self._writing:
                await self._own.make_sure()

    def _spare(self, now: float) -> int:
        """All, where the quota turns out to be spent or nobody calls; else what would last for long and is much."""
        if self._left < 0 or now - self._used_at >= IDLE_SECONDS:
            return self.free
        lasts = int(2 * HORIZON_SECONDS * self._burn)
        return self.free - lasts if self.free > 2 * lasts and self.free * SHARE > self._left else 0

    async def give_back_all(self) -> None:
        async with self._writing:
            await self._give_back(self.free)

    async def _give_back(self, pico: int) -> None:
        """Before it is sent it is ours no more, whatever becomes of the answer."""
        if pico <= 0:
            return
        self.free -= pico
        self._low = -NEVER
        try:
            await self._own.give_back(pico)
        except (Moved, Lacking):
            return  # it is ours again, until the next time
        self._left += pico

    def _tell_excess(self, worst: int, actual: int) -> None:
        if not self._has_told_of_excess:
            self._has_told_of_excess = True
            told = "a call of %s cost %d pico-dollars, and was taken to cost %d at most; the next are not told of"
            _log.error(told, " ".join(self.name), actual, worst)
