"""What is noted of budgets: by it goes who begins while the store is away, as if it had run before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.budgets import budget_refresh as limits
from price_keeper.budgets import budget_registry
from price_keeper.budgets import budget_snapshot as noted
from price_keeper.budgets.active_label import set_override
from price_keeper.budgets.budget_snapshot import MAX_READ_SECONDS, BudgetSnapshot, SnapshotFile
from price_keeper.budgets.budget_state import SpendTracker
from price_keeper.domain import Scope
from price_keeper.errors import Busy, QuotaExceeded
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.segment import decode_lines
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.rates.rate_limiter import RateLimitCache
from price_keeper.stores import schema
from price_keeper.stores.contract import Store

from tests.support.budget_fleet import (
    USD,
    BudgetSidecar,
    CountingStore,
    DelayedStore,
    new_caller,
    open_budget_sidecar,
    put_budget,
    put_item,
)
from tests.support.clock import ManualClock

QUOTAS = {"premium": 10, "standard": 5, "economy": 1}
DAY = "DAY#20261118"
KIRITIMATI_DAY = "DAY#20261119"


@pytest.fixture
async def one(tmp_path: Path, exact_store: Store, clock: ManualClock) -> AsyncIterator[BudgetSidecar]:
    async with open_budget_sidecar(tmp_path / "one", exact_store, clock) as made:
        yield made


def passed_on(notes: BudgetSnapshot) -> BudgetSnapshot:
    """As they come to the next process: as lines."""
    notes.record_pending(noted.MAX_RECORDS)
    following = BudgetSnapshot(notes._now)
    following.merge(found_in(notes))
    return following


def found_in(*several: BudgetSnapshot) -> dict[noted.RecordKey, noted.StoredRecord]:
    found, corrupt_lines = noted.select_newest(
        values for each in several for values in decode_lines(b"".join(each.export_lines())).values
    )
    assert corrupt_lines == 0
    return found


@asynccontextmanager
async def following(
    one: BudgetSidecar, folder: Path, *, is_away: bool = True, **config: Any
) -> AsyncIterator[BudgetSidecar]:
    """Begun with what `one` noted, while the store is away."""
    store, clock = one.store._store, one.clock
    async with open_budget_sidecar(
        folder / "two", store, clock, snapshot=passed_on(one.budget_registry.snapshot), **config
    ) as two:
        two.store.is_away = is_away
        yield two


async def test_snapshot_after_restart_continues_fallback_chain(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await one.clock.advance(limits.SETTINGS_REFRESH_SECONDS)
    await one.decide(who)
    await one.wait_for_refresh()
    await one.spend(who, 1 * USD)
    await one.flusher.flush()  # which no look has seen
    async with following(one, tmp_path) as two:
        assert await two.spend(who, 4 * USD) == "standard"
        caller_day = await two.caller_day(who)
        assert caller_day.budget.is_stale
        assert caller_day.budget.active_index == 1
        assert [caller_day.budget.get_tracker(label).spent for label in QUOTAS] == [10 * USD, 5 * USD, 0]
        assert (await two.decide(who)).label == "economy"


async def test_snapshot_keeps_hard_enforcement(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await put_item(one.store._store, schema.app_config_key(who.org, "web"), enforcement="hard", version=3)
    await one.decide(who)
    async with following(one, tmp_path) as two:
        plan = (await two.caller_day(who)).budget.settings
        assert (plan.enforcement, plan.version, dict(plan.quotas)) == (
            "hard",
            3,
            {label: usd * USD for label, usd in QUOTAS.items()},
        )


async def test_snapshot_of_org_wide_budget_covers_unseen_apps(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS, quota_scope="ORG", agg_shard_count=16, timezone="Asia/Tokyo")
    await one.decide(who)
    async with following(one, tmp_path) as two:
        for app in ("web", "never-met"):
            await two.spend(new_caller(app, who.org), 4 * USD)
        counted = sorted(two.flusher.journal.tally.sums())
        scopes = [f"ORG#{who.org}", f"ORG#{who.org}#APP#never-met", f"ORG#{who.org}#APP#web"]
        assert counted == [Counter(scope, "premium", "DAY#20261118", 16) for scope in scopes]
        assert (await two.caller_day(who)).budget.get_tracker("premium").spent == 8 * USD


async def test_snapshot_of_org_gives_unseen_app_only_its_calendar(one: BudgetSidecar, tmp_path: Path) -> None:
    """As by a process that runs: its own settings may allow it more than the org's do."""
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 0}, period="month", agg_shard_count=16)
    with pytest.raises(QuotaExceeded):
        await one.decide(who)
    one.store.is_away = True
    async with following(one, tmp_path) as two:
        for each in (one, two):
            stranger = new_caller("never-met", who.org)
            await each.spend(stranger, 1)
            plan = (await each.caller_day(stranger)).budget.settings
            assert (plan.period, plan.shards, dict(plan.quotas)) == (Period.MONTH, 16, {})


