"""Flushes the journal to the store in the background, and refuses calls that could not be recorded.

A flush seals the current segment and sends all sealed ones, in the order in which they were sealed. After a failure the
segment is kept and sent again; its marker makes sure that it counts once. `FlushInterval` decides how often,
`FlushGate` keeps readers of exact totals from running during a flush.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from price_keeper.clock import Clock
from price_keeper.domain import PICO_PER_USD
from price_keeper.errors import RecordingUnavailable, StoreError
from price_keeper.ledger.journal import Journal, SealedSegment
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.telemetry.incident import Incident

BUSY_REQUESTS = 200  # in one flush: at this rate the cost of its writes is negligible per request
MAX_QUIET_WAIT_SECONDS = 0.5  # for which a reader waits for a flush to end
EARLY_FLUSH_DIVISOR = 100  # a flush starts at once when unflushed spend exceeds one part in so many of the limit
_Sum = tuple[Counter, UsageCounts]
_log = logging.getLogger("price_keeper.recording")


class FlushInterval:
    """The time between two flushes: shorter under load, longer when there are few requests and after failures."""

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self.min_seconds = min_seconds
        self._max_seconds = max_seconds
        self.seconds = min_seconds

    def on_flushed(self, requests: int) -> None:
        if requests >= BUSY_REQUESTS:
            self.seconds = max(self.min_seconds, self.seconds / 2)
        elif requests:
            self._double()

    def on_failed(self) -> None:
        self._double()  # the failure may be a conflict with other writers of the same counters

    def _double(self) -> None:
        self.seconds = min(self._max_seconds, self.seconds * 2)


class FlushGate:
    """Excludes flushes and readers from each other. A waiting flush goes before later readers, so that readers cannot
    starve it."""

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
        """Yields whether flushes are excluded. False after the timeout; then one may be in progress."""
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


class Flusher:
    """Flushes the journal to the store in the background, and tells whether the cost of a call can be recorded: not
    while more than `max_unflushed_pico` waits for the store, nor, with `refuses_without_store`, while the store does
    not answer."""

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
        self._journal_lock = asyncio.Lock()  # the journal is synced and closed in threads
        self._flush_gate = FlushGate()
        self._flush_due = asyncio.Event()
        self._last_flush_at = self._caught_up_at = clock.monotonic()
        self.store_trouble = ""
        self._incident = Incident(_log, clock.monotonic, logging.ERROR)

    # Calls.

    def check_recordable(self) -> None:
        """Raises RecordingUnavailable if spend could not be recorded. Asks for a flush if much is unflushed."""
        pico, journal = self.journal.tally.pico, self.journal
        if pico + self._unsent_pico > self._max_unflushed_pico:
            usd = self._max_unflushed_pico / PICO_PER_USD
            raise RecordingUnavailable(
                f"spend of {usd:g} USD waits for the store, which is the limit (journal.max_unflushed_usd)",
                retry_after=5,
            )
        if self._refuses_without_store and self.store_trouble:
            raise RecordingUnavailable("the store that keeps count of spend is away", retry_after=5)
        if pico > self._early_flush_pico or journal.is_full:
            self._flush_due.set()

    def request_flush(self) -> None:
        """Flush soon: a reader needs this spend."""
        self._flush_due.set()

    # State.

    @property
    def unflushed_pico(self) -> int:
        """Recorded spend that is not in the store yet, in pico-dollars."""
        return self.journal.tally.pico + self._unsent_pico

    @property
    def limit_pico(self) -> int:
        """The limit of `unflushed_pico`."""
        return self._max_unflushed_pico

    @property
    def waiting_segments(self) -> int:
        return len(self._unsent)

    @property
    def lag_seconds(self) -> float:
        """An upper bound of how long recorded spend has been waiting."""
        is_waiting = self._unsent or self.journal.tally.requests
        return self._clock.monotonic() - self._caught_up_at if is_waiting else 0.0

    def unflushed_counts(self) -> dict[Counter, UsageCounts]:
        """By counter: all sums of the segments that are still in the journal, some of which may be stored."""
        return _add_counts(self.journal.tally.sums(), self._own_sums(SealedSegment.sums))

    def possibly_stored_counts(self) -> dict[Counter, UsageCounts]:
        """The part of `unflushed_counts` that may be in the store."""
        return _add_counts({}, self._own_sums(SealedSegment.possibly_stored_sums))

    def unflushed_by_counter(self) -> dict[Counter, int]:
        """`unflushed_counts` in pico-dollars."""
        return _select_pico(self.unflushed_counts())

    def possibly_stored_by_counter(self) -> dict[Counter, int]:
        """`possibly_stored_counts` in pico-dollars."""
        return _select_pico(self.possibly_stored_counts())

    def _own_sums(self, sums_of: Callable[[SealedSegment], Iterable[_Sum]]) -> Iterator[_Sum]:
        for sealed in (*self._unsent, *self.sender.rejected):
            if not sealed.is_adopted:
                yield from sums_of(sealed)

    @asynccontextmanager
    async def without_flush(self) -> AsyncIterator[bool]:
        """Yields whether no flush is in progress; it waits for one only briefly."""
        async with self._flush_gate.exclude_flush(MAX_QUIET_WAIT_SECONDS) as is_quiet:
            yield is_quiet

    @property
    def has_recovered_segments(self) -> bool:
        """Whether anything that earlier processes left in this journal is not certainly in the store."""
        unsent, rejected = self._segments_in(self.journal.folder)
        return bool(rejected) or any(sealed.is_recovered for sealed in unsent)

    def has_unflushed_in(self, folder: Path) -> bool:
        """Whether anything of the journal in that folder is not certainly in the store."""
        return any(self._segments_in(folder))

    def _segments_in(self, folder: Path) -> tuple[list[SealedSegment], list[SealedSegment]]:
        """The segments of that journal that wait, and those that were rejected."""
        unsent = [sealed for sealed in self._unsent if sealed.path.parent == folder]
        return unsent, [sealed for sealed in self.sender.rejected if sealed.path.parent == folder]

    @property
    def is_fully_flushed(self) -> bool:
        """Whether all spend of this journal is in the store and no call is in flight."""
        journal = self.journal
        return not (journal.open_calls or journal.tally.requests or self.has_unflushed_in(journal.folder))

    async def check(self) -> str | None:
        """Raises RecordingUnavailable with what keeps spend from being recorded. Returns a warning if segments were
        rejected."""
        if self.journal.trouble:
            raise RecordingUnavailable(f"the journal cannot be written: {self.journal.trouble}")
        self.check_recordable()
        if self.store_trouble:
            raise RecordingUnavailable("spend cannot be flushed, and waits in the journal; the log says why")
        rejected = len(self.sender.rejected)
        return (
            f"{rejected} segments cannot be flushed, and wait for an operator; the log says why" if rejected else None
        )

    def adopt_segments(self, segments: Iterable[SealedSegment]) -> None:
        """Take over the segments of another journal. Budgets count them as spent elsewhere until they are in the store;
        the limit of unflushed spend includes them."""
        for sealed in segments:
            sealed.is_adopted = True
            self._unsent.append(sealed)
            self._unsent_pico += sealed.seal.pico
            self._flush_due.set()

    # Background work.

    async def run_flush_timer(self) -> None:
        """Request a flush whenever the interval has passed; never returns."""
        while True:
            elapsed = self._clock.monotonic() - self._last_flush_at
            if elapsed >= self._interval.seconds:
                self._flush_due.set()
                elapsed = 0
            await self._clock.sleep(self._interval.seconds - elapsed)

    async def run_flushes(self) -> None:
        """Flush whenever one is requested; never returns. Even requested flushes keep the shortest interval."""
        while True:
            await self._flush_due.wait()
            pause = self._interval.seconds if self.store_trouble else self._interval.min_seconds
            rest = pause - (self._clock.monotonic() - self._last_flush_at)
            if rest > 0:
                await self._clock.sleep(rest)
            self._flush_due.clear()
            await self.flush()

    async def sync_journal(self) -> None:
        """Once: sync the journal to disk, and write again what the disk refused. A full segment is sealed even while
        the store is away."""
        self.journal.retry_unwritten()
        if self.journal.is_full:
            with suppress(OSError):  # the next flush reports it
                await self._seal()
        if self.journal.is_synced:
            return
        async with self._journal_lock:
            with suppress(OSError):  # the journal has logged it
                await asyncio.to_thread(self.journal.sync)

    async def close(self) -> None:
        """Close the journal, when no thread uses it."""
        async with self._journal_lock:
            self.journal.retry_unwritten()  # the last flush may have made room on the disk
            self.journal.close()

    async def flush(self) -> bool:
        """Seal and send all that was recorded; returns whether all of it is in the store."""
        async with self._flush_gate.flush():
            self._last_flush_at = self._clock.monotonic()
            try:
                had_unsent = bool(self._unsent)
                requests = await self._seal()
                await self._send_all()
                if had_unsent:  # what was recorded meanwhile is not sealed yet
                    requests += await self._seal()
                    await self._send_all()
            except (StoreError, OSError) as failure:
                self._on_flush_failed(failure)
                return False
            self.store_trouble = ""
            self._incident.end("spend is flushed again")
            if not self.journal.trouble:  # with trouble, recorded spend may be unsealed
                self._caught_up_at = self._last_flush_at
            self._interval.on_flushed(requests)
            return True

    async def _seal(self) -> int:
        """Seal the current segment, and return its number of requests. While other segments wait for the store, the
        current one is not sealed before it is full, so that their number stays low. Raises OSError."""
        sealed = None
        async with self._journal_lock:
            if not self._unsent or self.journal.is_full:
                with suppress(OSError):  # the journal has logged it, and continues in its segment
                    sealed = self.journal.seal()
            if sealed is not None:
                self._unsent.append(sealed)
                self._unsent_pico += sealed.seal.pico
            for waiting in tuple(self._unsent):  # a copy, as the first one may be sent and removed meanwhile
                if not waiting.is_seal_written:
                    await asyncio.to_thread(waiting.write_seal)
        return sealed.seal.requests if sealed is not None else 0

    async def _send_all(self) -> None:
        while (
            self._unsent and self._unsent[0].is_seal_written
        ):  # a segment that has just ended may not be on the disk yet
            await self.sender.send(self._unsent[0])
            self._unsent_pico -= self._unsent.popleft().seal.pico

    def _on_flush_failed(self, failure: StoreError | OSError) -> None:
        message = (
            "spend cannot be flushed, and waits in the journal: %s; %.2f USD wait, above %g calls get a 503; "
            "price-keeper doctor looks at the store"
        )
        self._incident.report(message, failure, self.unflushed_pico / PICO_PER_USD, self.limit_pico / PICO_PER_USD)
        self.store_trouble = str(failure)
        self._interval.on_failed()


def _add_counts(totals: dict[Counter, UsageCounts], sums: Iterable[_Sum]) -> dict[Counter, UsageCounts]:
    for counter, counts in sums:
        totals[counter] = totals[counter].plus(counts) if counter in totals else counts
    return totals


def _select_pico(sums: dict[Counter, UsageCounts]) -> dict[Counter, int]:
    return {counter: counts.pico for counter, counts in sums.items()}
