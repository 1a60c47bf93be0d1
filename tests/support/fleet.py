"""Sidecars of one fleet on one store, in simulated time and without sockets: what they decide and flush is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from price_keeper.config import Config
from price_keeper.config.keys import AggregatorConfig as AggregatorConfig
from price_keeper.model import Caller
from price_keeper.recording.aggregator import Aggregator
from price_keeper.recording.entries import UsageCounts, Intent, Receipt
from price_keeper.recording.journal import Journal
from price_keeper.recording.pace import FlushInterval
from price_keeper.recording.recorder import Recorder
from price_keeper.recording.sender import SegmentSender
from price_keeper.recording.ulid import UlidFactory
from price_keeper.selection.notes import BudgetSnapshot
from price_keeper.selection.payer import CallerDay
from price_keeper.selection.standing import Decision
from price_keeper.selection.standings import BudgetRegistry
from price_keeper.stores import schema
from price_keeper.stores.contract import Key, Put, Store, Value
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle

USD = 10**12  # in pico
MICRO = 10**6
LABELS = ("premium", "standard", "economy")

_chance = count(1 << 60)  # unlike that of tests.support.recording, as servers are shared


class Counted:
    """A store that counts what it is asked, and is away when it is told to be."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: list[str] = []
        self.is_away = False
        self.before: Callable[[str], Any] | None = None  # awaited before each verb

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)

        async def counted(*arguments: Any, **named: Any) -> Any:
            self.asked.append(name)
            if self.before is not None:
                await self.before(name)
            if self.is_away:
                from price_keeper.errors import StoreUnavailable

                raise StoreUnavailable("away")
            return await verb(*arguments, **named)

        return counted


@dataclass
class Sidecar:
    clock: ManualClock
    store: Counted
    recorder: Recorder
    standings: BudgetRegistry
    aggregator: Aggregator

    async def looked(self) -> None:
        """Until nobody looks at the store any more."""
        await settle()
        for over in tuple(self.standings._loading.values()):
            await over.wait()
        for watch in tuple(self.standings._refresh_states.values()):
            if watch.refresh_done is not None:
                await watch.refresh_done.wait()
        await settle()

    async def payer(self, caller: Caller) -> CallerDay:
        return self.standings.cached(caller) or await self.standings.load(caller)

    async def decide(self, caller: Caller, label: str = "premium", *, is_specific: bool = False) -> Decision:
        return (await self.payer(caller)).budget.decide(label, is_specific)

    async def begin(self, caller: Caller, label: str = "premium", expected: int = 0) -> tuple[str, int]:
        """The label that serves, and the number of the call. Raises QuotaSpent."""
        payer = await self.payer(caller)
        serving = payer.budget.decide(label, False).label
        intent = Intent(payer.get_charged_counters(serving), int(self.clock.now() * 1000), 1, 1, expected)
        return serving, self.recorder.journal.write_intent(intent)

    def end(self, number: int, pico: int) -> None:
        self.recorder.journal.record(number, Receipt(UsageCounts(1, 0, 1, 1, pico=pico)))

    async def spend(self, caller: Caller, pico: int, label: str = "premium") -> str:
        serving, number = await self.begin(caller, label)
        self.end(number, pico)
        return serving


@asynccontextmanager
async def sidecar(
    folder: Path,
    store: Store,
    clock: ManualClock,
    alerts: Any = None,
    notes: BudgetSnapshot | None = None,
    **config: Any,
) -> AsyncIterator[Sidecar]:
    # An org without a budget of its own is served: most tests are of something else than who registered it.
    wanted = {"aggregator": AggregatorConfig(60), "unknown_org": "meter", **config}
    whole = replace(Config.development(), **wanted)
    counted = Counted(store)
    ulids = UlidFactory(clock.now, lambda size: next(_chance).to_bytes(size))
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    async with Tasks(clock) as tasks:
        told = cast(Store, counted)
        journal = Journal(folder, ulids)
        recorder = Recorder(journal, [], SegmentSender(told, clock), clock, FlushInterval(1.0, 15.0), max_unflushed_pico=10**6 * USD)
        standings = BudgetRegistry(whole, told, recorder, clock, tasks, alerts, notes)
        yield Sidecar(clock, counted, recorder, standings, Aggregator(told, clock, whole.aggregator.interval_secs))
        journal.close()


def caller(app: str | None = "web", org: str | None = None) -> Caller:
    return Caller(org or str(uuid4()), app, "client")


async def configure(store: Store, key: Key, **attributes: Value) -> None:
    await store.put(Put(key, attributes))


async def budget(store: Store, org: str, quotas_usd: Mapping[str, float], **more: Value) -> None:
    """The labels in the order of their quotas."""
    quotas: dict[str, Value] = {label: round(usd * 10**6) for label, usd in quotas_usd.items()}
    await configure(store, schema.org_config_key(org), model_ordering=list(quotas_usd), quotas=quotas, **more)
