"""An app's own labels for inference profiles, with boto3 over real sockets: resolved, priced, budgeted like others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import ClientError
from price_keeper.config import Config
from price_keeper.domain import Caller, Scope
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Update

from tests.support.data_port import APP, ORG
from tests.support.profile_harness import (
    ARN,
    CLAUDE_PRICES,
    ENCODED,
    PRICES,
    REGION,
    ProfileHarness,
    open_profile_harness,
)
from tests.support.raw_clients import eventually
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE, CLAUDE_BODY, TURN

OTHER_ARN = ARN.replace("abc123", "xyz789")
NOVA_BODY = json.dumps({"schemaVersion": "messages-v1", **TURN})


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[ProfileHarness]:
    async with open_profile_harness(tmp_path) as opened:
        await opened.put_org_without_budget()
        yield opened


def spent(own: ProfileHarness) -> dict[tuple[str, str], UsageCounts]:
    """By scope and label, of what is in the journal."""
    found = own.port.recording.flusher.journal.tally.sums()
    return {(counter.scope, counter.label): counts for counter, counts in found.items()}


def last_cost(own: ProfileHarness, input: Any = 2, output: Any = 7) -> int:
    usage = own.port.bedrock.ledger[-1].usage
    assert usage is not None
    return int((usage.input_tokens * Decimal(input) + usage.output_tokens * Decimal(output)) * 10**6)


WEB = Scope(ORG, APP).key


async def test_profile_is_served_by_name_and_arn(own: ProfileHarness) -> None:
    await own.make_profile()
    cost = 0
    for number, asked in enumerate(["fast", ARN]):
        answer = await own.ask(asked, **TURN)
        entry = own.port.bedrock.ledger[-1]
        assert entry.target == f"/model/{ENCODED}/converse"
        assert f"/{REGION}/bedrock/aws4_request" in str(entry.header("authorization"))
        assert answer["x-price-keeper-requested"] == asked
        assert (answer["x-price-keeper-label"], answer["x-price-keeper-model"]) == ("fast", ARN)
        assert (answer["x-price-keeper-mode"], answer["x-price-keeper-price-source"]) == ("NORMAL", "config")
        cost += last_cost(own)
        counts = spent(own)[WEB, "fast"]
        assert (list(spent(own)), counts.requests, counts.pico) == ([(WEB, "fast")], number + 1, cost)


@pytest.mark.parametrize("operation", ["converse_stream", "invoke_model", "invoke_model_with_response_stream"])
async def test_profile_responses_are_read_in_its_format(own: ProfileHarness, operation: str) -> None:
    await own.make_profile(format="anthropic", prices_usd_per_1m=CLAUDE_PRICES)
    body: dict[str, Any] = TURN if operation == "converse_stream" else {"body": json.dumps(CLAUDE_BODY)}
    answer = await own.ask("fast", operation, **body)
    assert answer["x-price-keeper-label"] == "fast"
    counts = spent(own)[WEB, "fast"]
    assert (counts.pico, counts.estimated_requests) == (last_cost(own), 0)


async def test_profile_is_named_in_bodies(own: ProfileHarness) -> None:
    await own.make_profile(inference_profile_arn=ARN, format="openai")
    headers = {"authorization": f"Bearer {own.port.token}"}
    url = own.port.url + CHAT_PATH
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(url, json=CHAT | {"model": "fast"}) as answer:
            assert (answer.status, answer.headers["x-price-keeper-label"]) == (200, "fast")
        assert json.loads(own.port.bedrock.ledger[-1].body)["model"] == ARN
        assert spent(own)[WEB, "fast"].pico == last_cost(own)
        job = {"modelId": "fast", "modelInput": {}, "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://b/p"}}}
        async with session.post(f"{own.port.url}/async-invoke", json=job) as answer:
            assert (answer.status, "have no price here" in await answer.text()) == (400, True)


async def test_token_counting_of_profile_is_free(own: ProfileHarness) -> None:
    await own.make_profile()
    answer = await own.ask("fast", "count_tokens", input={"converse": TURN})
    assert answer["x-price-keeper-label"] == "fast"
    assert own.port.bedrock.ledger[-1].target == f"/model/{ENCODED}/count-tokens"
    assert spent(own) == {}


async def test_profile_is_unknown_to_other_apps(own: ProfileHarness) -> None:
    await own.make_profile()
    for app in ("other", None):
        for asked in ("fast", ARN):
            with pytest.raises(ClientError, match=r"no label for .*; there are premium, standard, economy, and"):
                await own.ask(asked, app=app, **TURN)
    with pytest.raises(ClientError, match="there are premium, standard, economy, fast, and the models"):
        await own.ask("slow", **TURN)
    assert list(own.port.bedrock.ledger) == []


async def test_configured_label_wins_over_profile(own: ProfileHarness) -> None:
    """The configuration may have gained it after the profile was made."""
    status, _ = await own.ask_as_admin("POST", f"/apps/{APP}/inference-profiles", profile("premium"))
    assert status == 409
    for label, arn in (("premium", ARN), ("mine", OTHER_ARN)):
        key = schema.inference_profile_key(ORG, APP, label)
        await own.store._store.put(Put(key, profile(label, inference_profile_arn=arn)))
    await own.store._store.update(Update(schema.app_config_key(ORG, APP), add={"profiles_made": 2}))
    answer = await own.ask("premium", **TURN)
    assert answer["x-price-keeper-model"] == CLAUDE
    with pytest.raises(ClientError, match="there is no label for"):
        await own.ask(ARN, **TURN)
    assert (await own.ask("mine", **TURN))["x-price-keeper-model"] == OTHER_ARN


async def test_configured_model_keeps_its_label(tmp_path: Path) -> None:
    premium = Config.development().labels["premium"]
    async with open_profile_harness(tmp_path, labels={"premium": replace(premium, model=ARN)}) as own:
        await own.put_org_without_budget()
        await own.make_profile()
        assert (await own.ask(ARN, **TURN))["x-price-keeper-label"] == "premium"
        assert (await own.ask("fast", **TURN))["x-price-keeper-label"] == "fast"
        assert (spent(own)[WEB, "fast"].requests, spent(own)[WEB, "premium"].requests) == (1, 1)


async def test_own_label_is_called_by_its_arn_although_its_model_has_a_configured_label(own: ProfileHarness) -> None:
    """Whoever calls the ARN spends of the own label's hard budget, not of the configured label's, which has none."""
    model = Config.development().labels["premium"].model.removeprefix("global.")
    arn = f"arn:aws:bedrock:{REGION}:123456789012:inference-profile/eu.{model}"
    assert (await own.ask(arn, **TURN))["x-price-keeper-label"] == "premium"
    await own.make_profile("mine", format="anthropic", inference_profile_arn=arn)
    await of_each_app(own)
    await own.put_app(enforcement="hard", **budget(mine=1))
    own.clock.ahead += 120
    turn = TURN | {"inferenceConfig": {"maxTokens": 20}}
    answer = await own.ask(arn, **turn)
    assert (answer["x-price-keeper-label"], answer["x-price-keeper-model"]) == ("mine", arn)
    assert spent(own)[WEB, "mine"].pico == last_cost(own)
    budgets = own.port.budget_registry  # that call had the settings read again, beside it
    await eventually(lambda: not any(map(budgets.refresher.is_reading, budgets._refresh_states.values())))
    with pytest.raises(ClientError, match="which is more than is left"):
        await own.ask(arn, **TURN | {"inferenceConfig": {"maxTokens": 200_000}})


def profile(label: str, **changes: Any) -> dict[str, Any]:
    settings = {"inference_profile_arn": ARN, "format": "nova", "prices_usd_per_1m": PRICES}
    return {"label": label, **settings, **changes}


# When what is new holds.


async def test_new_profile_applies_within_a_minute(own: ProfileHarness) -> None:
    with pytest.raises(ClientError):
        await own.ask(**TURN)
    await own.make_profile()
    own.expire_cache()
    with pytest.raises(ClientError):
        await own.ask(**TURN)
    own.clock.ahead += 60
    await own.ask(**TURN)
    await own.make_profile(prices_usd_per_1m={"input": 5, "output": 11}, inference_profile_arn=OTHER_ARN)
    own.expire_cache()
    before = spent(own)[WEB, "fast"].pico
    await own.ask(**TURN)
    assert spent(own)[WEB, "fast"].pico - before == last_cost(own)
    own.clock.ahead += 60
    before = spent(own)[WEB, "fast"].pico
    answer = await own.ask(**TURN)
    assert answer["x-price-keeper-model"] == OTHER_ARN
    assert spent(own)[WEB, "fast"].pico - before == last_cost(own, 5, 11)


async def test_profile_created_by_same_process_applies_at_once(own: ProfileHarness) -> None:
    with pytest.raises(ClientError):
        await own.ask(**TURN)
    await own.make_profile()
    await own.ask(**TURN)


async def test_call_in_flight_keeps_its_price(own: ProfileHarness) -> None:
    await own.make_profile()
    await own.ask(**TURN)
    before, calls = spent(own)[WEB, "fast"].pico, len(own.port.bedrock.ledger)
    slow = asyncio.create_task(own.ask(headers={"x_simulate_latency_ms": "3000"}, **TURN))
    await eventually(lambda: len(own.port.bedrock.ledger) > calls)
    await own.make_profile(prices_usd_per_1m={"input": 500, "output": 500})
    dear = await own.ask(**TURN)
    assert not slow.done()
    dear_cost = last_cost(own, 500, 500)
    assert dear["x-price-keeper-price-source"] == "config"
    await slow
    entry = own.port.bedrock.ledger[calls].usage
    assert entry is not None
    old = (entry.input_tokens * 2 + entry.output_tokens * 7) * 10**6
    assert spent(own)[WEB, "fast"].pico - before == dear_cost + old


async def test_warm_call_reads_nothing_from_store(own: ProfileHarness) -> None:
    await own.make_profile()
    await own.ask(**TURN)
    own.store.calls.clear()
    for asked in ("fast", ARN, "premium"):
        await own.ask(asked, **TURN)
    assert {"get", "get_many", "query"}.isdisjoint(own.store.calls)


async def test_unknown_names_are_looked_up_once_a_minute(own: ProfileHarness) -> None:
    for minute in range(3):
        own.store.calls.clear()
        for number in range(10):
            with pytest.raises(ClientError, match="there is no label for"):
                await own.ask(f"unknown-{minute}-{number}", **TURN)
        assert own.store.calls.count("get") <= 1
        assert "query" not in own.store.calls  # an app that never had a profile needs none
        own.clock.ahead += 60


async def test_store_outage_keeps_known_profiles(own: ProfileHarness) -> None:
    await own.make_profile()
    await own.ask(**TURN)
    own.store.is_away = True
    own.clock.ahead += 3600
    for _ in range(3):
        assert (await own.ask(**TURN))["x-price-keeper-label"] == "fast"
    with pytest.raises(ClientError) as refused:
        await own.ask(app="other", **TURN)
    answer: Any = refused.value.response
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503  # it may well be a label, so SDKs ask again
    own.store.is_away = False
    own.clock.ahead += 10
    await eventually(lambda: not _is_away(own))
    await own.ask(**TURN)


def _is_away(own: ProfileHarness) -> bool:
    """Each call has it read again."""
    caller = Caller(ORG, "other", "client")
    own.port.budget_registry.app_labels.cached(caller)
    return own.port.budget_registry.app_labels.last_read(Scope(ORG, "other")) is None


async def test_malformed_profile_serves_nobody(own: ProfileHarness, caplog: pytest.LogCaptureFixture) -> None:
    for label, changes in {
        "a": {"prices_usd_per_1m": {"input": 1}},
        "b": {"prices_usd_per_1m": {"input": -1, "output": 1}},
        "d": {"format": 7},
        "e": {"inference_profile_arn": "arn:aws:bedrock:-:123456789012:inference-profile/x"},
        "f": {"inference_profile_arn": 7},
        "g": {"prices_usd_per_1m": {"input": True, "output": 1}},
    }.items():
        await own.store._store.put(Put(schema.inference_profile_key(ORG, APP, label), profile(label, **changes)))
    await own.make_profile()
    for label in "abdefg":
        with pytest.raises(ClientError, match="economy, fast, and"):
            await own.ask(label, **TURN)
        assert f"the app label {label} cannot be used" in caplog.text
    await own.ask(**TURN)


# Budgets.


def budget(**usd: float) -> dict[str, Any]:
    return {"model_ordering": list(usd), "quotas": {label: round(amount * 10**6) for label, amount in usd.items()}}


async def of_each_app(own: ProfileHarness) -> None:
    await own.put_org(quota_scope="APP", **budget(premium=100, economy=100))


async def test_fallback_works_from_and_to_profile(own: ProfileHarness) -> None:
    await of_each_app(own)
    await own.make_profile()
    await own.put_app(**budget(premium=0, fast=0.00001, economy=100))
    labels = [(await own.ask("premium", **TURN))["x-price-keeper-label"] for _ in range(4)]
    assert list(dict.fromkeys(labels)) == ["fast", "economy"]
    assert set(spent(own)) == {(WEB, "fast"), (WEB, "economy")}
    answer = await own.ask("fast", **TURN)
    assert (answer["x-price-keeper-requested"], answer["x-price-keeper-label"]) == ("fast", "economy")
    assert spent(own)[WEB, "economy"].pico > 0


async def test_model_specific_body_goes_only_to_its_format(own: ProfileHarness) -> None:
    await of_each_app(own)
    for app, format in ((APP, "anthropic"), ("other", "nova")):
        await own.make_profile(app=app, format=format, prices_usd_per_1m=CLAUDE_PRICES)
        await own.put_app(app, **budget(premium=0, fast=100))
    answer = await own.ask("premium", "invoke_model", body=json.dumps(CLAUDE_BODY))
    assert answer["x-price-keeper-label"] == "fast"
    with pytest.raises(ClientError, match=r"no label with a body in the format anthropic .* fast \(nova\)"):
        await own.ask("premium", "invoke_model", app="other", body=json.dumps(CLAUDE_BODY))
    await own.ask("fast", "invoke_model", app="other", body=NOVA_BODY)
    assert (await own.ask("premium", app="other", **TURN))["x-price-keeper-label"] == "fast"


async def test_profile_outside_chain_bypasses_no_budget(own: ProfileHarness) -> None:
    """The app goes by its org's chain, which says nothing of it."""
    await of_each_app(own)
    await own.make_profile()
    with pytest.raises(ClientError, match=r"fast is not among the labels that .* has a quota for: premium, economy"):
        await own.ask(**TURN)
    await own.put_app(quotas={"premium": 10**6, "economy": 10**6, "fast": 0})
    own.clock.ahead += 120
    with pytest.raises(ClientError, match=r"has used today's fast budget of \$0\.00;"):
        await own.ask(**TURN)


