"""New labels and prices in a running data port: what is cached per label follows, and no call mixes two."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.budgets import app_label_cache
from price_keeper.budgets.hard.budget_lease import BudgetLease, CostReservation
from price_keeper.budgets.label_selector import LabelSelector
from price_keeper.config.config_sections import EndpointConfig, GuardrailsConfig, LabelConfig, PricesConfig, UnitPrices
from price_keeper.domain import Caller, build_client_id
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value
from price_keeper.upstream import connection_pool
from price_keeper.upstream.forwarder import parse_endpoint
from price_keeper.usage.price_updates import PriceTables

from tests.support.data_port import APP, ORG, DataPort, DataPortResponse, data_port
from tests.support.profile_harness import ARN
from tests.support.profile_harness import open_profile_harness as own_rig
from tests.support.simulated import CLAUDE, NOVA, TURN, simulated_bedrock

HAIKU = "anthropic.claude-haiku-4-5-20251001-v1:0"
ASKED = {**TURN, "inferenceConfig": {"maxTokens": 100}}


def label(model: str, price: int, **more: Any) -> LabelConfig:
    format = "nova" if model == NOVA else "anthropic"
    return LabelConfig(model, format, PricesConfig(*(Decimal(price) for _ in range(5))), price_source="config", **more)


BEFORE = {"moving": label(CLAUDE, 3), "steady": label(NOVA, 1)}
AFTER = {"moving": label(HAIKU, 50), "steady": label(NOVA, 1)}


class Shut:
    """A store that blocks reads while it is shut."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.opened = asyncio.Event()
        self.opened.set()
        self.asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, *arguments: Any, **named: Any) -> Any:
        self.asked.set()
        await self.opened.wait()
        return await self._store.get_many(*arguments, **named)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path, Shut, labels=BEFORE) as opened:
        yield opened


async def ask(port: DataPort, name: str = "moving") -> DataPortResponse:
    return await port.ask(f"/model/{name}/converse", ASKED)


def served(answer: DataPortResponse) -> tuple[str, str]:
    assert answer.status == 200, answer.body
    return answer.headers["x-price-keeper-label"], answer.headers["x-price-keeper-model"]


def recorded(port: DataPort) -> dict[str, UsageCounts]:
    return port.recording.flusher.journal.recorded_by_label


def last_cost(port: DataPort, labels: dict[str, LabelConfig], name: str) -> int:
    usage = port.bedrock.ledger[-1].usage
    assert usage is not None
    return (usage.input_tokens + usage.output_tokens) * int(labels[name].prices_usd_per_1m.input) * 10**6


async def budget(port: DataPort, ordering: list[str], **more: Value) -> None:
    quotas: dict[str, Value] = dict.fromkeys(ordering, 10**9)
    item: dict[str, Value] = {"timezone": "UTC", "model_ordering": list(ordering), "quotas": quotas, "version": 1}
    await port.store.put(Put(schema.org_config_key(ORG), {**item, **more}))
    forgotten(port)


def forgotten(port: DataPort) -> None:
    """No budget is cached, so the next call waits for the store."""
    port.budget_registry._caller_days.clear()
    port.budget_registry._refresh_states.clear()
    port.budget_registry._frozen_calendars.clear()


async def meanwhile(port: DataPort, asked: str, change: Callable[[], Awaitable[None]]) -> DataPortResponse:
    """The outcome of a call that waits for its budget while something changes."""
    store: Any = port.store
    forgotten(port)
    store.opened.clear()
    store.asked.clear()
    call = asyncio.create_task(ask(port, asked))
    async with asyncio.timeout(1.5):  # of the two seconds that a call waits
        await store.asked.wait()
    await change()
    store.opened.set()
    return await call


async def test_reload_applies_to_next_warm_call(port: DataPort) -> None:
    for _ in range(3):
        assert served(await ask(port)) == ("moving", CLAUDE)
    before = recorded(port)["moving"].pico
    await port.apply_config(labels=AFTER)
    assert served(await ask(port)) == ("moving", HAIKU)
    assert recorded(port)["moving"].pico - before == last_cost(port, AFTER, "moving")
    assert served(await ask(port, HAIKU)) == ("moving", HAIKU)
    assert (await ask(port, CLAUDE)).status == 400  # no label's any more
    assert (
        port.catalog.price_tables.for_label("moving", "us-east-1", HAIKU).default_prices.input == 50 * 10**6
    )  # which metrics tell


@pytest.mark.parametrize("enforcement", ["soft", "hard"])
async def test_call_waiting_for_budget_uses_reloaded_labels_only(port: DataPort, enforcement: str) -> None:
    await budget(port, ["moving", "steady"], enforcement=enforcement)
    await ask(port)
    before = recorded(port)["moving"].pico
    answer = await meanwhile(port, "moving", lambda: port.apply_config(labels=AFTER))
    assert served(answer) == ("moving", HAIKU)
    assert port.bedrock.ledger[-1].target.startswith(f"/model/{HAIKU.replace(':', '%3A')}/")
    assert recorded(port)["moving"].pico - before == last_cost(port, AFTER, "moving")


