"""Sidecars that serve a scope for some hours of simulated time: what they read of its state, in a store that counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from price_keeper.domain import Caller
from price_keeper.ledger.recording import AGGREGATE_JITTER
from price_keeper.ledger.total_sweep import SWEEP_SECONDS, TotalSweep
from price_keeper.stores.contract import Store

from tests.support.budget_fleet import BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock
from tests.support.metered_store import MeteredStore

CALL_PICO = 10**6  # a micro-dollar, of quotas that no day spends
QUOTA_USD = 10**6
FLUSH_SECONDS = 15


@dataclass
class StateReaders:
    store: MeteredStore
    clock: ManualClock
    sidecars: list[BudgetSidecar]

    async def serve(self, callers: list[Caller], seconds: float, pause: float) -> None:
        """Each sidecar serves each caller once in `pause` seconds, and flushes once in FLUSH_SECONDS."""
        for turn in range(round(seconds / pause)):
            for place, sidecar in enumerate(self.sidecars):
                for who in callers:
                    await sidecar.spend(who, CALL_PICO)
                if (turn + 1 + place) % (FLUSH_SECONDS // pause) == 0:
                    assert await sidecar.flusher.flush()
            await self.clock.advance(pause)


async def new_callers(store: MeteredStore, number: int) -> list[Caller]:
    """Apps with a budget each, of one org."""
    org = new_caller().org
    await put_budget(cast(Store, store), org, {"premium": QUOTA_USD}, quota_scope="APP")
    return [new_caller(f"app-{place}", org) for place in range(number)]


@asynccontextmanager
async def open_state_readers(folder: Path, number: int) -> AsyncIterator[StateReaders]:
    """With all background work that reads state. Flushes are not in the background, as they use threads."""
    store, clock = MeteredStore(), ManualClock()
    async with AsyncExitStack() as stack:
        sidecars = []
        for place in range(number):
            opened = open_budget_sidecar(folder / f"sidecar{place}", cast(Store, store), clock)
            sidecar = await stack.enter_async_context(opened)
            sidecars.append(sidecar)
            tasks, aggregator = sidecar.budget_registry._tasks, sidecar.aggregator
            sweep = TotalSweep(cast(Store, sidecar.store), clock, aggregator)
            tasks.run_every("totals", aggregator.tick_seconds, aggregator.run, jitter=AGGREGATE_JITTER)
            tasks.run_every("totals of ended processes", SWEEP_SECONDS / 2, sweep.run, jitter=AGGREGATE_JITTER)
            sidecar.budget_registry.start()
        yield StateReaders(store, clock, sidecars)
