"""The store, and each process's way to it: what is asked arrives late, twice or never, and so do the answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from price_keeper.clock import Clock
from price_keeper.errors import CancellationReason, ReasonCode, StoreThrottled, StoreUnavailable, TransactionFailed
from price_keeper.rates.store_time import StoreTime
from price_keeper.stores.contract import Delete, Item, Key, Put, Query, Update, Write

from tests.sim.scheduler import Loop
from tests.support.memory_store import MemoryStore

if TYPE_CHECKING:
    from tests.sim.truth import Truth

PATIENCE_SECONDS = 10.0  # of a client of the store
LATENCY = 0.001, 0.012
WRITES = frozenset({"put", "update", "delete", "transact"})
LATEST_SECONDS = 240.0  # that something which was sent is still on its way: a token is remembered for longer
STALE_TABLES = frozenset({"daily-total"})  # whose reads need not be consistent

# Outcomes of one request. The first three did nothing; after the others the outcome is unknown, or all is well.
WRITTEN = ("sticky-state", "daily-total", "request-dedup", "rate-buckets")  # tables, of a transaction the first
FAULTS = ("refused", "throttled", "conflict", "lost", "unheard", "late", "slow", "twice")


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Of a verb of the store in memory, which never waits."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value
    raise AssertionError("a store in memory never waits")


class SharedStore(MemoryStore):
    """Tells the truth of each item that changes, and remembers what stood there before."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.before: dict[Key, Item | None] = {}
        self._truth = truth

    def _keep(self, key: Key, item: Item | None) -> None:
        was = self.items.get(key)
        if key.table in STALE_TABLES:
            self.before[key] = was
        super()._keep(key, item)
        self._truth.changed(key, was, item)


class Weather:
    """How likely each fault is for what one process asks, and whether it is cut off."""

    def __init__(self, chance: random.Random, odds: dict[str, float]) -> None:
        self._chance, self._odds = chance, odds
        self.is_cut_off = False
        self.next: list[str] = []
        self.aimed: dict[str, str] = {}  # by table: of the next write to it
        self.met: Counter[str] = Counter()

    def fault(self, verb: str, table: str) -> str:
        found = (self.aimed.pop(table, "") if verb in WRITES else "") or self._drawn()
        if found == "conflict" and verb != "transact":
            found = "throttled"
        if found:
            self.met[found] += 1
        return found

    def _drawn(self) -> str:
        if self.is_cut_off:
            return "refused" if self._chance.random() < 0.5 else "lost"
        if self.next:
            return self.next.pop()
        number = self._chance.random()
        for name, odds in self._odds.items():
            number -= odds
            if number < 0:
                return name
        return ""

    def is_fine(self) -> None:
        self.is_cut_off, self._odds, self.next, self.aimed = False, {}, [], {}


