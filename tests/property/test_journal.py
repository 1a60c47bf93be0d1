"""Whatever happens to a journal, each call in it counts once: as recorded where that was written, else as estimated."""

from __future__ import annotations

import os
import shutil
from collections import Counter as Times
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from price_keeper.errors import RecordingUnavailable
from price_keeper.ledger.journal import Journal, SealedSegment
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX
from price_keeper.ledger.ulid import UlidFactory

from tests.support.effort import tries

SCOPES = ("ORG#a", "ORG#b", "ORG#c")


class Watched:
    """A budget that keeps what is reported to it."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.ended_with: list[int] = []

    def on_call_started(self, expected_pico: int) -> None:
        self.in_flight += expected_pico

    def on_call_ended(self, expected_pico: int, pico: int) -> None:
        self.in_flight -= expected_pico
        self.ended_with.append(pico)


def account(call: int, scope: str, budget: Watched) -> ChargedCounters:
    """A counter for each call, so that none can stand for another; and one for each scope."""
    counters = [Counter(scope, f"call{call}", "DAY#20261118", 8), Counter(scope, "all", "DAY#20261118", 8)]
    return ChargedCounters.from_counters(counters, (budget,))


WRITE = os.pwrite


class Disk:
    """Refuses writes when told to, at once or half-way through."""

    def __init__(self) -> None:
        self.room: int | None = None

    def write(self, file: int, data: bytes, at: int) -> int:
        if self.room is None:
            return WRITE(file, data, at)
        written = WRITE(file, data[: self.room], at) if self.room else 0
        if not written:
            raise OSError(28, "No space left on device")
        self.room = 0
        return written


class Machine(RuleBasedStateMachine):
    @initialize(room_taken=st.sampled_from((0, 300, 5000)))
    def begin(self, room_taken: int) -> None:
        """Where no room is taken beforehand, each line asks the disk for its own."""
        self.folder = Path(mkdtemp())
        self.disk = Disk()
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch("os.pwrite", self.disk.write))
        self.patches.enter_context(mock.patch("os.fsync"))  # no power cut here
        self.patches.enter_context(mock.patch("price_keeper.ledger.segment.MAX_ROOM_BYTES", room_taken))
        self.calls = count()
        self.chance = count(1)
        self.under_way: list[int] = []  # the numbers of those whose end the journal has not been told
        self.call_of: dict[int, int] = {}  # by its number in the journal
        self.recorded: set[int] = set()
        self.lost: set[int] = set()  # under way when the process died
        self.sealed: list[SealedSegment] = []
        self.counted: Times[int] = Times()
        self._opened()

    def _opened(self) -> None:
        ulids = UlidFactory(lambda: 1_795_003_200.0, lambda size: next(self.chance).to_bytes(size), self._last())
        self.journal, self.budget = Journal(self.folder, ulids), Watched()

    def _last(self) -> str:
        return max((path.stem for path in self.folder.glob(f"*{SEGMENT_SUFFIX}")), default="")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.disk.room = None
            self._check()
            self.patches.close()
            shutil.rmtree(self.folder)

    @rule(scope=st.sampled_from(SCOPES))
    def send(self, scope: str) -> None:
        call = next(self.calls)
        try:
            number = self.journal.write_intent(Intent(account(call, scope, self.budget), 0, 1, 1, call))
        except RecordingUnavailable:
            assert self.disk.room is not None  # it was not sent, and counts as nothing
            return
        self.under_way.append(number)
        self.call_of[number] = call

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 10**6), costs=st.booleans())
    def end(self, which: int, costs: bool) -> None:
        number = self.under_way.pop(which % len(self.under_way))
        call = self.call_of[number]
        if costs:
            self.recorded.add(call)
        counts = UsageCounts(requests=1, pico=call)
        self.journal.record(number, Receipt(counts) if costs else None)
        self.journal.record(number, Receipt(counts))  # twice is once

    @rule(room=st.none() | st.integers(0, 60))
    def fill_disk(self, room: int | None) -> None:
        self.disk.room = room
        if room is None:
            self.journal.retry_unwritten()

    @rule()
    def seal(self) -> None:
        try:
            sealed = self.journal.seal()
        except OSError:
            assert self.disk.room is not None
            return
        if sealed is not None:
            self.sealed.append(sealed)

    @precondition(lambda self: self.sealed)
    @rule()
    def flush(self) -> None:
        """As the flusher does: the oldest first, and not before its seal is on the disk."""
        try:
            self.sealed[0].write_seal()
        except OSError:
            return
        sealed = self.sealed.pop(0)
        self._count(sealed)
        sealed.discard()

    @rule(cut=st.integers(0, 9), dies_again=st.integers(0, 3))
    def die(self, cut: int, dies_again: int) -> None:
        """Killed at any moment, perhaps in the middle of a line, and again while it recovers."""
        self.disk.room = None
        self.lost |= {self.call_of[number] for number in self.journal._open}
        self.journal._segment.close()
        self._tear(cut)
        for _ in range(dies_again):
            self._recover_partly()
        self.sealed = recover(self.folder).sealed
        self.under_way, self.call_of = [], {}
        self._opened()

    def _tear(self, cut: int) -> None:
        path = self.folder / f"{self._last()}{SEGMENT_SUFFIX}"
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"0000 torn"[:cut])

    def _recover_partly(self) -> None:
        """Stopped after some of its writes."""
        left = iter(range(2))

        def some(file: int, data: bytes, at: int) -> int:
            if next(left, None) is None:
                raise OSError(5, "killed")
            return WRITE(file, data, at)

        with mock.patch("os.pwrite", some), suppress(OSError):
            recover(self.folder)

    def _count(self, sealed: SealedSegment) -> None:
        sums = {counter: counts for part in sealed.seal.parts for counter, counts in part}
        calls = [counter for counter in sums if counter.label != "all"]
        for counter in calls:
            self.counted[int(counter.label.removeprefix("call"))] += sums[counter].requests
        assert sealed.seal.requests == len(calls) == sum(sums[each].requests for each in sums if each.label == "all")
        assert sealed.seal.pico == sum(sums[counter].pico for counter in calls)

    @invariant()
    def budgets_hear_of_all(self) -> None:
        assert self.budget.in_flight == sum(intent.pico for intent in self.journal._open.values())
        assert sum(self.budget.ended_with) == self.journal.recorded.pico

    @invariant()
    def nothing_counts_twice(self) -> None:
        assert max(self.counted.values(), default=0) <= 1

    def _check(self) -> None:
        """The next process flushes what is left; calls without a receipt are estimated."""
        self.journal.retry_unwritten()
        lost = self.lost | {self.call_of[number] for number in self.journal._open}
        self.die(0, 0)
        for sealed in self.sealed:
            self._count(sealed)
        assert {call for call, times in self.counted.items() if times} == self.recorded | lost
        self.nothing_counts_twice()


TestJournal = Machine.TestCase
TestJournal.settings = settings(max_examples=tries(100), stateful_step_count=50)
