"""Other labels and prices beside the data port: the control API, what is known of AWS's list, and many budgets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.config import Config, parse_config
from price_keeper.config_reload import build_budget_reload
from price_keeper.domain import Caller, build_client_id
from price_keeper.ledger.flusher import Flusher
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.usage.inference_profiles import AppLabels
from price_keeper.usage.price_updates import CLAIM_TTL_SECONDS

from tests.support.clock import ManualClock
from tests.support.control_harness import API, ORG, SETTINGS, ControlHarness, config, open_control_harness
from tests.support.engines import Engines
from tests.support.price_fleet import (
    CLAUDE_PRICES,
    LABELS,
    PriceFleet,
    find_standard,
    status,
    usd_per_1m,
)
from tests.support.raw_clients import eventually

SHOP = f"{API}/apps/shop"
CALLER = (ORG, "shop")
USAGE = {"label": "premium", "input_tokens": 1000, "output_tokens": 200}
OTHERS = """
labels:
  premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 30, output: 150}}
  fresh: {model: e.f, format: nova, prices_usd_per_1m: {input: 1, output: 5}}
"""
MANY = 5_000
TURN_SECONDS = 0.25  # it takes a quarter of that; blocking the loop for longer is no noise of a busy machine


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as running:
        await running.put_org()
        await running.put_app()
        yield running


async def take_on(api: ControlHarness, whole: Config) -> None:
    for prepared in (build_budget_reload(api.parts.budgets), api.parts.prepare_config):
        (await prepared(whole))()


async def test_control_api_knows_only_new_labels(api: ControlHarness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    first = await api.ask("POST", f"{SHOP}/usage", USAGE | {"request_id": "r-1"}, who=CALLER)
    assert first.body["cost_usd_micros"] == "6000"
    await api.ask("GET", f"{SHOP}/model-selection", who=CALLER)
    await take_on(api, replace(config(), labels=parse_config(OTHERS, "config.yaml", {}).labels))
    message = (
        f"SIGHUP: label economy is no longer configured; it is skipped in the model_ordering of ORG#{ORG}#APP#shop"
    )
    assert [record.getMessage() for record in caplog.records] == [message]
    second = await api.ask("POST", f"{SHOP}/usage", USAGE | {"request_id": "r-2"}, who=CALLER)
    assert second.body["cost_usd_micros"] == "60000"
    again = await api.ask("POST", f"{SHOP}/usage", USAGE | {"request_id": "r-1"}, who=CALLER)
    assert (again.status, again.body["cost_usd_micros"]) == (200, "6000")  # never priced again
    gone = await api.ask("POST", f"{SHOP}/usage", USAGE | {"request_id": "r-3", "label": "economy"}, who=CALLER)
    assert gone.body["details"][0]["message"] == "there is no such label; there are premium, fresh"
    chosen = await api.ask("GET", f"{SHOP}/model-selection", who=CALLER)
    served = {each["label"]: each["would_be_served_by"] for each in chosen.body["labels"]}
    assert served == {"premium": "premium", "economy": None}
    refused = await api.ask("PUT", API, SETTINGS | {"model_ordering": ["premium", "fresh"]})
    assert (refused.status, refused.body["details"][0]["path"]) == (400, "quotas.economy")
    quotas = {"premium": 1000, "fresh": 5}
    await api.put_org(model_ordering=["premium", "fresh"], quotas=quotas)
    profile = {
        "label": "fresh",
        "inference_profile_arn": "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123",
        "format": "nova",
        "prices_usd_per_1m": {"input": 0.5, "output": 2},
    }
    assert (await api.ask("POST", f"{SHOP}/inference-profiles", profile)).status == 409
    assert (await api.ask("POST", f"{SHOP}/inference-profiles", profile | {"label": "economy"})).status == 201


async def test_name_moved_from_app_to_configuration_always_has_a_price(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a usage that waits until the app's own labels are read."""
    own = api.parts.budgets.app_labels
    of = own.get

    async def while_they_are_read(caller: Caller) -> AppLabels:
        await take_on(api, replace(config(), labels=parse_config(OTHERS, "config.yaml", {}).labels))
        return await of(caller)

    monkeypatch.setattr(own, "get", while_they_are_read)
    answer = await api.ask("POST", f"{SHOP}/usage", USAGE | {"request_id": "r-1", "label": "fresh"}, who=CALLER)
    assert (answer.status, answer.body.get("cost_usd_micros")) == (201, "2000")


