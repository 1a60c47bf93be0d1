"""What reports of a budget read: totals, whatever the number of shards; and that calls still read what decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest
from price_keeper.budgets.budget_state import BudgetState, Decision
from price_keeper.domain import Caller
from price_keeper.stores.contract import Store

from tests.support.budget_fleet import USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock, settle
from tests.support.metered_store import MeteredStore
from tests.support.recording_harness import sum_pending

QUOTAS = {"premium": 100, "standard": 50, "economy": 10}
SHARDS, TOTALS = "usage-agg-sharded", "daily-total"


class Fleet:
    """A sidecar that serves the calls of an app, and one that is asked how its budget stands."""

    def __init__(self, store: MeteredStore, clock: ManualClock, sidecars: list[BudgetSidecar]) -> None:
        self.store, self.clock, self.who = store, clock, new_caller()
        self.server, self.reporter = sidecars

    async def put_budget(self, shards: int = 8) -> None:
        await put_budget(cast(Store, self.store), self.who.org, QUOTAS, agg_shard_count=shards)

    async def spend(self, usd: float, label: str = "premium", *, is_summed: bool = True) -> None:
        await self.server.spend(self.who, round(usd * USD), label)
        assert await self.server.flusher.flush()
        if is_summed:
            await sum_pending(self.server.aggregator)

    async def report(self, who: Caller | None = None) -> BudgetState:
        budget, _ = await self.reporter.budget_registry.read_status(who or self.who, forces_read=False)
        await self.reporter.wait_for_refresh()
        return budget


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    store, clock = MeteredStore(), ManualClock()
    async with AsyncExitStack() as stack:
        sidecars = [
            await stack.enter_async_context(open_budget_sidecar(tmp_path / name, cast(Store, store), clock))
            for name in ("server", "reporter")
        ]
        yield Fleet(store, clock, sidecars)


@pytest.mark.parametrize("shards", [1, 64])
@pytest.mark.parametrize("usd", [0, 20, 150])  # nothing, a part of the quota, and more than all of it
async def test_first_report_of_a_budget_reads_totals_whatever_the_shards(fleet: Fleet, usd: int, shards: int) -> None:
    await fleet.put_budget(shards)
    if usd:
        await fleet.spend(usd)
    fleet.store.reset()
    budget = await fleet.report()
    assert budget.get_tracker("premium").spent == usd * USD
    assert fleet.store.reads[SHARDS] == 0
    assert fleet.store.reads[TOTALS] == len(QUOTAS)
    assert fleet.store.requests <= 4  # settings; these and the active label; totals; the label moves if it is spent


async def test_reports_for_an_hour_read_no_shards_and_follow_the_totals(fleet: Fleet) -> None:
    await fleet.put_budget()
    for place in range(60):
        await fleet.spend(1)
        fleet.store.reset()
        for _ in range(30):
            await fleet.clock.advance(2)
            budget = await fleet.report()
            assert fleet.store.reads[SHARDS] == 0
        assert budget.get_tracker("premium").spent == (place + 1) * USD


async def test_report_of_a_quota_that_is_nearly_spent_reads_shards(fleet: Fleet) -> None:
    """What is not in a total yet decides which label serves."""
    await fleet.put_budget()
    await fleet.spend(96)
    await fleet.spend(5, is_summed=False)
    budget = await fleet.report()
    assert budget.get_tracker("premium").spent == 101 * USD
    assert budget.find_enforced_label("premium") == "standard"


async def test_report_includes_own_usage_that_no_total_has(fleet: Fleet) -> None:
    await fleet.put_budget()
    await fleet.spend(20)
    await fleet.reporter.spend(fleet.who, 3 * USD)
    await fleet.clock.advance(400)
    assert (await fleet.report()).get_tracker("premium").spent == 23 * USD
    assert await fleet.reporter.flusher.flush()
    assert (await fleet.report()).get_tracker("premium").spent == 23 * USD


async def test_first_call_after_a_report_reads_shards(fleet: Fleet) -> None:
    """A call is decided by exact spend, however recent the report is."""
    await fleet.put_budget()
    await fleet.spend(20)
    await fleet.spend(30, is_summed=False)
    budget = await fleet.report()
    assert budget.get_tracker("premium").spent == 20 * USD
    await fleet.reporter.decide(fleet.who)
    assert budget.get_tracker("premium").spent == 50 * USD


async def test_call_that_comes_while_a_report_reads_waits_for_shards(fleet: Fleet) -> None:
    await fleet.put_budget()
    await fleet.spend(20)
    await fleet.spend(30, is_summed=False)
    calls: list[asyncio.Task[Decision]] = []

    async def call_comes(verb: str) -> None:
        """At the read of the totals, which is the third."""
        if fleet.reporter.store.calls.count("get_many") == 3 and not calls:
            calls.append(asyncio.create_task(fleet.reporter.decide(fleet.who)))
            await settle()

    fleet.reporter.store.before_call = call_comes
    budget = await fleet.report()
    await calls[0]
    assert budget.get_tracker("premium").spent == 50 * USD


async def test_reports_do_not_make_calls_wait_that_know_enough(fleet: Fleet) -> None:
    """A read for a report counts as one for calls, where calls have read before it."""
    await fleet.put_budget()
    await fleet.reporter.decide(fleet.who)
    for _ in range(60):
        for _ in range(5):
            await fleet.clock.advance(12)
            await fleet.report()
        assert fleet.reporter.budget_registry.cached(fleet.who) is not None


async def test_report_does_not_wait_twice_for_a_store_that_is_away(fleet: Fleet) -> None:
    await fleet.put_budget()
    fleet.reporter.store.is_away = True
    assert (await fleet.report()).is_stale
    fleet.reporter.store.calls.clear()
    assert (await fleet.report()).is_stale
    assert fleet.reporter.store.calls == []
    fleet.reporter.store.is_away = False
    await fleet.spend(20)
    await fleet.clock.advance(4)
    await fleet.report()
    await fleet.clock.advance(4)
    budget = await fleet.report()
    assert not budget.is_stale
    assert budget.get_tracker("premium").spent == 20 * USD
