"""Usage, aggregates, model selection, overrides and inference profiles over the control API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import Caller, Scope, build_client_id
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.aggregator import Aggregator, build_total_key, list_active_counters, sum_shards
from price_keeper.ledger.known_totals import KnownTotal
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.usage_submissions import MAX_SUBMISSION_AGE_SECONDS, SubmissionRecorder, UsageSubmission
from price_keeper.stores.contract import Store

from tests.support.clock import ManualClock
from tests.support.control_harness import API, ORG, OTHER, SETTINGS, ControlHarness, open_control_harness
from tests.support.engines import Engines

SHOP = f"{API}/apps/shop"
DAY = "2026-11-18"  # on which the clock of these tests stands, at noon
CALLER = (ORG, "shop")
ONE = {"request_id": "r-1", "label": "premium", "input_tokens": 1000, "output_tokens": 200}  # 6,000 micro-dollars
PROFILE = {
    "label": "own",
    "inference_profile_arn": "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123",
    "format": "nova",
    "prices_usd_per_1m": {"input": 0.5, "output": 2},
}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as running:
        await running.put_org()
        await running.put_app()
        yield running


async def counted(store: Store, scope: Scope, label: str = "premium", period: str = "DAY#20261118") -> tuple[int, int]:
    """Requests and micro-dollars."""
    sums = await sum_shards(store, Counter(scope.key, label, period, 8))
    return int(sums["requests"]), int(sums["cost_usd_micros"])


async def test_submitted_usage_is_priced_counted_and_reported(api: ControlHarness) -> None:
    first = await api.ask("POST", f"{SHOP}/usage", ONE, who=CALLER)
    kept = {
        "request_id": "r-1",
        "label": "premium",
        "day": DAY,
        "cost_usd_micros": "6000",
        "cost_usd_micros_exact": "6000",
        "cost_usd_micros_whole": 6000,
        "daily_total_usd_micros": 6000,
        "daily_total_usd_micros_exact": "6000",
        "quota_usd_micros": 10_000_000,
        "quota_usd_micros_exact": "10000000",
        "quota_pct": 0,
        "mode": "NORMAL",
        "active_label": "premium",
        "data_age_seconds": None,  # there is no total yet
    }
    assert (first.status, first.body) == (201, kept | {"is_repeat": False})
    again = await api.ask("POST", f"{SHOP}/usage", ONE, who=CALLER)
    assert (again.status, again.body) == (200, kept | {"is_repeat": True})
    other = await api.ask("POST", f"{SHOP}/usage", ONE | {"output_tokens": 201}, who=CALLER)
    assert (other.status, other.body["details"][0]["path"]) == (409, "request_id")
    assert await counted(api.store, Scope(ORG, "shop")) == (1, 6000)
    for path in (f"{SHOP}/aggregates/today", f"{API}/aggregates/{DAY}", f"{API}/aggregates?from={DAY}&to={DAY}"):
        answer = await api.ask("GET", path, who=CALLER if "shop" in path else (ORG, None))
        assert answer.status == 200, answer.body
        (row,) = answer.body["rows"]
        assert (row["app"], row["label"], row["day"], row["cost_usd_micros"]) == ("shop", "premium", DAY, "6000")
        assert (row["org_name"], row["input_tokens"], answer.body["total"]["requests"]) == ("Acme", 1000, 1)


async def test_usage_submitted_fifty_times_at_once_counts_once(exact_store: Store, tmp_path: Path) -> None:
    async with open_control_harness(exact_store, tmp_path) as api:
        await api.put_org()
        await api.put_app()
        name = {"request_id": str(tmp_path).replace("/", ".")[-100:]}
        before = await counted(api.store, Scope(ORG, "shop"))
        answers = await asyncio.gather(*(api.ask("POST", f"{SHOP}/usage", ONE | name) for _ in range(50)))
        assert sorted(answer.status for answer in answers) == [200] * 49 + [201], answers[0].body
        assert len({answer.body["cost_usd_micros"] for answer in answers}) == 1
        after = await counted(api.store, Scope(ORG, "shop"))
        assert (after[0] - before[0], after[1] - before[1]) == (1, 6000)


async def test_batch_submitted_five_times_at_once_counts_once(exact_store: Store, tmp_path: Path) -> None:
    async with open_control_harness(exact_store, tmp_path) as api:
        await api.put_org()
        await api.put_app()
        mine = str(tmp_path).replace("/", ".")[-100:]
        batch = {"items": [ONE | {"request_id": f"{mine}-{number}"} for number in range(100)]}
        before = await counted(api.store, Scope(ORG, "shop"))
        answers = await asyncio.gather(*(api.ask("POST", f"{SHOP}/usage/batch", batch) for _ in range(5)))
        statuses = [[each["status"] for each in answer.body["results"]] for answer in answers]
        assert [sorted(of_one) for of_one in zip(*statuses, strict=True)] == [[200] * 4 + [201]] * 100
        after = await counted(api.store, Scope(ORG, "shop"))
        assert (after[0] - before[0], after[1] - before[1]) == (100, 600_000)


@pytest.mark.parametrize("quota_scope", ["ORG", "APP"])
@pytest.mark.parametrize("period", ["day", "week"])
async def test_submitted_usage_counts_in_scope_of_quota(tmp_path: Path, quota_scope: str, period: str) -> None:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as api:
        await api.put_org(quota_scope=quota_scope, period=period)
        await api.put_app()
        assert (await api.ask("POST", f"{SHOP}/usage", ONE)).status == 201
        whole, app = Scope(ORG), Scope(ORG, "shop")
        assert await counted(store, app) == (1, 6000)
        assert await counted(store, whole) == ((1, 6000) if quota_scope == "ORG" else (0, 0))
        whose = whole if quota_scope == "ORG" else app
        assert await counted(store, whose, period="WEEK#2026-W47") == ((1, 6000) if period == "week" else (0, 0))
        for path in (API, SHOP):
            document = (await api.ask("GET", f"{path}/aggregates/today")).body
            assert (len(document["rows"]), document["total"]["cost_usd_micros"]) == (1, "6000")


async def test_submitted_usage_counts_on_org_day_of_usage(api: ControlHarness) -> None:
    await api.put_org(OTHER, timezone="Pacific/Auckland")
    await api.put_app("x", OTHER)
    for number, (at, day) in enumerate([("2026-11-17T10:59:59Z", "2026-11-17"), ("2026-11-17T12:00:00+01:00", DAY)]):
        usage = ONE | {"request_id": f"n{number}", "occurred_at": at}
        answer = await api.ask("POST", f"/api/v1/orgs/{OTHER}/apps/x/usage", usage)
        assert (answer.status, answer.body["day"]) == (201, day)
    assert await counted(api.store, Scope(OTHER, "x"), period="DAY#20261117") == (1, 6000)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"label": "gold"}, "label"),
    ({"label": "guardrails"}, "label"),
    ({"input_tokens": -1}, "input_tokens"),
    ({"input_tokens": 1.5}, "input_tokens"),
    ({"input_tokens": True}, "input_tokens"),
    ({"output_tokens": 10**9 + 1}, "output_tokens"),
    ({"request_id": "a#b"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": None}, "request_id"),
    ({"occurred_at": "2026-11-18T13:00:00Z"}, "occurred_at"),
    ({"occurred_at": "2026-10-01T13:00:00Z"}, "occurred_at"),
    ({"occurred_at": "2026-11-18T11:00:00"}, "occurred_at"),
    ({"occurred_at": "0001-01-01T00:00:00+23:59"}, "occurred_at"),
    ({"cost": 1}, "cost"),
]


async def test_invalid_usage_is_refused_and_not_counted(api: ControlHarness) -> None:
    for changes, path in WRONG:
        answer = await api.ask("POST", f"{SHOP}/usage", ONE | changes)
        assert (answer.status, [each["path"] for each in answer.body["details"]]) == (400, [path]), answer.body
    assert (await api.ask("POST", f"{API}/apps/ghost/usage", ONE)).status == 404
    assert await counted(api.store, Scope(ORG, "shop")) == (0, 0)
    assert MAX_SUBMISSION_AGE_SECONDS == 30 * 86_400


async def test_batch_items_count_independently(api: ControlHarness) -> None:
    items: list[Any] = [ONE, ONE, ONE | {"label": "gold"}, ONE | {"input_tokens": 1}, 7]
    items += [ONE | {"request_id": f"b{number}"} for number in range(95)]
    answer = await api.ask("POST", f"{SHOP}/usage/batch", {"items": items}, who=CALLER)
    assert answer.status == 207
    results = answer.body["results"]
    assert [each["index"] for each in results] == list(range(100))
    # The first two and the fourth have one name; whichever came first stands, and the others are measured by it.
    statuses = [each["status"] for each in results]
    assert (statuses[2], statuses[4], statuses[5:]) == (400, 400, [201] * 95)
    assert results[2]["problem"]["details"][0]["path"] == "items.2.label"
    assert sum(statuses[number] == 201 for number in (0, 1, 3)) == 1
    requests, _ = await counted(api.store, Scope(ORG, "shop"))
    assert requests == 96
    for bad in ({}, {"items": []}, {"items": [ONE] * 101}, [], {"items": [ONE], "x": 1}):
        assert (await api.ask("POST", f"{SHOP}/usage/batch", bad)).status == 400


async def test_usage_with_lost_answer_counts_once(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    store = api.parts.submissions._store
    real = store.transact

    async def lost(*arguments: Any, **named: Any) -> None:
        await real(*arguments, **named)
        raise StoreUnavailable("lost", maybe_applied=True)

    monkeypatch.setattr(store, "transact", lost)
    answer = await api.ask("POST", f"{SHOP}/usage", ONE)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    monkeypatch.undo()
    assert (await api.ask("POST", f"{SHOP}/usage", ONE)).body["is_repeat"] is True
    assert await counted(api.store, Scope(ORG, "shop")) == (1, 6000)


async def test_days_without_spend_are_empty(api: ControlHarness) -> None:
    for path in ("/aggregates/2026-11-01", "/aggregates/today", "/apps/ghost/aggregates/today"):
        answer = await api.ask("GET", API + path)
        assert (answer.status, answer.body["rows"], answer.body["total"]["cost_usd_micros"]) == (200, [], "0")
    unknown = await api.ask("GET", f"/api/v1/orgs/{OTHER}/aggregates/today")
    assert (unknown.status, unknown.body["rows"]) == (200, [])
    past = await api.ask("GET", f"{API}/aggregates/2026-11-01")
    assert past.headers["Cache-Control"] == "private, max-age=300"
    same = await api.ask("GET", f"{API}/aggregates/2026-11-01", headers={"If-None-Match": past.headers["ETag"]})
    assert same.status == 304


async def selection(api: ControlHarness, path: str = SHOP, **query: str) -> Any:
    answer = await api.ask("GET", f"{path}/model-selection", params=query)
    assert answer.status == 200, answer.body
    return answer.body


async def test_model_selection_reports_budget_state(api: ControlHarness) -> None:
    selection_report = await selection(api)
    assert (selection_report["scope"], selection_report["period"]) == ({"org": ORG, "app": "shop"}, "DAY#20261118")
    assert (selection_report["resets_at"], selection_report["active_label"], selection_report["override"]) == (
        "2026-11-19T00:00:00Z",
        "premium",
        None,
    )
    assert selection_report["is_stale"] is False
    premium, economy = selection_report["labels"]
    assert premium == {
        "label": "premium",
        "served_by": "premium",
        "would_be_served_by": "premium",
        "spent_usd_micros": "0",
        "spent_usd_micros_exact": "0",
        "spent_usd_micros_whole": 0,
        "in_flight_usd_micros": "0",
        "in_flight_usd_micros_exact": "0",
        "in_flight_usd_micros_whole": 0,
        "quota_usd_micros": 10_000_000,
        "quota_usd_micros_exact": "10000000",
        "quota_pct": 0,
        "mode": "NORMAL",
    }
    assert (economy["label"], economy["served_by"]) == ("economy", "economy")


async def test_forced_refresh_sees_spend_of_others(api: ControlHarness) -> None:
    await selection(api)
    million = {"request_id": "big", "input_tokens": 1_000_000, "output_tokens": 600_000}  # 12 dollars
    assert (await api.ask("POST", f"{SHOP}/usage", ONE | million)).status == 201
    selection_report = await selection(api, force_check="true")
    premium, economy = selection_report["labels"]
    assert (premium["spent_usd_micros"], premium["quota_pct"], premium["mode"]) == ("12000000", 120, "EXCEEDED")
    assert (premium["served_by"], economy["served_by"], selection_report["active_label"]) == (
        "economy",
        "economy",
        "economy",
    )
    assert (await api.ask("GET", API)).status == 200


async def test_model_selection_is_stale_during_store_outage(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await selection(api)

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(api.store, "get_many", away)
    selection_report = await selection(api, force_check="true")
    assert (selection_report["is_stale"], selection_report["active_label"]) == (True, "premium")
    assert (await api.ask("GET", SHOP)).status == 503


async def test_override_is_set_reported_and_cleared(api: ControlHarness) -> None:
    body = {"label": "economy", "reason": "a quiet day", "until": "2026-11-18T15:00:00+02:00"}
    put = await api.ask("PUT", f"{SHOP}/override", body)
    override = {"label": "economy", "reason": "a quiet day", "who": "admin", "until": "2026-11-18T13:00:00Z"}
    assert (put.status, put.body["override"]) == (200, override | {"version": 1})
    selection_report = await selection(api, force_check="true")
    assert (selection_report["override"]["label"], selection_report["active_label"]) == ("economy", "economy")
    assert selection_report["labels"][0]["served_by"] == "economy"
    cleared = await api.ask("DELETE", f"{SHOP}/override")
    assert (cleared.status, cleared.body["is_cleared"]) == (200, True)
    assert (await api.ask("DELETE", f"{SHOP}/override")).body["is_cleared"] is False
    audit = (await api.ask("GET", f"{API}/audit")).body["records"]
    assert [(each["action"], each["app"]) for each in audit[:2]] == [
        ("override.clear", "shop"),
        ("override.set", "shop"),
    ]
    assert audit[0]["before"] == audit[1]["after"] == override | {"version": 1}


async def test_override_requires_scope_of_quota(api: ControlHarness) -> None:
    body = {"label": "economy", "reason": "x"}
    assert (await api.ask("PUT", f"{API}/override", body)).status == 409
    await api.put_org(OTHER, quota_scope="ORG")
    await api.put_app("x", OTHER)
    assert (await api.ask("PUT", f"/api/v1/orgs/{OTHER}/apps/x/override", body)).status == 409
    assert (await api.ask("PUT", f"/api/v1/orgs/{OTHER}/override", body)).status == 200
    selection_report = await selection(api, f"/api/v1/orgs/{OTHER}/apps/x")
    assert (selection_report["scope"]["app"], selection_report["active_label"]) == (None, "economy")
    for changes in ({"label": "premum"}, {"reason": " "}, {"until": "2026-11-18T11:00:00Z"}, {"until": "later"}):
        refused = await api.ask("PUT", f"{SHOP}/override", body | changes)
        assert (refused.status, refused.body["details"][0]["path"]) == (400, next(iter(changes))), refused.body


async def test_inference_profile_becomes_app_label(api: ControlHarness) -> None:
    made = await api.ask("POST", f"{SHOP}/inference-profiles", PROFILE)
    assert (made.status, made.body) == (201, PROFILE | {"version": 1})
    dearer = PROFILE | {"prices_usd_per_1m": {"input": 1, "output": 3.25}}
    assert (await api.ask("POST", f"{SHOP}/inference-profiles", dearer)).body == dearer | {"version": 2}
    listed = await api.ask("GET", f"{SHOP}/inference-profiles", who=CALLER)
    assert listed.body == {"inference_profiles": [dearer | {"version": 2}]}
    assert (await api.ask("GET", f"{API}/apps")).body["apps"][0]["app"] == "shop"
    assert len((await api.ask("GET", f"{API}/apps")).body["apps"]) == 1
    audit = (await api.ask("GET", f"{API}/audit")).body["records"][0]
    assert (audit["action"], audit["before"]["prices_usd_per_1m"]) == ("profile.put", PROFILE["prices_usd_per_1m"])
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"label": "premium"}, 409),
        ({"label": "guardrails"}, 409),
        ({"label": "a.b"}, 409),  # the model of a label
        ({"label": "us.a.b"}, 409),  # and a profile of it
        ({"label": "a..b"}, 400),
        ({"inference_profile_arn": PROFILE["inference_profile_arn"].replace("us-east-1", "nowhere")}, 400),
        ({"inference_profile_arn": "arn:aws:s3:::x"}, 400),
        ({"format": "novel"}, 400),
        ({"format": ["nova"]}, 400),
        ({"prices_usd_per_1m": {"input": 1}}, 400),
        ({"prices_usd_per_1m": {"input": -1, "output": 1}}, 400),
        ({"prices_usd_per_1m": {"input": 1, "output": "1"}}, 400),
        ({"prices_usd_per_1m": {"input": 1, "output": 1, "x": 1}}, 400),
        ({"prices_usd_per_1m": {"input": 1, "output": Decimal("1E-30").__float__()}}, 400),
        ({"prices_usd_per_1m": [1]}, 400),
    ]
    for changes, status in wrong:
        answer = await api.ask("POST", f"{SHOP}/inference-profiles", PROFILE | changes)
        assert answer.status == status, (changes, answer.body)
    assert (await api.ask("POST", f"{API}/apps/ghost/inference-profiles", PROFILE)).status == 404


async def test_selection_label_without_quota_is_unlimited_and_takes_over(api: ControlHarness) -> None:
    await api.put_app("some", quotas={"premium": 6000})
    path = f"{API}/apps/some"
    premium, economy = (await selection(api, path))["labels"]
    assert (premium["quota_usd_micros"], economy["quota_usd_micros"], economy["quota_pct"]) == (6000, None, None)
    assert (await api.ask("POST", f"{path}/usage", ONE)).status == 201  # all of premium's quota
    told = await selection(api, path, force_check="true")
    assert (told["active_label"], [each["served_by"] for each in told["labels"]]) == ("economy", ["economy"] * 2)
    assert [each["mode"] for each in told["labels"]] == ["EXCEEDED", "NORMAL"]
    query = "label=premium&quota_usd_micros=1"
    assert (await api.ask("GET", f"{path}/what-if?{query}")).body["as_it_would_be"]["serves"] == "economy"


CHEAP = {"input_tokens": 1, "output_tokens": 0}  # 3 micro-dollars


async def aggregate(api: ControlHarness) -> None:
    """As the processes do that added to the counters."""
    listed = await list_active_counters(api.store, [datetime.fromtimestamp(api.clock.now(), UTC).date()])
    _, failures = await Aggregator(api.store, api.clock, 60.0).write_totals([each.counter for each in listed])
    assert not failures


@pytest.mark.parametrize("quota_scope", ["ORG", "APP"])
@pytest.mark.parametrize("period", ["day", "week"])
async def test_usage_answer_has_total_quota_and_mode_after_it(tmp_path: Path, quota_scope: str, period: str) -> None:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as api:
        await api.put_org(quota_scope=quota_scope, period=period, quotas={"premium": 20_000})
        await api.put_app()
        told = []
        for number in range(4):
            answer = await api.ask("POST", f"{SHOP}/usage", ONE | {"request_id": f"n{number}"}, who=CALLER)
            told.append([answer.body[name] for name in ("daily_total_usd_micros", "quota_pct", "mode")])
            if number == 1:
                await aggregate(api)
            seen = (await selection(api))["labels"][0]
            assert [int(seen["spent_usd_micros"]), seen["quota_pct"], seen["mode"]] == told[-1]
        assert told == [[6000, 30, "NORMAL"], [12000, 60, "NORMAL"], [18000, 90, "NORMAL"], [24000, 120, "EXCEEDED"]]
        await advance(api, 2)  # the active label moves within seconds
        last = await api.ask(
            "POST", f"{SHOP}/usage", ONE | CHEAP | {"request_id": "n5", "label": "economy"}, who=CALLER
        )
        assert (last.body["active_label"], last.body["mode"]) == ("economy", "NORMAL")
        assert (last.body["quota_usd_micros"], last.body["quota_pct"]) == (None, None)
        assert last.body["daily_total_usd_micros"] == 1


async def advance(api: ControlHarness, seconds: float) -> None:
    assert isinstance(api.clock, ManualClock)
    await api.clock.advance(seconds)
    await selection(api)  # starts what is due
    for _ in range(200):
        budgets = api.parts.budgets
        if not any(budgets.refresher.is_reading(refresh) for refresh in budgets._refresh_states.values()):
            return
        await asyncio.sleep(0.01)


async def test_usage_answer_counts_own_usage_beside_an_old_total(api: ControlHarness) -> None:
    """Of what another process adds as much shows as the total has; all that this one acknowledged shows at once."""
    other = SubmissionRecorder(api.store, api.clock)
    counter = Counter(Scope(ORG, "shop").key, "economy", "DAY#20261118", 8)

    async def spend_elsewhere(name: str) -> None:
        counts = UsageCounts(1, input_tokens=10, pico=50 * 10**6)
        await other.submit(UsageSubmission(ORG, "shop", name, name, counts, {}), [counter])

    await api.put_org(quotas={})  # without a quota no tracker reads the shards
    await spend_elsewhere("e-1")
    await aggregate(api)
    totals = []
    for number in range(3):
        await spend_elsewhere(f"f-{number}")
        answer = await api.ask("POST", f"{SHOP}/usage", ONE | {"request_id": f"n{number}", "label": "economy"})
        totals.append(answer.body["daily_total_usd_micros"])
    assert totals == [2050, 4050, 6050]  # 2,000 each of its own, and 50 of the only total that there is
    await aggregate(api)
    answer = await api.ask("POST", f"{SHOP}/usage", ONE | {"request_id": "n3", "label": "economy"})
    assert answer.body["daily_total_usd_micros"] == 8200
    assert 0 <= answer.body["data_age_seconds"] <= 1


async def test_submitted_usage_is_summed_by_its_own_process_and_counts_once_in_answers(api: ControlHarness) -> None:
    aggregator, noted = Aggregator(api.store, api.clock, 60.0), list[Counter]()
    for listener in (aggregator.note_written, noted.append):
        api.parts.submissions.subscribe(listener)
    assert (await api.ask("POST", f"{SHOP}/usage", ONE)).status == 201
    assert sorted({each.scope for each in noted}) == sorted(each.scope for each in noted)
    counter = noted[0]
    await advance(api, 60)
    await aggregator.run()
    total = await api.store.get(build_total_key(counter), consistent=True)
    assert total is not None
    assert (total["requests"], total["cost_usd_micros"]) == (1, 6000)
    noted.clear()
    items = [ONE | {"request_id": f"b{number}"} for number in range(2)]
    told = await api.ask("POST", f"{SHOP}/usage/batch", {"items": items}, who=CALLER)
    assert told.body["results"][1]["usage"]["daily_total_usd_micros"] == 18000
    assert noted.count(counter) == 1


async def test_usage_batch_computes_the_state_once_for_each_label(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_totals, looked_up = api.parts.budgets.known_totals, list[str]()
    get_all = known_totals.get_all

    def count(counters: list[Counter]) -> dict[Counter, KnownTotal]:
        looked_up.extend(counter.label for counter in counters)
        return get_all(counters)

    monkeypatch.setattr(known_totals, "get_all", count)
    items = [ONE | {"request_id": f"r-{n}", "label": ("premium", "economy")[n % 2]} for n in range(100)]
    answer = await api.ask("POST", f"{SHOP}/usage/batch", {"items": items}, who=CALLER)
    assert [each["status"] for each in answer.body["results"]] == [201] * 100
    assert sorted(looked_up) == ["economy", "premium"]


async def test_usage_batch_answers_each_item_with_the_total_after_all(api: ControlHarness) -> None:
    items = [ONE | {"request_id": f"b{number}"} for number in range(3)] + [ONE | {"label": "gold"}]
    told = await api.ask("POST", f"{SHOP}/usage/batch", {"items": items}, who=CALLER)
    usages = [each["usage"] for each in told.body["results"][:3]]
    assert [each["daily_total_usd_micros"] for each in usages] == [18000] * 3
    assert "usage" not in told.body["results"][3]


async def test_usage_repeat_is_answered_with_the_total_of_its_first_day(api: ControlHarness) -> None:
    first = await api.ask("POST", f"{SHOP}/usage", ONE | {"occurred_at": "2026-11-17T12:00:00Z"})
    again = await api.ask("POST", f"{SHOP}/usage", ONE | {"occurred_at": "2026-11-17T12:00:00Z"})
    assert [(each.body["day"], each.body["daily_total_usd_micros"]) for each in (first, again)] == [
        ("2026-11-17", 6000)
    ] * 2
    assert again.body["quota_pct"] == 0  # nothing is spent today


async def test_usage_failed_or_of_unknown_outcome_is_not_in_the_total(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await selection(api)
    real = api.store.transact

    async def fail(*arguments: Any, **named: Any) -> None:
        await real(*arguments, **named)
        raise StoreUnavailable("lost", maybe_applied=True)

    monkeypatch.setattr(api.parts.submissions._store, "transact", fail)
    assert (await api.ask("POST", f"{SHOP}/usage", ONE)).status == 503
    monkeypatch.undo()
    told = (await api.ask("POST", f"{SHOP}/usage", ONE | {"request_id": "r-2"})).body
    assert told["daily_total_usd_micros"] == 6000  # the outcome of the first is unknown until the shards are read
    premium = (await selection(api, force_check="true"))["labels"][0]
    assert premium["spent_usd_micros"] == "12000"
    assert (await api.ask("POST", f"{SHOP}/usage", ONE)).body["daily_total_usd_micros"] == 12000


async def test_org_usage_where_all_apps_share_a_budget_counts_for_the_org_alone(api: ControlHarness) -> None:
    own = f"{API}/usage"
    told = await api.ask("POST", own, ONE, who=(ORG, None))
    assert (told.status, "each app" in told.body["message"]) == (409, True)
    assert (await api.ask("POST", f"{own}/batch", {"items": [ONE]}, who=(ORG, None))).status == 409
    shared = f"/api/v1/orgs/{OTHER}"
    assert (await api.ask("POST", f"{shared}/usage", ONE)).status == 404
    await api.put_org(OTHER, quota_scope="ORG", quotas={"premium": 24_000})
    await api.put_app("x", OTHER)
    one, again = [await api.ask("POST", f"{shared}/usage", ONE, who=(OTHER, None)) for _ in range(2)]
    assert [(each.status, each.body["is_repeat"]) for each in (one, again)] == [(201, False), (200, True)]
    of_app = await api.ask("POST", f"{shared}/apps/x/usage", ONE, who=(OTHER, "x"))  # of another client
    assert (of_app.status, of_app.body["daily_total_usd_micros"], of_app.body["quota_pct"]) == (201, 12000, 50)
    items = {"items": [ONE, ONE | {"request_id": "r-2"}]}
    batch = (await api.ask("POST", f"{shared}/usage/batch", items, who=(OTHER, None))).body["results"]
    assert [(each["status"], each["usage"]["quota_pct"]) for each in batch] == [(200, 75), (201, 75)]
    assert await counted(api.store, Scope(OTHER)) == (3, 18000)
    assert await counted(api.store, Scope(OTHER, "x")) == (1, 6000)
    rows = (await api.ask("GET", f"{shared}/aggregates/{DAY}", who=(OTHER, None))).body["rows"]
    assert sorted((row["app"] or "-", row["requests"]) for row in rows) == [("-", 2), ("x", 1)]
    for who in ((OTHER, "x"), (ORG, None), None):
        assert (await api.ask("POST", f"{shared}/usage", ONE, who=who)).status == (403 if who else 401)


async def test_aggregates_today_list_every_label_with_quota_and_mode(api: ControlHarness) -> None:
    await api.put_app("other", quotas={"premium": 6000, "guardrails": 5})
    for app, count in (("shop", 1), ("other", 2)):
        for number in range(count):
            usage = ONE | {"request_id": f"r-{number}"}
            assert (await api.ask("POST", f"{API}/apps/{app}/usage", usage)).status == 201
    told = (await api.ask("GET", f"{API}/aggregates/today", who=(ORG, None))).body["labels"]
    shown = (
        "app",
        "label",
        "requests",
        "input_tokens",
        "daily_total_usd_micros",
        "quota_usd_micros",
        "quota_pct",
        "mode",
    )
    assert [tuple(each[name] for name in shown) for each in told] == [
        ("other", "premium", 2, 2000, 12000, 6000, 200, "EXCEEDED"),
        ("other", "economy", 0, 0, 0, None, None, "NORMAL"),  # unlimited
        ("other", "guardrails", 0, 0, 0, 5, 0, "NORMAL"),
        ("shop", "premium", 1, 1000, 6000, 10_000_000, 0, "NORMAL"),
        ("shop", "economy", 0, 0, 0, 2_000_000, 0, "NORMAL"),
    ]
    of_app = (await api.ask("GET", f"{SHOP}/aggregates/today", who=CALLER)).body["labels"]
    assert of_app == told[3:]
    exact = (await api.ask("GET", f"{SHOP}/aggregates/today?consistent=true", who=CALLER)).body
    assert (exact["labels"], exact["total"]["cost_usd_micros"]) == (of_app, "6000")
    assert "labels" not in (await api.ask("GET", f"{API}/aggregates/{DAY}")).body
    assert (await api.ask("GET", f"{API}/aggregates/today?consistent=1")).status == 400


@pytest.mark.parametrize("consistent", ["true", "false"])
async def test_aggregates_today_of_a_shared_weekly_budget_are_the_orgs(api: ControlHarness, consistent: str) -> None:
    shared = f"/api/v1/orgs/{OTHER}"
    await api.put_org(OTHER, quota_scope="ORG", period="week", quotas={"premium": 24_000})
    await api.put_app("x", OTHER)
    yesterday = ONE | {"request_id": "old", "occurred_at": "2026-11-17T12:00:00Z"}
    for usage in (ONE, yesterday):
        assert (await api.ask("POST", f"{shared}/apps/x/usage", usage)).status == 201
    for path in (shared, f"{shared}/apps/x"):
        told = (await api.ask("GET", f"{path}/aggregates/today?consistent={consistent}")).body
        premium, economy = told["labels"]
        assert (premium["app"], premium["period"], premium["requests"]) == (None, "WEEK#2026-W47", 1)
        assert (premium["daily_total_usd_micros"], premium["period_total_usd_micros"]) == (6000, 12000)
        assert (premium["quota_pct"], premium["mode"], economy["quota_usd_micros"]) == (50, "NORMAL", None)


async def test_aggregates_of_others_are_those_of_the_last_total_unless_consistent(api: ControlHarness) -> None:
    other, key = SubmissionRecorder(api.store, api.clock), Scope(ORG, "shop").key
    counter = Counter(key, "economy", "DAY#20261118", 8)
    for name in ("a", "b"):
        counts = UsageCounts(1, input_tokens=10, pico=1_500_000)
        await other.submit(UsageSubmission(ORG, "shop", name, name, counts, {}), [counter])
        if name == "a":
            await aggregate(api)
    for query, requests, exact in (("", 1, "1.5"), ("?consistent=true", 2, "3")):
        told = (await api.ask("GET", f"{SHOP}/aggregates/today{query}")).body
        economy = told["labels"][1]
        assert (economy["requests"], economy["daily_total_usd_micros"], told["total"]["requests"]) == (
            requests,
            1 if requests == 1 else 3,
            requests,
        )
        assert economy["daily_total_usd_micros_exact"] == exact


TEXTS = {"cost_usd_micros", "spent_usd_micros", "in_flight_usd_micros"}  # until 1.0


def check_money(value: Any) -> int:
    """The number of amounts. Each is a whole number with the exact figure beside it, or the other way round."""
    if isinstance(value, list):
        return sum(map(check_money, value))
    if not isinstance(value, dict):
        return 0
    found = [name for name in value if name.endswith("_usd_micros")]
    for name in found:
        exact = value[f"{name}_exact"]
        whole = value[f"{name}_whole"] if name in TEXTS else value[name]
        assert whole == (None if exact is None else math.floor(Decimal(exact)))
        assert type(whole) in (int, type(None))
        assert (value[name] == exact) is (name in TEXTS or exact is None)
    return len(found) + sum(map(check_money, value.values()))


async def test_money_in_json_is_whole_and_rounded_down_with_the_exact_figure(api: ControlHarness) -> None:
    await api.put_app(quotas={"premium": 10_000_000})
    assert (await api.ask("POST", f"{SHOP}/inference-profiles", PROFILE)).status == 201
    usage = ONE | {"label": "own", "input_tokens": 1, "output_tokens": 1}  # 2.5 micro-dollars
    told = (await api.ask("POST", f"{SHOP}/usage", usage)).body
    assert (told["cost_usd_micros"], told["cost_usd_micros_whole"], told["daily_total_usd_micros"]) == ("2.5", 2, 2)
    assert (await api.ask("POST", f"{SHOP}/usage", ONE | {"request_id": "r-2"})).status == 201
    paths = ["aggregates/today", f"aggregates/{DAY}", "model-selection", "what-if?label=premium&quota_usd_micros=7"]
    counts = [check_money((await api.ask("GET", f"{SHOP}/{path}")).body) for path in paths]
    board = (await api.ask("GET", f"/status/board?org={ORG}&app=shop", headers={"X-Price-Keeper-Page": "1"})).body
    counts += [check_money(told), check_money(board)]
    assert min(counts) >= 2, counts


async def test_aggregates_today_have_calls_of_this_process_once_wherever_they_are(api: ControlHarness) -> None:
    """In the journal, in the shards, in a total: the figures stay."""
    counter = Counter(Scope(ORG, "shop").key, "premium", "DAY#20261118", 8)
    api.recording.spend(7_000_000, counter)
    told = []
    for step in (None, api.recording.flusher.flush(), aggregate(api), aggregate(api)):
        if step is not None:
            await step
        body = (await api.ask("GET", f"{SHOP}/aggregates/today")).body
        told.append(
            (body["labels"][0]["requests"], body["labels"][0]["daily_total_usd_micros"], body["total"]["requests"])
        )
    assert told == [(1, 7, 1)] * 4


async def test_path_without_prefix_leads_to_the_same_handler(api: ControlHarness) -> None:
    bare = f"/orgs/{ORG}"
    assert (await api.ask("POST", f"{bare}/apps/shop/usage", ONE, who=CALLER)).status == 201
    for below in (
        "/aggregates/today",
        f"/aggregates/{DAY}",
        "/apps/shop/aggregates/today",
        "/apps/shop/model-selection",
    ):
        short, long = [await api.ask("GET", path + below, who=(ORG, None)) for path in (bare, API)]
        assert (short.status, short.raw, short.headers["ETag"]) == (200, long.raw, long.headers["ETag"])
    assert (await api.ask("GET", f"{bare}/aggregates/today", who=(OTHER, None))).status == 403
    assert (await api.ask("GET", f"{bare}/aggregates/today", who=None)).status == 401
    assert (await api.ask("GET", f"/ORGS/{ORG}")).status == 404


@pytest.mark.parametrize(
    "path", ["model-selection", "model-selection?force_check=true", "what-if?label=premium&quota_usd_micros=1"]
)
async def test_report_of_a_budget_of_an_unknown_app_is_404_and_keeps_nothing(api: ControlHarness, path: str) -> None:
    budgets, invented = api.parts.budgets, Caller(ORG, "invented", build_client_id(ORG, "invented"))
    answer = await api.ask("GET", f"{API}/apps/invented/{path}", who=(ORG, None))
    assert (answer.status, answer.body["error"]) == (404, "not_found")
    board = await api.ask("GET", f"/status/board?org={ORG}&app=invented", headers={"X-Price-Keeper-Page": "1"})
    assert (board.status, board.body["trouble"], "scope" in board.body) == (200, None, False)
    assert not budgets.is_known(invented)
    assert budgets.snapshot.find_settings(Scope(ORG, "invented")) is None
    assert (await api.ask("GET", f"{SHOP}/{path}", who=(ORG, None))).status == 200


async def test_model_selection_query_counts_no_call(api: ControlHarness, caplog: pytest.LogCaptureFixture) -> None:
    await api.put_app("spent", quotas={"premium": 0, "economy": 0})
    selection_report = await selection(api, f"{API}/apps/spent")
    assert [each["served_by"] for each in selection_report["labels"]] == [None, None]
    caller = Caller(ORG, "spent", build_client_id(ORG, "spent"))
    state, _ = await api.parts.budgets.read_status(caller, forces_read=False)
    assert state._counters.refusals == 0
    assert " now (before: " not in caplog.text
    assert SETTINGS["quotas"]["premium"] == 10_000_000
