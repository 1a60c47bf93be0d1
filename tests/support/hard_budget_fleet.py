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

from price_keeper.budgets.hard.budget_lease import BudgetLeases, CostReservation
from price_keeper.clock import Clock
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.aggregator import Aggregator, read_spent_pico
from price_keeper.ledger.counter_writes import build_addition
from price_keeper.ledger.flusher import Flusher, FlushInterval
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.lease_file import BudgetLeaseFile, release_former_leases
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recording import Recording
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle
from tests.support.fleet_simulation import USD, SkewedClock, simulated
from tests.support.memory_store import MemoryStore

T = TypeVar("T")

ORG = "550e8400-e29b-41d4-a716-446655440000"
NAME = HardBudgetKey(f"ORG#{ORG}#APP#web", "premium", "DAY#20261118")
CLIENT_TIMEOUT_SECONDS = 10.0  # of a client of the store


class HardBudgetWorld:
    def __init__(self, clock: ManualClock, folder: Path, quota: int) -> None:
        self.clock = clock
        self.folder = folder
        self.store = MemoryStore()
        self.quota, self.version = quota, 1
        self.truth: Sums[str] = Sums()  # by holder: what its calls cost, or may cost at most
        self.spent_elsewhere = 0
        self.gates: list[asyncio.Event] = []  # what waits on its way
        self.chance = count(1)
        self.copies = count()

    def ulids(self, clock: Clock, after: str = "") -> UlidFactory:
        return UlidFactory(clock.now, lambda size: next(self.chance).to_bytes(size), after)

    def bucket(self) -> HardBudgetBucket | None:
        item = self.store.items.get(NAME.bucket_key)
        return None if item is None else HardBudgetBucket.from_item(item)

    def lease_rows(self) -> dict[str, BudgetLeaseRow]:
        keys = [key for key in self.store.items if key.sk.startswith("HOLD#")]
        return {key.sk.rpartition("#")[2]: BudgetLeaseRow.from_item(self.store.items[key]) for key in keys}

    async def spend_elsewhere(self, pico: int) -> None:
        self.spent_elsewhere += pico
        counter = Counter(*NAME, 64)
        await self.store.update(
            build_addition(f"{next(self.chance)}", counter, UsageCounts(1, pico=pico), self.clock.now())
        )

    def check(self) -> None:
        """What always holds, whatever has happened so far."""
        bucket, lease_rows = self.bucket(), self.lease_rows()
        for holder, spent in self.truth.items():
            assert spent <= lease_rows[holder].leased
        for holder, row in lease_rows.items():
            assert row.used <= max(row.leased, self.truth[holder])
        if bucket is not None:
            assert (
                bucket.unleased + sum(row.leased for row in lease_rows.values()) + bucket.spent_without_lease
                == bucket.quota
            )
            assert bucket.unleased >= 0 or self.spent_elsewhere
            assert sum(self.truth.values()) <= self.quota

    async def check_at_the_end(self) -> None:
        """All is replayed, and unspent money is in the bucket again."""
        bucket, lease_rows = self.bucket(), self.lease_rows()
        for holder, row in lease_rows.items():
            assert row.is_closed
            assert row.leased == row.used == self.truth[holder]
        if bucket is not None:
            assert bucket.unleased == bucket.quota - bucket.spent_without_lease - sum(self.truth.values())
            assert (
                await read_spent_pico(cast(Store, self.store), NAME) == sum(self.truth.values()) + self.spent_elsewhere
            )


