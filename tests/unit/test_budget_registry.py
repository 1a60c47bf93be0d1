"""Budgets in force: what is read from the store and when, which label serves, and how both change over time."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from price_keeper.budgets import budget_refresh as limits
from price_keeper.budgets.active_label import clear_override, set_override
from price_keeper.budgets.budget_state import MIN_REFRESH_SECONDS
from price_keeper.budgets.label_policy import Mode
from price_keeper.domain import Scope
from price_keeper.errors import InvalidRequest, QuotaExceeded, TooManyRequests
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Store, Update, Value

from tests.support.budget_fleet import LABELS, USD, BudgetSidecar, new_caller, open_budget_sidecar, put_budget, put_item
from tests.support.clock import ManualClock
from tests.support.recording_harness import sum_pending

QUOTAS = {"premium": 10, "standard": 5, "economy": 1}


@pytest.fixture
async def one(tmp_path: Path, exact_store: Store, clock: ManualClock) -> AsyncIterator[BudgetSidecar]:
    async with open_budget_sidecar(tmp_path / "one", exact_store, clock) as made:
        yield made


@pytest.fixture
async def two(tmp_path: Path, exact_store: Store, clock: ManualClock) -> AsyncIterator[BudgetSidecar]:
    async with open_budget_sidecar(tmp_path / "two", exact_store, clock) as made:
        yield made


async def test_warm_decision_reads_nothing_from_store(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    one.store.calls.clear()
    for label in LABELS:
        for _ in range(100):
            await one.spend(who, 10_000, label)
    await one.wait_for_refresh()
    assert one.store.calls == []


async def test_concurrent_calls_share_one_read(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    for decision in await asyncio.gather(*(one.decide(who) for _ in range(50))):
        assert decision == ("premium", Mode.NORMAL, 0, None)
    assert one.store.calls == ["get_many", "get_many", "get_many"]  # who it is, how it stands, what is spent


async def test_own_spend_counts_immediately(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    assert await one.spend(who, 10 * USD - 1) == "premium"
    assert (await one.decide(who)) == ("premium", Mode.TIGHT, 99, None)
    assert await one.spend(who, 1) == "premium"
    assert (await one.decide(who)).label == "standard"


async def test_spend_reaching_quota_triggers_refresh_without_further_call(
    one: BudgetSidecar, exact_store: Store, clock: ManualClock
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.spend(who, 1)
    await one.wait_for_refresh()
    one.store.calls.clear()
    await one.spend(who, 10 * USD)
    await one.wait_for_refresh()
    assert one.store.calls == []  # it was looked at less than a second ago
    await clock.advance(MIN_REFRESH_SECONDS)
    await one.wait_for_refresh()
    assert one.store.calls


@pytest.mark.parametrize("is_due_later", [True, False])
async def test_label_exhausted_during_settings_read_moves_on_without_another_call(
    one: BudgetSidecar, exact_store: Store, clock: ManualClock, is_due_later: bool
) -> None:
    """The read began before spend was due to be read, and ends after that: spend is read next without another call."""
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    await one.wait_for_refresh()
    [refresh] = one.budget_registry._refresh_states.values()
    answers = asyncio.Event()

    async def wait(_: str) -> None:
        await answers.wait()

    if not is_due_later:
        await clock.advance(MIN_REFRESH_SECONDS)
    one.store.before_call = wait
    one.budget_registry.refresher.refresh(refresh)
    await clock.advance(MIN_REFRESH_SECONDS / 2)
    await one.spend(who, 10 * USD)
    await clock.advance(MIN_REFRESH_SECONDS)
    one.store.before_call = None
    answers.set()
    await one.wait_for_refresh()
    await one.wait_for_refresh()
    assert one.budget_registry.refresher.active_label_moves == 1


async def test_calls_in_flight_count_as_expected_cost_then_as_actual_cost(
    one: BudgetSidecar, exact_store: Store
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    served = [await one.begin(who, expected=4 * USD) for _ in range(5)]
    assert [label for label, _ in served] == ["premium"] * 3 + ["standard"] * 2
    served += [await one.begin(who, expected=4 * USD) for _ in range(1)]  # economy's, which has room for a quarter
    with pytest.raises(
        TooManyRequests, match=r"calls in flight are expected to use what is left .*: premium \$0\.00 of \$10\.00"
    ):
        await one.begin(who)
    for _, number in served:
        one.end(number, 1)
    assert (await one.decide(who)).label == "premium"
    await one.wait_for_refresh()
    assert one.budget_registry.refresher.active_label_moves == 0  # for good it moves on only by what was spent


async def test_spend_of_other_processes_moves_all_to_next_label(
    one: BudgetSidecar, two: BudgetSidecar, exact_store: Store
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await two.decide(who)
    for _ in range(4):
        await one.spend(who, 3 * USD)
    assert await one.flusher.flush()
    await one.clock.advance(1)
    await one.decide(who)
    await one.wait_for_refresh()
    assert one.budget_registry.refresher.active_label_moves == 1
    await one.clock.advance(limits.SETTINGS_REFRESH_SECONDS)
    await two.decide(who)
    await two.wait_for_refresh()
    assert (await two.decide(who)).label == "standard"
    assert two.budget_registry.refresher.active_label_moves == 0


async def test_idle_scope_reads_spend_before_first_decision(
    one: BudgetSidecar, two: BudgetSidecar, exact_store: Store
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await two.decide(who)
    await one.spend(who, 11 * USD)
    assert await one.flusher.flush()
    await two.clock.advance(1000)
    assert (await two.decide(who)).label == "standard"  # it waits for the store, as what it knows is old


async def test_exhausted_quota_is_refused_with_full_message(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, timezone="Europe/Berlin")
    for label, usd in QUOTAS.items():
        await one.spend(who, usd * USD, label)
    with pytest.raises(QuotaExceeded) as refused:
        await one.decide(who)
    assert refused.value.message == (
        f"app web of org {who.org} has used today's budget: premium $10.00 of $10.00, standard $5.00 of $5.00, "
        "economy $1.00 of $1.00; it resets at 00:00 Europe/Berlin"
    )


@pytest.mark.parametrize(
    ("shared", "period", "said"),
    [
        ("APP", "day", "app 'Shop front' of 'Acme' has used today's premium budget of $5.00; it resets at 00:00 UTC"),
        ("ORG", "day", "org 'Acme' has used today's premium budget of $5.00; it resets at 00:00 UTC"),
        (
            "APP",
            "week",
            "app 'Shop front' of 'Acme' has used this week's premium budget of $5.00; "
            "it resets on 2026-11-23 at 00:00 UTC",
        ),
        (
            "ORG",
            "month",
            "org 'Acme' has used this month's premium budget of $5.00; it resets on 2026-12-01 at 00:00 UTC",
        ),
    ],
)
async def test_refusal_has_names_in_message_and_ids_in_details(
    one: BudgetSidecar, exact_store: Store, shared: str, period: str, said: str
) -> None:
    who = new_caller()
    await put_item(exact_store, schema.app_config_key(who.org, "web"), app_name="Shop front")
    await put_budget(exact_store, who.org, {"premium": 5}, org_name="Acme", quota_scope=shared, period=period)
    await one.spend(who, 5 * USD)
    with pytest.raises(QuotaExceeded) as refused:
        await one.decide(who)
    assert refused.value.message == said
    assert refused.value.details is not None
    ids = refused.value.details["org"], refused.value.details["app"]
    assert ids == (who.org, "web" if shared == "APP" else None)


async def test_renamed_app_has_its_new_name_without_a_read_for_the_message(
    one: BudgetSidecar, exact_store: Store
) -> None:
    who = new_caller()
    await put_item(exact_store, schema.app_config_key(who.org, "web"), app_name="Before", version=1)
    await put_budget(exact_store, who.org, {"premium": 0}, org_name="Acme")
    with pytest.raises(QuotaExceeded, match="app 'Before' of 'Acme' has used"):
        await one.decide(who)
    await put_item(exact_store, schema.app_config_key(who.org, "web"), app_name="After", version=2)
    await one.clock.advance(1000)
    with pytest.raises(QuotaExceeded, match="app 'After' of 'Acme' has used"):
        await one.decide(who)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129, 7, None])
async def test_unusable_name_is_replaced_by_id(one: BudgetSidecar, exact_store: Store, name: Value) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, {"premium": 0}, **({} if name is None else {"org_name": name}))
    with pytest.raises(QuotaExceeded, match=f"^app web of org {who.org} has used today's premium budget"):
        await one.decide(who)


async def test_new_day_starts_with_zero_spend(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, timezone="America/New_York")
    await one.spend(who, 10 * USD)
    midnight = datetime(2026, 11, 19, 5, tzinfo=UTC).timestamp()
    await one.clock.advance(midnight - one.clock.now() - 1)
    assert (await one.decide(who)).label == "standard"
    await one.clock.advance(1)
    assert (await one.decide(who)) == ("premium", Mode.NORMAL, 0, None)


async def test_call_is_charged_to_day_it_started(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    _, number = await one.begin(who)
    await one.clock.advance(12 * 3600)
    await one.decide(who)
    one.end(number, 10 * USD)
    assert (await one.decide(who)) == ("premium", Mode.NORMAL, 0, None)
    (counter,) = one.flusher.journal.tally.sums()
    assert counter.period_or_lease == "DAY#20261118"


@pytest.mark.parametrize(("period", "key"), [("week", "WEEK#2026-W47"), ("month", "MONTH#202611")])
async def test_longer_periods_have_their_own_counters(
    one: BudgetSidecar, exact_store: Store, period: str, key: str
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, period=period)
    await one.spend(who, 10 * USD)
    assert sorted(counter.period_or_lease for counter in one.flusher.journal.tally.sums()) == ["DAY#20261118", key]
    await one.clock.advance(86_400)
    assert (await one.decide(who)).label == "standard"
    await one.spend(who, 1)
    periods = {counter.period_or_lease for counter in one.flusher.journal.tally.sums()}
    assert periods == {"DAY#20261118", "DAY#20261119", key}


async def test_org_wide_budget_is_shared_by_all_apps(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, quota_scope="ORG")
    await one.spend(who, 10 * USD)
    other = new_caller("batch", who.org)
    assert (await one.decide(other)).label == "standard"
    assert {counter.scope for counter in one.flusher.journal.tally.sums()} == {
        f"ORG#{who.org}",
        f"ORG#{who.org}#APP#web",
    }


async def test_app_settings_override_org_settings(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await put_item(exact_store, schema.app_config_key(who.org, "web"), model_ordering=["economy"])
    assert (await one.decide(who, "economy")).label == "economy"
    await put_item(
        exact_store, schema.app_config_key(who.org, "batch"), quotas={"premium": 0, "standard": 0, "economy": 1_000_000}
    )
    batch = new_caller("batch", who.org)
    assert await one.spend(batch, 2 * USD) == "economy"
    with pytest.raises(
        QuotaExceeded, match=r"premium \$0\.00 of \$0\.00, standard \$0\.00 of \$0\.00, economy \$2\.00 of \$1\.00;"
    ):
        await one.decide(batch)
    await put_item(exact_store, schema.org_config_key(other := new_caller().org), model_ordering=["premium"], quotas={})
    with pytest.raises(InvalidRequest, match=r"economy is not among the labels that .* has a quota for: premium"):
        await one.decide(new_caller(None, other), "economy")


async def test_org_without_chain_serves_requested_labels(one: BudgetSidecar) -> None:
    who = new_caller()
    await one.spend(who, 1000 * USD)
    assert (await one.decide(who)) == ("premium", Mode.NORMAL, None, None)


async def test_model_specific_body_keeps_to_compatible_labels(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    assert (await one.decide(who, is_specific=True)).label == "standard"
    await one.spend(who, 5 * USD)
    assert (await one.decide(who)).label == "economy"
    with pytest.raises(InvalidRequest, match=r"format anthropic has quota left; Converse .* economy \(nova\)"):
        await one.decide(who, is_specific=True)


async def test_shadow_mode_changes_nothing_and_reports_everything(
    one: BudgetSidecar, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, enforcement="shadow")
    await one.spend(who, 10 * USD)
    assert (await one.decide(who)) == ("premium", Mode.EXCEEDED, 100, "standard")
    assert "for premium would be served by standard now (before: served by premium)" in caplog.text
    await one.spend(who, 5 * USD, "standard")
    await one.spend(who, 1 * USD, "economy")
    assert (await one.decide(who)) == ("premium", Mode.EXCEEDED, 100, "")
    await one.flusher.flush()
    await one.clock.advance(60)
    await one.decide(who)
    await one.wait_for_refresh()
    assert await exact_store.get(schema.sticky_state_key(Scope(who.org, "web"), "DAY#20261118")) is None


async def look(one: BudgetSidecar, who: object) -> None:
    """After so long a while that the store is asked."""
    await one.clock.advance(limits.SETTINGS_REFRESH_SECONDS)
    await one.decide(who)  # type: ignore[arg-type]
    await one.wait_for_refresh()


async def test_raised_quota_does_not_restore_label_but_override_does(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await look(one, who)
    await put_budget(exact_store, who.org, QUOTAS | {"premium": 100})
    await look(one, who)
    assert (await one.decide(who)).label == "standard"
    scope, today = Scope(who.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    until = one.clock.now() + 600
    await set_override(exact_store, one.clock, scope, today, "premium", "a demo", "ops", until, ordering=list(QUOTAS))
    await look(one, who)
    assert (await one.decide(who)).label == "premium"
    await one.clock.advance(541)
    assert (await one.decide(who)).label == "standard"


async def test_override_may_move_down_and_be_cleared(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    scope, today = Scope(who.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    await set_override(exact_store, one.clock, scope, today, "economy", "save", "ops", ordering=list(QUOTAS))
    await look(one, who)
    assert (await one.decide(who)).label == "economy"
    await clear_override(exact_store, scope, today)
    await look(one, who)
    assert (await one.decide(who)).label == "premium"


async def test_override_log_tells_set_cleared_and_expired_apart(
    one: BudgetSidecar, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    scope, today = Scope(who.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    await set_override(exact_store, one.clock, scope, today, "economy", "save", "ops", ordering=list(QUOTAS))
    await look(one, who)
    await clear_override(exact_store, scope, today)
    await look(one, who)
    until = one.clock.now() + 600
    await set_override(exact_store, one.clock, scope, today, "economy", "save", "ops", until, ordering=list(QUOTAS))
    await look(one, who)
    one.store.is_away = True
    await one.clock.advance(600)
    for _ in range(2):  # the first call finds the store away
        await one.decide(who)
    assert re.findall(r"override (\w+): scope=", caplog.text) == ["set", "cleared", "set", "expired"]


async def test_non_sticky_fallback_follows_quotas_alone(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, sticky_fallback_enabled=False)
    await one.spend(who, 10 * USD)
    assert (await one.decide(who)).label == "standard"
    await put_budget(exact_store, who.org, QUOTAS | {"premium": 100}, sticky_fallback_enabled=False)
    await look(one, who)
    assert (await one.decide(who)).label == "premium"


async def test_new_ordering_keeps_active_label_by_name(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, version=1)
    await one.spend(who, 10 * USD)
    await one.flusher.flush()
    await look(one, who)
    assert one.budget_registry.refresher.active_label_moves == 1
    await put_budget(exact_store, who.org, {"economy": 1, "standard": 5, "premium": 100}, version=2)
    await look(one, who)
    assert (await one.decide(who, "economy")).label == "standard"
    assert (await one.decide(who, "premium")).label == "premium"  # behind the active one by now


async def test_store_outage_keeps_budget_as_stale(
    one: BudgetSidecar, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    one.store.is_away = True
    for _ in range(5):
        await look(one, who)
        assert (await one.decide(who)).label == "standard"
    assert (await one.caller_day(who)).budget.is_stale
    assert caplog.text.count("cannot be read from the store") == 1
    one.store.is_away = False
    await look(one, who)
    assert not (await one.caller_day(who)).budget.is_stale


async def test_unknown_org_has_defaults_until_store_returns(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS | {"premium": 0})
    one.store.is_away = True
    for _ in range(10):
        assert (await one.decide(who)).label == "premium"
    assert one.store.calls.count("get_many") <= 2
    one.store.is_away = False
    await one.clock.advance(limits.STORE_RETRY_SECONDS)
    await one.decide(who)  # which has them asked for again
    await one.wait_for_refresh()
    assert (await one.decide(who)).label == "standard"


async def test_store_outage_on_new_day_keeps_budget_of_yesterday(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.decide(who)
    one.store.is_away = True
    await one.clock.advance(12 * 3600)
    await one.spend(who, 10 * USD)
    assert (await one.decide(who)).label == "standard"


async def test_new_zone_and_scope_of_org_apply_from_next_day(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_item(exact_store, schema.org_config_key(who.org), timezone="UTC")
    before = (await one.caller_day(who)).get_charged_counters("premium")
    changed = {"timezone": "Pacific/Kiritimati", "quota_scope": "ORG"}
    await exact_store.update(Update(schema.org_config_key(who.org), set=changed))
    await look(one, who)
    assert (await one.caller_day(who)).get_charged_counters("premium") is before
    other = (await one.caller_day(new_caller("batch", who.org))).get_charged_counters("premium")
    assert [counter.period_or_lease for counter in other.counters] == ["DAY#20261118"]
    await one.clock.advance(12 * 3600)
    after = (await one.caller_day(who)).get_charged_counters("premium")
    assert [counter.period_or_lease for counter in after.counters] == [
        "DAY#20261119"
    ] * 2  # where it is the 19th since noon


async def test_day_repeated_by_zone_change_keeps_one_budget(one: BudgetSidecar, exact_store: Store) -> None:
    """Further west it is still the 18th."""
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS, timezone="Asia/Tokyo")
    await one.spend(who, 10 * USD)
    turn = datetime(2026, 11, 18, 15, tzinfo=UTC).timestamp()
    settled = {"timezone": "Asia/Tokyo", "quota_scope": "APP", "period": "day"}
    more: dict[str, Value] = {"settled": settled, "settled_until_epoch": int(turn)}
    await put_budget(exact_store, who.org, QUOTAS, timezone="America/New_York", **more)
    await one.clock.advance(turn - one.clock.now() - 1)
    assert (await one.decide(who)).label == "standard"
    await one.clock.advance(2)
    assert (await one.decide(who)).label == "standard"
    await one.wait_for_refresh()
    one.store.calls.clear()
    for _ in range(10):
        await one.decide(who)
    assert one.store.calls == []
    caller_day = await one.caller_day(who)
    assert caller_day.end == datetime(2026, 11, 19, 5, tzinfo=UTC).timestamp()


async def test_unflushed_spend_of_former_run_counts_from_start(one: BudgetSidecar, exact_store: Store) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await one.spend(who, 10 * USD)
    one.budget_registry._refresh_states.clear()
    one.budget_registry._caller_days.clear()
    assert (await one.decide(who)).label == "standard"
    assert await one.flusher.flush()
    await look(one, who)
    state = (await one.caller_day(who)).budget
    assert state.get_tracker("premium").spent == 10 * USD


async def test_decision_change_is_logged_once(
    one: BudgetSidecar, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    for _ in range(7):
        await one.spend(who, 2 * USD)
    lines = [record.message for record in caplog.records if " now (before: " in record.message]
    assert lines == [
        f"calls of ORG#{who.org}#APP#web for premium are served by standard now (before: served by premium): "
        "spent premium $10.00 of $10.00, standard $0.00 of $5.00, economy $0.00 of $1.00 in DAY#20261118; "
        "active label premium, enforcement soft"
    ]


async def test_start_logs_nothing_of_what_did_not_change(
    one: BudgetSidecar, two: BudgetSidecar, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a fallback that was logged when it happened, nor an override that has been in force."""
    caplog.set_level(logging.INFO)
    who, overridden = new_caller(), new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await put_budget(exact_store, overridden.org, QUOTAS)
    scope, today = Scope(overridden.org, "web"), find_span(Period.DAY, one.clock.now(), load_zone("UTC"))
    await set_override(exact_store, one.clock, scope, today, "economy", "save", "ops", ordering=list(QUOTAS))
    for _ in range(5):
        await one.spend(who, 2 * USD)
    assert await one.flusher.flush()
    await look(one, who)
    assert "for premium are served by standard now" in caplog.text
    caplog.clear()
    assert (await two.decide(who)).label == "standard"  # as after a restart
    assert (await two.decide(overridden)).label == "economy"
    assert [each.getMessage() for each in caplog.records] == []
    await two.spend(who, 5 * USD)
    assert (await two.decide(who)).label == "economy"
    assert "for premium are served by economy now (before: served by standard)" in caplog.text


async def test_a_budget_that_is_looked_at_follows_the_totals_at_one_read_an_interval(
    one: BudgetSidecar, two: BudgetSidecar, exact_store: Store, clock: ManualClock
) -> None:
    """As by the status page of a process that serves none of its calls."""
    who = new_caller()
    await put_budget(exact_store, who.org, QUOTAS)
    await two.budget_registry.read_status(who, forces_read=False)
    await one.spend(who, 3 * USD)
    assert await one.flusher.flush()
    await sum_pending(one.aggregator)
    refreshes = two.budget_registry.refresher.refreshes
    for _ in range(100):
        await clock.advance(2)
        budget, _ = await two.budget_registry.read_status(who, forces_read=False)
        await two.wait_for_refresh()
    assert budget.get_tracker("premium").spent == 3 * USD
    assert two.budget_registry.refresher.refreshes - refreshes <= 4
