"""A hard budget while something moves: the day, the quota, the prices, the place, the client, or the process ends."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.config.config_sections import EndpointConfig, LabelConfig, PricesConfig
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store, Value, iterate_rows
from price_keeper.usage.price_table import PriceTable, build_price_table
from price_keeper.usage.price_updates import PriceTables

from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.ports import free_port
from tests.support.simulated import CLAUDE, CLAUDE_BODY

USD = 10**12  # in pico
TURN: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"text": "How are you?"}]}],
    "inferenceConfig": {"maxTokens": 100},
}
YESTERDAY, TODAY = "DAY#20261118", "DAY#20261119"
CHEAP, DEAR = (PricesConfig(*(Decimal(factor * each) / 10 for each in (30, 150, 3, 38, 60))) for factor in (1, 4))


class SettableClock(SystemClock):
    def __init__(self, to: datetime) -> None:
        self.set(to)

    def now(self) -> float:
        return time.time() + self._ahead

    def set(self, to: datetime) -> None:
        self._ahead = to.timestamp() - time.time()


@dataclass
class Budget:
    """Of premium, as the store has it."""

    bucket: HardBudgetBucket
    holds: list[BudgetLeaseRow]
    spent: int

    def check(self) -> None:
        assert (
            self.bucket.unleased + sum(hold.leased for hold in self.holds) + self.bucket.spent_without_lease
            == self.bucket.quota
        )
        assert sum(hold.used for hold in self.holds) == self.spent


async def budget_of(store: Store, day: str) -> Budget:
    name = HardBudgetKey(Scope(ORG, APP).key, "premium", day)
    holds = [BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(store, name.lease_query)]
    found = Budget(
        HardBudgetBucket.from_item(await store.get(name.bucket_key) or {}), holds, await read_spent_pico(store, name)
    )
    found.check()
    return found


def day_of(port: DataPort) -> str:
    return port.budget_registry._caller_days[ORG, APP][0].budget.span.key


async def flushed(port: DataPort) -> Budget:
    assert await port.recording.flusher.flush()
    return await budget_of(port.store, day_of(port))


async def is_hard(port: DataPort, usd: float, version: int = 1) -> None:
    quotas: dict[str, Value] = {"premium": round(usd * 10**6)}
    item: dict[str, Value] = {"timezone": "UTC", "model_ordering": ["premium"], "quotas": quotas, "version": version}
    await port.store.put(Put(schema.org_config_key(ORG), {**item, "enforcement": "hard"}))
    port.budget_registry._caller_days.clear()
    port.budget_registry._refresh_states.clear()


async def ask(port: DataPort, path: str = "converse", body: Any = TURN, **headers: str) -> int:
    """The status; 0 where the answer is cut."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers |= {"Authorization": f"Bearer {port.token}", "Content-Type": "application/json"}
    url = f"{port.url}/model/premium/{path}"
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, headers=headers, data=json.dumps(body)) as response,
        ):
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


def at_places(*places: EndpointConfig) -> dict[str, LabelConfig]:
    labels = dict(Config.development().labels)
    return labels | {"premium": replace(labels["premium"], prices_usd_per_1m=CHEAP, endpoints=places)}


