"""A report from a store filled by the real flusher: exact, whoever has added up what, whenever, in any zone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, Aggregator, build_total_key
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.org_calendar import format_org_day, load_zone
from price_keeper.reports.report_period import parse_report_period
from price_keeper.reports.report_rows import sum_counts
from price_keeper.reports.spend_report import SpendReport, build_report
from price_keeper.stores import schema
from price_keeper.stores.contract import Delete, Put, Store, Update

from tests.support.clock import ManualClock
from tests.support.engines import Engines
from tests.support.recording_harness import RecordingHarness, open_recording_harness

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()
DAY = 86_400
HOUR = 3600
UTC_ZONE = ZoneInfo("UTC")


@dataclass
class Org:
    """An org that calls, and what it ought to have spent."""

    rec: RecordingHarness
    store: Store
    zone: ZoneInfo = UTC_ZONE
    quota_scope: str = "ORG"
    org: str = field(default_factory=lambda: str(uuid4()))

    async def register(self, name: str = "Acme") -> None:
        item = {"org_name": name, "timezone": self.zone.key, "quota_scope": self.quota_scope}
        await self.store.put(Put(schema.org_config_key(self.org), item))
        await self.store.put(Put(schema.org_entry_key(self.org), {"org_name": name}))

    def call(self, app: str | None, label: str, pico: int, *, estimated: bool = False, shards: int = 8) -> None:
        """Counted as `budgets/budget_registry.py` does it."""
        whole = Scope(self.org)
        own = Scope(self.org, app)
        scopes = [whole] if app is None else [own] if self.quota_scope == "APP" else [whole, own]
        period = f"DAY#{format_org_day(self.rec.clock.now(), self.zone)}"
        account = ChargedCounters.from_counters([Counter(scope.key, label, period, shards) for scope in scopes])
        number = self.rec.journal.write_intent(Intent(account, int(self.rec.clock.now() * 1000), 7, 7, 5))
        self.rec.journal.record(number, Receipt(UsageCounts(1, int(estimated), 10, 20, pico=pico)))

    async def flush(self) -> None:
        assert await self.rec.flusher.flush()

    async def aggregate(self) -> None:
        store, clock = self.rec.store, self.rec.clock
        assert await TotalSweep(store, clock, Aggregator(store, clock, 60.0)).sweep()

    async def report(self, text: str = "today") -> SpendReport:
        return await build_report(
            self.rec.store, parse_report_period(text), self.org, {}, UTC_ZONE, self.rec.clock.now()
        )

    async def read_spend(self, text: str = "today") -> dict[tuple[str | None, str, str], int]:
        found = await self.report(text)
        assert len({each[:4] for each in found.spent}) == len(found.spent)
        return {(each.app, each.label, each.day.isoformat()): each.counts.pico for each in found.spent}


@pytest.fixture(autouse=True)
def _list_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' tables are shared by all tests, and a list of what was active on a day grows with each."""
    mine = uuid4().hex
    monkeypatch.setattr(schema, "active_counters_partition", lambda day: f"ACTIVE#{mine}#{day}")


@pytest.fixture
async def rec(tmp_path: Path, exact_store: Store) -> AsyncIterator[RecordingHarness]:
    async with open_recording_harness(tmp_path / "journal", exact_store, ManualClock(NOON)) as made:
        yield made


@pytest.fixture
def acme(rec: RecordingHarness, exact_store: Store) -> Org:
    return Org(rec, exact_store)


async def test_report_of_today_is_as_of_last_flush(acme: Org) -> None:
    acme.call("shop", "premium", 1_000_001)
    acme.call("shop", "guardrails", 7)
    acme.call(None, "premium", 30, estimated=True)
    assert await acme.read_spend() == {}  # it is all in the journal
    await acme.flush()
    acme.call("shop", "premium", 500)
    found = await acme.report()
    assert await acme.read_spend() == {
        ("shop", "premium", "2026-11-18"): 1_000_001,
        ("shop", "guardrails", "2026-11-18"): 7,
        (None, "premium", "2026-11-18"): 30,
    }
    assert sum_counts(each.counts for each in found.spent) == UsageCounts(3, 1, 30, 60, pico=1_000_038)
    assert (found.first, found.last) == (date(2026, 11, 18), date(2026, 11, 18))
    assert (found.is_running, found.is_final, found.notes) == (True, False, [])
    await acme.flush()
    assert (await acme.read_spend())["shop", "premium", "2026-11-18"] == 1_000_501


