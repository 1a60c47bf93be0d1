"""A hard budget over real sockets: no call is sent whose worst case is not held, and the rest of it comes back."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value, iterate_rows

from tests.support.data_port import APP, ORG, DataPort, DataPortResponse, data_port

TURN: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"text": "How are you?"}]}],
    "inferenceConfig": {"maxTokens": 100},
}
SCOPE = Scope(ORG, APP)
USD = 10**12  # in pico
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 30).decode()


@asynccontextmanager
async def hard(folder: Path, quotas: dict[str, float], **more: Any) -> AsyncIterator[DataPort]:
    async with data_port(folder, **more) as port:
        await budget(port, quotas)
        yield port


async def budget(port: DataPort, quotas: dict[str, float], version: int = 1, enforcement: str = "hard") -> None:
    micros: dict[str, Value] = {label: round(usd * 10**6) for label, usd in quotas.items()}
    item: dict[str, Value] = {
        "timezone": "UTC",
        "model_ordering": list(quotas),
        "quotas": micros,
        "enforcement": enforcement,
        "version": version,
    }
    await port.store.put(Put(schema.org_config_key(ORG), item))


async def ask(port: DataPort, label: str = "premium", path: str = "converse", body: Any = TURN) -> DataPortResponse:
    return await port.ask(f"/{path}" if "/" in path else f"/model/{label}/{path}", body)


async def name_of(port: DataPort, label: str = "premium") -> HardBudgetKey:
    period = port.budget_registry._caller_days[ORG, APP][0].budget.span.key
    return HardBudgetKey(SCOPE.key, label, period)


async def in_store(port: DataPort, label: str = "premium") -> tuple[HardBudgetBucket, list[BudgetLeaseRow]]:
    name = await name_of(port, label)
    item = await port.store.get(name.bucket_key)
    assert item is not None
    return HardBudgetBucket.from_item(item), [
        BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(port.store, name.lease_query)
    ]


async def true_spend(port: DataPort, label: str = "premium") -> int:
    await port.recording.flusher.flush()
    return await read_spent_pico(port.store, await name_of(port, label))


async def test_hard_budget_refuses_when_ceiling_does_not_fit(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 0.02}) as port:
        answers = [await ask(port)]
        while answers[-1].status == 200:
            answers.append(await ask(port))
        refused = answers.pop()
        assert len(answers) > 3
        assert refused.status == 400
        assert refused.headers["x-amzn-errortype"].startswith("ServiceQuotaExceededException")
        assert "of app web of org" in refused.message
        assert "may cost up to $0.0" in refused.message
        assert "it resets at" in refused.message
        spent = await true_spend(port)
        assert 0 < spent <= 0.02 * USD
        small = {**TURN, "inferenceConfig": {"maxTokens": 1}}
        assert (await ask(port, body=small)).status in (200, 400)
        assert len(port.bedrock.ledger) >= len(answers)


async def test_unspent_reservation_is_returned_at_shutdown(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        assert (await ask(port)).status == 200
        bucket, holds = await in_store(port)
        assert bucket.unleased + sum(hold.leased for hold in holds) == bucket.quota == USD
        assert holds[0].leased > 0
        name = await name_of(port)
        spent = await true_spend(port)
    async with data_port(tmp_path) as port:
        assert HardBudgetBucket.from_item(await port.store.get(name.bucket_key) or {}).unleased == USD - spent


async def test_hard_budget_continues_with_next_label(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 0.02, "economy": 0.5}) as port:
        labels = [(await ask(port)).headers["x-price-keeper-label"] for _ in range(30)]
        assert labels[0] == "premium"
        assert labels[-1] == "economy"
        assert await true_spend(port) <= 0.02 * USD
        assert await true_spend(port, "economy") > 0


async def test_missing_output_limit_is_inserted(tmp_path: Path) -> None:
    labels = dict(Config.development().labels)
    labels["premium"] = replace(labels["premium"], max_output_tokens=33)
    async with hard(tmp_path, {"premium": 1.0, "standard": 1.0}, labels=labels) as port:
        body = {"messages": TURN["messages"]}
        answer = await ask(port, body=body)
        assert answer.status == 200
        assert answer.body["usage"]["outputTokens"] <= 33
        refused = await ask(port, "standard", body=body)
        assert refused.status == 400
        assert "max_output_tokens" in refused.message


async def test_model_in_chat_body_is_replaced_at_its_place(tmp_path: Path) -> None:
    labels = dict(Config.development().labels)
    labels["premium"] = replace(labels["premium"], max_output_tokens=20)
    async with hard(tmp_path, {"premium": 1.0}, labels=labels) as port:
        body = {"messages": [{"role": "user", "content": "hello"}], "model": "premium"}
        answer = await ask(port, path="openai/v1/chat/completions", body=body)
        assert answer.status == 200, answer.body
        assert answer.headers["x-price-keeper-label"] == "premium"
        assert await true_spend(port) > 0


async def test_non_text_body_is_counted_by_bedrock(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        image = {"image": {"format": "png", "source": {"bytes": PIXEL}}}
        body = {**TURN, "messages": [{"role": "user", "content": [image, {"text": "what is it?"}]}]}
        assert (await ask(port, body=body)).status == 200
        assert [entry.operation for entry in port.bedrock.ledger].count("CountTokens") == 1


async def test_unbounded_request_is_refused(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        film = {"video": {"format": "mp4", "source": {"s3Location": {"uri": "s3://bucket/film.mp4"}}}}
        body = {**TURN, "messages": [{"role": "user", "content": [film]}]}
        refused = await ask(port, body=body)
        assert refused.status == 400
        assert refused.headers["x-amzn-errortype"].startswith("ValidationException")
        twice = json.dumps(TURN).replace('"maxTokens": 100', '"maxTokens": 1, "maxTokens": 100000')
        headers = {"Authorization": f"Bearer {port.token}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{port.url}/model/premium/converse", headers=headers, data=twice) as answer,
        ):
            assert answer.status == 400
        assert not port.bedrock.ledger


async def test_truncated_response_costs_its_ceiling(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        headers = {"Authorization": f"Bearer {port.token}", "Content-Type": "application/json"}
        headers |= {"x-simulate-fault": "cut", "x-simulate-after-frames": "2"}
        async with aiohttp.ClientSession() as session:
            answer = await session.post(
                f"{port.url}/model/premium/converse-stream", headers=headers, data=json.dumps(TURN)
            )
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        spent = await true_spend(port)
        bucket, holds = await in_store(port)
        assert spent >= Decimal(100) * 15 * 10**6  # its 100 tokens at 15 USD for a million
        assert bucket.unleased + sum(hold.leased for hold in holds) == USD
        assert sum(hold.used for hold in holds) == spent


async def test_refused_call_costs_nothing(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        headers = {"Authorization": f"Bearer {port.token}", "Content-Type": "application/json"}
        headers["x-simulate-fault"] = "access-denied"
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{port.url}/model/premium/converse", headers=headers, data=json.dumps(TURN)) as answer,
        ):
            assert answer.status == 403
        assert await true_spend(port) == 0


async def test_switch_from_soft_to_hard_counts_former_spend(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await budget(port, {"premium": 1.0}, enforcement="soft")
        assert [(await ask(port)).status for _ in range(3)] == [200] * 3
        soft = await true_spend(port)
        await budget(port, {"premium": 1.0}, version=2)
        port.budget_registry._caller_days.clear()
        port.budget_registry._refresh_states.clear()
        assert (await ask(port)).status == 200
        bucket, holds = await in_store(port)
        assert bucket.spent_without_lease == soft
        assert bucket.unleased == USD - soft - sum(hold.leased for hold in holds)


async def test_removed_and_restored_quota_is_not_spent_twice(tmp_path: Path) -> None:
    """Within a minute of each change, as by a look at the settings."""

    async def quotas(version: int, **usd: float) -> None:
        micros: dict[str, Value] = {label: round(each * 10**6) for label, each in usd.items()}
        item: dict[str, Value] = {"timezone": "UTC", "quotas": micros, "enforcement": "hard", "version": version}
        await port.store.put(Put(schema.org_config_key(ORG), item))
        if port.budget_registry._caller_days:
            await port.budget_registry.refresher.refresh_now(port.budget_registry._caller_days[ORG, APP][1])

    async with data_port(tmp_path) as port:
        await quotas(1, premium=0.05, economy=1.0)
        assert [(await ask(port)).status for _ in range(3)] == [200] * 3
        await quotas(2, economy=1.0)
        assert [(await ask(port)).status for _ in range(20)] == [200] * 20
        await true_spend(port)
        await quotas(3, premium=0.05, economy=1.0)
        await ask(port)
        await port.hard.leases.tick()
        answers = await asyncio.gather(*(ask(port) for _ in range(60)))
        assert {answer.status for answer in answers} <= {200, 400, 429}
        assert await true_spend(port) <= 0.05 * USD
        _, holds = await in_store(port)
        assert all(hold.used <= hold.leased for hold in holds)


@pytest.mark.parametrize(("fault", "status"), [("throttle", 429), ("5xx", 503), ("access-denied", 400)])
async def test_failing_token_count_is_reported(tmp_path: Path, fault: str, status: int) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        image = {"image": {"format": "png", "source": {"bytes": PIXEL}}}
        body = {**TURN, "messages": [{"role": "user", "content": [image]}]}
        port.bedrock.plan({"fault": fault})
        assert (await ask(port, body=body)).status == status


async def test_model_without_count_tokens_is_bounded_by_bytes(tmp_path: Path) -> None:
    async with hard(tmp_path, {"premium": 1.0}) as port:
        image = {"image": {"format": "png", "source": {"bytes": PIXEL}}}
        schema_of = {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": "x" * 300_000}}}}
        body = {**TURN, "messages": [{"role": "user", "content": [image]}], "outputConfig": schema_of}
        refused = await ask(port, body=body)
        assert refused.status == 400
        assert "may cost up to $" in refused.message
