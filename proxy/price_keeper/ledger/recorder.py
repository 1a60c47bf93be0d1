"""Flushes the journal to the store in the background, and refuses calls that could not be recorded.

A flush seals the current segment and sends all sealed ones, in the order in which they were sealed. After any failure a
segment stays and is sent again; its marker makes sure that it counts once. `FlushInterval` decides how often,
`FlushGate` keeps readers of exact totals from meeting a flush.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from price_keeper.clock import Clock
from price_keeper.errors import RecordingUnavailable, StoreError
from price_keeper.ledger.journal import Journal, SealedSegment
from price_keeper.ledger.ledger_entries import PICO_PER_USD, Counter, UsageCounts
from price_keeper.ledger.log_throttle import LogThrottle
from price_keeper.ledger.segment_sender import SegmentSender

BUSY_REQUESTS = 200  # in one flush: at this rate its price in writes is lost among the requests


class FlushInterval:
    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self.min_seconds = min_seconds
        self._max_seconds = max_seconds
        self.seconds = min_seconds

    def on_flushed(self, requests: int) -> None:
        if requests >= BUSY_REQUESTS:
            self.seconds = max(self.min_seconds, self.seconds / 2)
        elif requests:
            self.on_failed()

    def on_failed(self) -> None:
        """Or met with conflicts: others write to the same counters at the same time."""
        self.seconds = min(self._max_seconds, self.seconds * 2)


class FlushGate:
    """A flush that waits goes before those who come after it, so that nobody keeps it waiting for long."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_flushing = False
        self._flushes_waiting = 0
        self._excluding = 0

    @asynccontextmanager
    async def flush(self) -> AsyncIterator[None]:
        self._flushes_waiting += 1
        try:
            await self._wait_until(lambda: not (self._is_flushing or self._excluding))
            self._is_flushing = True
        finally:
            self._flushes_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._is_flushing = False
            self._wake()

    @asynccontextmanager
    async def exclude_flush(self, timeout_seconds: float) -> AsyncIterator[bool]:
        """Whether no flush is under way meanwhile; if it does not come to that in so many seconds, one may be."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wait_until(lambda: not (self._is_flushing or self._flushes_waiting))
        except TimeoutError:
            yield False
            return
        self._excluding += 1
        try:
            yield True
        finally:
            self._excluding -= 1
            self._wake()

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


MAX_QUIET_WAIT_SECONDS = 0.5  # of those who would rather not meet a flush
EARLY_FLUSH_DIVISOR = 100  # a hundredth of what may wait is flushed at once

_Sum = tuple[Counter, UsageCounts]

_log = logging.getLogger("price_keeper.recording")


class Recorder:
    """`max_unflushed_pico` is how much may wait for the store; past it, or while the store is away with
    `refuses_without_store`, no call is let through."""

    def __init__(
        self,
        journal: Journal,
        recovered: Iterable[SealedSegment],
        sender: SegmentSender,
        clock: Clock,
        interval: FlushInterval,
        *,
        max_unflushed_pico: int,
        refuses_without_store: bool = False,
    ) -> None:
        self.journal = journal
        self.sender = sender
        self._clock = clock
        self._interval = interval
        self._max_unflushed_pico = max_unflushed_pico
        self._early_flush_pico = max_unflushed_pico // EARLY_FLUSH_DIVISOR
        self._refuses_without_store = refuses_without_store
        self._unsent: deque[SealedSegment] = deque(recovered)
        self._unsent_pico = sum(sealed.seal.pico for sealed in self._unsent)
        self._journal_lock = asyncio.Lock()  # of the journal, which threads sync and close
        self._flush_gate = FlushGate()
        self._flush_due = asyncio.Event()
        self._last_flush_at = self._caught_up_at = clock.monotonic()
        self.store_trouble = ""
        self._throttle = LogThrottle(clock.monotonic)

    # For the calls.

    def admit(self) -> None:
        """Raises CannotRecord where a call must not be sent, because nobody could keep count of it."""
        pico, journal = self.journal.tally.pico, self.journal
        if pico + self._unsent_pico > self._max_unflushed_pico:
            usd = self._max_unflushed_pico / PICO_PER_USD
            raise RecordingUnavailable(
                f"spend of {usd:g} USD waits for the store, which is all that may", retry_after=5
            )
        if self._refuses_without_store and self.store_trouble:
            raise RecordingUnavailable("the store that keeps count of spend is away", retry_after=5)
        if pico > self._early_flush_pico or journal.is_full:
            self._flush_due.set()

    def request_flush(self) -> None:
        """Somebody needs to know soon."""
        self._flush_due.set()

    # What can be told.

    @property
    def unflushed_pico(self) -> int:
        return self.journal.tally.pico + self._unsent_pico

    @property
    def limit_pico(self) -> int:
        """Of what is not flushed."""
        return self._max_unflushed_pico

    @property
    def waiting_segments(self) -> int:
        return len(self._unsent)

    @property
    def lag_seconds(self) -> float:
        """For how long something recorded has been waiting at most."""
        is_waiting = self._unsent or self.journal.tally.requests
        return self._clock.monotonic() - self._caught_up_at if is_waiting else 0.0

    def unflushed_by_counter(self) -> dict[Counter, int]:
        """Pico-dollars by counter: what is in the journal. Of a segment that is there, all: some may be stored."""
        sums = {counter: counts.pico for counter, counts in self.journal.tally.sums().items()}
        return _add_pico(sums, self._own_sums(SealedSegment.sums))

    def possibly_stored_by_counter(self) -> dict[Counter, int]:
        """Of these, what may be in the store."""
        return _add_pico({}, self._own_sums(SealedSegment.possibly_stored_sums))

    def _own_sums(self, sums_of: Callable[[SealedSegment], Iterable[_Sum]]) -> Iterator[_Sum]:
        for sealed in (*self._unsent, *self.sender.rejected):
            if not sealed.is_adopted:
                yield from sums_of(sealed)

    @asynccontextmanager
    async def without_flush(self) -> AsyncIterator[bool]:
        """Whether no flush is under way meanwhile; if one takes long, nobody waits for it."""
        async with self._flush_gate.exclude_flush(MAX_QUIET_WAIT_SECONDS) as is_quiet:
            yield is_quiet

    @property
    def has_recovered_segments(self) -> bool:
        """Whether something that former processes left in this journal is not, or not certainly, in the store."""
        unsent, rejected = self._segments_in(self.journal.folder)
        return bool(rejected) or any(sealed.is_recovered for sealed in unsent)

    def has_unflushed_in(self, folder: Path) -> bool:
        """Whether anything of the journal there is not, or not certainly, in the store."""
        return any(self._segments_in(folder))

    def _segments_in(self, folder: Path) -> tuple[list[SealedSegment], list[SealedSegment]]:
        """Of the journal there: what waits, and what is left to a person."""
        unsent = [sealed for sealed in self._unsent if sealed.path.parent == folder]
        return unsent, [sealed for sealed in self.sender.rejected if sealed.path.parent == folder]

    @property
    def is_fully_flushed(self) -> bool:
        """Whether everything ever spent here is in the store, and no call is under way."""
        journal = self.journal
        return not (journal.open_calls or journal.tally.requests or self.has_unflushed_in(journal.folder))

    async def check(self) -> str | None:
        """Raises CannotRecord with what keeps spend from being recorded; tells of what waits for a person."""
        if self.journal.trouble:
            raise RecordingUnavailable(f"the journal cannot be written: {self.journal.trouble}")
        self.admit()
        if self.store_trouble:
            raise RecordingUnavailable("spend cannot be flushed, and waits in the journal; the log says why")
        rejected = len(self.sender.rejected)
        return (
            f"what the store did not take, {rejected} segments, waits for a person; the log says why"
            if rejected
            else None
        )

    def adopt_segments(self, segments: Iterable[SealedSegment]) -> None:
        """Of another journal. For budgets it is spent elsewhere until it is in the store; it has to be flushed as our
        own has."""
        for sealed in segments:
            sealed.is_adopted = True
            self._unsent.append(sealed)
            self._unsent_pico += sealed.seal.pico
            self._flush_due.set()

    # Background work.

    async def run_flush_timer(self) -> None:
        """Says when the next flush is due, for ever."""
        while True:
            elapsed = self._clock.monotonic() - self._last_flush_at
            if elapsed >= self._interval.seconds:
                self._flush_due.set()
                elapsed = 0
            await self._clock.sleep(self._interval.seconds - elapsed)

    async def run_flushes(self) -> None:
        """Flushes whenever it is due, for ever; in a hurry too not more often than the pace's shortest."""
        while True:
            await self._flush_due.wait()
            pause = self._interval.seconds if self.store_trouble else self._interval.min_seconds
            rest = pause - (self._clock.monotonic() - self._last_flush_at)
            if rest > 0:
                await self._clock.sleep(rest)
            self._flush_due.clear()
            await self.flush()

    async def sync_journal(self) -> None:
        """Once: what was written is on the disk, and what the disk refused is tried again. A segment that is full ends,
        however long the store takes over those before it."""
        self.journal.retry_unwritten()
        if self.journal.is_full:
            with suppress(OSError):  # the next flush tells of it
                await self._seal()
        if self.journal.is_synced:
            return
        async with self._journal_lock:
            with suppress(OSError):  # the journal has told of it
                await asyncio.to_thread(self.journal.sync)

    async def close(self) -> None:
        """The journal, when no thread is at it."""
        async with self._journal_lock:
            self.journal.retry_unwritten()  # what was flushed may have made room
            self.journal.close()

    async def flush(self) -> bool:
        """Seals and sends everything there is; whether all of it arrived."""
        async with self._flush_gate.flush():
            self._last_flush_at = self._clock.monotonic()
            try:
                had_unsent = bool(self._unsent)
                requests = await self._seal()
                await self._send_all()
                if had_unsent:  # what came since then is not sealed yet
                    requests += await self._seal()
                    await self._send_all()
            except (StoreError, OSError) as failure:
                self._on_flush_failed(failure)
                return False
            self.store_trouble = ""
            if not self.journal.trouble:  # else what was recorded may not be sealed
                self._caught_up_at = self._last_flush_at
            self._interval.on_flushed(requests)
            return True

    async def _seal(self) -> int:
        """How many requests are sealed now. While others wait for the store, the journal goes on in one segment as
        long as it may, so that it does not come to consist of many. Raises OSError."""
        sealed = None
        async with self._journal_lock:
            if not self._unsent or self.journal.is_full:
                with suppress(OSError):  # the journal has told of it, and goes on where it was
                    sealed = self.journal.seal()
            if sealed is not None:
                self._unsent.append(sealed)
                self._unsent_pico += sealed.seal.pico
            for waiting in tuple(self._unsent):  # whose first may go to the store meanwhile
                if not waiting.has_seal:
                    await asyncio.to_thread(waiting.write_seal)
        return sealed.seal.requests if sealed is not None else 0

    async def _send_all(self) -> None:
        while self._unsent and self._unsent[0].has_seal:  # one that has just ended may not be on the disk yet
            await self.sender.send(self._unsent[0])
            self._unsent_pico -= self._unsent.popleft().seal.pico

    def _on_flush_failed(self, failure: StoreError | OSError) -> None:
        if not self.store_trouble and self._throttle.allows("flush"):
            _log.error("spend cannot be flushed, and waits in the journal: %s", failure)
        self.store_trouble = str(failure)
        self._interval.on_failed()


def _add_pico(picos: dict[Counter, int], sums: Iterable[_Sum]) -> dict[Counter, int]:
    for counter, counts in sums:
        picos[counter] = picos.get(counter, 0) + counts.pico
    return picos
