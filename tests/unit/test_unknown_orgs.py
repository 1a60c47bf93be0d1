"""An org that is not registered: refused by default, metered where configured; and while the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import pytest
from price_keeper.budgets import unknown_orgs
from price_keeper.budgets.budget_refresh import SETTINGS_REFRESH_SECONDS
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.config import Config
from price_keeper.domain import Caller, Scope
from price_keeper.errors import AccessDenied, Busy, UnknownOrg
from price_keeper.stores import schema
from price_keeper.stores.contract import Delete, Store
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.budget_fleet import (
    BudgetSidecar,
    DelayedStore,
    new_caller,
    open_budget_sidecar,
    put_budget,
    put_item,
)
from tests.support.clock import ManualClock

QUOTAS = {"premium": 10, "standard": 5, "economy": 1}


def by_default(
    folder: Path, store: Store, clock: ManualClock, **more: Any
) -> AbstractAsyncContextManager[BudgetSidecar]:
    return open_budget_sidecar(folder, store, clock, **{"unknown_org": Config.development().unknown_org, **more})


@pytest.fixture
async def one(tmp_path: Path, exact_store: Store, clock: ManualClock) -> AsyncIterator[BudgetSidecar]:
    async with by_default(tmp_path / "one", exact_store, clock) as made:
        yield made


def served(one: BudgetSidecar) -> dict[str, float]:
    telemetry = MetricsRegistry()
    one.budget_registry.register_metrics(telemetry)
    lines = [
        line
        for line in telemetry.render_own().splitlines()
        if line.startswith("price_keeper_unknown_orgs_served_total{")
    ]
    return {line.partition('why="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def warnings(caplog: pytest.LogCaptureFixture, org: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"org {org} is not" in record.getMessage()]


async def test_unregistered_org_is_refused_with_what_to_do(
    one: BudgetSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    for _ in range(3):
        with pytest.raises(AccessDenied) as refused:
            await one.decide(who)
        assert (refused.value.status, refused.value.error_type) == (403, "AccessDeniedException")
        assert f"`price-keeper org put {who.org} FILE`" in refused.value.message
        await one.clock.advance(unknown_orgs.RECHECK_SECONDS)
    (line,) = warnings(caplog, who.org)
    assert "calls are refused (unknown_org: refuse)" in line
    assert served(one) == {"unregistered": 0, "store_away": 0}


async def test_org_registered_after_refusal_is_served_within_seconds(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    with pytest.raises(UnknownOrg):
        await one.decide(who)
    await put_budget(exact_store, who.org, QUOTAS)
    await one.clock.advance(unknown_orgs.RECHECK_SECONDS)
    assert (await one.decide(who)).label == "premium"
    assert unknown_orgs.RECHECK_SECONDS <= 5


class Lagging:
    """Reads that need not be consistent do not see the org yet."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Any, *, consistent: bool = False) -> Any:
        found = await self._store.get_many(keys, consistent=consistent)
        return found if consistent else [None] * len(found)


