"""Composes the ledger of one process: locks its folder, recovers what is in it, begins a new journal, starts flushing.

If the disk is full, recovered segments are sent first, since each one that is removed makes room. `finish` flushes the
rest and returns unused budget leases; what cannot be flushed then waits in the journal for the next start. Start with
`open_recording`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.domain import PICO_PER_USD
from price_keeper.errors import JournalFull, JournalUnusable, StoreError
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.flusher import Flusher, FlushInterval
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.journal_lock import is_disk_full, lock_folder
from price_keeper.ledger.lease_file import BudgetLeaseFile, release_former_leases
from price_keeper.ledger.orphaned_journals import OrphanedJournals
from price_keeper.ledger.recovery import RecoveredJournal, recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.total_sweep import SWEEP_SECONDS, TotalSweep
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.price_dimensions import PIECES, TOKENS, UsageCounts
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.incident import Incident
from price_keeper.telemetry.metrics import MetricsRegistry, Samples

LAST_FLUSH_TIMEOUT_SECONDS = 5.0  # of the time that Kubernetes leaves after the calls in flight have ended
LAST_RETURN_TIMEOUT_SECONDS = 2.0
LEASE_RETURN_INTERVAL_SECONDS = 5.0  # between two attempts to return the budget leases of ended runs
ORPHANS_INTERVAL_SECONDS = 5.0  # between two searches for journals of ended workers
AGGREGATE_JITTER = 0.2  # so that a fleet started at once does not read all shards at once

_log = logging.getLogger("price_keeper.recording")


async def begin_journal(
    folder: Path, recovered: RecoveredJournal, sender: SegmentSender, begin: Callable[[], Journal]
) -> Journal:
    """Begin the new journal. If the disk is full, recovered segments are sent to the store first, the oldest first, as
    each file that is removed makes room.

    A segment may be sent without its seal then: its sums follow from its lines and those of the next segment, which
    stay unchanged until it is removed, as no other process writes to them. Raises JournalUnusable.
    """
    while True:
        try:
            return await _seal_and_begin(folder, recovered, begin)
        except JournalFull as failure:
            if not recovered.sealed:
                raise
            await _send_first(recovered, sender, failure)


async def _seal_and_begin(folder: Path, recovered: RecoveredJournal, begin: Callable[[], Journal]) -> Journal:
    try:
        for sealed in recovered.sealed:
            if not sealed.is_seal_written:
                await asyncio.to_thread(sealed.write_seal)
    except OSError as failure:
        kind = JournalFull if is_disk_full(failure) else JournalUnusable
        raise kind(f"cannot seal what is left in the journal in {folder}: {failure.strerror}") from None
    return begin()


async def _send_first(recovered: RecoveredJournal, sender: SegmentSender, cause: JournalFull) -> None:
    first = recovered.sealed[0]
    try:
        await sender.send(first)
    except (StoreError, OSError) as failure:
        raise JournalFull(f"{cause}; and what is left there cannot be flushed to make room: {failure}") from None
    recovered.sealed.pop(0)


@dataclass(slots=True)
class Recording:
    """The parts of a process's ledger, and their background work."""

    flusher: Flusher
    recovered: RecoveredJournal
    aggregator: Aggregator
    lease_file: BudgetLeaseFile  # the hard budgets that this run leased money from
    store: Store
    clock: Clock
    folder: Path
    has_former_leases: bool = True
    orphans: OrphanedJournals | None = None
    _orphans_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _former_leases: Incident = field(init=False)

    def __post_init__(self) -> None:
        self._former_leases = Incident(_log, self.clock.monotonic)

    def start(self, config: Config, tasks: Tasks) -> None:
        tasks.start("flush timer", self.flusher.run_flush_timer)
        tasks.start("flush", self.flusher.run_flushes)
        tasks.run_every("journal to disk", config.journal.fsync_interval_ms / 1000, self.flusher.sync_journal)
        tasks.run_every("totals", self.aggregator.tick_seconds, self.aggregator.run, jitter=AGGREGATE_JITTER)
        sweep = TotalSweep(self.store, self.clock, self.aggregator)
        tasks.run_every("totals of ended processes", SWEEP_SECONDS / 2, sweep.run, jitter=AGGREGATE_JITTER)
        tasks.run_every(
            "budget leases of former runs",
            LEASE_RETURN_INTERVAL_SECONDS,
            self.return_former_leases,
            jitter=AGGREGATE_JITTER,
        )
        if self.orphans is not None:
            tasks.run_every(
                "journals of former workers", ORPHANS_INTERVAL_SECONDS, self.adopt_orphans, jitter=AGGREGATE_JITTER
            )

    async def adopt_orphans(self) -> None:
        """Adopt the journals of ended workers, and remove each folder whose spend is in the store."""
        if self.orphans is None:
            return
        async with self._orphans_lock:
            try:
                await asyncio.to_thread(self.orphans.find)
            finally:  # journals found before a failure must not wait for the next attempt
                for journal in self.orphans.take_found():
                    self.recovered.add_losses(journal)
                    self.flusher.adopt_segments(journal.sealed)
            await self._finish_orphans(self.orphans)

    async def _finish_orphans(self, orphans: OrphanedJournals) -> None:
        for folder in orphans.folders:
            if not self.flusher.has_unflushed_in(folder):
                await orphans.finish_folder(folder, self.store, self.clock)

    async def return_former_leases(self) -> None:
        """Return the unspent budget leases of earlier runs, once, as soon as all spend of those runs is in the
        store."""
        if not self.has_former_leases or self.flusher.has_recovered_segments:
            return
        try:
            await release_former_leases(self.store, self.clock, self.folder, self.lease_file.holder)
        except (StoreError, OSError) as failure:
            message = "budget leases of former runs cannot be released yet; their money stays leased until then: %s"
            self._former_leases.report(message, failure)
            return
        self.has_former_leases = False
        self._former_leases.end("budget leases of former runs are released")

    async def finish(self) -> None:
        """Flush what is recorded; what the store does not take waits in the journal for the next start. Then bring the
        totals that lack its additions up to date, which no other process does soon, and return the budget leases, as
        no call can begin any more."""
        self.flusher.journal.retry_unwritten()  # the next start would count an unwritten receipt as estimated
        try:
            async with asyncio.timeout(LAST_FLUSH_TIMEOUT_SECONDS):
                if await self.flusher.flush():
                    await self._sum_last_additions()
        except TimeoutError:
            _log.warning(
                "the last totals take too long; a later sweep brings them up to date"
                if self.flusher.is_fully_flushed
                else "the last flush takes too long; what is recorded waits in the journal for the next start"
            )
        await self.flusher.close()
        if self.flusher.is_fully_flushed:
            await self._return_leases()

    async def _sum_last_additions(self) -> None:
        try:
            await self.aggregator.run(is_last=True)
        except Exception as failure:  # whatever it is, leases are returned all the same
            _log.error("the last totals are not brought up to date; a later sweep does it", exc_info=failure)

    async def _return_leases(self) -> None:
        try:
            async with asyncio.timeout(LAST_RETURN_TIMEOUT_SECONDS):
                await self.return_former_leases()  # in case this run was too short for it
                if self.orphans is not None:
                    async with self._orphans_lock:
                        await self._finish_orphans(self.orphans)
                await self.lease_file.release(self.store, self.clock)
        except (StoreError, OSError, TimeoutError) as failure:
            why = str(failure) or "no answer"
            _log.warning("budget leases cannot be released now; they are released at the next start: %s", why)

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        flusher, recovered, aggregator = self.flusher, self.recovered, self.aggregator

        _register_usage_metrics(telemetry, flusher.journal)
        telemetry.add(metrics.CALLS_OPEN, lambda: flusher.journal.open_calls)
        telemetry.add(metrics.UNFLUSHED_USD, lambda: flusher.unflushed_pico / PICO_PER_USD)
        telemetry.add(metrics.UNFLUSHED_LIMIT_USD, lambda: flusher.limit_pico / PICO_PER_USD)
        telemetry.add(metrics.UNFLUSHED_SECONDS, lambda: flusher.lag_seconds)
        telemetry.add(metrics.STORE_TROUBLE, lambda: bool(flusher.store_trouble))
        telemetry.add(metrics.JOURNAL_TROUBLE, lambda: bool(flusher.journal.trouble))
        telemetry.add(metrics.JOURNAL_SEGMENTS_WAITING, lambda: flusher.waiting_segments)
        telemetry.add(metrics.JOURNAL_TORN_LINES, lambda: recovered.corrupt_lines)
        telemetry.add(metrics.JOURNAL_ESTIMATED_CALLS, lambda: recovered.estimated_calls)
        telemetry.add(metrics.JOURNAL_UNRECOVERABLE_CALLS, lambda: recovered.unrecoverable_calls)
        telemetry.add(metrics.FLUSHES, lambda: flusher.sender.sent_segments)
        telemetry.add(metrics.FLUSH_REPEATS, lambda: flusher.sender.repeated_parts)
        telemetry.add(metrics.FLUSH_REJECTS, lambda: len(flusher.sender.rejected_ulids))
        telemetry.add(metrics.TOTALS_WRITTEN, lambda: aggregator.totals_written)
        telemetry.add(metrics.TOTALS_LEFT_ALONE, lambda: aggregator.totals_fresh)
        telemetry.add(metrics.TOTALS_LAG_SECONDS, lambda: [({}, aggregator.lag)])
        telemetry.add(metrics.TOTALS_AGE_SECONDS, lambda: self.clock.monotonic() - aggregator.completed_at)