async def test_snapshot_without_entry_gives_no_budget(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await one.decide(who)
    async with following(one, tmp_path) as two:
        for each in (who, new_caller()):
            assert dict((await two.caller_day(each)).budget.settings.quotas) == {}


async def test_snapshot_keeps_override_until_its_end_without_its_reason(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    scope, today = Scope(who.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    until = one.clock.now() + 600
    await set_override(
        one.store._store, one.clock, scope, today, "economy", "a secret plan", "ops@hand", until, ordering=list(QUOTAS)
    )
    await one.decide(who)
    text = b"".join(passed_on(one.budget_registry.snapshot).export_lines())
    assert b"secret plan" not in text
    assert b"ops@hand" not in text
    async with following(one, tmp_path) as two:
        assert (await two.decide(who)).label == "economy"
        await two.clock.advance(601)
        assert (await two.decide(who)).label == "premium"


async def test_snapshot_of_other_period_has_no_spend_in_this_one(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await one.clock.advance(86_400)
    async with following(one, tmp_path) as two:
        state = (await two.caller_day(who)).budget
        assert (state.span.key, state.get_tracker("premium").spent, state.settings.quotas["premium"]) == (
            "DAY#20261119",
            0,
            10 * USD,
        )


async def test_call_of_yesterday_ending_today_keeps_snapshot_of_today(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    _, number = await one.begin(who)
    await one.clock.advance(43_200)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await one.wait_for_refresh()
    one.end(number, 1 * USD)
    await one.flusher.flush()
    async with following(one, tmp_path) as two:
        state = (await two.caller_day(who)).budget
        assert (state.span.key, state.get_tracker("premium").spent) == (KIRITIMATI_DAY, 10 * USD)


async def test_answering_store_wins_over_snapshot(one: BudgetSidecar, tmp_path: Path) -> None:
    who, store = new_caller(), one.store._store
    await put_budget(store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)  # and its journal is lost
    await one.wait_for_refresh()
    async with following(one, tmp_path, is_away=False) as two:
        await put_budget(store, who.org, {"standard": 7}, version=2, timezone="Pacific/Kiritimati")
        assert (await two.decide(who, "standard")).label == "standard"
        state = (await two.caller_day(who)).budget
        assert (dict(state.settings.quotas), state.span.key, state.is_stale) == (
            {"standard": 7 * USD},
            KIRITIMATI_DAY,
            False,
        )
        assert state.get_tracker("standard").spent == 0


async def test_returning_store_replaces_snapshot(one: BudgetSidecar, tmp_path: Path) -> None:
    who, store = new_caller(), one.store._store
    await put_budget(store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await one.wait_for_refresh()
    async with following(one, tmp_path) as two:
        assert (await two.decide(who)).label == "standard"
        more: dict[str, Any] = {"version": 2, "quota_scope": "ORG", "timezone": "Pacific/Kiritimati"}
        await put_budget(store, who.org, {"standard": 7}, **more)
        two.store.is_away = False
        for _ in range(3):
            await two.clock.advance(limits.STORE_RETRY_SECONDS)
            await two.decide(who, "standard")
            await two.wait_for_refresh()
        state = (await two.caller_day(who)).budget
        assert (state.scope.app, state.span.key, state.is_stale) == (None, KIRITIMATI_DAY, False)
        assert dict(state.settings.quotas) == {"standard": 7 * USD}


async def test_silent_store_is_awaited_no_longer_than_without_snapshot(
    one: BudgetSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, gate = new_caller(), asyncio.Event()
    await put_budget(one.store._store, who.org, QUOTAS, enforcement="hard")
    await one.decide(who)
    monkeypatch.setattr(budget_registry, "LOAD_TIMEOUT_SECONDS", 0.05)

    async def hangs(verb: str) -> None:
        await gate.wait()

    async with following(one, tmp_path, is_away=False) as two:
        two.store.before_call = hangs
        state = (await two.caller_day(who)).budget
        assert (state.settings.enforcement, state.is_stale) == ("hard", True)
        monkeypatch.setattr(budget_registry, "LOAD_TIMEOUT_SECONDS", 60)  # the next look gets its answer
        gate.set()
        await two.wait_for_refresh()
        assert not (await two.caller_day(who)).budget.is_stale


async def test_refuse_policy_ignores_snapshot(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    async with following(one, tmp_path, on_store_down="refuse") as two:
        with pytest.raises(Busy, match="budget of this caller is not known"):
            await two.decide(who)


async def test_failed_refresh_keeps_snapshot_for_next_process(one: BudgetSidecar, tmp_path: Path) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await one.wait_for_refresh()
    async with following(one, tmp_path) as two:
        await two.decide(who)
        await two.clock.advance(limits.SETTINGS_REFRESH_SECONDS)
        await two.decide(who)
        async with following(two, tmp_path / "more") as three:
            assert (await three.caller_day(who)).budget.get_tracker("premium").spent == 10 * USD


async def test_snapshot_keeps_rate_limits(exact_store: Store, clock: ManualClock) -> None:
    who, notes = new_caller(), BudgetSnapshot(clock.now)
    await put_item(exact_store, schema.org_config_key(who.org), limits={"rpm": 60})
    await put_item(exact_store, schema.app_config_key(who.org, "web"), limits={"rpm": 6}, version=4)
    met = await RateLimitCache(exact_store, clock, notes).load(who)
    away = CountingStore(exact_store)
    away.is_away = True
    kept = RateLimitCache(cast(Store, away), clock, passed_on(notes))
    found = await kept.load(who)
    assert (found.buckets, dict(found.rates)) == (met.buckets, {"rpm": 6})
    assert not (await kept.load(new_caller())).buckets
    away.is_away = False
    await put_item(exact_store, schema.app_config_key(who.org, "web"), limits={"rpm": 7}, version=5)
    assert dict((await kept.load(who)).rates) == {"rpm": 7}


async def test_slow_read_of_limits_does_not_undo_newer_settings(one: BudgetSidecar, tmp_path: Path) -> None:
    """It began before the budget became hard, and ends after that was read with the budget."""
    who, store = new_caller(), DelayedStore(one.store._store)
    await put_budget(one.store._store, who.org, QUOTAS, enforcement="soft", version=1)
    limits_read = asyncio.create_task(
        RateLimitCache(cast(Store, store), one.clock, one.budget_registry.snapshot).load(who)
    )
    await store.has_read.wait()
    await put_budget(one.store._store, who.org, QUOTAS, enforcement="hard", version=2)
    await one.decide(who)
    store.may_answer.set()
    await limits_read
    async with following(one, tmp_path) as two:
        assert (await two.caller_day(who)).budget.settings.enforcement == "hard"


async def test_slow_read_of_one_worker_does_not_undo_newer_settings_of_another(
    exact_store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    who, store = new_caller(), DelayedStore(exact_store)
    slow, fast = (SnapshotFile(tmp_path, clock, worker, 2) for worker in range(2))
    await put_budget(exact_store, who.org, QUOTAS, enforcement="soft", version=1)
    limits_read = asyncio.create_task(RateLimitCache(cast(Store, store), clock, slow.snapshot).load(who))
    await store.has_read.wait()
    await put_budget(exact_store, who.org, QUOTAS, enforcement="hard", version=2)
    async with open_budget_sidecar(tmp_path / "fast", exact_store, clock, snapshot=fast.snapshot) as one:
        await one.decide(who)
    await clock.advance(10)
    store.may_answer.set()
    await limits_read
    for worker in (slow, fast):
        await worker.write()
    successor = SnapshotFile(tmp_path, clock)
    await successor.open()
    async with open_budget_sidecar(tmp_path / "two", exact_store, clock, snapshot=successor.snapshot) as two:
        two.store.is_away = True
        assert (await two.caller_day(who)).budget.settings.enforcement == "hard"


@given(
    stored=st.integers(0, 10**16),
    before=st.lists(st.integers(0, 10**14), max_size=6),
    flushed=st.integers(0, 12),
    after=st.lists(st.integers(0, 10**14), max_size=6),
)
def test_restored_spend_is_between_known_and_actual(
    stored: int, before: list[int], flushed: int, after: list[int]
) -> None:
    """Calls, a note, more calls and flushes of some of all these in order, then a death: the journal has the rest."""
    spent = SpendTracker()
    spent.apply_exact_sum(stored, 0.0)
    for pico in before:
        spent.on_call_ended(0, pico)
    parts = spent.stored_and_pending
    left = sum([*before, *after][flushed:])
    following = SpendTracker(left, left)
    following.restore(*parts, is_own=True)
    assert spent.spent <= following.spent <= stored + sum(before) + sum(after)
    assert following.spent >= stored + left
    following.add_acknowledged(left)
    following.apply_exact_sum(stored + sum(before) + sum(after), 200.0)
    assert following.spent == stored + sum(before) + sum(after)


@pytest.mark.parametrize("worker", [0, 1])
async def test_snapshot_of_other_worker_or_older_version_counts_nothing_twice(one: BudgetSidecar, worker: int) -> None:
    """What a flush of ours without an answer brought to the store, another worker may have seen there."""
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.spend(who, 4 * USD)
    await one.wait_for_refresh()
    one.budget_registry.snapshot.record_pending(noted.MAX_RECORDS)
    values = decode_lines(b"".join(one.budget_registry.snapshot.export_lines())).values
    scope, same = Scope(who.org, "web"), BudgetSnapshot(one.clock.now, worker)
    same.merge(noted.select_newest(values)[0])
    found = same.find_budget(scope, DAY)
    assert found is not None
    assert found.is_own is (worker == 0)
    for each in values:
        each[3].pop("worker", None)
    older = BudgetSnapshot(one.clock.now, worker)
    older.merge(noted.select_newest(values)[0])
    assert older.find_budget(scope, DAY) == found._replace(is_own=False)


async def test_scope_seen_by_another_worker_since_start_is_known(one: BudgetSidecar, tmp_path: Path) -> None:
    who, other = new_caller(), new_caller()
    for each in (who, other):
        await put_budget(one.store._store, each.org, QUOTAS)
    asked: list[int] = []

    async def look_again() -> None:
        asked.append(1)
        two.budget_registry.snapshot.merge(found_in(one.budget_registry.snapshot))

    async with following(one, tmp_path, reread_snapshot=look_again) as two:
        await one.decide(who)
        for _ in range(3):
            assert dict((await two.caller_day(who)).budget.settings.quotas)
            await two.clock.advance(limits.STORE_RETRY_SECONDS)
        assert len(asked) == 1
        assert not dict((await two.caller_day(other)).budget.settings.quotas)  # never registered


async def test_budget_that_became_hard_for_another_worker_is_hard_for_a_caller_new_to_this_one(
    exact_store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    """What this worker has of the org is older: it was in the snapshots when this worker began."""
    who = new_caller()
    earlier = SnapshotFile(tmp_path, clock)
    async with open_budget_sidecar(tmp_path / "earlier", exact_store, clock, snapshot=earlier.snapshot) as one:
        await put_budget(exact_store, who.org, QUOTAS, enforcement="soft", version=1)
        await one.decide(who)
    await earlier.write()
    this, other = (SnapshotFile(tmp_path, clock, worker, 2) for worker in range(2))
    await this.open()
    await clock.advance(MAX_READ_SECONDS + 1)
    async with open_budget_sidecar(tmp_path / "other", exact_store, clock, snapshot=other.snapshot) as one:
        await put_budget(exact_store, who.org, QUOTAS, enforcement="hard", version=2)
        await one.decide(who)
    await other.write()
    async with open_budget_sidecar(
        tmp_path / "this", exact_store, clock, snapshot=this.snapshot, reread_snapshot=this.reread
    ) as two:
        two.store.is_away = True
        assert (await two.caller_day(who)).budget.settings.enforcement == "hard"


# What is kept, and how much of it.


async def test_snapshot_holds_no_other_attributes(one: BudgetSidecar) -> None:
    who = new_caller()
    more: dict[str, Any] = {"org_name": "Marked name", "credentials": {"secret_hash": "marked-hash"}, "other": "marked"}
    await put_budget(one.store._store, who.org, QUOTAS, **more)
    await put_item(
        one.store._store, schema.app_config_key(who.org, "web"), app_name="Marked app", secret="marked-secret"
    )
    await one.spend(who, 1)
    text = b"".join(passed_on(one.budget_registry.snapshot).export_lines())
    assert who.org.encode() in text
    assert b"arked" not in text


def put(notes: BudgetSnapshot, number: int, size: int = 0) -> Scope:
    scope = Scope(f"{number:08d}-0000-4000-8000-000000000000")
    notes.record_settings(scope, {"quotas": {"premium": number, "x" * size: 0}})
    return scope


def test_full_snapshot_evicts_least_recently_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "MAX_RECORDS", 10)
    notes = BudgetSnapshot(lambda: 5.0)
    scopes = [put(notes, number) for number in range(10)]
    put(notes, 0)  # read again, and the same
    put(notes, 10)
    assert notes.find_settings(scopes[1]) is None
    assert notes.find_settings(scopes[0]) == {"quotas": {"premium": 0, "": 0}}
    assert len(notes.export_lines()) == 10
    assert len(passed_on(notes).export_lines()) == 10


def test_snapshot_size_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "MAX_SNAPSHOT_BYTES", 10_000)
    notes = BudgetSnapshot(lambda: 5.0)
    for number in range(100):
        put(notes, number % 30, 50 * (number % 17))
        assert notes._size == sum(map(len, notes.export_lines())) <= 10_000
    assert 10 < len(notes.export_lines()) < 30


RECORDED = st.tuples(
    st.sampled_from(["settings", "settings", "standing"]),
    st.sampled_from([0] * 9 + [1, 2, 3]),  # an org of many apps, and quiet ones
    st.sampled_from([None, *(f"app-{number}" for number in range(15))]),
    st.integers(0, 120),
)


@given(st.lists(RECORDED, min_size=20, max_size=80), st.booleans())
def test_full_snapshot_leaves_each_org_its_fair_share(recorded: list[Any], restarts: bool) -> None:
    """An org whose settings take no more than its share keeps all of them, whatever other orgs have."""
    orgs = [f"{number:08d}-0000-4000-8000-000000000000" for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noted, "MAX_RECORDS", 12)
        patch.setattr(noted, "MAX_SNAPSHOT_BYTES", 2400)
        notes, last, most = BudgetSnapshot(lambda: 5.0), dict[Scope, Any](), dict[Scope, int]()
        for kind, org, app, size in recorded:
            scope, content = Scope(orgs[org], app), {"quotas": {"x" * size: 0}}
            if kind == "settings":
                notes.record_settings(scope, content)
                last[scope] = content
                most[scope] = max(most.get(scope, 0), len(b"".join(recorded_alone(scope, content))))
            else:
                notes._record(kind, scope.key, {"spent": {"x" * size: [1, 0]}})
            lines = notes.export_lines()
            assert notes._size == sum(map(len, lines)) <= 2400
            assert len(lines) <= 12
        kept = passed_on(notes) if restarts else notes
        for org_id in orgs:
            own = [scope for scope in last if scope.org == org_id]
            if len(own) <= 12 / len(orgs) and sum(most[scope] for scope in own) <= 2400 / len(orgs):
                assert [kept.find_settings(scope) for scope in own] == [last[scope] for scope in own]


def recorded_alone(scope: Scope, content: Any) -> list[bytes]:
    notes = BudgetSnapshot(lambda: 5.0)
    notes.record_settings(scope, content)
    return notes.export_lines()


def test_one_org_with_many_apps_leaves_hard_budget_of_another_in_full_snapshot() -> None:
    notes, quiet, busy = BudgetSnapshot(lambda: 5.0), new_scope(), new_scope()
    notes.record_settings(quiet, {"enforcement": "hard"})
    for number in range(noted.MAX_RECORDS + 100):
        notes.record_settings(Scope(busy.org, f"app-{number}"), {"version": 1})
    assert noted.MAX_RECORDS * 0.99 <= len(notes.export_lines()) <= noted.MAX_RECORDS
    assert passed_on(notes).find_settings(quiet) == {"enforcement": "hard"}


def test_full_snapshot_compares_its_orgs_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed, snapshot = 0, BudgetSnapshot(lambda: 5.0)
    make_room = snapshot._make_room

    def count(weigh: Any, is_full: Any) -> None:
        nonlocal weighed
        weighed += len(snapshot._orgs["settings"])
        make_room(weigh, is_full)

    monkeypatch.setattr(noted, "MAX_RECORDS", 1000)
    monkeypatch.setattr(snapshot, "_make_room", count)
    for _ in range(3000):
        snapshot.record_settings(new_scope(), {"version": 1})
    assert weighed <= 3000 * 101


async def test_full_snapshot_evicts_spend_before_settings(
    one: BudgetSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was spent by many apps would have it forgotten that their budgets are hard."""
    monkeypatch.setattr(noted, "MAX_RECORDS", 16)
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 10}, enforcement="hard")
    apps = [new_caller(f"app-{number}", who.org) for number in range(12)]
    for _ in range(2):
        for each in apps:
            await one.spend(each, 1 * USD)
        await one.flusher.flush()
        one.budget_registry.snapshot.record_pending(noted.MAX_RECORDS)
    assert len(one.budget_registry.snapshot.export_lines()) == 16
    async with following(one, tmp_path) as two:
        payers = [await two.caller_day(each) for each in apps]
        assert {caller_day.budget.settings.enforcement for caller_day in payers} == {"hard"}
        known = sorted(caller_day.budget.get_tracker("premium").spent for caller_day in payers)
        assert known == [0] * 9 + [2 * USD] * 3


def test_oversized_settings_are_dropped_with_former_ones() -> None:
    notes = BudgetSnapshot(lambda: 5.0)
    scope = put(notes, 1)
    put(notes, 1, noted.MAX_RECORD_BYTES)
    assert notes.find_settings(scope) is None
    assert (notes.export_lines(), notes._size) == ([], 0)


def test_merged_snapshots_keep_newest_entry() -> None:
    now = [10.0]
    first, second = BudgetSnapshot(lambda: now[0]), BudgetSnapshot(lambda: now[0])
    one, other = put(first, 1), put(second, 2)
    now[0] = 20.0
    second.record_settings(one, {"version": 2})
    first.record_settings(other, {"version": 3})
    for several in ((first, second), (second, first)):
        merged = BudgetSnapshot(lambda: now[0])
        merged.merge(found_in(*several))
        assert (merged.find_settings(one), merged.find_settings(other)) == ({"version": 2}, {"version": 3})


def test_concurrent_reads_keep_higher_version() -> None:
    notes, scope = BudgetSnapshot(lambda: 5.0), new_scope()
    earlier, later = notes.start_read(), notes.start_read()
    notes.record_settings(scope, {"version": 2}, later)
    notes.record_settings(scope, {"version": 1}, earlier)
    notes.record_settings(scope, None, earlier)
    assert notes.find_settings(scope) == {"version": 2}
    notes.record_settings(scope, {"version": 3}, earlier)  # it reached the store after the one that began later
    assert notes.find_settings(scope) == {"version": 3}


@pytest.mark.parametrize("lower", [{"version": 1}, {"enforcement": "hard"}, None])
@pytest.mark.parametrize("is_in_time", [True, False])
def test_settings_of_two_workers_go_by_version_within_the_time_of_a_read(lower: Any, is_in_time: bool) -> None:
    """After that time the lower version was read later: an item was removed, or written anew by hand."""
    now, scope = [5.0], new_scope()
    first, second = BudgetSnapshot(lambda: now[0]), BudgetSnapshot(lambda: now[0])
    first.record_settings(scope, {"version": 2})
    now[0] += MAX_READ_SECONDS if is_in_time else MAX_READ_SECONDS + 0.001
    second.record_settings(scope, lower)
    for several in ((first, second), (second, first)):
        merged = BudgetSnapshot(lambda: now[0])
        merged.merge(found_in(*several))
        assert merged.find_settings(scope) == ({"version": 2} if is_in_time else lower or {})


@pytest.mark.parametrize("recorded_later", [-60.0, MAX_READ_SECONDS])
def test_confirmed_settings_win_in_the_end_over_a_higher_version_that_is_gone(recorded_later: float) -> None:
    """The org was deleted and recreated; the other worker's last read of the old one ended before or after that."""
    began, scope = 1000.0, new_scope()
    now = [began]
    this, other = BudgetSnapshot(lambda: now[0]), BudgetSnapshot(lambda: now[0])
    this.record_settings(scope, {"version": 1}, this.start_read())
    now[0] = began + recorded_later
    other.record_settings(scope, {"version": 9}, other.start_read())
    writes = 0
    for minute in range(1, 60):
        now[0] = began + 60 * minute
        this.export_lines()
        this.record_settings(scope, {"version": 1}, this.start_read())
        writes += this.has_changes
    for several in ((this, other), (other, this)):
        merged = BudgetSnapshot(lambda: now[0])
        merged.merge(found_in(*several))
        assert merged.find_settings(scope) == {"version": 1}
    assert writes == 1
    this.record_settings(scope, {"version": 2}, this.start_read())
    now[0] += 2 * MAX_READ_SECONDS + 1
    this.export_lines()
    this.record_settings(scope, {"version": 2}, this.start_read())
    assert this.has_changes  # each new content has its second time


@pytest.mark.parametrize("item", [{"version": 1}, {"version": "x"}, {"enforcement": "hard"}, None])
def test_read_that_began_later_wins_whatever_its_version(item: Any) -> None:
    """An item may have been removed, or rewritten by hand."""
    notes, scope = BudgetSnapshot(lambda: 5.0), new_scope()
    notes.record_settings(scope, {"version": 7}, notes.start_read())
    notes.record_settings(scope, item, notes.start_read())
    assert notes.find_settings(scope) == (item or {})


def test_versions_are_evicted_with_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "MAX_RECORDS", 10)
    notes = BudgetSnapshot(lambda: 5.0)
    for version in range(1, 4):
        for _ in range(15):
            notes.record_settings(new_scope(), {"version": version}, notes.start_read())
    assert notes._versions.keys() == notes._lines["settings"].keys()
    scope = new_scope()
    notes.record_settings(scope, {"version": 1}, notes.start_read())
    notes.record_settings(scope, {"version": 2, "quotas": {"x" * noted.MAX_RECORD_BYTES: 1}}, notes.start_read())
    assert scope.key not in notes._versions


def new_scope() -> Scope:
    return Scope(new_caller().org)


def test_own_entries_win_over_merged_ones() -> None:
    old, new = BudgetSnapshot(lambda: 10.0), BudgetSnapshot(lambda: 20.0)
    one = put(old, 1)
    new.record_settings(one, {"version": 2})
    old.merge(found_in(new))
    assert old.find_settings(one) == {"quotas": {"premium": 1, "": 0}}


def test_settings_read_while_other_files_are_read_are_not_replaced() -> None:
    """What was selected from the files and the earlier record may be older than what the store has answered since."""
    notes, other = BudgetSnapshot(lambda: 10.0), BudgetSnapshot(lambda: 20.0)
    read_again, unchanged = new_scope(), new_scope()
    for scope in (read_again, unchanged):
        notes.record_settings(scope, {"version": 1})
        other.record_settings(scope, {"version": 2})
    compared = notes.copy_settings()
    notes.record_settings(read_again, {"version": 3})
    notes.merge(found_in(other), compared)
    assert (notes.find_settings(read_again), notes.find_settings(unchanged)) == ({"version": 3}, {"version": 2})
    assert notes._size == sum(map(len, notes.export_lines()))


def test_slow_read_does_not_undo_settings_that_were_merged_meanwhile() -> None:
    notes, other, scope = BudgetSnapshot(lambda: 10.0), BudgetSnapshot(lambda: 20.0), new_scope()
    notes.record_settings(scope, {"version": 1, "enforcement": "soft"}, notes.start_read())
    slow = notes.start_read()
    other.record_settings(scope, {"version": 5, "enforcement": "hard"}, other.start_read())
    notes.merge(found_in(notes, other), notes.copy_settings())
    notes.record_settings(scope, {"version": 1, "enforcement": "soft"}, slow)
    assert notes.find_settings(scope) == {"version": 5, "enforcement": "hard"}
    notes.record_settings(scope, {"version": 2}, notes.start_read())
    assert notes.find_settings(scope) == {"version": 2}


def test_merge_leaves_equal_records_as_they_are() -> None:
    notes, other = BudgetSnapshot(lambda: 1_795_003_200.25), BudgetSnapshot(lambda: 1_795_003_200.0)
    scopes = [put(notes, number) for number in range(3)]
    put(other, 3)
    before = notes.copy_settings()
    notes.merge(found_in(notes, other), before)
    after = notes.copy_settings()
    assert len(after) == 4
    assert all(after[scope.key] is before[scope.key] for scope in scopes)


def test_only_changes_need_writing() -> None:
    notes = BudgetSnapshot(lambda: 5.0)
    put(notes, 1)
    assert notes.has_changes
    notes.export_lines()
    put(notes, 1)
    assert not notes.has_changes
