"""A fleet of sidecars and one store in simulated time, with all that goes wrong between them, and the truth beside it.

Flusher, standings and aggregator are the real ones. Each has a line of its own to the store, on which answers are lost
or come late. Threads are run at once and timeouts go by the simulated clock, so a run depends on nothing but its rules.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter as Sums
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from unittest import mock

from price_keeper.budgets import active_label
from price_keeper.budgets.budget_registry import BudgetRegistry, CallerDay
from price_keeper.budgets.budget_state import SpendTracker
from price_keeper.config import Config
from price_keeper.domain import PICO_PER_MICRO, Caller
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, Aggregator
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, to_pico
from price_keeper.ledger.flusher import Flusher, FlushInterval
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recording import AGGREGATE_JITTER
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores.contract import Item, Key, Put, Store, Update, Write
from price_keeper.stores.schema import SHARD_COUNTS
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore
from tests.support.recording_harness import sum_pending

P = ParamSpec("P")
T = TypeVar("T")

USD = 10**12  # in pico
MAX_STEPS = 100  # of time, that anything takes
SHARDS, TOTALS, STICKY = "usage-agg-sharded", "daily-total", "sticky-state"


class CounterName(NamedTuple):
    """Of a counter, however many shards it has."""

    scope: str
    label: str
    period: str


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        self._simulated = clock
        super().__init__()

    def time(self) -> float:
        return self._simulated.monotonic()


async def _run_now(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    return work(*arguments, **named)


@contextmanager
def simulated(clock: ManualClock) -> Iterator[tuple[SimulatedLoop, Path]]:
    """A loop, and a folder for journals, in memory where there is such a place. Nothing waits for a disk."""
    in_memory = Path("/dev/shm")
    loop = SimulatedLoop(clock)
    with (
        tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as folder,
        mock.patch("asyncio.to_thread", _run_now),
        mock.patch("os.fsync", return_value=None),
    ):
        try:
            yield loop, Path(folder)
        finally:
            loop.close()


@dataclass
class SkewedClock:
    """A wall clock that is a little wrong."""

    true: ManualClock
    skew: float = 0.0

    def now(self) -> float:
        return self.true.now() + self.skew

    def monotonic(self) -> float:
        return self.true.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.true.sleep(seconds)


class FleetWorld:
    """The store, and what was really written to it and when."""

    def __init__(self, clock: ManualClock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self.store = MemoryStore()
        self.applied: list[tuple[str, CounterName, int]] = []  # the process, the counter, the amount
        self.recorded: Sums[tuple[str, CounterName]] = Sums()  # all that ever was, by process
        self.history: dict[Key, list[Item]] = {}  # of totals
        self.violations: list[str] = []
        self.chance = count(1)

    def flushed(self, name: CounterName, until: int | None = None, owner: str | None = None) -> int:
        return sum(pico for who, what, pico in self.applied[:until] if what == name and owner in (None, who))

    def truth(self, name: CounterName) -> int:
        return sum(pico for (_, what), pico in self.recorded.items() if what == name)

    def record_writes(self, owner: str, writes: Sequence[Write]) -> None:
        for write in writes:
            if isinstance(write, Update) and write.key.table == SHARDS:
                self.applied.append((owner, name_of(write.key), to_pico(write.add[COST_ATTRIBUTE])))


def name_of(key: Key) -> CounterName:
    scope, _, rest = key.pk.partition("#LABEL#")
    return CounterName(scope, rest.partition("#SH#")[0], key.sk)


class CheckedStoreLink:
    """One component's way to the store."""

    def __init__(self, world: FleetWorld, owner: str, clock: SkewedClock) -> None:
        self._world = world
        self._store = world.store
        self._owner = owner
        self._clock = clock
        self.is_away = False
        self.loses_answers = False
        self.next_fault = ""  # "away" or "lost", of the next thing that is asked
        self.is_behind = False  # reads that need not be consistent are not
        self.blocked: asyncio.Event | None = None
        self.blocks_before = False
        self._calls_before_block = 0  # how many are let through before that
        self.last_read: dict[CounterName, int] = {}  # how much of what was applied, when it last read the shards
        self.reads_by_start: dict[CounterName, dict[float, int]] = {}  # the same, by when the reading began
        self.ages: list[tuple[float, float]] = []  # when totals were read, and how old they were
        self._quotas: Any = {}  # micro-USD, as last read

    def block(self, is_before: bool, passing: int) -> None:
        """What is requested after so many more is not carried out, or not answered, until released."""
        self.blocked, self.blocks_before, self._calls_before_block = asyncio.Event(), is_before, passing

    def unblock(self) -> None:
        if self.blocked is not None:
            self.blocked.set()
        self.blocked = None

    async def _pass(self, is_before: bool) -> None:
        if self.blocked is not None and self.blocks_before is is_before:
            self._calls_before_block -= 1
            if self._calls_before_block < 0:
                await self.blocked.wait()
        if is_before and (self.is_away or self._take_fault("away")):
            raise StoreUnavailable("away")
        if not is_before and (self.loses_answers or self._take_fault("lost")):
            raise StoreUnavailable("the answer was lost", maybe_applied=True)

    def _take_fault(self, fault: str) -> bool:
        if self.next_fault != fault:
            return False
        self.next_fault = ""
        return True

    async def _send(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self._pass(True)
        except BaseException:
            work.close()
            raise
        result = await work
        await self._pass(False)
        return result

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        return await self._send(self._store.get(key))

    async def query(self, query: Any) -> Any:
        return await self._send(self._store.query(query))

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        began = self._clock.monotonic()
        return await self._send(self._record_reading(keys, began, consistent))

    async def _record_reading(self, keys: Sequence[Key], began: float, consistent: bool) -> list[Item | None]:
        items = await self._store.get_many(keys)
        for number, key in enumerate(keys):
            if key.table == SHARDS:
                assert consistent
                name, applied = name_of(key), len(self._world.applied)
                self.last_read[name] = applied
                self.reads_by_start.setdefault(name, {})[began] = applied
            elif key.table == TOTALS:
                items[number] = self._read_total(key)
            elif key.sk == "CONFIG":
                self._quotas = cast(Item, items[number])["quotas"]
        return items

    def _read_total(self, key: Key) -> Item | None:
        history = self._world.history.get(key)
        if not history:
            return None
        item = history[len(history) // 2 if self.is_behind else -1]
        stamp = float(cast(Decimal, item[AS_OF_ATTRIBUTE]))
        self.ages.append((self._clock.monotonic(), self._clock.now() - stamp))
        return item

    async def put(self, put: Put) -> None:
        await self._send(self._record_put(put))

    async def _record_put(self, put: Put) -> None:
        await self._store.put(put)
        if put.key.table == TOTALS:
            self._world.history.setdefault(put.key, []).append(put.item)

    async def update(self, update: Update) -> Item:
        return await self._send(self._checked_update(update))

    async def _checked_update(self, update: Update) -> Item:
        """The active label never goes back, but by a new ordering, and moves on only when it is really spent."""
        before = self._store.items.get(update.key) or {}
        after = await self._store.update(update)
        if update.key.table == STICKY and active_label.LABEL_ATTRIBUTE in before:
            was, now = (
                (cast(int, item[active_label.VERSION_ATTRIBUTE]), cast(int, item[active_label.INDEX_ATTRIBUTE]))
                for item in (before, after)
            )
            if now <= was:
                self._world.violations.append(f"the active label goes from {was} to {now}")
        if update.key.table == STICKY:
            previous_label = str(after["previous_model_label"])
            truth = self._world.truth(CounterName(update.key.pk, previous_label, update.key.sk))
            if truth < self._quotas[previous_label] * PICO_PER_MICRO:
                self._world.violations.append(f"{previous_label} is left when {truth} is spent")
        return after

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        await self._send(self._record_transaction(writes))

    async def _record_transaction(self, writes: Sequence[Write]) -> None:
        await self._store.transact(writes)
        self._world.record_writes(self._owner, writes)


@dataclass
class FleetCall:
    account: ChargedCounters
    number: int
    expected: int
    label: str


@dataclass
class SimulatedProcess:
    """A sidecar in one of its lives."""

    world: FleetWorld
    name: str
    clock: SkewedClock
    config: Config = field(default_factory=Config.development)
    lives: int = 0
    open: list[FleetCall] = field(default_factory=list)
    alerts: Any = None

    def start(self) -> None:
        folder = self.world.folder / self.name
        folder.mkdir(exist_ok=True)
        recovered = recover(folder)
        self.links = {role: CheckedStoreLink(self.world, self.name, self.clock) for role in ("flush", "look", "total")}
        flush, look, total = (cast(Store, line) for line in self.links.values())
        ulids = UlidFactory(self.clock.now, lambda size: next(self.world.chance).to_bytes(size), recovered.newest_ulid)
        self.journal = Journal(folder, ulids)
        self.flusher = Flusher(
            self.journal,
            recovered.sealed,
            SegmentSender(flush, self.clock),
            self.clock,
            FlushInterval(self.config.journal.flush_interval_secs, self.config.journal.flush_interval_max_secs),
            max_unflushed_pico=10**6 * USD,
        )
        self.tasks = Tasks(self.clock)
        self.budget_registry = BudgetRegistry(self.config, look, self.flusher, self.clock, self.tasks, self.alerts)
        self.aggregator = Aggregator(total, self.clock, self.config.aggregator.interval_secs)
        self.flusher.sender.subscribe_written(self.aggregator.note_written)
        self.work: list[asyncio.Task[Any]] = []

    def stop(self) -> None:
        """At once. Nothing in flight continues; the system keeps what is in the journal."""
        for task in (*self.work, *self.tasks._spawned, *self.tasks._supervised):
            task.cancel()
        self.journal._segment.close()

    def die(self) -> None:
        self.stop()
        for call in self.open:
            self._count(call, call.expected)
        self.open.clear()

    async def caller_day(self, caller: Caller) -> CallerDay:
        return self.budget_registry.cached(caller) or await self.budget_registry.load(caller)

    async def begin(self, caller: Caller, label: str, expected: int) -> FleetCall:
        """Raises Refusal and InvalidRequest."""
        state = (caller_day := await self.caller_day(caller)).budget
        serving = state.decide(label, False).label
        quota = state.settings.quotas.get(serving)
        assert quota is None or state.get_tracker(serving).committed < quota
        account = caller_day.get_charged_counters(serving)
        number = self.journal.write_intent(Intent(account, int(self.clock.now() * 1000), 1, 1, expected))
        call = FleetCall(account, number, expected, serving)
        self.open.append(call)
        return call

    def end(self, call: FleetCall, pico: int) -> None:
        self.open.remove(call)
        self.journal.record(call.number, Receipt(UsageCounts(1, 0, 1, 1, pico=pico)) if pico else None)
        self._count(call, pico)

    def _count(self, call: FleetCall, pico: int) -> None:
        for counter in call.account.counters:
            self.world.recorded[self.name, CounterName(*counter[:3])] += pico

    async def add_up_totals(self) -> None:
        """Of all that anybody flushed, at once."""
        for name in {name for _, name, _ in self.world.applied}:
            self.aggregator.note_written(Counter(*name, max(SHARD_COUNTS)))
        await sum_pending(self.aggregator)

    def spend_trackers(self) -> Iterator[tuple[CounterName, SpendTracker]]:
        """Of what calls can be paid from: standings by defaults alone are left as soon as better is known."""
        for state in {
            id(caller_day.budget): caller_day.budget for caller_day, _ in self.budget_registry._caller_days.values()
        }.values():
            for label, spent in state._trackers.items():
                yield CounterName(state.scope.key, label, state.span.key), spent

    def min_known_spend(self, name: CounterName, spent: SpendTracker) -> int:
        """What it must at least know of: all that it last read exactly, and all its own that was not in there."""
        read = self.links["look"].reads_by_start.get(name, {}).get(spent.exact_at)
        if read is None:
            return sum(pico for counter, pico in self.flusher.unflushed_by_counter().items() if counter[:3] == name)
        world = self.world
        own = world.recorded[self.name, name] - world.flushed(name, read, self.name)
        return world.flushed(name, read) + own

    def check(self) -> None:
        assert self.world.violations == []
        for name, spent in self.spend_trackers():
            assert 0 <= self.min_known_spend(name, spent) <= spent.spent <= self.world.truth(name)
            under_way = [call.expected for call in self.open if spent in call.account.spend_listeners]
            assert spent.in_flight == sum(under_way)

    def start_background_tasks(self) -> None:
        """As a sidecar does by itself."""
        self.tasks.start("flush timer", self.flusher.run_flush_timer)
        self.tasks.start("flush", self.flusher.run_flushes)
        self.tasks.run_every("totals", self.aggregator.tick_seconds, self.aggregator.run, jitter=AGGREGATE_JITTER)


async def run_with_time(clock: ManualClock, work: Coroutine[Any, Any, T]) -> T:
    """While time passes, as far as the work takes it. The work itself must not wait for all to be settled."""
    task = asyncio.get_running_loop().create_task(work)
    await settle()
    for _ in range(MAX_STEPS):
        if task.done():
            break
        await clock.advance(0.5)
    else:
        task.cancel()
    try:
        return await task
    finally:
        await settle()
