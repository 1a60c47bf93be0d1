"""Active labels and overrides that other processes change: followed within 5 s by who serves the scope, and cheaply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from price_keeper.budgets.active_label import clear_override, set_override
from price_keeper.domain import Caller, Scope
from price_keeper.errors import StoreUnavailable
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores.contract import Item, Key

from tests.support.budget_fleet import LABELS, USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock
from tests.support.metered_store import MeteredStore

FOLLOWED_SECONDS = 5.0
QUOTAS = {"premium": 1000, "standard": 500, "economy": 100}
STICKY = "sticky-state"


class Fleet:
    """Two sidecars: one moves the active label, the other one has to follow."""

    def __init__(self, store: MeteredStore, clock: ManualClock, sidecars: list[BudgetSidecar]) -> None:
        self.store, self.clock = store, clock
        self.mover, self.follower = sidecars
        for sidecar in sidecars:
            sidecar.budget_registry.start()

    async def warm_up(self, who: Caller) -> None:
        await put_budget(self.store, who.org, QUOTAS)
        for sidecar in (self.mover, self.follower):
            await sidecar.decide(who)
            await sidecar.wait_for_refresh()

    async def serve(self, who: Caller, seconds: float, pause: float = 0.5) -> list[str]:
        """The labels that serve one call after the other, by the follower."""
        served = []
        for _ in range(round(seconds / pause)):
            served.append((await self.follower.decide(who)).label)
            await self.clock.advance(pause)
        return served

    async def override(self, who: Caller, label: str) -> None:
        span = find_span(Period.DAY, self.clock.now(), load_zone("UTC"))
        await set_override(self.store, self.clock, Scope(who.org, who.app), span, label, "why", "who", ordering=LABELS)

    async def clear_override(self, who: Caller) -> None:
        span = find_span(Period.DAY, self.clock.now(), load_zone("UTC"))
        assert await clear_override(self.store, Scope(who.org, who.app), span, self.clock)

    async def spend_quota(self, who: Caller, label: str) -> None:
        """All of it at once, by the mover, which then moves the active label."""
        await self.mover.spend(who, QUOTAS[label] * USD, label)
        await self.mover.wait_for_refresh()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    store, clock = MeteredStore(), ManualClock()
    async with AsyncExitStack() as stack:
        sidecars = [
            await stack.enter_async_context(open_budget_sidecar(tmp_path / name, store, clock))  # type: ignore[arg-type]
            for name in ("mover", "follower")
        ]
        yield Fleet(store, clock, sidecars)


@pytest.mark.parametrize("late_by", [0.1 * number for number in range(0, 50, 3)])
async def test_a_sidecar_that_serves_follows_a_flip_within_five_seconds(fleet: Fleet, late_by: float) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    assert set(await fleet.serve(who, 12)) == {"premium"}
    await fleet.clock.advance(late_by)
    await fleet.spend_quota(who, "premium")
    await fleet.serve(who, FOLLOWED_SECONDS)
    assert set(await fleet.serve(who, 2)) == {"standard"}


async def test_a_sidecar_that_serves_follows_an_override_and_its_end(fleet: Fleet) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    await fleet.serve(who, 7)
    await fleet.override(who, "economy")
    await fleet.serve(who, FOLLOWED_SECONDS)
    assert set(await fleet.serve(who, 2)) == {"economy"}
    await fleet.clear_override(who)
    await fleet.serve(who, FOLLOWED_SECONDS)
    assert set(await fleet.serve(who, 2)) == {"premium"}


async def test_a_sidecar_that_begins_to_serve_again_follows_at_once(fleet: Fleet) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    await fleet.clock.advance(40)  # no call, and no refresh is due
    await fleet.spend_quota(who, "premium")
    assert await fleet.serve(who, 1) == ["premium", "standard"]


async def test_a_scope_that_serves_costs_one_read_in_five_seconds_and_a_resting_one_none(fleet: Fleet) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    await fleet.serve(who, 10)
    fleet.store.reset()
    await fleet.serve(who, 40, 0.25)
    assert 40 / 5 <= fleet.store.reads[STICKY] <= 40 / 4.7 + 1
    assert fleet.store.reads.total() == fleet.store.reads[STICKY] == fleet.store.units.reads
    await fleet.clock.advance(5)
    fleet.store.reset()
    await fleet.clock.advance(3600)
    assert fleet.store.requests == 0


async def test_many_scopes_that_serve_are_read_in_one_request(fleet: Fleet) -> None:
    callers = [new_caller() for _ in range(50)]
    for who in callers:
        await fleet.warm_up(who)
    await fleet.clock.advance(12)
    for who in callers:
        await fleet.follower.decide(who)
    fleet.store.reset()
    await fleet.clock.advance(1)
    assert (fleet.store.requests, fleet.store.reads[STICKY]) == (1, 50)


async def test_no_call_waits_for_a_read_of_the_active_label(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    await fleet.serve(who, 6)

    async def never(*_: Any, **__: Any) -> list[Item | None]:
        await fleet.clock.sleep(30)
        raise StoreUnavailable("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "get_many", never)
        for _ in range(20):
            caller_day = fleet.follower.budget_registry.cached(who)
            assert caller_day is not None
            assert caller_day.budget.decide("premium", False).label == "premium"
            await fleet.clock.advance(1)
        await fleet.clock.advance(11)
    await fleet.override(who, "standard")
    await fleet.serve(who, FOLLOWED_SECONDS)
    assert set(await fleet.serve(who, 1)) == {"standard"}


async def test_a_read_that_is_overtaken_by_a_refresh_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    await fleet.serve(who, 6)
    get_many = fleet.store.get_many

    async def slow(keys: list[Key], *, consistent: bool = False) -> list[Item | None]:
        found = await get_many(keys, consistent=consistent)
        if len(keys) == 1:
            await fleet.clock.sleep(3)
        return found

    monkeypatch.setattr(fleet.store, "get_many", slow)
    await fleet.follower.decide(who)
    await fleet.clock.advance(5)  # the slow read is under way
    await fleet.override(who, "economy")
    await fleet.follower.budget_registry.read_status(who, forces_read=True)
    assert (await fleet.follower.decide(who)).label == "economy"
    await fleet.clock.advance(3)
    assert (await fleet.follower.decide(who)).label == "economy"


async def test_a_followed_active_label_is_noted_for_a_start_without_the_store(fleet: Fleet) -> None:
    who = new_caller()
    await fleet.warm_up(who)
    snapshot = fleet.follower.budget_registry.snapshot
    snapshot.record_pending(10)
    snapshot.has_changes = False
    await fleet.override(who, "economy")
    await fleet.serve(who, FOLLOWED_SECONDS)
    assert snapshot.has_changes  # so that it is written soon
    snapshot.record_pending(10)
    (refresh,) = fleet.follower.budget_registry._refresh_states.values()
    record = snapshot.find_budget(refresh.budget.scope, refresh.budget.span.key)
    assert record is not None
    assert record.sticky_item is not None
    assert record.sticky_item["override_label"] == "economy"