@pytest.mark.parametrize("has_chain", [True, False])
async def test_shared_budget_with_profiles(own: ProfileHarness, has_chain: bool) -> None:
    if has_chain:
        await own.put_org(quota_scope="ORG", **budget(premium=100))
    else:
        await own.store._store.put(Put(schema.org_config_key(ORG), {"org_name": "Acme", "quota_scope": "ORG"}))
    await own.make_profile(format="anthropic", prices_usd_per_1m=CLAUDE_PRICES)
    await own.make_profile(
        app="other", inference_profile_arn=OTHER_ARN, prices_usd_per_1m={"input": 100, "output": 100}
    )
    bodies = {APP: json.dumps(CLAUDE_BODY), "other": NOVA_BODY}
    for app, body in bodies.items():
        if has_chain:
            with pytest.raises(ClientError, match=r"fast is not among the labels that .* has a quota for: premium"):
                await own.ask("fast", "invoke_model", app=app, body=body)
        else:
            answer = await own.ask("fast", "invoke_model", app=app, body=body)
            assert answer["x-price-keeper-label"] == "fast"
            assert own.port.bedrock.ledger[-1].model == (ARN if app == APP else OTHER_ARN)
            prices = (2, 7) if app == APP else (100, 100)
            assert spent(own)[Scope(ORG, app).key, "fast"].pico == last_cost(own, *prices)
    if not has_chain:
        whole, apart = spent(own)[f"ORG#{ORG}", "fast"], [spent(own)[Scope(ORG, app).key, "fast"] for app in bodies]
        assert whole == apart[0].plus(apart[1])
    status, answer = await own.ask_as_admin("PUT", f"/apps/{APP}", {"app_name": "web", **budget(fast=1)})
    assert (status, "all apps share one budget" in answer["details"][0]["message"]) == (400, True)