@pytest.mark.parametrize("quota_scope", ["ORG", "APP"])
async def test_report_of_one_app_equals_its_part_of_org_report(acme: Org, quota_scope: str) -> None:
    acme.quota_scope = quota_scope
    await acme.register()
    for app in ("shop", "shop-2", "bot", None):
        acme.call(app, "premium", len(app or ""))
        acme.call(app, "guardrails", 7)
    await acme.flush()
    store, now = acme.rec.store, acme.rec.clock.now()
    for app in ("shop", "bot", "unheard-of"):
        found = await build_report(store, parse_report_period("today"), acme.org, {}, UTC_ZONE, now, app)
        among_all = await acme.report()
        assert found.spent == [each for each in among_all.spent if each.app == app]
        assert found.app_names == among_all.app_names
        assert (found.first, found.last, found.is_running) == (among_all.first, among_all.last, among_all.is_running)


async def test_app_scope_total_of_org_is_sum_of_apps(acme: Org) -> None:
    acme.quota_scope = "APP"
    await acme.register()
    acme.call("shop", "premium", 5)
    acme.call("bot", "premium", 6)
    acme.call(None, "premium", 7)
    acme.call("shop", "premium", 50)
    await acme.flush()
    assert await acme.read_spend() == {
        ("shop", "premium", "2026-11-18"): 55,
        ("bot", "premium", "2026-11-18"): 6,
        (None, "premium", "2026-11-18"): 7,
    }


async def test_stale_total_of_today_is_ignored(acme: Org) -> None:
    acme.call("shop", "premium", 1)
    await acme.flush()
    await acme.aggregate()
    acme.call("shop", "premium", 2)
    await acme.flush()
    assert await acme.read_spend() == {("shop", "premium", "2026-11-18"): 3}


class NoShards:
    """A store from which shards cannot be read."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Any, **how: Any) -> Any:
        assert not any(key.table == "usage-agg-sharded" for key in keys), "shards"
        return await self._store.get_many(keys, **how)


async def test_aggregated_past_day_is_read_from_totals_alone(acme: Org) -> None:
    acme.call("shop", "premium", 1)
    await acme.flush()
    await acme.rec.clock.advance(12 * HOUR + HOUR + 1)
    await acme.aggregate()
    acme.rec.store = NoShards(acme.rec.store)  # type: ignore[assignment]
    found = await acme.report("yesterday")
    assert [each.counts.pico for each in found.spent] == [1]
    assert (found.is_running, found.is_final) == (False, True)


@pytest.mark.parametrize("after", [-1, 30, HOUR - 1])
async def test_total_from_before_last_possible_flush_is_ignored(acme: Org, after: float) -> None:
    """Stamped before the day's end; or after it, when calls from before it may still have been flushed."""
    acme.call("shop", "premium", 1)
    await acme.flush()
    await acme.rec.clock.advance(12 * HOUR - 2)
    acme.call("shop", "premium", 2)  # two seconds before midnight
    await acme.rec.clock.advance(2 + after)
    await acme.aggregate()
    await acme.flush()
    await acme.rec.clock.advance(DAY / 2)
    assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 3}
    assert not (await acme.report("2026-11-18")).is_final


async def test_late_replay_is_found_and_outdated_totals_are_ignored(acme: Org) -> None:
    acme.call("shop", "premium", 1)
    await acme.flush()
    await acme.rec.clock.leap(2 * DAY)
    await acme.aggregate()
    acme.rec.clock.set_wall(NOON)  # a pod that was away: its calls were made on that day
    acme.call("shop", "premium", 2)
    acme.call("bot", "economy", 4)  # and this one was never reported
    acme.rec.clock.set_wall(NOON + 33 * DAY)
    await acme.flush()
    assert await acme.read_spend("2026-11-18") == {
        ("shop", "premium", "2026-11-18"): 3,
        ("bot", "economy", "2026-11-18"): 4,
    }
    assert await acme.read_spend("2026-11-19..today") == {}
    assert await acme.read_spend("2026-11") == await acme.read_spend("2026-11-18")


