"""Sidecars of one fleet on one store, in simulated time and without sockets: decisions and flushes are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from price_keeper.budgets.budget_registry import BudgetRegistry, CallerDay
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.budgets.budget_state import Decision
from price_keeper.config import Config
from price_keeper.config.config_sections import AggregatorConfig as AggregatorConfig
from price_keeper.domain import Caller
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.flusher import Flusher, FlushInterval
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import Intent, Receipt, UsageCounts
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores import schema
from price_keeper.stores.contract import Key, Put, Store, Value
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle

USD = 10**12  # in pico
MICRO = 10**6
LABELS = ("premium", "standard", "economy")

_ulid_counter = count(1 << 60)  # unlike the one in tests.support.recording_harness, as servers are shared


class CountingStore:
    """A store that counts its calls, and is away on command."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[str] = []
        self.is_away = False
        self.before_call: Callable[[str], Any] | None = None  # awaited before each verb

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)

        async def counted(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            if self.before_call is not None:
                await self.before_call(name)
            if self.is_away:
                from price_keeper.errors import StoreUnavailable

                raise StoreUnavailable("away")
            return await verb(*arguments, **named)

        return counted


class DelayedStore:
    """A store that answers consistent reads, or only those of `key`, late: they see what was there before."""

    def __init__(self, store: Store, key: Key | None = None) -> None:
        self._store = store
        self._key = key
        self.has_read, self.may_answer = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> Any:
        found = await self._store.get_many(keys, consistent=consistent)
        if consistent and (self._key is None or self._key in keys):
            self.has_read.set()
            await self.may_answer.wait()
        return found


@dataclass
class BudgetSidecar:
    clock: ManualClock
    store: CountingStore
    flusher: Flusher
    budget_registry: BudgetRegistry
    aggregator: Aggregator

    async def wait_for_refresh(self) -> None:
        """Until no reads of the store are due."""
        await settle()
        for key in tuple(self.budget_registry._loads._running):
            await self.budget_registry._loads.wait(key)
        for refresh in tuple(self.budget_registry._refresh_states.values()):
            await self.budget_registry.refresher.wait(refresh)
        await settle()

    async def caller_day(self, caller: Caller) -> CallerDay:
        return self.budget_registry.cached(caller) or await self.budget_registry.load(caller)

    async def decide(self, caller: Caller, label: str = "premium", *, is_specific: bool = False) -> Decision:
        return (await self.caller_day(caller)).budget.decide(label, is_specific)

    async def begin(self, caller: Caller, label: str = "premium", expected: int = 0) -> tuple[str, int]:
        """The label that serves, and the number of the call. Raises QuotaSpent."""
        caller_day = await self.caller_day(caller)
        serving = caller_day.budget.decide(label, False).label
        intent = Intent(caller_day.get_charged_counters(serving), int(self.clock.now() * 1000), 1, 1, expected)
        return serving, self.flusher.journal.write_intent(intent)

    def end(self, number: int, pico: int) -> None:
        self.flusher.journal.record(number, Receipt(UsageCounts(1, 0, 1, 1, pico=pico)))

    async def spend(self, caller: Caller, pico: int, label: str = "premium") -> str:
        serving, number = await self.begin(caller, label)
        self.end(number, pico)
        return serving


@asynccontextmanager
async def open_budget_sidecar(
    folder: Path,
    store: Store,
    clock: ManualClock,
    alerts: Any = None,
    snapshot: BudgetSnapshot | None = None,
    reread_snapshot: Callable[[], Awaitable[None]] | None = None,
    **config: Any,
) -> AsyncIterator[BudgetSidecar]:
    # An org without a budget of its own is served: most tests are of something else than who registered it.
    settings = {"aggregator": AggregatorConfig(60), "unknown_org": "meter", **config}
    full_config = replace(Config.development(), **settings)
    counted = CountingStore(store)
    ulids = UlidFactory(clock.now, lambda size: next(_ulid_counter).to_bytes(size))
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    async with Tasks(clock) as tasks:
        typed_store = cast(Store, counted)
        journal = Journal(folder, ulids)
        flusher = Flusher(
            journal,
            [],
            SegmentSender(typed_store, clock),
            clock,
            FlushInterval(1.0, 15.0),
            max_unflushed_pico=10**6 * USD,
        )
        budget_registry = BudgetRegistry(
            full_config, typed_store, flusher, clock, tasks, alerts, snapshot, reread_snapshot
        )
        aggregator = Aggregator(typed_store, clock, full_config.aggregator.interval_secs)
        flusher.sender.subscribe_written(aggregator.note_written)
        yield BudgetSidecar(clock, counted, flusher, budget_registry, aggregator)
        journal.close()


def new_caller(app: str | None = "web", org: str | None = None) -> Caller:
    return Caller(org or str(uuid4()), app, "client")


async def put_item(store: Store, key: Key, **attributes: Value) -> None:
    await store.put(Put(key, attributes))


async def put_budget(store: Store, org: str, quotas_usd: Mapping[str, float], **more: Value) -> None:
    """The labels in the order of their quotas."""
    quotas: dict[str, Value] = {label: round(usd * 10**6) for label, usd in quotas_usd.items()}
    await put_item(store, schema.org_config_key(org), model_ordering=list(quotas_usd), quotas=quotas, **more)