class DelayedStoreLink:
    """One process's way to the store. What was sent arrives whatever becomes of who sent it."""

    def __init__(self, world: HardBudgetWorld) -> None:
        self._world = world
        self.fault = ""  # of one thing that is asked: away, lost, late (to arrive) or unheard (its answer, for a while)
        self.transactions_before_fault = 0  # how many transactions are let through before that
        self.is_away = False
        self.calls = 0

    def set_fault(self, fault: str, transactions: int) -> None:
        self.fault, self.transactions_before_fault = fault, transactions

    async def _send(self, verb: str, work: Callable[[], Awaitable[T]]) -> T:
        self.calls += 1
        fault = self._take_fault(verb)
        if fault == "away":
            raise StoreUnavailable("away")
        sending = asyncio.get_running_loop().create_task(self._execute(work, fault))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
                return await asyncio.shield(sending)
        except TimeoutError:
            raise StoreUnavailable("no answer", maybe_applied=True) from None

    def _take_fault(self, verb: str) -> str:
        if self.is_away:
            return "away"
        if not self.fault:
            return ""
        self.transactions_before_fault -= verb == "transact"
        if self.transactions_before_fault >= 0:
            return ""
        fault, self.fault = self.fault, ""
        return fault

    async def _execute(self, work: Callable[[], Awaitable[T]], fault: str) -> T:
        if fault == "late":
            await self._wait_at_gate()
        result = await work()
        if fault == "unheard":
            await self._wait_at_gate()
        if fault == "lost":
            raise StoreUnavailable("the answer was lost", maybe_applied=True)
        return result

    async def _wait_at_gate(self) -> None:
        gate = asyncio.Event()
        self._world.gates.append(gate)
        await gate.wait()

    def __getattr__(self, verb: str) -> Any:
        async def send(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(0)  # so that others come in between
            return await self._send(verb, partial(getattr(self._world.store, verb), *arguments, **named))

        return send


@dataclass
class OpenCall:
    number: int
    cost_ceiling: int
    holder: str


@dataclass
class HardBudgetSidecar:
    world: HardBudgetWorld
    name: str
    skew: float = 0.0
    open: list[OpenCall] = field(default_factory=list)
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    is_running: bool = False
    refused: int = 0

    @property
    def folder(self) -> Path:
        return self.world.folder / self.name

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.clock = SkewedClock(self.world.clock, self.skew)
        recovered = recover(self.folder)
        self.link = DelayedStoreLink(self.world)
        self.store = cast(Store, self.link)
        ulids = self.world.ulids(self.clock, recovered.newest_ulid)
        journal = Journal(self.folder, ulids)
        flusher = Flusher(
            journal,
            recovered.sealed,
            SegmentSender(self.store, self.clock),
            self.clock,
            FlushInterval(1, 15),
            max_unflushed_pico=10**9 * USD,
        )
        lease_file = BudgetLeaseFile(self.folder, ulids.new())
        aggregator = Aggregator(self.store, self.clock, 60)
        self.recording = Recording(flusher, recovered, aggregator, lease_file, self.store, self.clock, self.folder)
        self.tasks = Tasks(self.clock)
        self.budget_leases = BudgetLeases(
            self.store, self.clock, self.tasks, lease_file, partial(read_spent_pico, self.store)
        )
        self.settings = self.world.quota, self.world.version
        counters = [Counter(*NAME, 8), Counter.for_lease(NAME.scope, NAME.label, lease_file.holder, NAME.period, 8)]
        self.account = ChargedCounters.from_counters(counters)
        self.is_running = True

    def do(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)
        return task

    async def call(self, cost_ceiling: int) -> OpenCall | None:
        lease = self.budget_leases.get(NAME, *self.settings)
        reservation = (
            CostReservation(lease, cost_ceiling)
            if lease.try_reserve(cost_ceiling)
            else await lease.reserve(cost_ceiling)
        )
        if reservation is None:
            self.refused += 1
            return None
        await asyncio.sleep(0)
        intent = Intent(
            self.account, int(self.clock.now() * 1000), 1, 1, cost_ceiling, completion_listeners=(reservation,)
        )
        call = OpenCall(self.recording.flusher.journal.write_intent(intent), cost_ceiling, self.budget_leases.holder)
        self.world.truth[call.holder] += cost_ceiling
        self.open.append(call)
        return call

    def end(self, call: OpenCall, pico: int) -> None:
        self.open.remove(call)
        self.world.truth[call.holder] -= call.cost_ceiling - pico
        receipt = Receipt(UsageCounts(1, 0, 1, 1, pico=pico)) if pico else None
        self.recording.flusher.journal.record(call.number, receipt)

    async def kill(self) -> None:
        for task in (*self.work, *self.tasks._spawned, *self.tasks._supervised):
            task.cancel()
        self.recording.flusher.journal._segment.close()
        self.open.clear()  # each costs its worst case, for all that anybody knows
        self.is_running = False
        await settle()

    async def stop(self) -> None:
        """In order: no new calls come, though responses may be outstanding."""
        await self.recording.finish()
        await self.tasks.stop()
        self.open.clear()
        self.is_running = False

    def copy_folder(self) -> Path:
        """What is found on the disk of a dead process."""
        copy = self.world.folder / f"copy{next(self.world.copies)}"
        shutil.copytree(self.folder, copy)
        return copy


async def replay(world: HardBudgetWorld, folder: Path, link: DelayedStoreLink) -> None:
    """As the command does it."""
    clock, store = SkewedClock(world.clock), cast(Store, link)
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
                loop.run_until_complete(test(world=HardBudgetWorld(clock, folder, quota), **arguments))

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]  # what pytest fills in
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return of