class Until:
    """A store that does something of ours before it carries out its next transaction."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.first: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, *arguments: Any, **named: Any) -> None:
        first, self.first = self.first, None
        if first is not None:
            first()
        await self._store.transact(*arguments, **named)


async def test_call_waiting_over_midnight_is_charged_to_day_it_came(tmp_path: Path) -> None:
    midnight = datetime(2026, 11, 19, tzinfo=UTC)
    clock = SettableClock(datetime(2026, 11, 18, 23, 50, tzinfo=UTC))
    async with data_port(tmp_path, Until, clock) as port:
        await is_hard(port, 1.0)
        store: Any = port.store
        store.first = lambda: clock.set(midnight)
        assert await ask(port) == 200
        assert store.first is None
        await port.recording.flusher.flush()
        assert (await budget_of(port.store, YESTERDAY)).spent > 0
        assert await port.store.get(HardBudgetKey(Scope(ORG, APP).key, "premium", TODAY).bucket_key) is None
        assert await ask(port) == 200
        assert (await flushed(port)).spent > 0
        assert day_of(port) == TODAY


async def test_call_in_flight_when_quota_is_lowered_is_the_last(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await is_hard(port, 1.0)
        calling = asyncio.create_task(ask(port, x_simulate_latency_ms="400"))
        while not port.bedrock.ledger:  # noqa: ASYNC110  # no event for this
            await asyncio.sleep(0.01)
        await is_hard(port, 0.0005, version=2)
        assert await ask(port) in (400, 429)
        assert await calling == 200
        assert await ask(port) in (400, 429)
        assert len(port.bedrock.ledger) == 1
        after = await flushed(port)
        assert after.bucket.quota == 0.0005 * USD
        await is_hard(port, 1.0, version=3)
        assert await ask(port) == 200
        assert (await flushed(port)).bucket.quota == USD


async def test_retried_call_is_reserved_and_charged_once(tmp_path: Path) -> None:
    worst = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with data_port(folder) as port:
            await is_hard(port, 1.0)
            again = {"x_simulate_latency_ms": "200", "amz_sdk_invocation_id": "the same"}
            assert await asyncio.gather(*(ask(port, **again) for _ in range(number))) == [200] * number
            assert len(port.bedrock.ledger) == 1
            after = await flushed(port)
            assert port.recording.flusher.journal.recorded.requests == 1
            worst.append(after.holds[0].leased)  # the first that is taken is what one call may cost
    assert worst[0] == worst[1]


async def test_most_expensive_endpoint_is_reserved_and_serving_one_charged(tmp_path: Path) -> None:
    nobody = EndpointConfig("eu-west-1", endpoint=f"http://127.0.0.1:{free_port()}")
    labels = at_places(nobody, EndpointConfig("us-east-1", prices_usd_per_1m=DEAR))
    async with data_port(tmp_path, labels=labels) as port:
        await is_hard(port, 0.02)  # enough at the first place alone
        assert await ask(port) == 400
        assert not port.bedrock.ledger
        await is_hard(port, 1.0, version=2)
        assert await ask(port) == 200
        after, usage = await flushed(port), port.bedrock.ledger[0].usage
        assert usage is not None
        assert after.spent == usage.input_tokens * 12 * 10**6 + usage.output_tokens * 60 * 10**6
        assert 0.02 * USD < after.holds[0].leased <= 0.1 * USD


async def test_dearest_price_of_piece_at_any_endpoint_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each region has its own listed prices."""
    cents = {"us-east-1": 4, "eu-west-1": 6}
    free = build_price_table(PricesConfig(Decimal(0), Decimal(0)))
    tables = {region: replace(free, unit_prices={"image": each * USD // 100}) for region, each in cents.items()}

    def for_label(_: PriceTables, label: str, region: str, model: str) -> PriceTable:
        return tables[region]

    monkeypatch.setattr(PriceTables, "for_label", for_label)
    labels = at_places(*map(EndpointConfig, cents))
    pictures: Any = {"image": Decimal("0.04")}
    canvas = replace(labels["premium"], model="amazon.nova-canvas-v1:0", format="nova", prices_usd_per_unit=pictures)
    async with data_port(tmp_path, labels=labels | {"premium": canvas}) as port:
        await is_hard(port, 0.05)  # enough at the first place alone
        assert await ask(port, "invoke", {"taskType": "TEXT_IMAGE", "textToImageParams": {"text": "a fox"}}) == 400
        assert not port.bedrock.ledger
        assert (await flushed(port)).holds == []


@pytest.mark.parametrize(
    ("second", "counts"),
    [(CLAUDE.replace("global.", "us."), [CLAUDE]), ("anthropic.claude-haiku-4-5-20251001-v1:0", [CLAUDE, None])],
    ids=["the same model", "another"],
)
async def test_each_model_of_label_is_counted_separately(second: str, counts: list[Any], tmp_path: Path) -> None:
    labels = at_places(EndpointConfig("us-east-1"), EndpointConfig("us-east-1", model=second))
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 30).decode()
    image = {"image": {"format": "png", "source": {"bytes": picture}}}
    async with data_port(tmp_path, labels=labels) as port:
        await is_hard(port, 1.0)
        assert await ask(port, body={**TURN, "messages": [{"role": "user", "content": [image]}]}) == 200
        counted = [entry.model for entry in port.bedrock.ledger if entry.operation == "CountTokens"]
        assert sorted(counted) == sorted(each or second for each in counts)


async def test_endpoint_with_stored_prompt_is_refused(tmp_path: Path) -> None:
    stored = "arn:aws:bedrock:us-east-1:123456789012:prompt/ABCDEFGHIJ"
    labels = at_places(EndpointConfig("us-east-1"), EndpointConfig("us-east-1", model=stored))
    async with data_port(tmp_path, labels=labels) as port:
        await is_hard(port, 1.0)
        assert await ask(port) == 400
        assert not port.bedrock.ledger


async def test_call_is_charged_at_prices_it_was_reserved_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New prices may come while it is on its way to the next place."""
    in_force = build_price_table(CHEAP)

    def for_label(*_: object) -> PriceTable:
        return in_force

    monkeypatch.setattr(PriceTables, "for_label", for_label)
    async with data_port(tmp_path, labels=at_places(EndpointConfig("eu-west-1"), EndpointConfig("us-east-1"))) as port:
        await is_hard(port, 1.0)
        port.bedrock.plan({"fault": "throttle", "latency_ms": 200}, {})
        calling = asyncio.create_task(ask(port))
        while not port.bedrock.ledger:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        in_force = build_price_table(DEAR)
        assert await calling == 200
        after, usage = await flushed(port), port.bedrock.ledger[1].usage
        assert usage is not None
        assert after.spent == usage.input_tokens * 3 * 10**6 + usage.output_tokens * 15 * 10**6


STREAM, INVOKED = "converse-stream", "invoke-with-response-stream"


@pytest.mark.parametrize(
    ("path", "wishes"),
    [
        ("converse", {"fault": "cut"}),
        ("converse", {"fault": "reset"}),
        ("converse", {"fault": "half-head"}),
        ("converse", {"usage": "none"}),
        (STREAM, {"fault": "reset"}),
        (STREAM, {"fault": "cut", "after_frames": "1"}),
        (STREAM, {"fault": "cut", "after_frames": "5"}),
        (STREAM, {"fault": "exception-frame", "after_frames": "4"}),
        (STREAM, {"usage": "none"}),
        (INVOKED, {"fault": "cut", "after_frames": "1"}),  # whose first event states usage, but not all of it
        (INVOKED, {"fault": "cut", "after_frames": "4"}),
        (INVOKED, {"fault": "exception-frame", "after_frames": "2"}),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each.values()),
)
async def test_call_of_unknown_usage_costs_its_ceiling(path: str, wishes: dict[str, str], tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await is_hard(port, 1.0)
        body = CLAUDE_BODY | {"max_tokens": 100} if path == INVOKED else TURN
        await ask(port, path, body, **{f"x_simulate_{name}": value for name, value in wishes.items()})
        assert len(port.bedrock.ledger) == 1
        assert port.bedrock.ledger[0].usage is not None
        after = await flushed(port)
        assert after.spent == after.holds[0].leased > 100 * 15 * 10**6
        assert port.recording.flusher.journal.recorded.estimated_requests == 1


async def test_stream_with_damaged_text_costs_what_its_end_states(tmp_path: Path) -> None:
    """The frame with the usage is whole, whatever happened to one before it."""
    async with data_port(tmp_path) as port:
        await is_hard(port, 1.0)
        await ask(port, STREAM, x_simulate_fault="bad-crc", x_simulate_after_frames="3")
        after, usage = await flushed(port), port.bedrock.ledger[0].usage
        assert usage is not None
        assert after.spent == usage.input_tokens * 3 * 10**6 + usage.output_tokens * 15 * 10**6
        assert port.recording.flusher.journal.recorded.estimated_requests == 0


@pytest.mark.parametrize("path", ["converse", STREAM])
async def test_call_outliving_its_process_costs_its_ceiling(path: str, tmp_path: Path) -> None:
    """And all else that the process held is in the bucket again when it has ended."""
    async with data_port(tmp_path) as port:
        await is_hard(port, 1.0)
        assert await ask(port) == 200
        spent = (await flushed(port)).spent
        calling = asyncio.create_task(ask(port, path, x_simulate_fault="stall", x_simulate_after_frames="1"))
        while len(port.bedrock.ledger) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        day = day_of(port)
    assert await calling in (0, 503)
    async with data_port(tmp_path) as port:
        after = await budget_of(port.store, day)
        assert after.spent - spent > 100 * 15 * 10**6
        assert [(hold.leased, hold.is_closed) for hold in after.holds] == [(after.spent, True)]
        assert after.bucket.unleased == USD - after.spent