async def test_report_has_what_was_flushed_under_an_announcement_that_another_process_followed_by_a_shorter_one(
    acme: Org, tmp_path: Path
) -> None:
    """The day of Tokyo ends at 15:00 UTC. A process that flushes every 20 minutes may add to it until 19:00."""
    acme.zone = ZoneInfo("Asia/Tokyo")
    await acme.register()
    clock = acme.rec.clock
    async with open_recording_harness(tmp_path / "other", acme.store, clock, acme.rec.scope) as rec:
        other = Org(rec, acme.store, acme.zone, org=acme.org)
        for org, seconds in ((acme, 1200), (acme, 600), (other, 5400)):
            org.call("shop", "premium", 1)
            await org.flush()
            await clock.advance(seconds)
        await other.aggregate()  # more than an hour after the time that the other process announced
        await clock.advance(NOON + 3 * HOUR - 10 - clock.now())
        acme.call("shop", "premium", 50)
        await acme.flush()
        await clock.advance(15)
        assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 53}
        assert not (await acme.report("2026-11-18")).is_final


async def test_total_is_used_when_shards_have_expired(acme: Org) -> None:
    """And where some shards have expired, their known sum remains."""
    for pico in (1, 2, 3, 4, 5, 6):
        acme.call("shop", "premium", pico)
        await acme.flush()
    await acme.aggregate()
    await acme.rec.clock.leap(36 * DAY)
    scope, period = Scope(acme.org, "shop"), "DAY#20261118"
    for scope_of in (scope, Scope(acme.org)):
        for shard in range(8):
            await acme.store.delete(Delete(schema.usage_shard_key(scope_of, "premium", shard, period)))
    assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 21}
    left = schema.usage_shard_key(scope, "premium", 0, period)
    await acme.store.update(Update(left, add={"requests": 1, "cost_usd_micros": Decimal("0.000009")}))
    assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 21}


async def test_total_with_future_stamp_is_ignored(acme: Org) -> None:
    acme.call("shop", "premium", 1)
    await acme.flush()
    key = build_total_key(Counter(Scope(acme.org, "shop").key, "premium", "DAY#20261118", 8))
    stamped = {"requests": 1, "cost_usd_micros": Decimal("0.000001"), AS_OF_ATTRIBUTE: int(NOON + 9 * DAY)}
    await acme.store.put(Put(key, stamped))
    acme.call("shop", "premium", 2)
    await acme.flush()
    await acme.rec.clock.leap(2 * DAY)
    assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 3}


async def test_running_day_is_read_from_shards(acme: Org) -> None:
    """No flush came since the UTC day ended at which the total was made; yet the org's own day has half to go."""
    acme.zone = load_zone("Etc/GMT+12")
    await acme.register()
    await acme.rec.clock.advance(HOUR)
    acme.call("shop", "premium", 1)
    await acme.flush()
    await acme.rec.clock.advance(13 * HOUR)
    await acme.aggregate()
    acme.rec.store = NoShards(acme.rec.store)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="shards"):
        await acme.report()


@pytest.mark.parametrize(("first", "second"), [(8, 64), (64, 8)])
async def test_counter_with_changed_shard_count_is_complete(acme: Org, first: int, second: int) -> None:
    """The number in the list of one day, and another in the next day's list."""
    for pico, shards, flushed in ((1, first, NOON), (10, second, NOON + DAY)):
        for _ in range(20):
            acme.rec.clock.set_wall(NOON)
            acme.call("shop", "premium", pico, shards=shards)
            acme.rec.clock.set_wall(flushed)
            await acme.flush()
    assert await acme.read_spend("2026-11-18") == {("shop", "premium", "2026-11-18"): 220}


async def test_counter_without_rows_is_omitted(acme: Org) -> None:
    for scope in (Scope(acme.org), Scope(acme.org, "shop")):
        await acme.store.put(
            Put(schema.active_counter_key("20261118", scope, "premium", "DAY#20261118"), {"shards_8": True})
        )
    assert await acme.read_spend() == {}
    assert (await acme.report("2026-11-18")).notes == []