async def test_org_registered_this_moment_is_not_refused_by_stale_read(
    tmp_path: Path, exact_store: Store, clock: ManualClock
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    async with by_default(tmp_path / "one", cast(Store, Lagging(exact_store)), clock) as one:
        assert (await one.decide(who)).percent == 0


async def test_flood_of_refused_calls_reads_store_rarely(one: BudgetSidecar) -> None:
    who = new_caller()
    for app in range(200):
        with pytest.raises(UnknownOrg):
            await one.caller_day(Caller(who.org, f"app-{app}", "client"))
    assert one.store.calls == ["get_many", "get_many"]  # the second one consistently, before anybody is refused
    await one.clock.advance(unknown_orgs.RECHECK_SECONDS)
    with pytest.raises(UnknownOrg):
        await one.caller_day(who)
    assert len(one.store.calls) == 4


async def test_cache_of_refused_orgs_is_bounded(
    tmp_path: Path, exact_store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_orgs, "MAX_ORGS", 10)
    async with by_default(tmp_path / "one", exact_store, clock) as one:
        for _ in range(50):
            with pytest.raises(UnknownOrg):
                await one.decide(new_caller())
        assert len(one.budget_registry.unknown_orgs._checked_at) == 10
        assert not one.budget_registry._caller_days
        assert not one.budget_registry._refresh_states


async def test_removed_org_is_refused_after_next_refresh(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    await exact_store.transact([Delete(schema.org_config_key(who.org))])
    await one.clock.advance(SETTINGS_REFRESH_SECONDS)
    await one.decide(who)
    await one.wait_for_refresh()
    with pytest.raises(UnknownOrg):
        await one.decide(who)
    await put_budget(exact_store, who.org, QUOTAS)
    await one.clock.advance(unknown_orgs.RECHECK_SECONDS)
    assert (await one.decide(who)).label == "premium"


async def test_unregistered_org_with_meter_is_served_logged_once_and_counted_once(
    tmp_path: Path, exact_store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    async with by_default(tmp_path / "one", exact_store, clock, unknown_org="meter") as one:
        for app in ("web", "job", None):
            assert await one.spend(Caller(who.org, app, "client"), 5) == "premium"
        await one.clock.advance(86_400)
        assert await one.spend(who, 5) == "premium"
        await one.wait_for_refresh()
        (line,) = warnings(caplog, who.org)
        assert "served and metered without a budget (unknown_org: meter)" in line
        assert served(one) == {"unregistered": 1, "store_away": 0}


async def test_unregistered_app_of_known_org_is_served_by_org_budget(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller("never-put")
    await put_budget(exact_store, who.org, QUOTAS)
    assert (await one.decide(who)).percent == 0


# While the store is away.


async def test_store_outage_serves_and_logs_org_outside_snapshot(
    one: BudgetSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    one.store.is_away = True
    for app in ("web", "job"):
        assert (await one.decide(Caller(who.org, app, "client"))).label == "premium"
    (line,) = warnings(caplog, who.org)
    assert "is not in the budget snapshot and the store is away" in line
    assert served(one) == {"unregistered": 0, "store_away": 1}
    one.store.is_away = False
    await one.clock.advance(unknown_orgs.RECHECK_SECONDS)
    await one.decide(who)  # the last one before the store has answered
    await one.wait_for_refresh()
    with pytest.raises(UnknownOrg):
        await one.decide(who)


async def test_store_outage_with_refuse_policy_refuses_org_outside_snapshot(
    tmp_path: Path, exact_store: Store, clock: ManualClock
) -> None:
    async with by_default(tmp_path / "one", exact_store, clock, on_store_down="refuse") as one:
        one.store.is_away = True
        with pytest.raises(Busy):
            await one.decide(new_caller())
        assert served(one) == {"unregistered": 0, "store_away": 0}


@pytest.mark.parametrize("is_new_process", [False, True])
async def test_refused_org_stays_refused_during_store_outage(
    one: BudgetSidecar, tmp_path: Path, exact_store: Store, clock: ManualClock, is_new_process: bool
) -> None:
    who = new_caller()
    with pytest.raises(UnknownOrg):
        await one.decide(who)
    async with by_default(tmp_path / "two", exact_store, clock, snapshot=one.budget_registry.snapshot) as two:
        now = two if is_new_process else one
        now.store.is_away = True
        await clock.advance(1000)
        with pytest.raises(UnknownOrg):
            await now.decide(who)


async def test_org_registered_during_a_slow_read_keeps_its_hard_budget_in_the_snapshot(
    tmp_path: Path, exact_store: Store, clock: ManualClock
) -> None:
    """The read that does not find it began before another app of it was read, and ends later."""
    who = new_caller("web")
    other = new_caller("batch", who.org)
    store = DelayedStore(exact_store, schema.app_config_key(who.org, "web"))
    async with open_budget_sidecar(tmp_path / "one", cast(Store, store), clock) as one:
        slow = asyncio.create_task(one.caller_day(who))
        await store.has_read.wait()
        await put_budget(exact_store, who.org, QUOTAS, enforcement="hard", version=1)
        await one.caller_day(other)
        one.store.is_away = True  # so that nothing is read anew
        store.may_answer.set()
        await slow
        snapshot = one.budget_registry.snapshot
        async with open_budget_sidecar(tmp_path / "two", exact_store, clock, snapshot=snapshot) as two:
            two.store.is_away = True
            assert (await two.caller_day(other)).budget.settings.enforcement == "hard"


async def test_hand_written_org_with_name_only_is_registered(
    one: BudgetSidecar, tmp_path: Path, exact_store: Store, clock: ManualClock
) -> None:
    who = new_caller()
    await put_item(exact_store, schema.org_config_key(who.org), org_name="By hand")
    assert (await one.decide(who)).label == "premium"
    await one.wait_for_refresh()
    async with by_default(tmp_path / "two", exact_store, clock, snapshot=one.budget_registry.snapshot) as two:
        two.store.is_away = True
        assert (await two.decide(who)).label == "premium"


def test_snapshot_distinguishes_unregistered_org_from_empty_settings(clock: ManualClock) -> None:
    notes, none, bare = BudgetSnapshot(clock.now), new_caller().org, new_caller().org
    notes.record_settings(Scope(none), None)
    notes.record_settings(Scope(bare), {"org_name": "By hand"})
    assert notes.find_settings(Scope(none)) == {}
    assert notes.find_settings(Scope(bare))
    assert notes.find_settings(Scope(new_caller().org)) is None


# For people.


@pytest.mark.parametrize("is_forced", [False, True])
async def test_status_of_unregistered_org_shows_no_serving_label(one: BudgetSidecar, is_forced: bool) -> None:
    who = new_caller()
    state, override = await one.budget_registry.read_status(who, forces_read=is_forced)
    assert (state.scope, override) == (Scope(who.org, who.app), None)
    assert state.find_enforced_label("premium") is None


async def test_forced_refresh_shows_org_registered_this_moment(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    with pytest.raises(UnknownOrg):
        await one.decide(who)
    await put_budget(exact_store, who.org, QUOTAS)
    state, _ = await one.budget_registry.read_status(who, forces_read=True)
    assert state.find_enforced_label("premium") == "premium"
    assert (await one.decide(who)).label == "premium"