async def test_shared_chain_naming_profile_never_leads_to_it(own: ProfileHarness) -> None:
    shared = {"quota_scope": "ORG", **budget(premium=0, fast=100)}
    await own.store._store.put(Put(schema.org_config_key(ORG), {"org_name": "Acme", **shared}))
    await own.make_profile()
    for _ in range(2):  # before anybody named it, and after
        for app in (APP, "other"):
            with pytest.raises(ClientError, match=r"has used today's premium budget of \$0\.00;"):
                await own.ask("premium", app=app, **TURN)
        assert (await own.ask(**TURN))["x-price-keeper-quota-pct"] == "0"  # of the quota of that name


async def test_format_read_by_call_applies_to_whole_app(own: ProfileHarness) -> None:
    await of_each_app(own)
    await own.make_profile()
    await own.put_app(**budget(premium=0, fast=100))
    with pytest.raises(ClientError, match=r"fast \(nova\)"):
        await own.ask("premium", "invoke_model", body=json.dumps(CLAUDE_BODY))
    await own.make_profile(format="anthropic", prices_usd_per_1m=CLAUDE_PRICES)
    await own.ask(**TURN)
    answer = await own.ask("premium", "invoke_model", body=json.dumps(CLAUDE_BODY))
    assert answer["x-price-keeper-label"] == "fast"


