"""Budgets when something fails: known state stays right, no call waits for long, no read is wasted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from price_keeper.budgets import budget_refresh as limits
from price_keeper.budgets import budget_registry, budget_state
from price_keeper.budgets.active_label import set_override
from price_keeper.budgets.label_policy import Mode
from price_keeper.config import Config
from price_keeper.domain import Caller, Scope
from price_keeper.errors import Busy, InvalidRequest, InvalidStoreRequest, QuotaExceeded
from price_keeper.ledger.aggregator import build_total_key
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store

from tests.support.budget_fleet import USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock, settle

QUOTAS = {"premium": 10, "standard": 5, "economy": 1}
DAY = "DAY#20261118"


@pytest.fixture
async def one(tmp_path: Path, exact_store: Store) -> AsyncIterator[BudgetSidecar]:
    async with open_budget_sidecar(tmp_path / "one", exact_store, ManualClock()) as made:
        yield made


@pytest.fixture
async def two(tmp_path: Path, exact_store: Store, one: BudgetSidecar) -> AsyncIterator[BudgetSidecar]:
    async with open_budget_sidecar(tmp_path / "two", exact_store, one.clock) as made:
        yield made


async def look(one: BudgetSidecar, who: Caller, seconds: float = limits.SETTINGS_REFRESH_SECONDS) -> None:
    await one.clock.advance(seconds)
    await one.decide(who)
    await one.wait_for_refresh()


async def test_caller_first_seen_during_outage_is_correct_later(one: BudgetSidecar, two: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS, agg_shard_count=64)
    one.store.is_away = True
    await one.decide(who)
    one.store.is_away = False
    for _ in range(15):
        await two.spend(who, 1 * USD)
        await two.flusher.flush()
    await look(one, who, limits.STORE_RETRY_SECONDS)
    assert (await one.decide(who)).label == "economy"


async def test_spend_of_an_outage_is_found_where_the_default_has_more_shards_than_the_org(
    tmp_path: Path, exact_store: Store
) -> None:
    who, defaults = new_caller(), replace(Config.development().defaults, agg_shard_count=64)
    await put_budget(exact_store, who.org, {"premium": 100}, agg_shard_count=8)
    async with open_budget_sidecar(tmp_path / "three", exact_store, ManualClock(), defaults=defaults) as one:
        one.store.is_away = True
        for _ in range(9):
            await one.spend(who, 11 * USD)
        one.store.is_away = False
        await one.flusher.flush()
        await look(one, who, limits.STORE_RETRY_SECONDS)
        budget = (await one.caller_day(who)).budget
        assert (budget.settings.shards, budget.get_tracker("premium").spent) == (8, 99 * USD)


async def test_refuse_policy_refuses_callers_without_known_budget(tmp_path: Path, exact_store: Store) -> None:
    """Not even before the first flush has failed: by then a call may have cost more than a hard budget has."""
    known, met = new_caller(), new_caller()
    async with open_budget_sidecar(tmp_path / "three", exact_store, ManualClock(), on_store_down="refuse") as one:
        for who in (known, met):
            await put_budget(exact_store, who.org, QUOTAS, enforcement="hard")
        assert (await one.decide(known)).label == "premium"
        one.store.is_away = True
        for _ in range(2):
            with pytest.raises(Busy, match="budget of this caller is not known"):
                await one.decide(met)
            assert (await one.decide(known)).label == "premium"
            await one.clock.advance(86_400)  # to another period, in which what was known holds
        one.store.is_away = False
        assert (await one.decide(met)).label == "premium"


async def test_caller_first_seen_with_unreadable_settings_is_charged_correctly_from_next_call(
    one: BudgetSidecar,
) -> None:
    """However seldom it calls: each of its calls finds what is known too old, and waits for a look."""
    who = new_caller()
    more: dict[str, Any] = {"quota_scope": "ORG", "agg_shard_count": 16}
    await put_budget(one.store._store, who.org, QUOTAS, **more)
    asked: list[str] = []

    async def first_in_vain(verb: str) -> None:
        asked.append(verb)
        if len(asked) == 1:
            raise InvalidStoreRequest("not this one")

    one.store.before_call = first_in_vain
    await one.spend(who, 1)
    await one.wait_for_refresh()
    await one.clock.advance(1000)
    await one.spend(who, 2)
    (counter,) = [each for each in one.flusher.journal.tally.sums() if "#APP#" not in each.scope]
    assert counter == Counter(f"ORG#{who.org}", "premium", DAY, 16)


async def test_caller_first_seen_with_defaults_is_corrected_by_first_requested_refresh(
    one: BudgetSidecar,
) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS, quota_scope="ORG")
    one.store.is_away = True
    await one.decide(who)
    one.store.is_away = False
    await one.clock.advance(limits.STORE_RETRY_SECONDS)
    state, _ = await one.budget_registry.read_status(who, forces_read=True)
    assert state.scope == Scope(who.org)
    assert not state.is_stale


async def test_read_with_outdated_shard_count_is_not_used(one: BudgetSidecar, two: BudgetSidecar) -> None:
    """A caller first seen during that read does not use it."""
    who = new_caller()
    await one.decide(who)
    await one.wait_for_refresh()
    await put_budget(one.store._store, who.org, {"premium": 40, "standard": 5}, agg_shard_count=64)
    for _ in range(30):
        await two.spend(who, 1 * USD)
        await two.flusher.flush()
    gate, asked = asyncio.Event(), list[str]()

    async def the_second_hangs(verb: str) -> None:
        asked.append(verb)
        if verb == "get_many" and asked.count(verb) == 2:  # after the settings, the shards
            await gate.wait()

    one.store.before_call = the_second_hangs
    await one.clock.advance(limits.SETTINGS_REFRESH_SECONDS)
    watch = next(iter(one.budget_registry._refresh_states.values()))
    one.budget_registry.refresher.refresh(watch)
    for _ in range(100):
        await asyncio.sleep(0)
    meeting = asyncio.create_task(one.budget_registry.load(who))
    for _ in range(100):
        await asyncio.sleep(0)
    gate.set()
    await meeting
    await one.wait_for_refresh()
    caller_day = await one.caller_day(who)
    assert caller_day.budget.get_tracker("premium").spent == 30 * USD


async def test_first_put_of_org_applies_as_soon_as_read(one: BudgetSidecar) -> None:
    web, batch = new_caller(), new_caller()
    batch = new_caller("batch", web.org)
    for who in (web, batch):
        await one.spend(who, 1)
    more: dict[str, Any] = {"quota_scope": "ORG", "timezone": "America/New_York", "agg_shard_count": 16}
    await put_budget(one.store._store, web.org, QUOTAS, **more)
    for who in (web, batch):
        await look(one, who)
        await one.decide(who)
        await one.wait_for_refresh()
    await one.spend(web, 10 * USD)
    assert (await one.decide(batch)).label == "standard"
    (counter,) = [each for each in one.flusher.journal.tally.sums() if "#APP#" not in each.scope]
    assert counter == Counter(f"ORG#{web.org}", "premium", DAY, 16)


async def test_refresh_does_not_wait_for_hanging_flush(one: BudgetSidecar, two: BudgetSidecar) -> None:
    who, gate = new_caller(), asyncio.Event()
    await put_budget(one.store._store, who.org, QUOTAS)
    await two.spend(who, 10 * USD)
    await two.flusher.flush()

    async def hangs(verb: str) -> None:
        if verb == "transact":
            await gate.wait()

    one.store.before_call = hangs
    await one.spend(new_caller(), 1)
    flush = asyncio.create_task(one.flusher.flush())
    await asyncio.sleep(0)
    assert (await one.decide(who)).label == "standard"
    assert one.budget_registry.refresher.active_label_moves == 1  # so much is certain
    gate.set()
    await flush


async def test_refreshes_of_many_scopes_run_concurrently(one: BudgetSidecar) -> None:
    under_way: list[int] = []

    async def counts(verb: str) -> None:
        under_way.append(under_way[-1] + 1 if under_way else 1)
        await asyncio.sleep(0.01)
        under_way.append(under_way[-1] - 1)

    who = [new_caller() for _ in range(20)]
    for each in who:
        await put_budget(one.store._store, each.org, QUOTAS)
    one.store.before_call = counts
    await asyncio.gather(*(one.decide(each) for each in who))
    assert max(under_way) > 15


async def test_total_with_future_stamp_is_ignored(one: BudgetSidecar, two: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 10}, sticky_fallback_enabled=False)
    await one.decide(who)
    counter = Counter(f"ORG#{who.org}#APP#web", "premium", DAY, 8)
    total = {"as_of_epoch": int(one.clock.now()) + 86_400, "cost_usd_micros": 1, "requests": 1}
    await one.store._store.put(Put(build_total_key(counter), total))
    await two.spend(who, 10 * USD)
    await two.flusher.flush()
    await one.clock.advance(300)
    await one.decide(who)
    await one.wait_for_refresh()
    with pytest.raises(QuotaExceeded):
        await one.decide(who)


async def test_corrected_clock_neither_hides_own_spend_nor_counts_it_twice(one: BudgetSidecar) -> None:
    """By the hour that it was behind, what was flushed then seemed to be older than a total that did not have it."""
    who, right = new_caller(), one.clock.now()
    await put_budget(one.store._store, who.org, {"premium": 1000})
    one.clock.set_wall(right - 3600)
    await one.decide(who)
    await one.clock.advance(20)
    key = build_total_key(Counter(f"ORG#{who.org}#APP#web", "premium", DAY, 8))
    of_others = {"as_of_epoch": int(right) + 20, "cost_usd_micros": 10**6, "requests": 1}
    await one.store._store.put(Put(key, of_others))
    await one.clock.advance(20)
    await one.spend(who, 5 * USD)
    await one.flusher.flush()
    one.clock.set_wall(right + 40)
    await look(one, who, 265)
    assert (await one.caller_day(who)).budget.get_tracker(
        "premium"
    ).spent == 5 * USD  # for certain: some may be in the total
    of_all = {"as_of_epoch": int(one.clock.now()), "cost_usd_micros": 6 * 10**6, "requests": 2}
    await one.store._store.put(Put(key, of_all))
    await look(one, who, 305)
    assert (await one.caller_day(who)).budget.get_tracker("premium").spent == 6 * USD


async def test_rejected_segment_still_counts_as_spend(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)

    async def rejects(verb: str) -> None:
        if verb == "transact":
            raise InvalidStoreRequest("never")

    one.store.before_call = rejects
    await one.flusher.flush()
    one.store.before_call = None
    assert len(one.flusher.sender.rejected_ulids) == 1
    await look(one, who)
    assert (await one.decide(who)).label == "standard"
    one.budget_registry._refresh_states.clear()
    one.budget_registry._caller_days.clear()
    assert (await one.decide(who)).label == "standard"


async def put_override(one: BudgetSidecar, who: Caller, until: float) -> None:
    scope, today = Scope(who.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    store = one.store._store
    await set_override(store, one.clock, scope, today, "economy", "save", "ops", until, ordering=list(QUOTAS))


@pytest.mark.parametrize("is_spend_fresh", [True, False])  # if it is not, the call waits for a read
@pytest.mark.parametrize("store_state", ["there", "away", "hanging"])
async def test_override_that_is_over_serves_no_further_call(
    one: BudgetSidecar, monkeypatch: pytest.MonkeyPatch, store_state: str, is_spend_fresh: bool
) -> None:
    who, seconds = new_caller(), 1 if is_spend_fresh else 601
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    await put_override(one, who, one.clock.now() + limits.SETTINGS_REFRESH_SECONDS + seconds)
    await look(one, who)
    assert (await one.decide(who)).label == "economy"
    answers = asyncio.Event()

    async def wait(_: str) -> None:
        await answers.wait()

    one.store.is_away = store_state == "away"
    if store_state == "hanging":
        one.store.before_call = wait
        monkeypatch.setattr(budget_registry, "LOAD_TIMEOUT_SECONDS", 0.01)
    await one.clock.advance(seconds)
    one.store.calls.clear()
    for _ in range(100):
        assert (await one.decide(who)).label == "premium"
    answers.set()
    await one.wait_for_refresh()
    assert len(one.store.calls) <= 4


async def test_override_that_ends_while_status_is_read_is_not_reported(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    await put_override(one, who, one.clock.now() + 600)
    await look(one, who)
    await one.wait_for_refresh()

    async def answer_late(_: str) -> None:
        one.store.before_call = None
        one.store.is_away = True
        await one.clock.leap(600)

    one.store.before_call = answer_late
    budget, override = await one.budget_registry.read_status(who, forces_read=True)
    assert (budget.is_stale, override, budget.active_index) == (True, None, 0)


@pytest.mark.parametrize("when", ["new", "known"])
async def test_unexpected_error_keeps_budget_state_and_is_logged(
    one: BudgetSidecar, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    if when == "known":
        await one.decide(who)

    async def breaks(verb: str) -> None:
        raise KeyError("a bug")

    one.store.before_call = breaks
    await look(one, who)
    for _ in range(100):
        assert (await one.decide(who)).label == "premium"
    await one.wait_for_refresh()
    assert (await one.caller_day(who)).budget.is_stale
    assert len(one.store.calls) < 12
    assert "KeyError" in caplog.text
    assert "a bug" not in caplog.text


async def test_shadow_mode_never_refuses(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 0}, enforcement="shadow")
    assert await one.decide(who) == ("premium", Mode.EXCEEDED, 100, "")
    assert await one.decide(who, "economy") == ("economy", Mode.NORMAL, None, "")
    state = (await one.caller_day(who)).budget
    assert state.decide_without_fallback("guardrails") == ("guardrails", Mode.NORMAL, None, "")
    assert state.decide_without_fallback("unlabelled.x") == ("unlabelled.x", Mode.NORMAL, None, "")


async def test_label_outside_chain_is_refused(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 10})
    state = (await one.caller_day(who)).budget
    for label in ("guardrails", "async-jobs", "unlabelled.anthropic.claude-3"):
        with pytest.raises(InvalidRequest, match=r"is not among the labels that .* has a quota for: premium"):
            state.decide_without_fallback(label)


def test_flush_recorded_before_quota_was_known_is_own_spend() -> None:
    known = budget_state.SpendTracker()
    known.on_call_ended(0, 3)
    known.add_sent(10)
    assert known.spent == 10
    known.add_acknowledged(10)
    known.apply_exact_sum(10, 2.0)
    assert known.spent == 10


async def test_labels_without_quota_have_no_tracker(one: BudgetSidecar) -> None:
    who = new_caller()
    for number in range(50):
        (await one.caller_day(who)).get_charged_counters(f"unlabelled.{number}")
    assert (await one.caller_day(who)).budget._trackers == {}


async def test_budget_states_of_past_days_are_evicted(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    for _ in range(5):
        await one.spend(who, 1)
        await one.clock.advance(86_400)
    await one.decide(who)
    assert len(one.budget_registry._refresh_states) <= 2


async def test_hanging_store_delays_one_call_only(one: BudgetSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_registry, "LOAD_TIMEOUT_SECONDS", 0.05)
    who, gate = new_caller(), asyncio.Event()

    async def hangs(verb: str) -> None:
        await gate.wait()

    one.store.before_call = hangs
    loop = asyncio.get_running_loop()
    began = loop.time()
    await one.decide(who)
    first, began = loop.time() - began, loop.time()
    for _ in range(20):
        await one.decide(who)
    assert loop.time() - began < 2 * first
    gate.set()
    await one.wait_for_refresh()


async def test_budget_after_failed_refresh_becomes_stale_again(one: BudgetSidecar, two: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    one.store.is_away = True
    await look(one, who)
    one.store.is_away = False
    await look(one, who)
    await two.spend(who, 10 * USD)
    await two.flusher.flush()
    await one.clock.advance(6 * 3600)
    assert (await one.decide(who)).label == "standard"


async def test_calls_in_flight_alone_log_no_decision_change(
    one: BudgetSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS)
    for _ in range(50):
        _, number = await one.begin(who, expected=11 * USD)
        assert (await one.decide(who)).label == "standard"
        one.end(number, 1)
        assert (await one.decide(who)).label == "premium"
    assert " now (before: " not in caplog.text


async def test_hand_written_items_of_other_types_keep_their_budget(one: BudgetSidecar) -> None:
    """As far as an engine can hold them; what cannot be used is passed over."""
    who = new_caller()
    await put_budget(one.store._store, who.org, {"premium": 0}, tags=["a", "b"], notes={"x": ""})
    with pytest.raises(QuotaExceeded):
        await one.decide(who)


async def test_process_without_newest_ordering_moves_no_label(one: BudgetSidecar) -> None:
    who = new_caller()
    await put_budget(one.store._store, who.org, QUOTAS, version=1)
    key = schema.sticky_state_key(Scope(who.org, "web"), DAY)
    newer = {"active_model_label": "premium", "active_model_index": 0, "ordering_version": 9}
    await one.store._store.put(Put(key, newer))
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await look(one, who)
    assert one.store.calls.count("update") == 0
    assert (await one.decide(who)).label == "standard"


async def test_registry_that_is_full_evicts_idle_budgets_and_their_callers(
    one: BudgetSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_registry, "MAX_BUDGETS", 20)
    for _ in range(60):
        await one.decide(new_caller())
        await one.wait_for_refresh()
        known = one.budget_registry._refresh_states.values()
        assert len(known) <= 20
        assert {id(refresh) for _, refresh in one.budget_registry._caller_days.values()} <= set(map(id, known))


async def test_forced_status_does_not_settle_for_a_read_that_began_before_it(
    one: BudgetSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, has_read, gate = new_caller(), asyncio.Event(), asyncio.Event()
    await put_budget(one.store._store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    refresher, (refresh,) = one.budget_registry.refresher, one.budget_registry._refresh_states.values()
    read = refresher.reader.read_settings_and_sticky

    async def read_and_wait(budget: budget_state.BudgetState) -> Any:
        found = await read(budget)
        has_read.set()
        await gate.wait()
        return found

    monkeypatch.setattr(refresher.reader, "read_settings_and_sticky", read_and_wait)
    refresher.refresh(refresh)
    await has_read.wait()
    await put_budget(one.store._store, who.org, {**QUOTAS, "premium": 99})
    status = asyncio.create_task(one.budget_registry.read_status(who, forces_read=True))
    await settle()
    gate.set()
    budget, _ = await status
    assert budget.settings.quotas["premium"] == 99 * USD