_CountGetter = Callable[[UsageCounts], float]

_REQUESTS: Mapping[str, _CountGetter] = {
    "false": lambda counts: counts.requests - counts.estimated_requests,
    "true": lambda counts: counts.estimated_requests,
}
_TOKENS: Mapping[str, _CountGetter] = {each.name: attrgetter(each.counter) for each in TOKENS}
_PIECES: Mapping[str, _CountGetter] = {unit.counter: attrgetter(unit.counter) for unit in PIECES}


def _register_usage_metrics(telemetry: MetricsRegistry, journal: Journal) -> None:
    def build_samples(kind: str, parts: Mapping[str, _CountGetter]) -> Samples:
        by_label = journal.recorded_by_label.items()
        return [({"label": label, kind: name}, of(counts)) for label, counts in by_label for name, of in parts.items()]

    telemetry.add(metrics.RECORDED_REQUESTS, lambda: build_samples("estimated", _REQUESTS))
    telemetry.add(metrics.TOKENS, lambda: build_samples("type", _TOKENS))
    telemetry.add(metrics.PIECES, lambda: build_samples("type", _PIECES))
    telemetry.add(
        metrics.RECORDED_USD,
        lambda: [({"label": label}, counts.pico / PICO_PER_USD) for label, counts in journal.recorded_by_label.items()],
    )
    telemetry.add(metrics.GUARDRAIL_UNITS, lambda: journal.recorded.guardrail_units)