async def test_store_outage_on_next_day_keeps_profiles(own: ProfileHarness) -> None:
    await of_each_app(own)
    await own.make_profile()
    await own.put_app(**budget(premium=0, fast=100))
    await own.ask("premium", **TURN)
    own.store.is_away = True
    own.clock.ahead += 86_400
    assert (await own.ask("premium", **TURN))["x-price-keeper-label"] == "fast"


async def test_fallback_price_is_at_most_a_minute_old(own: ProfileHarness) -> None:
    await of_each_app(own)
    await own.make_profile()
    await own.put_app(**budget(premium=0, fast=100))
    await own.ask("premium", **TURN)
    await own.make_profile(prices_usd_per_1m={"input": 5, "output": 11})
    own.expire_cache()
    own.clock.ahead += 61
    before = spent(own)[WEB, "fast"].pico
    await own.ask("premium", **TURN)
    assert spent(own)[WEB, "fast"].pico - before == last_cost(own, 5, 11)


# Over the control API.


async def test_submitted_usage_is_priced_by_profile(own: ProfileHarness) -> None:
    usage = {"request_id": "one", "label": "fast", "input_tokens": 1000, "output_tokens": 100}
    status, answer = await own.ask_as_admin("POST", f"/apps/{APP}/usage", usage)
    assert (status, answer["details"][0]["path"]) == (400, "label")
    await own.make_profile()
    status, answer = await own.ask_as_admin("POST", f"/apps/{APP}/usage", usage)
    assert (status, answer["label"], answer["cost_usd_micros"]) == (201, "fast", "2700")
    items = [usage | {"request_id": "two"}, usage | {"request_id": "three", "label": "slow"}]
    _, answer = await own.ask_as_admin("POST", f"/apps/{APP}/usage/batch", {"items": items})
    assert [each["status"] for each in answer["results"]] == [201, 400]
    assert answer["results"][1]["problem"]["details"][0]["message"].endswith("premium, standard, economy, fast")
    status, _ = await own.ask_as_admin("POST", "/apps/other/usage", usage)
    assert status == 400


