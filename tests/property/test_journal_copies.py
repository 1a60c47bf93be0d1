"""Copies of a journal are replayed in any order, while its process lives and after it died: each call counts once.

A copy is what a snapshot of the disk has: some lines of each segment, and calls in flight then. The process that comes
first counts those as estimated; they stay so.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.errors import StoreError, StoreUnavailable
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE
from price_keeper.ledger.journal import Journal, SealedSegment
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores.contract import Page, Query, Write

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.memory_store import MemoryStore

ORG = "550e8400-e29b-41d4-a716-446655440000"
DAY = "DAY#20261118"
COSTS, GUESS = 10**6, 10**12  # pico-dollars: the size tells a call's cost from its estimate
FAULTS = st.lists(st.sampled_from(("", "", "before", "after")), max_size=4)


class Wire:
    """One process's way to the store, on which others come in between and answers are lost."""

    def __init__(self, store: MemoryStore, faults: Sequence[str], chance: random.Random) -> None:
        self._store, self._faults, self._chance = store, [*faults], chance

    async def query(self, query: Query) -> Page:
        await self._others()
        return await self._store.query(query)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        await self._others()
        fault = self._faults.pop(0) if self._faults else ""
        if fault == "before":
            raise StoreUnavailable("away")
        await self._store.transact(writes, token=token)
        if fault == "after":
            raise StoreUnavailable("the answer was lost", maybe_applied=True)

    async def _others(self) -> None:
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)


