"""Sidecars that spend of one hard budget in simulated time, the lines between them and the store, and the truth."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter as Sums
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from inspect import Signature, signature
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from price_keeper.clock import Clock
from price_keeper.errors import StoreUnavailable
from price_keeper.hard.holds import BudgetLeaseFile, release_former_leases
from price_keeper.hard.purse import CostReservation
from price_keeper.hard.purses import BudgetLeases
from price_keeper.hard.rows import HardBudgetBucket, BudgetLeaseRow, HardBudgetKey
from price_keeper.recording.aggregator import Aggregator, read_spent_pico
from price_keeper.recording.composed import Recording
from price_keeper.recording.entries import ChargedCounters, Counter, UsageCounts, Intent, Receipt
from price_keeper.recording.flush import build_addition
from price_keeper.recording.journal import Journal
from price_keeper.recording.leftovers import recover
from price_keeper.recording.pace import FlushInterval
from price_keeper.recording.recorder import Recorder
from price_keeper.recording.sender import SegmentSender
from price_keeper.recording.ulid import UlidFactory
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore
from tests.support.simulation import USD, SkewedClock, simulated

T = TypeVar("T")

ORG = "550e8400-e29b-41d4-a716-446655440000"
NAME = HardBudgetKey(f"ORG#{ORG}#APP#web", "premium", "DAY#20261118")
PATIENCE_SECONDS = 10.0  # of a client of the store


class World:
    def __init__(self, clock: ManualClock, folder: Path, quota: int) -> None:
        self.clock = clock
        self.folder = folder
        self.store = MemoryStore()
        self.quota, self.version = quota, 1
        self.truth: Sums[str] = Sums()  # by holder: what its calls cost, or may cost at most
        self.foreign = 0
        self.gates: list[asyncio.Event] = []  # what waits on its way
        self.chance = count(1)
        self.copies = count()

    def ulids(self, clock: Clock, after: str = "") -> UlidFactory:
        return UlidFactory(clock.now, lambda size: next(self.chance).to_bytes(size), after)

    def bucket(self) -> HardBudgetBucket | None:
        item = self.store.items.get(NAME.bucket_key)
        return None if item is None else HardBudgetBucket.from_item(item)

    def holds(self) -> dict[str, BudgetLeaseRow]:
        keys = [key for key in self.store.items if key.sk.startswith("HOLD#")]
        return {key.sk.rpartition("#")[2]: BudgetLeaseRow.from_item(self.store.items[key]) for key in keys}

    async def spend_elsewhere(self, pico: int) -> None:
        self.foreign += pico
        counter = Counter(*NAME, 64)
        await self.store.update(build_addition(f"{next(self.chance)}", counter, UsageCounts(1, pico=pico), self.clock.now()))

    def check(self) -> None:
        """What always holds, whatever has happened so far."""
        bucket, holds = self.bucket(), self.holds()
        for holder, spent in self.truth.items():
            assert spent <= holds[holder].leased
        for holder, hold in holds.items():
            assert hold.used <= max(hold.leased, self.truth[holder])
        if bucket is not None:
            assert bucket.unleased + sum(hold.leased for hold in holds.values()) + bucket.spent_without_lease == bucket.quota
            assert bucket.unleased >= 0 or self.foreign
            assert sum(self.truth.values()) <= self.quota

    async def check_at_the_end(self) -> None:
        """All is replayed, and what nobody spent is in the bucket again."""
        bucket, holds = self.bucket(), self.holds()
        for holder, hold in holds.items():
            assert hold.is_closed
            assert hold.leased == hold.used == self.truth[holder]
        if bucket is not None:
            assert bucket.unleased == bucket.quota - bucket.spent_without_lease - sum(self.truth.values())
            assert await read_spent_pico(cast(Store, self.store), NAME) == sum(self.truth.values()) + self.foreign


class Wire:
    """One process's way to the store. What was sent arrives whatever becomes of who sent it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.fault = ""  # of one thing that is asked: away, lost, late (to arrive) or unheard (its answer, for a while)
        self.passing = 0  # how many transactions are let through before that
        self.is_away = False
        self.asked = 0

    def meet(self, fault: str, passing: int) -> None:
        self.fault, self.passing = fault, passing

    async def _asked(self, verb: str, work: Callable[[], Awaitable[T]]) -> T:
        self.asked += 1
        fault = self._fault(verb)
        if fault == "away":
            raise StoreUnavailable("away")
        sent = asyncio.get_running_loop().create_task(self._carried_out(work, fault))
        sent.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await asyncio.shield(sent)
        except TimeoutError:
            raise StoreUnavailable("no answer", maybe_applied=True) from None

    def _fault(self, verb: str) -> str:
        if self.is_away:
            return "away"
        if not self.fault:
            return ""
        self.passing -= verb == "transact"
        if self.passing >= 0:
            return ""
        fault, self.fault = self.fault, ""
        return fault

    async def _carried_out(self, work: Callable[[], Awaitable[T]], fault: str) -> T:
        if fault == "late":
            await self._gate()
        found = await work()
        if fault == "unheard":
            await self._gate()
        if fault == "lost":
            raise StoreUnavailable("the answer was lost", maybe_applied=True)
        return found

    async def _gate(self) -> None:
        gate = asyncio.Event()
        self._world.gates.append(gate)
        await gate.wait()

    def __getattr__(self, verb: str) -> Any:
        async def asked(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(0)  # so that others come in between
            return await self._asked(verb, partial(getattr(self._world.store, verb), *arguments, **named))

        return asked


@dataclass
class Call:
    number: int
    worst: int
    holder: str


@dataclass
class Sidecar:
    world: World
    name: str
    skew: float = 0.0
    open: list[Call] = field(default_factory=list)
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    is_running: bool = False
    refused: int = 0

    @property
    def folder(self) -> Path:
        return self.world.folder / self.name

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.clock = SkewedClock(self.world.clock, self.skew)
        left = recover(self.folder)
        self.wire = Wire(self.world)
        self.store = cast(Store, self.wire)
        ulids = self.world.ulids(self.clock, left.newest_ulid)
        journal = Journal(self.folder, ulids)
        recorder = Recorder(
            journal,
            left.sealed,
            SegmentSender(self.store, self.clock),
            self.clock,
            FlushInterval(1, 15),
            max_unflushed_pico=10**9 * USD,
        )
        holds = BudgetLeaseFile(self.folder, ulids.new())
        aggregator = Aggregator(self.store, self.clock, 60)
        self.recording = Recording(recorder, left, aggregator, holds, self.store, self.clock, self.folder)
        self.tasks = Tasks(self.clock)
        self.purses = BudgetLeases(self.store, self.clock, self.tasks, holds, partial(read_spent_pico, self.store))
        self.settings = self.world.quota, self.world.version
        counters = [Counter(*NAME, 8), Counter.for_lease(NAME.scope, NAME.label, holds.holder, NAME.period, 8)]
        self.account = ChargedCounters.from_counters(counters)
        self.is_running = True

    def do(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)
        return task

    async def call(self, worst: int) -> Call | None:
        purse = self.purses.get(NAME, *self.settings)
        held = CostReservation(purse, worst) if purse.try_reserve(worst) else await purse.reserve(worst)
        if held is None:
            self.refused += 1
            return None
        await asyncio.sleep(0)
        intent = Intent(self.account, int(self.clock.now() * 1000), 1, 1, worst, completion_listeners=(held,))
        call = Call(self.recording.recorder.journal.write_intent(intent), worst, self.purses.holder)
        self.world.truth[call.holder] += worst
        self.open.append(call)
        return call

    def end(self, call: Call, pico: int) -> None:
        self.open.remove(call)
        self.world.truth[call.holder] -= call.worst - pico
        receipt = Receipt(UsageCounts(1, 0, 1, 1, pico=pico)) if pico else None
        self.recording.recorder.journal.record(call.number, receipt)

    async def kill(self) -> None:
        for task in (*self.work, *self.tasks._spawned, *self.tasks._supervised):
            task.cancel()
        self.recording.recorder.journal._segment.close()
        self.open.clear()  # each costs its worst case, for all that anybody knows
        self.is_running = False
        await settle()

    async def stop(self) -> None:
        """In order: nobody calls any more, though answers may be under way."""
        await self.recording.finish()
        await self.tasks.stop()
        self.open.clear()
        self.is_running = False

    def copied(self) -> Path:
        """What is found on the disk of one that is no more."""
        copy = self.world.folder / f"copy{next(self.world.copies)}"
        shutil.copytree(self.folder, copy)
        return copy


async def replayed(world: World, folder: Path, wire: Wire) -> None:
    """As the command does it."""
    clock, store = SkewedClock(world.clock), cast(Store, wire)
    sender = SegmentSender(store, clock)
    for sealed in recover(folder).sealed:
        await sender.send(sealed)
    assert not sender.rejected
    await release_former_leases(store, clock, folder)


Test = Callable[..., Coroutine[Any, Any, None]]


def simulated_run(quota: int) -> Callable[[Test], Callable[..., None]]:
    """Of a test whose argument `world` is one in simulated time; the rest is as ever."""

    def of(test: Test) -> Callable[..., None]:
        shown = [each for each in signature(test).parameters.values() if each.name != "world"]

        def run(**arguments: Any) -> None:
            clock = ManualClock()
            with simulated(clock) as (loop, folder):
                loop.run_until_complete(test(world=World(clock, folder, quota), **arguments))

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]  # what pytest fills in
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return of