async def test_weekly_and_monthly_counters_are_not_days(acme: Org) -> None:
    key = schema.active_counter_key("20261118", Scope(acme.org), "premium", "MONTH#202611")
    await acme.store.put(Put(key, {"shards_8": True}))
    await acme.store.update(
        Update(schema.usage_shard_key(Scope(acme.org), "premium", 0, "MONTH#202611"), add={"requests": 9})
    )
    acme.call(None, "premium", 1)
    await acme.flush()
    assert await acme.read_spend() == {(None, "premium", "2026-11-18"): 1}


ZONES = ["Pacific/Kiritimati", "Asia/Kolkata", "UTC", "America/Los_Angeles", "Etc/GMT+12"]


@pytest.mark.parametrize("zone", ZONES)
async def test_day_is_in_zone_of_org(acme: Org, zone: str) -> None:
    """A call every hour for three days, told by the day as the org has it."""
    acme.zone = load_zone(zone)
    await acme.register()
    truth: dict[tuple[str | None, str, str], int] = {}
    for hour in range(72):
        acme.call("shop", "premium", 10**6 + hour)
        key = ("shop", "premium", datetime.fromtimestamp(acme.rec.clock.now(), acme.zone).date().isoformat())
        truth[key] = truth.get(key, 0) + 10**6 + hour
        await acme.flush()
        if hour % 5 == 0:
            await acme.aggregate()
        await acme.rec.clock.advance(HOUR)
    assert await acme.read_spend("2026-11-01..2026-11-30") == truth
    for day in {key[2] for key in truth}:
        assert await acme.read_spend(day) == {key: pico for key, pico in truth.items() if key[2] == day}
    found = await acme.report("today")
    assert found.first == datetime.fromtimestamp(acme.rec.clock.now(), acme.zone).date()


@pytest.mark.parametrize(
    ("zone", "begins", "hours"),
    [
        ("Europe/Berlin", datetime(2026, 10, 24, 22, tzinfo=UTC), 25),
        ("America/New_York", datetime(2026, 3, 8, 5, tzinfo=UTC), 23),
        ("Africa/Cairo", datetime(2026, 4, 23, 22, tzinfo=UTC), 23),  # this day begins at one o'clock
        ("Australia/Lord_Howe", datetime(2026, 4, 4, 13, tzinfo=UTC), 24.5),
    ],
)
async def test_day_of_clock_change_is_complete(
    tmp_path: Path, engines: Engines, zone: str, begins: datetime, hours: float
) -> None:
    start = begins.timestamp()
    async with _opened(engines, tmp_path) as store:
        clock = ManualClock(start - HOUR / 2)
        async with open_recording_harness(tmp_path / "journal", store, clock) as rec:
            org = Org(rec, store, load_zone(zone))
            await org.register()
            for step in range(int(hours * 2) + 2):  # every half an hour, from before the day until after it
                org.call("shop", "premium", 10**step if step in (0, 1) else 10)
                await clock.advance(HOUR / 2)
            await org.flush()
            day = datetime.fromtimestamp(start + 2 * HOUR, org.zone).date().isoformat()
            await clock.advance(3 * HOUR)
            assert await org.read_spend(day) == {("shop", "premium", day): int(hours * 2) * 10}
            await clock.advance(DAY)
            await org.aggregate()
            found = await org.report(day)
            assert ([each.counts.requests for each in found.spent], found.is_final) == ([hours * 2], True)


def _opened(engines: Engines, folder: Path) -> AbstractAsyncContextManager[Store]:
    return engines.open("sqlite", folder)


async def test_report_of_all_orgs_includes_unregistered(tmp_path: Path, engines: Engines) -> None:
    """Each on its own day."""
    async with (
        _opened(engines, tmp_path) as store,
        open_recording_harness(tmp_path / "journal", store, ManualClock(NOON)) as rec,
    ):
        early, late, ghost = Org(rec, store, load_zone("Etc/GMT+12")), Org(rec, store), Org(rec, store)
        late.zone = load_zone("Pacific/Kiritimati")
        await early.register("Early")
        await late.register("Late")
        await store.put(Put(schema.app_config_key(late.org, "shop"), {"app_name": "Shop"}))
        for org in (early, late, ghost):
            org.call("shop", "premium", 5)
        await early.flush()
        found = await build_report(store, parse_report_period("today"), None, {early.org: "old name"}, UTC_ZONE, NOON)
        days = {each.org: each.day.isoformat() for each in found.spent}
        assert days == {early.org: "2026-11-18", late.org: "2026-11-19", ghost.org: "2026-11-18"}
        assert (found.first.isoformat(), found.last.isoformat()) == ("2026-11-18", "2026-11-19")
        assert {each.org: each.name for each in found.orgs.values()} == {
            early.org: "Early",
            late.org: "Late",
            ghost.org: None,
        }
        assert found.app_names == {(late.org, "shop"): "Shop"}
        one = await build_report(store, parse_report_period("today"), late.org, {}, UTC_ZONE, NOON)
        assert {each.org for each in one.spent} == {late.org}


