"""Composes the recording of one process: from its journal's folder to a recorder with everything it left before."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy import telemetry as metrics
from proxy.clock import Clock
from proxy.config import Config
from proxy.errors import JournalUnusable
from proxy.recording.aggregator import Aggregator
from proxy.recording.beginning import begun
from proxy.recording.entries import PICO_PER_USD
from proxy.recording.folder import locked
from proxy.recording.journal import Journal
from proxy.recording.leftovers import Leftovers, recover
from proxy.recording.pace import Pace
from proxy.recording.recorder import Recorder
from proxy.recording.sender import Sender
from proxy.recording.ulid import Ulids
from proxy.stores.contract import Store
from proxy.tasks import Tasks
from proxy.telemetry import Telemetry

LAST_FLUSH_SECONDS = 5.0  # of what Kubernetes leaves after the calls under way have ended
AGGREGATE_JITTER = 0.2  # so that a fleet started at once does not read all shards at once

_log = logging.getLogger("proxy.recording")


@dataclass(frozen=True, slots=True)
class Recording:
    recorder: Recorder
    leftovers: Leftovers
    aggregator: Aggregator

    def start(self, config: Config, tasks: Tasks) -> None:
        tasks.start("flush timer", self.recorder.keep_time)
        tasks.start("flush", self.recorder.keep_flushing)
        tasks.every("journal to disk", config.journal.fsync_interval_ms / 1000, self.recorder.keep_on_disk)
        tasks.every("totals", config.aggregator.interval_secs, self.aggregator.run, jitter=AGGREGATE_JITTER)

    async def finish(self) -> None:
        """What is recorded goes to the store if that can be had; if not, it waits for the next start."""
        self.recorder.journal.pay_owed()  # else it would be estimated then
        try:
            async with asyncio.timeout(LAST_FLUSH_SECONDS):
                await self.recorder.flush()
        except TimeoutError:
            _log.warning("the last flush takes too long; what is recorded waits in the journal for the next start")
        self.recorder.journal.pay_owed()  # what was flushed may have made room
        self.recorder.journal.close()

    def add_to(self, telemetry: Telemetry) -> None:
        recorder, left, aggregator = self.recorder, self.leftovers, self.aggregator

        def requests() -> list[tuple[dict[str, str], float]]:
            recorded = recorder.journal.recorded
            exact = recorded.requests - recorded.estimated_requests
            return [({"estimated": "false"}, exact), ({"estimated": "true"}, recorded.estimated_requests)]

        telemetry.add(metrics.RECORDED_REQUESTS, requests)
        telemetry.add(metrics.RECORDED_USD, lambda: recorder.journal.recorded.pico / PICO_PER_USD)
        telemetry.add(metrics.CALLS_OPEN, lambda: recorder.journal.open_calls)
        telemetry.add(metrics.UNFLUSHED_USD, lambda: recorder.unflushed_pico / PICO_PER_USD)
        telemetry.add(metrics.UNFLUSHED_SECONDS, lambda: recorder.lag_seconds)
        telemetry.add(metrics.SEGMENTS_WAITING, lambda: recorder.waiting_segments)
        telemetry.add(metrics.TORN_LINES, lambda: left.spoilt)
        telemetry.add(metrics.LOST_CALLS, lambda: left.estimated)
        telemetry.add(metrics.FLUSHES, lambda: recorder.sender.sent)
        telemetry.add(metrics.FLUSH_REPEATS, lambda: recorder.sender.repeats)
        telemetry.add(metrics.FLUSH_REJECTS, lambda: len(recorder.sender.refused))
        telemetry.add(metrics.TOTALS_WRITTEN, lambda: aggregator.written)
        telemetry.add(metrics.TOTALS_FRESH, lambda: aggregator.left_alone)


@asynccontextmanager
async def opened_recording(config: Config, store: Store, clock: Clock) -> AsyncIterator[Recording]:
    """Raises JournalInUse and JournalUnusable."""
    folder = Path(config.journal.dir)
    with locked(folder):
        try:
            left = await asyncio.to_thread(recover, folder)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as failure:
            raise JournalUnusable(f"the journal in {folder} cannot be read: {failure}") from None
        ulids, sender = Ulids(clock.now, os.urandom, left.newest), Sender(store, clock)
        journal = await begun(folder, left, sender, lambda: Journal(folder, ulids))
        recorder = Recorder(
            journal,
            left.sealed,
            sender,
            clock,
            Pace(config.journal.flush_interval_secs, config.journal.flush_interval_max_secs),
            max_unflushed_pico=int(config.journal.max_unflushed_usd * PICO_PER_USD),
            refuses_without_store=config.on_store_down == "refuse",
        )
        yield Recording(recorder, left, Aggregator(store, clock, config.aggregator.interval_secs))