@pytest.mark.parametrize("enforcement", ["soft", "hard"])
async def test_waiting_call_finds_label_removed_or_replaced(port: DataPort, enforcement: str) -> None:
    await budget(port, ["moving", "steady", "added"], enforcement=enforcement)
    await ask(port, "steady")
    answer = await meanwhile(port, "moving", lambda: port.apply_config(labels={"steady": BEFORE["steady"]}))
    assert (answer.status, answer.message[:31]) == (400, "there is no label for 'moving';")
    await port.apply_config(labels=BEFORE)
    spent: dict[str, Value] = {"moving": 0, "steady": 0, "added": 10**9}
    await budget(port, ["moving", "steady", "added"], enforcement=enforcement, quotas=spent)
    answer = await meanwhile(port, "moving", lambda: port.apply_config(labels={**AFTER, "added": label(CLAUDE, 7)}))
    assert served(answer) == ("added", CLAUDE)  # which its first labels did not have
    assert recorded(port)["added"].requests == 1


async def test_labels_may_change_while_hard_budget_is_read(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exhausted label leads to the next one, which the call did not know when it came."""
    quotas: dict[str, Value] = {"moving": 1, "added": 10**9}
    await budget(port, ["moving", "added"], enforcement="hard", quotas=quotas)
    hold = BudgetLease.reserve

    async def holding(lease: BudgetLease, pico: int) -> CostReservation | None:
        held = await hold(lease, pico)
        if held is None and "added" not in port.config.labels:
            await port.apply_config(labels={**AFTER, "added": label(CLAUDE, 7)})
        return held

    monkeypatch.setattr(BudgetLease, "reserve", holding)
    assert served(await ask(port)) == ("added", CLAUDE)
    assert recorded(port)["added"].pico == last_cost(port, {"added": label(CLAUDE, 7)}, "added")


async def test_forecasts_stay_with_their_model(port: DataPort) -> None:
    for _ in range(4):
        await ask(port)
        await ask(port, "steady")
    known = port.handler.label_selector.meters._forecasts
    means = {name: (known[name].output_tokens, known[name].pico) for name in ("moving", "steady")}
    await port.apply_config(labels={**AFTER, "moving": label(CLAUDE, 9)})
    kept = port.handler.label_selector.meters._forecasts
    means["moving"] = means["moving"][0], None  # what calls under way are taken to cost is never by the price before
    assert {name: (kept[name].output_tokens, kept[name].pico) for name in kept} == means
    await port.apply_config(labels=AFTER)
    assert set(port.handler.label_selector.meters._forecasts) == {"steady"}


async def test_unlabelled_models_and_guardrails_are_reloaded(port: DataPort) -> None:
    assert (await ask(port, CLAUDE.replace("4-5", "9-9"))).status == 400
    prices = PricesConfig(*(Decimal(8) for _ in range(5)))
    await port.apply_config(unlabelled="meter", default_price=prices)
    gone = await ask(port, HAIKU)
    assert served(gone) == ("", HAIKU)
    assert recorded(port)["other"].requests == 1
    await port.apply_config(labels=AFTER)
    assert served(await ask(port, HAIKU)) == ("moving", HAIKU)
    await port.apply_config(unlabelled="reject", default_price=None, labels=BEFORE)
    assert (await ask(port, HAIKU)).status == 400
    applied = "/guardrail/g1/version/1/apply", {"source": "INPUT", "content": [{"text": {"text": "x" * 1001}}]}
    assert (await port.ask(*applied)).status == 400
    units = UnitPrices(*(Decimal(1) for _ in range(10)))
    await port.apply_config(guardrails=GuardrailsConfig(units))
    assert (await port.ask(*applied)).status == 200
    cost = recorded(port)["guardrails"].pico
    await port.apply_config(guardrails=GuardrailsConfig(UnitPrices(*(Decimal(3) for _ in range(10)))))
    assert (await port.ask(*applied)).status == 200
    assert recorded(port)["guardrails"].pico == cost + 3 * cost > 0


async def test_name_moved_to_configuration_is_no_app_label(tmp_path: Path) -> None:
    async with own_rig(tmp_path) as own:
        await own.put_org_without_budget()
        await own.make_profile()
        caller = Caller(ORG, APP, build_client_id(ORG, APP))
        assert (await own.ask("fast", **TURN))["x-price-keeper-model"] == ARN
        labels = dict(own.port.config.labels)
        await own.port.apply_config(labels={**labels, "fast": label(HAIKU.replace("4-5", "9-9"), 9)})
        assert (await own.ask("fast", **TURN))["x-price-keeper-model"] == HAIKU.replace("4-5", "9-9")
        assert own.port.budget_registry.app_labels.cached(caller).by_name == {}  # type: ignore[union-attr]
        await own.port.apply_config(labels=labels)
        assert (await own.ask("fast", **TURN))["x-price-keeper-model"] == ARN


async def test_name_moved_from_app_to_configuration_is_always_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a call that waits until the app's own labels are read."""
    async with own_rig(tmp_path) as own:
        await own.put_org_without_budget()
        await own.make_profile()
        assert (await own.ask("fast", **TURN))["x-price-keeper-model"] == ARN
        kept, model = own.port.budget_registry.app_labels, HAIKU.replace("4-5", "9-9")
        gate, asked, read = asyncio.Event(), asyncio.Event(), kept.refresh

        async def reading(*of: Any) -> None:
            asked.set()
            await gate.wait()
            await read(*of)

        monkeypatch.setattr(kept, "refresh", reading)
        own.clock.ahead += app_label_cache.STALE_SECONDS
        call = asyncio.create_task(own.ask("fast", **TURN))
        async with asyncio.timeout(1.5):  # of the two seconds that a call waits
            await asked.wait()
        await own.port.apply_config(labels={**own.port.config.labels, "fast": label(model, 9)})
        gate.set()
        assert (await call)["x-price-keeper-model"] == model
        assert last_cost(own.port, own.port.config.labels, "fast") == recorded(own.port)["fast"].pico


async def test_new_endpoints_are_called_and_unused_connections_closed(
    port: DataPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated_bedrock() as another:
        there = label(CLAUDE, 3, endpoints=(EndpointConfig("eu-west-1", endpoint=another.url),))
        await port.apply_config(labels={"moving": there})
        assert served(await ask(port)) == ("moving", CLAUDE)
        assert "/eu-west-1/bedrock/aws4_request" in str(another.ledger[-1].header("authorization"))
        assert len(port.forwarder._pools) == 1  # to the first place no call was ever made
        await port.apply_config(labels=BEFORE)
        assert served(await ask(port)) == ("moving", CLAUDE)
        await port.forwarder.check_timeouts()
        assert len(port.forwarder._pools) == 2  # a connection stands by
        home = parse_endpoint(port.bedrock.url)
        (old,) = (pool for endpoint, pool in port.forwarder._pools.items() if endpoint != home)
        port.forwarder.health.on_connect_failed(old, OSError("nobody is there any more"))
        monkeypatch.setattr(connection_pool, "IDLE_TIMEOUT_SECONDS", -1.0)
        await port.forwarder.check_timeouts()
        await port.forwarder.check_timeouts()
        (left,) = port.forwarder._pools
        assert left == home
        assert port.forwarder.health.unreachable_count == 0


async def test_only_last_configuration_is_kept_in_memory(port: DataPort) -> None:
    for number in range(50):
        await port.apply_config(labels=AFTER if number % 2 else BEFORE)
        await ask(port)
    gc.collect()
    kept = Counter(type(each) for each in gc.get_objects())
    assert kept[LabelSelector] == 1
    assert kept[PriceTables] <= 2  # the first ones have a part that counts
    assert len(port.handler.request_stats._labels) == 4
    assert json.dumps(list(recorded(port))) == '["moving", "steady", "guardrails", "async-jobs", "other"]'


async def test_failing_price_check_leaks_no_task_per_reload(
    port: DataPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(_: PriceTables) -> None:
        raise RuntimeError("of whatever kind")

    monkeypatch.setattr(PriceTables, "refresh", failing)
    before = len(asyncio.all_tasks())
    for _ in range(5):
        await port.apply_config(labels=BEFORE)
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before
    messages = [record.getMessage() for record in caplog.records]
    failed = "first refresh of prices failed (RuntimeError); the prices known so far apply until the next refresh"
    assert messages == [failed] * 5


async def test_series_never_decrease_and_are_bounded(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("price_keeper.telemetry.request_stats.MAX_LABELS", 8)
    monkeypatch.setattr("price_keeper.ledger.journal.MAX_LABELS", 8)
    prices = PricesConfig(*(Decimal(8) for _ in range(5)))
    await port.apply_config(unlabelled="meter", default_price=prices)
    seen: dict[tuple[str, ...], float] = {}
    for number in range(12):
        await ask(port, f"amazon.nova-{number}")
        await port.apply_config(
            labels={**BEFORE, f"unlabelled.amazon.nova-{number}": label(f"amazon.nova-{number}", 5)}
        )
        await ask(port, f"amazon.nova-{number}")
        now = {(name, "usd"): float(counts.pico) for name, counts in recorded(port).items()}
        now |= {
            (lane.operation, lane.label): float(sum(lane.responses_by_status))
            for lane in port.handler.request_stats.operations
        }
        assert all(now.get(name, -1) >= before for name, before in seen.items())
        seen = now
    assert sum(name == "converse" for name, *_ in seen) <= 10
    assert len(recorded(port)) == 8
    assert sum(counts.requests for counts in recorded(port).values()) == 24