# What is known of the price list.


MORE = f"""{LABELS}
  added: {{model: us.anthropic.claude-sonnet-4-5-20250929-v1:0, format: anthropic, prices_usd_per_1m: {CLAUDE_PRICES}}}
"""
NEGOTIATED = LABELS.replace("format: anthropic,", "format: anthropic, price_source: config,")


async def test_reload_keeps_listed_price_of_label(fleet: PriceFleet) -> None:
    before = await fleet.start_sidecar()
    await fleet.clock.advance(CLAIM_TTL_SECONDS)  # until then no other process reads the list, whatever it lacks
    reads = len(fleet.server.reads)
    after = fleet.sidecar(MORE)
    after.inherit(before)
    assert usd_per_1m(find_standard(after)) == usd_per_1m(find_standard(before)) == 1.1
    assert status(after) == status(before)
    assert status(after, "added").source == "config"
    await after.refresh()
    assert len(fleet.server.reads) == reads + 2  # once more, for the one that is new
    assert (usd_per_1m(find_standard(after)), status(after, "added").source) == (1.1, "aws")
    negotiated = fleet.sidecar(NEGOTIATED)
    negotiated.inherit(after)
    assert (usd_per_1m(find_standard(negotiated)), status(negotiated).source) == (1, "config")


async def test_list_being_read_during_reload_applies_to_new_labels(fleet: PriceFleet) -> None:
    fleet.server.gate = asyncio.Event()
    before = fleet.sidecar()
    reading = asyncio.create_task(before.refresh())
    await eventually(lambda: fleet.server.calls)
    after = fleet.sidecar()
    after.inherit(before)
    looking = asyncio.create_task(after.refresh())
    await asyncio.sleep(0)
    assert usd_per_1m(find_standard(after)) == 1
    fleet.server.gate.set()
    await asyncio.gather(reading, looking)
    assert (usd_per_1m(find_standard(after)), status(after).trouble) == (1.1, "")
    assert len(fleet.server.reads) == 2  # by one of them


# Many.


async def test_thousands_of_budgets_reload_within_one_short_turn() -> None:
    clock = ManualClock()
    whole = parse_config(OTHERS, "config.yaml", {})
    async with Tasks(clock) as tasks:
        others = dict.fromkeys(map(str, range(MANY)), config().labels["premium"])
        before = replace(config(), labels={**config().labels, **others})
        registry = BudgetRegistry(before, cast(Store, None), cast(Flusher, _Quiet()), clock, tasks)
        settings = {"model_ordering": ["premium", "economy"], "quotas": {"premium": 5, "economy": 5}}
        plan = resolve_settings(settings, None, whole.defaults, (80,), clock.now())  # type: ignore[arg-type]
        for number in range(MANY):
            org = str(UUID(int=number))
            registry._add(Caller(org, "web", build_client_id(org, "web")), plan, is_read=True, is_registered=True)
        take_on = await build_budget_reload(registry)(whole)
        began = time.process_time()
        take_on()
        assert time.process_time() - began < TURN_SECONDS
        every = [watch.budget for watch in registry._refresh_states.values()]
        assert len(every) == MANY
        assert all(not each.has_label("economy") and each.find_enforced_label("premium") == "premium" for each in every)


class _Quiet:
    """A flusher that has nothing to tell."""

    sender = SimpleNamespace(subscribe=lambda _: None, subscribe_flushed=lambda _: None)

    def unflushed_by_counter(self) -> dict[object, int]:
        return {}

    possibly_stored_by_counter = unflushed_by_counter