async def test_submitted_usage_without_known_price_is_to_be_retried(own: ProfileHarness) -> None:
    await own.make_profile()

    async def is_away(verb: str) -> None:
        if verb == "get":
            raise StoreUnavailable("away")

    own.store.before_call = is_away
    usage = {"request_id": "one", "label": "fast", "input_tokens": 1000, "output_tokens": 100}
    status, _ = await own.ask_as_admin("POST", f"/apps/{APP}/usage", usage)
    assert status == 503
    own.store.before_call = None
    own.clock.ahead += 3
    own.port.budget_registry.app_labels.cached(Caller(ORG, APP, "client"))
    await eventually(lambda: own.port.budget_registry.app_labels.last_read(Scope(ORG, APP)) is not None)
    status, answer = await own.ask_as_admin("POST", f"/apps/{APP}/usage", usage)
    assert (status, answer["cost_usd_micros"]) == (201, "2700")


async def test_model_selection_names_and_resolves_profile(own: ProfileHarness) -> None:
    await own.make_profile()
    for app, names in ((APP, {"fast": "fast"}), ("other", {})):
        _, answer = await own.ask_as_admin("GET", f"/apps/{app}/model-selection?force_check=true")
        served = {each["label"]: each["served_by"] for each in answer["labels"]}
        assert {label: served[label] for label in served if label == "fast"} == names
    await of_each_app(own)
    await own.put_app(**budget(premium=0, fast=100))
    own.clock.ahead += 120
    _, answer = await own.ask_as_admin("GET", f"/apps/{APP}/model-selection?force_check=true")
    assert [(each["label"], each["served_by"]) for each in answer["labels"]] == [("premium", "fast"), ("fast", "fast")]


async def test_model_selection_with_shared_budget(own: ProfileHarness) -> None:
    await own.store._store.put(Put(schema.org_config_key(ORG), {"org_name": "Acme", "quota_scope": "ORG"}))
    await own.make_profile()
    for path, is_named in ((f"/apps/{APP}", True), ("/apps/other", False), ("", False)):
        _, answer = await own.ask_as_admin("GET", f"{path}/model-selection")
        assert ("fast" in [each["label"] for each in answer["labels"] if each["served_by"] == "fast"]) is is_named
    await own.make_profile(app="other")
    own.expire_cache()
    for query, is_named in (("", False), ("?force_check=true", True)):
        _, answer = await own.ask_as_admin("GET", f"/apps/other/model-selection{query}")
        assert ("fast" in [each["label"] for each in answer["labels"]]) is is_named