async def test_report_without_spend_is_empty(acme: Org) -> None:
    found = await acme.report("yesterday")
    assert (found.spent, found.notes, found.is_final, found.is_running) == ([], [], True, False)
    assert found.first == found.last == date(2026, 11, 17)


async def test_changed_scope_is_noted_when_day_is_over(acme: Org) -> None:
    await acme.register()
    acme.quota_scope = "APP"
    acme.call("shop", "premium", 100)
    acme.quota_scope = "ORG"
    acme.call("shop", "premium", 1)
    await acme.flush()
    assert await acme.read_spend() == {("shop", "premium", "2026-11-18"): 101}
    assert (await acme.report()).notes == []
    await acme.rec.clock.leap(DAY)
    (note,) = (await acme.report("2026-11")).notes
    assert note.startswith("Acme, 2026-11-18: its own counter is lower than its apps' sum")


async def test_flush_during_report_is_not_attributed_to_callers_without_app(acme: Org) -> None:
    await acme.register()
    acme.call("shop", "premium", 5)
    await acme.flush()

    class Flushing(NoShards):
        async def get_many(self, keys: Any, **how: Any) -> Any:
            found = await self._store.get_many(keys, **how)
            if any(key.table == "usage-agg-sharded" for key in keys):
                acme.call("shop", "premium", 70)
                await acme.flush()
            return found

    acme.rec.store = Flushing(acme.rec.store)  # type: ignore[assignment]
    assert await acme.read_spend() == {("shop", "premium", "2026-11-18"): 75}


async def test_many_counters_are_read_in_pieces(acme: Org, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("price_keeper.reports.spend_report.COUNTERS_PER_READ", 2)
    orgs = [acme, *(Org(acme.rec, acme.store) for _ in range(3))]
    for number, org in enumerate(orgs, start=1):
        await org.register()
        for app in ("shop", "bot", None):
            for label in ("premium", "economy"):
                org.call(app, label, number)
    await acme.flush()
    for number, org in enumerate(orgs, start=1):
        reported = await org.read_spend()
        assert (len(reported), set(reported.values())) == (6, {number})
    found = await build_report(acme.store, parse_report_period("today"), None, {}, UTC_ZONE, NOON)
    mine = [each for each in found.spent if each.org in {org.org for org in orgs}]
    assert (len(mine), sum(each.counts.pico for each in mine)) == (24, 60)


async def test_one_unfinished_counter_makes_report_not_final(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is read last."""
    monkeypatch.setattr("price_keeper.reports.spend_report.COUNTERS_PER_READ", 1)
    async with (
        _opened(engines, tmp_path) as store,
        open_recording_harness(tmp_path / "journal", store, ManualClock(NOON)) as rec,
    ):
        orgs = [Org(rec, store) for _ in range(3)]
        for org in orgs:
            org.call("shop", "premium", 1)
        await orgs[0].flush()
        await rec.clock.advance(14 * HOUR)
        await orgs[0].aggregate()
        whole = await build_report(store, parse_report_period("yesterday"), None, {}, UTC_ZONE, rec.clock.now())
        assert whole.is_final
        for org in orgs:
            total_of = build_total_key(Counter(Scope(org.org).key, "premium", "DAY#20261118", 8))
            item = await store.get(total_of)
            await store.delete(Delete(total_of))
            assert not (
                await build_report(store, parse_report_period("yesterday"), None, {}, UTC_ZONE, rec.clock.now())
            ).is_final
            await store.put(Put(total_of, dict(item or {})))