@asynccontextmanager
async def open_recording(
    config: Config, store: Store, clock: Clock, orphans: OrphanedJournals | None = None
) -> AsyncIterator[Recording]:
    """Open the ledger of this process. Journals adopted here are flushed first, and count as this process's own spend.
    Raises JournalInUse and JournalUnusable."""
    folder = Path(config.journal.dir)
    with ExitStack() as locks:
        locks.enter_context(lock_folder(folder))
        try:
            recovered = await asyncio.to_thread(recover, folder)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as failure:
            raise JournalUnusable(f"the journal in {folder} cannot be read: {failure}") from None
        if orphans is not None:
            locks.callback(orphans.close)
            await asyncio.to_thread(orphans.find)
            for orphan in orphans.take_found():
                recovered.add_losses(orphan)
                recovered.sealed[:0] = orphan.sealed
        ulids, sender = UlidFactory(clock.now, os.urandom, recovered.newest_ulid), SegmentSender(store, clock)
        journal = await begin_journal(
            folder, recovered, sender, lambda: Journal(folder, ulids, (*config.labels, *PSEUDO_LABELS))
        )
        flusher = Flusher(
            journal,
            recovered.sealed,
            sender,
            clock,
            FlushInterval(config.journal.flush_interval_secs, config.journal.flush_interval_max_secs),
            max_unflushed_pico=int(config.journal.max_unflushed_usd * PICO_PER_USD),
            refuses_without_store=config.on_store_down == "refuse",
        )
        aggregator = Aggregator(store, clock, config.aggregator.interval_secs)
        sender.subscribe_written(aggregator.note_written)
        yield Recording(
            flusher, recovered, aggregator, BudgetLeaseFile(folder, ulids.new()), store, clock, folder, orphans=orphans
        )
