"""Own spend beside a total that may hold it: no label flips, no alert fires and no call is refused too early."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from price_keeper.budgets.label_policy import Mode
from price_keeper.config.config_sections import AggregatorConfig as AggregatorConfig
from price_keeper.domain import Caller
from price_keeper.errors import QuotaExceeded, StoreUnavailable
from price_keeper.stores.contract import Store

from tests.support.budget_fleet import USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock
from tests.support.recording_harness import sum_pending

QUOTAS = {"premium": 100, "standard": 5000}


class RecordedAlerts:
    def __init__(self) -> None:
        self.pcts: list[int] = []

    async def raise_alert(self, _: Any, __: str, ___: Any, pct: int, *____: int) -> bool:
        self.pcts.append(pct)
        return True


@pytest.fixture
def alerts() -> RecordedAlerts:
    return RecordedAlerts()


@pytest.fixture
async def one(tmp_path: Path, exact_store: Store, alerts: RecordedAlerts) -> AsyncIterator[BudgetSidecar]:
    often = AggregatorConfig(interval_secs=0.9)  # a little more often than anybody looks, which is once a second
    async with open_budget_sidecar(tmp_path / "one", exact_store, ManualClock(), alerts, aggregator=often) as made:
        yield made


async def spend_flush_and_read_a_fresh_total(one: BudgetSidecar, who: Caller, pico: int) -> None:
    """The later part of it calls for a look, a second after the one before: by then it is flushed and in a total."""
    await one.decide(who)
    await one.clock.advance(10)
    await one.spend(who, 50 * USD)
    await one.wait_for_refresh()
    await one.spend(who, pico - 50 * USD)
    await one.clock.advance(0.4)
    assert await one.flusher.flush()
    await one.clock.advance(0.4)
    await sum_pending(one.aggregator)
    await one.clock.advance(0.3)
    await one.wait_for_refresh()


async def test_own_spend_in_a_fresh_total_counts_once(one: BudgetSidecar, alerts: RecordedAlerts) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await spend_flush_and_read_a_fresh_total(one, who, 57 * USD)
    await one.spend(who, 3 * USD)
    decision = await one.decide(who)
    assert (decision.label, decision.mode, decision.percent) == ("premium", Mode.NORMAL, 60)
    assert set(alerts.pcts) == {50}


async def test_hard_budget_is_not_refused_for_own_spend_in_a_fresh_total(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 100}, enforcement="hard")
    await spend_flush_and_read_a_fresh_total(one, who, 165 * USD // 2)
    decision = (await one.caller_day(who)).budget.decide_hard("premium", False, ())
    assert (decision.label, decision.percent) == ("premium", 82)


async def test_exact_read_moves_label_as_soon_as_quota_is_spent(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await spend_flush_and_read_a_fresh_total(one, who, 57 * USD)
    await one.spend(who, 43 * USD)
    assert (await one.decide(who)).label == "standard"


async def test_own_spend_alone_exhausts_quota_during_store_outage(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 100})
    await spend_flush_and_read_a_fresh_total(one, who, 57 * USD)
    one.store.is_away = True
    await one.clock.advance(400)
    for _ in range(4):
        await one.spend(who, 10 * USD)
        assert not await one.flusher.flush()
    await one.spend(who, 3 * USD)
    with pytest.raises(QuotaExceeded):
        await one.decide(who)


async def test_flush_that_certainly_failed_counts_beside_shards(one: BudgetSidecar, tmp_path: Path) -> None:
    who, store = new_caller(), one.store._store
    await put_budget(store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    await one.spend(who, 60 * USD)
    one.store.is_away = True
    assert not await one.flusher.flush()
    one.store.is_away = False
    async with open_budget_sidecar(tmp_path / "two", store, one.clock) as two:
        await two.spend(who, 20 * USD)
        assert await two.flusher.flush()
    await one.clock.advance(400)
    await one.caller_day(who)
    assert (await one.decide(who)).percent == 80


async def test_flush_of_unknown_outcome_counts_once_beside_shards(one: BudgetSidecar) -> None:
    """Its answer was lost, so it may be in the shards, and is in the journal as well."""
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    await one.spend(who, 60 * USD)
    transact = one.store._store.transact

    async def loses_the_answer(*given: Any, **named: Any) -> None:
        await transact(*given, **named)
        raise StoreUnavailable("the answer was lost", maybe_applied=True)

    one.store._store.transact = loses_the_answer  # type: ignore[method-assign]
    assert not await one.flusher.flush()
    await one.clock.advance(400)
    await one.caller_day(who)
    await one.wait_for_refresh()
    assert (await one.decide(who)).percent == 60
    one.store._store.transact = transact  # type: ignore[method-assign]
    assert await one.flusher.flush()
    await one.clock.advance(400)
    await one.caller_day(who)
    assert (await one.decide(who)).percent == 60
