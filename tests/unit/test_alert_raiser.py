"""One alert for the fleet, whatever the store does and whichever process raises it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from price_keeper.alerts import alert_raiser as module
from price_keeper.alerts.alert import MARKER_SECONDS
from price_keeper.alerts.alert_raiser import SETTLE_SECONDS, AlertRaiser
from price_keeper.errors import StoreUnavailable
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Store
from price_keeper.tasks import Tasks

from tests.support.alerts import DAY, USD, ScriptedAlertStore, scope
from tests.support.clock import ManualClock


@pytest.fixture
async def tasks(clock: ManualClock) -> AsyncIterator[Tasks]:
    async with Tasks(clock) as made:
        yield made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "threshold reached: " in record.getMessage()]


async def test_ten_concurrent_raisers_raise_one_alert(
    exact_store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    whom = scope()
    fleet = [AlertRaiser(exact_store, clock) for _ in range(10)]
    for pct in (50, 80):
        raised = await asyncio.gather(*(each.raise_alert(whom, "premium", DAY, pct, USD, 2 * USD) for each in fleet))
        assert sorted(raised) == [False] * 9 + [True]
    assert sum((each.raised for each in fleet), start=fleet[0].raised - fleet[0].raised) == {50: 1, 80: 1}
    assert len(lines(caplog)) == 2
    marker = await exact_store.get(schema.alert_marker_key(whom, "premium", DAY.key, 80), consistent=True)
    assert marker is not None
    assert marker[EXPIRY_ATTRIBUTE] == DAY.end + MARKER_SECONDS


async def test_each_scope_label_period_and_threshold_has_its_own_alert(clock: ManualClock) -> None:
    alerts, whom = AlertRaiser(ScriptedAlertStore(), clock), scope()  # type: ignore[arg-type]
    tomorrow = PeriodSpan("DAY#20261119", DAY.end, DAY.end + 86_400)
    cases: list[tuple[Any, str, PeriodSpan, int]] = [
        (whom, "premium", DAY, 50),
        (whom, "premium", DAY, 80),
        (whom, "economy", DAY, 50),
        (whom, "premium", tomorrow, 50),
        (scope(), "premium", DAY, 50),
    ]
    for _ in range(2):
        raised = [await alerts.raise_alert(*case, USD, USD) for case in cases]
    assert raised == [False] * 5
    assert alerts.raised == {50: 4, 80: 1}


async def test_log_line_of_alert_has_all_fields(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    whom = scope()
    alerts = AlertRaiser(ScriptedAlertStore(), clock, new_id=lambda: "the-id")  # type: ignore[arg-type]
    await alerts.raise_alert(whom, "premium", DAY, 80, 8 * USD + 499_999, 10 * USD)
    assert lines(caplog) == [
        f"threshold reached: scope={whom.key} label=premium period=DAY#20261118 threshold_pct=80 "
        "spent_usd_micros=8000000 quota_usd_micros=10000000 resets_at=2026-11-19T00:00:00Z alert=the-id"
    ]


async def test_known_raised_alert_asks_store_once(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SETTLED", 3)
    rows, whom = ScriptedAlertStore(), scope()
    winner, loser = AlertRaiser(rows, clock), AlertRaiser(rows, clock)  # type: ignore[arg-type]
    for _ in range(5):
        await winner.raise_alert(whom, "premium", DAY, 50, USD, USD)
        await loser.raise_alert(whom, "premium", DAY, 50, USD, USD)
    assert rows.puts == 2
    for pct in range(1, 11):
        await winner.raise_alert(whom, "premium", DAY, pct, USD, USD)
    assert len(winner._settled) == 3
    assert not await winner.raise_alert(whom, "premium", DAY, 50, USD, USD)  # forgotten, and still not raised again
    assert winner.raised[50] == 1


async def test_concurrent_raises_in_one_process_write_once(clock: ManualClock) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    alerts = AlertRaiser(rows, clock)  # type: ignore[arg-type]
    raised = await asyncio.gather(*(alerts.raise_alert(whom, "premium", DAY, 50, USD, USD) for _ in range(5)))
    assert sorted(raised) == [False] * 4 + [True]
    assert rows.puts == 1


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_raise_during_store_outage_is_retried(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = [fault, "before"]
    alerts, other = AlertRaiser(rows, clock), AlertRaiser(rows, clock)  # type: ignore[arg-type]
    assert not await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert not await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert not await other.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert (alerts.raised, other.raised) == ({50: 1}, {})
    assert len(lines(caplog)) == 1
    assert sum("alerts cannot be raised: store error" in record.getMessage() for record in caplog.records) == 1
    assert alerts._in_doubt == {}


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_unresolved_raise_is_retried_by_sweep(clock: ManualClock, tasks: Tasks, fault: str) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = [fault]
    alerts = AlertRaiser(rows, clock)  # type: ignore[arg-type]
    assert not await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    alerts.start(tasks)
    await clock.advance(SETTLE_SECONDS)
    assert alerts.raised == {50: 1}
    assert not await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert alerts.raised == {50: 1}


async def test_unresolved_raise_yields_to_other_process(clock: ManualClock) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = ["before"]
    alerts, other = AlertRaiser(rows, clock), AlertRaiser(rows, clock)  # type: ignore[arg-type]
    assert not await alerts.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    assert await other.raise_alert(whom, "premium", DAY, 50, USD, 2 * USD)
    await alerts.settle_unfinished()
    assert (alerts.raised, alerts._in_doubt) == ({}, {})


async def test_unresolved_alerts_are_bounded(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_DOUBT", 3)
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = ["before"] * 10
    alerts = AlertRaiser(rows, clock)  # type: ignore[arg-type]
    for pct in range(1, 11):
        await alerts.raise_alert(whom, "premium", DAY, pct, USD, USD)
    assert len(alerts._in_doubt) == 3


async def test_cancelled_raise_is_completed_by_next_caller(clock: ManualClock) -> None:
    whom, gate = scope(), asyncio.Event()

    class Slow(ScriptedAlertStore):
        async def put(self, put: Any) -> None:
            await super().put(put)
            await gate.wait()

    rows = Slow()
    alerts = AlertRaiser(rows, clock)  # type: ignore[arg-type]
    asking = asyncio.create_task(alerts.raise_alert(whom, "premium", DAY, 50, USD, USD))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    gate.set()
    assert await alerts.raise_alert(whom, "premium", DAY, 50, USD, USD)  # the marker is ours, and no alert was sent
    assert alerts.raised == {50: 1}


async def test_expired_marker_raises_no_alert(clock: ManualClock) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    first, late = AlertRaiser(rows, clock), AlertRaiser(rows, clock)  # type: ignore[arg-type]
    assert await first.raise_alert(whom, "premium", DAY, 50, USD, USD)
    clock.set_wall(DAY.end + MARKER_SECONDS - 1)
    assert not await late.raise_alert(whom, "premium", DAY, 50, USD, USD)
    clock.set_wall(DAY.end + MARKER_SECONDS)
    assert not await AlertRaiser(rows, clock).raise_alert(whom, "premium", DAY, 50, USD, USD)  # type: ignore[arg-type]
    again = PeriodSpan(DAY.key, DAY.start, DAY.end + 86_400)  # the clocks of a fleet, or an org's zone, may differ
    assert await AlertRaiser(rows, clock).raise_alert(whom, "premium", again, 50, USD, USD)  # type: ignore[arg-type]


async def test_sweep_stops_at_first_failure_and_resumes_next_time(clock: ManualClock) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = ["before"] * 4
    alerts = AlertRaiser(rows, clock)  # type: ignore[arg-type]
    for pct in (50, 80, 95):
        await alerts.raise_alert(whom, "premium", DAY, pct, USD, USD)
    await alerts.settle_unfinished()
    assert rows.puts == 4
    await alerts.settle_unfinished()
    assert alerts.raised == {50: 1, 80: 1, 95: 1}


async def test_store_failure_never_raises_to_caller(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        async def put(self, put: Any) -> None:
            raise StoreUnavailable("away")

    alerts = AlertRaiser(Away(), clock)  # type: ignore[arg-type]
    caplog.set_level(logging.WARNING)
    assert not await alerts.raise_alert(scope(), "premium", DAY, 50, USD, USD)
    await alerts.settle_unfinished()
    assert alerts.raised == {}