class Wire:
    """One life's way to the store. What was sent arrives whatever becomes of who sent it."""

    def __init__(
        self,
        owner: str,
        store: SharedStore,
        truth: Truth,
        world: Loop,
        weather: Weather,
        chance: random.Random,
        trace: Callable[..., None],
        time: StoreTime | None = None,
        wall: Callable[[], float] = lambda: 0.0,
        clock: Clock | None = None,
    ) -> None:
        """`wall` is the store's own time, `clock` the clock of a process that must follow what it reads."""
        self.owner = owner
        self.store = store
        self._truth, self._world, self._weather = truth, world, weather
        self._chance, self._trace, self._time, self._wall, self._clock = chance, trace, time, wall, clock
        self.seen = truth.of_reader(owner)
        self.asked = 0
        self.last_fault_at = -1e9

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        (found,) = await self._read("get", [key], consistent)
        return found

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        return await self._read("get_many", keys, consistent)

    async def _read(self, verb: str, keys: Sequence[Key], consistent: bool) -> list[Item | None]:
        """Each as from a get of its own, so others may write between two of them."""
        keys = list(keys)
        middle = self._chance.randrange(len(keys)) if len(keys) > 1 else 0
        found: list[Item | None] = []
        began = 0.0 if self._clock is None else self._clock.monotonic()
        positions = self._truth.positions()

        def first() -> None:
            found.extend(self._item(key, consistent) for key in keys[:middle])

        def rest() -> list[Item | None]:
            found.extend(self._item(key, consistent) for key in keys[middle:])
            self.seen.read(keys, began, positions)
            return found

        answer = list(await self._ask(verb, keys[0], rest, first if middle else None))
        if consistent:
            self.seen.heard(keys, answer)
        return answer

    def _item(self, key: Key, consistent: bool) -> Item | None:
        if not consistent and key in self.store.before and self._chance.random() < 0.3:
            return self.store.before[key]
        return self.store.items.get(key)

    async def query(self, query: Query) -> Any:
        return await self._ask("query", Key(query.table, query.pk), lambda: at_once(self.store.query(query)))

    async def put(self, put: Put) -> None:
        def work() -> None:
            at_once(self.store.put(put))

        await self._ask("put", put.key, work)

    async def update(self, update: Update) -> Item:
        self._truth.moves(self.seen, update)

        def work() -> Item:
            found: Item = at_once(self.store.update(update))
            return found

        return await self._ask("update", update.key, work)

    async def delete(self, delete: Delete) -> Item | None:
        return await self._ask("delete", delete.key, lambda: at_once(self.store.delete(delete)))

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        def work() -> None:
            known = token in self.store._done
            at_once(self.store.transact(writes, token=token))
            if not known:
                self._truth.applied(self.owner, writes)

        await self._ask("transact", writes[0].key, work, writes=writes)

    async def _ask(
        self,
        verb: str,
        key: Key,
        work: Callable[[], Any],
        first: Callable[[], None] | None = None,
        writes: Sequence[Write] = (),
    ) -> Any:
        self.asked += 1
        answer = asyncio.get_running_loop().create_future()
        fault, chance = self._weather.fault(verb, key.table), self._chance
        if fault:
            self.last_fault_at = self._truth.now()
        there, back = chance.uniform(*LATENCY), chance.uniform(*LATENCY)
        if fault == "slow":
            back += chance.uniform(0.3, 5.0)
        if fault == "late":
            there = chance.uniform(PATIENCE_SECONDS, LATEST_SECONDS)
        heard = None if self._time is None else self._time.start_request()
        fails: Exception | None = None
        if fault == "refused":
            fails = StoreUnavailable("away")
        elif fault == "throttled":
            fails = StoreThrottled("too much")
        elif fault == "conflict":
            number, codes = chance.randrange(len(writes)), (ReasonCode.CONFLICT, ReasonCode.NONE)
            fails = TransactionFailed([CancellationReason(codes[place != number]) for place in range(len(writes))])
        elif fault in ("lost", "late", "unheard"):
            fails = StoreUnavailable("no answer", maybe_applied=True)
        is_carried_out = fault not in ("refused", "throttled", "conflict", "lost")

        def arrive(is_first: bool) -> None:
            found, failure = None, None
            try:
                found = work()
            except Exception as why:
                failure = why
            if fault == "twice" and is_first and isinstance(failure, TransactionFailed):
                failure.maybe_applied = True  # an engine sends twice only what has no answer, and knows what it did
            self._trace(self.owner, verb, key.table, key.pk[-24:], key.sk[-24:], fault, type(failure).__name__)
            if is_first and fails is None:
                self._world.call_later(back, tell, found, failure)

        def tell(found: Any, failure: Exception | None) -> None:
            if heard is not None and not isinstance(failure, StoreUnavailable):
                loop.call_soon(heard, formatdate(int(self._wall()), usegmt=True))
            loop.call_soon(_answered, answer, found, failure)

        loop = asyncio.get_running_loop()
        if is_carried_out:
            if first is not None:
                self._world.call_later(there, first)
                there += chance.uniform(*LATENCY)
            arriving = self._world.call_later(there, arrive, True)
            if there > 1:
                self._truth.late.append((arriving, arrive))
            if fault == "twice" and verb in WRITES:
                again = self._world.call_later(there + chance.choice((0.001, 0.1, 5.0, 30.0, 100.0)), arrive, False)
                self._truth.late.append((again, arrive))
        if fails is not None:
            waits = PATIENCE_SECONDS if fault in ("lost", "late", "unheard") else back
            self._world.call_later(waits, tell, None, fails)
            self._trace(self.owner, verb, key.table, fault)
        return await answer


def _answered(answer: Any, found: Any, failure: Exception | None) -> None:
    if answer.done():
        return
    if failure is None:
        answer.set_result(found)
    else:
        answer.set_exception(failure)
