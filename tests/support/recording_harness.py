"""A journal and its flusher in a test's hands: a store that fails by a script, and what the store has counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.domain import PICO_PER_MICRO, Scope
from price_keeper.errors import CancellationReason, InvalidStoreRequest, ReasonCode, StoreUnavailable, TransactionFailed
from price_keeper.ledger.aggregator import Aggregator, sum_shards
from price_keeper.ledger.flusher import Flusher, FlushInterval
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.journal_lock import lock_folder
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recovery import RecoveredJournal, recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores.contract import Store, Write

from tests.support.clock import ManualClock

Fault = Literal["before", "after", "conflict", "rejected"]
USD = 10**12  # in pico
_ulid_counter = count(1)


class ScriptedFaults:
    """A store whose transactions meet the faults of a script, then none; the rest of it is untroubled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.faults: list[Fault] = []
        self.is_away = False
        self.transactions: list[list[Write]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        self.transactions.append(list(writes))
        fault = self.faults.pop(0) if self.faults else None
        if fault == "before" or self.is_away:
            raise StoreUnavailable("away")
        if fault == "rejected":
            raise InvalidStoreRequest("never")
        if fault == "conflict":
            raise TransactionFailed(
                [CancellationReason(ReasonCode.NONE)] + [CancellationReason(ReasonCode.CONFLICT)] * (len(writes) - 1)
            )
        await self._store.transact(writes, token=token)
        if fault == "after":
            raise StoreUnavailable("the answer was lost", maybe_applied=True)


@dataclass
class RecordingHarness:
    folder: Path
    store: ScriptedFaults
    clock: Any  # a ManualClock, unless another one is given
    flusher: Flusher
    recovered: RecoveredJournal
    scope: Scope = field(default_factory=lambda: Scope(str(uuid4())))

    @property
    def journal(self) -> Journal:
        return self.flusher.journal

    def counter(self, label: str = "premium", day: str = "20261118") -> Counter:
        return Counter(self.scope.key, label, f"DAY#{day}", 8)

    def begin(self, *counters: Counter, estimate: int = 0) -> int:
        account = ChargedCounters.from_counters(counters or [self.counter()])
        return self.journal.write_intent(Intent(account, int(self.clock.now() * 1000), 7, 7, estimate))

    def spend(self, pico: int, *counters: Counter) -> None:
        self.journal.record(self.begin(*counters), Receipt(UsageCounts(1, 0, 10, 20, pico=pico)))

    async def read_counts(self, counter: Counter | None = None) -> tuple[int, int]:
        """Requests and pico-dollars that are in the store."""
        sums = await sum_shards(self.store._store, counter or self.counter())
        pico = sums["cost_usd_micros"] * PICO_PER_MICRO
        assert pico == int(pico)
        return int(sums["requests"]), int(pico)

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SEGMENT_SUFFIX}"))


async def sum_pending(aggregator: Aggregator) -> None:
    """As if the time had come to look at all totals that may be behind."""
    for pending in aggregator._pending.values():
        pending.look_at = 0.0
    await aggregator.run()


@asynccontextmanager
async def open_recording_harness(
    folder: Path,
    store: Store,
    clock: Clock | None = None,
    scope: Scope | None = None,
    *,
    max_usd: float = 100,
    refuses: bool = False,
) -> AsyncIterator[RecordingHarness]:
    """As the process has it from its start until it is killed."""
    clock = clock or ManualClock()
    with ExitStack() as stack:
        stack.enter_context(lock_folder(folder))
        recovered = recover(folder)
        ulids = UlidFactory(clock.now, lambda size: next(_ulid_counter).to_bytes(size), recovered.newest_ulid)
        faulty_store = ScriptedFaults(store)
        flusher = _build_flusher(Journal(folder, ulids), recovered, faulty_store, clock, max_usd, refuses)
        harness = RecordingHarness(folder, faulty_store, clock, flusher, recovered)
        if scope is not None:
            harness.scope = scope
        yield harness
        flusher.journal._segment.close()


def _build_flusher(
    journal: Journal, recovered: RecoveredJournal, store: Any, clock: Clock, max_usd: float, refuses: bool
) -> Flusher:
    return Flusher(
        journal,
        recovered.sealed,
        SegmentSender(store, clock),
        clock,
        FlushInterval(1.0, 15.0),
        max_unflushed_pico=int(max_usd * USD),
        refuses_without_store=refuses,
    )