class Machine(RuleBasedStateMachine):
    @initialize(sums=st.sampled_from((2, 3, 49)))
    def begin(self, sums: int) -> None:
        """Few sums fit into a part, so that there are many."""
        self.place = Path(mkdtemp())
        self.folder = self.place / "journal"
        self.folder.mkdir()
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch("os.fsync"))
        self.patches.enter_context(mock.patch("price_keeper.ledger.journal.SUMS_PER_PART", sums))
        self.clock, self.store, self.chance = ManualClock(), MemoryStore(), random.Random(0)
        self.calls, self.names, self.copies = count(1), count(1), dict[Path, set[int]]()
        self.under_way: dict[int, int] = {}  # calls, by their numbers in the journal
        self.recorded: set[int] = set()
        self.sent: set[int] = set()
        self.may_be_estimated: set[int] = set()  # under way in a copy that was replayed, or when the process died
        self._opened([])

    def _opened(self, left: list[SealedSegment]) -> None:
        newest = max((path.stem for path in self.folder.glob(f"*{SEGMENT_SUFFIX}")), default="")
        ulids = UlidFactory(self.clock.now, lambda size: next(self.names).to_bytes(size), newest)
        self.journal, self.sealed = Journal(self.folder, ulids), left
        self.sender = self._sender(())

    def _sender(self, faults: Sequence[str]) -> SegmentSender:
        return SegmentSender(Wire(self.store, faults, self.chance), self.clock)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self._check()
            self.patches.close()
            shutil.rmtree(self.place)

    # What the process does.

    @rule(app=st.sampled_from("abc"))
    def call_begins(self, app: str) -> None:
        call = next(self.calls)
        scope = f"ORG#{ORG}#APP#{app}"
        account = ChargedCounters.from_counters([Counter(scope, f"call{call}", DAY, 8), Counter(scope, "all", DAY, 8)])
        number = self.journal.write_intent(Intent(account, 0, 1, 1, GUESS + call))
        self.under_way[number] = call
        self.sent.add(call)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 10**6), costs=st.booleans())
    def call_ends(self, which: int, costs: bool) -> None:
        number = [*self.under_way][which % len(self.under_way)]
        call = self.under_way.pop(number)
        if costs:
            self.recorded.add(call)
        self.journal.record(number, Receipt(UsageCounts(requests=1, pico=COSTS * call)) if costs else None)

    @rule()
    def seal(self) -> None:
        sealed = self.journal.seal()
        if sealed is not None:
            self.sealed.append(sealed)

    @rule(faults=FAULTS)
    def flush(self, faults: list[str]) -> None:
        asyncio.run(self._flush(faults))

    async def _flush(self, faults: Sequence[str]) -> None:
        self.sender._store = Wire(self.store, faults, self.chance)  # type: ignore[assignment]
        with suppress(StoreError):
            while self.sealed:
                if not self.sealed[0].is_seal_written:
                    self.sealed[0].write_seal()
                await self.sender.send(self.sealed[0])
                self.sealed.pop(0)
        assert self.sender.rejected == []

    @rule(torn=st.binary(max_size=9))
    def die(self, torn: bytes) -> None:
        self.may_be_estimated |= set(self.under_way.values())
        self.journal._segment.close()
        with self.journal._segment.path.open("ab") as file:
            file.write(torn.replace(b"\n", b""))
        self.under_way = {}
        self._opened(recover(self.folder).sealed)

    # Replays of copies.

    @rule()
    def copy(self) -> None:
        path = self.place / f"copy{len(self.copies)}"
        shutil.copytree(self.folder, path)
        self.copies[path] = set(self.under_way.values())

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 10**6))
    def copy_lacks_the_newest(self, which: int) -> None:
        """It was begun while that segment was not there yet."""
        path = self._copy(which)
        names = sorted(path.glob(f"*{SEGMENT_SUFFIX}"))
        if len(names) > 1 and names[-1].stem == self.journal._segment.ulid:
            names[-1].unlink()
            self.copies[path] |= self.sent  # as far as the copy tells

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 10**6))
    def copy_has_newer_segments(self, which: int) -> None:
        """Beside older states of earlier ones, as on a disk where not everything was synced."""
        path = self._copy(which)
        for each in self.folder.glob(f"*{SEGMENT_SUFFIX}"):
            if not (path / each.name).exists() and each.stem > max((one.stem for one in path.iterdir()), default=""):
                shutil.copy(each, path)
        self.copies[path] |= set(self.under_way.values())

    def _copy(self, which: int) -> Path:
        return [*self.copies][which % len(self.copies)]

    @precondition(lambda self: self.copies)
    @rule(which=st.lists(st.integers(0, 10**6), min_size=1, max_size=3), faults=FAULTS, flushes=st.booleans())
    def replay(self, which: list[int], faults: list[str], flushes: bool) -> None:
        """Several at the same time, perhaps while the process flushes. A copy of the copy stays."""
        asyncio.run(self._replay_all([self._copy(each) for each in which], faults, flushes=flushes))

    async def _replay_all(self, paths: Sequence[Path], faults: Sequence[str], *, flushes: bool = False) -> None:
        work = [self._replay(path, faults) for path in paths]
        await asyncio.gather(*work, *([self._flush(faults)] if flushes else []))

    async def _replay(self, path: Path, faults: Sequence[str]) -> None:
        again = self.place / f"again{next(self.names)}"
        shutil.copytree(path, again)
        self.may_be_estimated |= self.copies[path]
        sender = self._sender(faults)
        with suppress(StoreError):
            for sealed in recover(again).sealed:
                await sender.send(sealed)
        shutil.rmtree(again)

    # What has to hold.

    def _check(self) -> None:
        self.die(b"")
        self.flush([])
        assert self.sealed == []
        for _ in range(2):
            found = self._stored()
            counted = {call for call, sums in found.items() if sums["requests"]}
            assert self.recorded <= counted <= self.sent
            for call in counted:
                is_estimated = bool(found[call].get("estimated_requests"))
                pico = int(found[call][COST_ATTRIBUTE] * PICO_PER_MICRO)
                assert found[call]["requests"] == 1
                assert pico == (GUESS + call if is_estimated else COSTS * call)
                assert call in (self.may_be_estimated if is_estimated else self.recorded)
            for path in self.copies:
                asyncio.run(self._replay_all([path], []))
            assert self._stored() == found  # all of it was there

    def _stored(self) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        whole = {"requests": 0, "pico": 0}
        for key, item in self.store.items.items():
            if key.table != "usage-agg-sharded":
                continue
            label = key.pk.partition("#LABEL#")[2].partition("#SH#")[0]
            if label == "all":
                whole["requests"] += int(str(item["requests"]))
                continue
            sums = found.setdefault(int(label.removeprefix("call")), {})
            for name in ("requests", "estimated_requests", COST_ATTRIBUTE):
                if name in item:
                    sums[name] = sums.get(name, 0) + item[name]  # type: ignore[operator]
        assert whole["requests"] == sum(sums["requests"] for sums in found.values())
        return found


TestCopies = Machine.TestCase
TestCopies.settings = settings(max_examples=tries(150), stateful_step_count=40)
