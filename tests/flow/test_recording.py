"""What each call costs, through the whole data port with real boto3: recorded as the simulated Bedrock counts it."""

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
from price_keeper.config.config_sections import GuardrailsConfig, LongContext, PricesConfig, UnitPrices
from price_keeper.domain import Scope
from price_keeper.ledger.ledger_entries import UsageCounts

from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.raw_clients import eventually
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE_BODY, LONG, TURN

GUARDRAILS = GuardrailsConfig(UnitPrices(*(Decimal(number) for number in (15, 20, 25, 30, 35, 40, 45, 50, 55))))
JOB_USD = Decimal("1.5")
PICO = {"premium": (3, 15, "0.30", "3.75", "6"), "economy": ("0.06", "0.24", "0.015", 0, 0)}
QUESTION = {"guardrailIdentifier": "g1", "guardrailVersion": "1", "source": "INPUT"}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    labels = dict(Config.development().labels)
    long = LongContext(*(Decimal(usd) for usd in ("6", "22.5", "0.6", "7.5", "12")), above_input_tokens=200_000)
    labels["premium"] = replace(
        labels["premium"], prices_usd_per_1m=replace(labels["premium"].prices_usd_per_1m, long_context=long)
    )
    labels["film"] = replace(labels["economy"], model="amazon.nova-reel-v1:0", price_usd_per_async_job=JOB_USD)
    labels["clip"] = replace(
        labels["economy"], model="amazon.nova-reel-v1:1", prices_usd_per_unit={"video_second": Decimal("0.08")}
    )
    labels["pictures"] = replace(
        labels["economy"],
        model="amazon.nova-canvas-v1:0",
        prices_usd_per_1m=PricesConfig(Decimal(0), Decimal(0)),
        prices_usd_per_unit={"image": Decimal("0.04"), "image_2048_premium": Decimal("0.08")},
    )
    labels["chat"] = replace(labels["economy"], model=CHAT["model"], format="openai")
    async with data_port(tmp_path, labels=labels, guardrails=GUARDRAILS) as opened:
        yield opened


def sums(port: DataPort) -> dict[str, UsageCounts]:
    """By label, of what is in the journal."""
    found = port.recording.flusher.journal.tally.sums()
    assert {counter.scope for counter in found} <= {Scope(ORG, APP).key}
    return {counter.label: counts for counter, counts in found.items()}


def of_ledger(port: DataPort, label: str, prices: tuple[Any, ...]) -> UsageCounts:
    """What the last call used, priced by hand."""
    usage = port.bedrock.ledger[-1].usage
    assert usage is not None
    tokens = tuple(getattr(usage, name) for name in UsageCounts._fields if name.endswith("_tokens"))
    pico = sum(int(count * Decimal(price) * 10**6) for count, price in zip(tokens, prices, strict=True))
    return UsageCounts(1, 0, *tokens, 0, pico)


async def call(client: Any, operation: str, **arguments: Any) -> Any:
    def carried_out() -> Any:
        answer = getattr(client, operation)(**arguments)
        for name in ("stream", "body"):
            if name in answer:
                answer[name] = list(answer[name])
        return answer

    return await asyncio.to_thread(carried_out)


@pytest.mark.parametrize("operation", ["converse", "converse_stream"])
@pytest.mark.parametrize("label", ["premium", "economy"])
async def test_conversations_are_charged(port: DataPort, operation: str, label: str) -> None:
    answer = await call(port.client(), operation, modelId=label, **TURN)
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-price-keeper-price-source"] == "config"
    assert sums(port) == {label: of_ledger(port, label, PICO[label])}


@pytest.mark.parametrize("operation", ["invoke_model", "invoke_model_with_response_stream"])
async def test_invocations_with_both_cache_lifetimes_are_charged(port: DataPort, operation: str) -> None:
    cached = [
        {"type": "text", "text": LONG + str(ttl), "cache_control": {"type": "ephemeral", "ttl": ttl}}
        for ttl in ("1h", "5m")
    ]
    body = json.dumps(CLAUDE_BODY | {"system": cached})
    client = port.client()
    await call(client, operation, modelId="premium", body=body)
    first = of_ledger(port, "premium", PICO["premium"])
    assert first.cache_write_5m_tokens > 0 < first.cache_write_1h_tokens
    assert sums(port) == {"premium": first}
    await call(client, operation, modelId="premium", body=body)
    second = of_ledger(port, "premium", PICO["premium"])
    assert second.cache_read_tokens > 0
    assert sums(port) == {"premium": first.plus(second)}


@pytest.mark.parametrize(("tokens", "prices"), [(200_000, (3, 15)), (200_001, (6, "22.5"))])
@pytest.mark.parametrize("operation", ["converse", "converse_stream"])
async def test_long_contexts_are_charged(port: DataPort, operation: str, tokens: int, prices: tuple[Any, Any]) -> None:
    client = port.client(x_simulate_input_tokens=str(tokens))
    await call(client, operation, modelId="premium", **TURN)
    assert sums(port) == {"premium": of_ledger(port, "premium", (*prices, 0, 0, 0))}


async def test_unanswered_long_context_is_estimated_as_long(port: DataPort) -> None:
    client = port.client(x_simulate_fault="reset")
    long = [{"role": "user", "content": [{"text": "word " * 180_000}]}]
    with pytest.raises(Exception, match=r"."):
        await call(client, "converse", modelId="premium", messages=long)
    found = sums(port)["premium"]
    assert found.input_tokens > 200_000 * found.requests
    assert found.pico == found.input_tokens * 6 * 10**6 + found.output_tokens * 225 * 10**5


async def test_intent_of_long_context_has_its_price(port: DataPort) -> None:
    """So that a process that dies has not counted too little."""
    client = port.client(read_timeout=1, x_simulate_latency_ms="60000")
    client.meta.config.retries["total_max_attempts"] = 1
    long = [{"role": "user", "content": [{"text": "word " * 180_000}]}]
    task = asyncio.create_task(call(client, "converse", modelId="premium", messages=long))
    await eventually(lambda: port.recording.flusher.journal.open_calls > 0)
    (intent, *_) = port.recording.flusher.journal._open.values()
    assert intent.input_tokens > 200_000
    assert intent.pico == intent.input_tokens * 6 * 10**6 + intent.output_tokens * 225 * 10**5
    with pytest.raises(Exception, match=r"."):
        await task


async def test_token_counting_is_free(port: DataPort) -> None:
    await call(port.client(), "count_tokens", modelId="premium", input={"converse": TURN})
    assert (sums(port), port.recording.flusher.journal.open_calls) == ({}, 0)


async def test_guardrails_are_charged_by_unit(port: DataPort) -> None:
    content = [{"text": {"text": "a harmless text " * 200}}]
    answer = await call(port.client(), "apply_guardrail", **QUESTION, content=content)
    units = {name: count for name, count in answer["usage"].items() if count}
    found = sums(port)["guardrails"]
    assert found.guardrail_units == sum(count for name, count in units.items() if "Free" not in name) > 0
    assert found.pico > 0
    assert found.pico % (5 * 10**9) == 0  # so many dollars for a thousand


async def test_job_has_its_own_price(port: DataPort) -> None:
    start = {"modelInput": {"a": 1}, "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://bucket/x"}}}
    await call(port.client(), "start_async_invoke", modelId="film", **start)
    assert sums(port) == {"async-jobs": UsageCounts(1, pico=15 * 10**11)}


async def start(port: DataPort, token: str = "", client: Any = None, **more: Any) -> str:
    """The job's ARN."""
    arguments = {"clientRequestToken": token} if token else {}
    output = {"s3OutputDataConfig": {"s3Uri": "s3://bucket/x"}}
    call = (client or port.client()).start_async_invoke
    job = {"modelId": "film", "modelInput": {"a": 1}, "outputDataConfig": output} | arguments | more
    return str((await asyncio.to_thread(call, **job))["invocationArn"])


async def test_repeated_job_start_is_charged_once(port: DataPort) -> None:
    assert len({await start(port, "one") for _ in range(3)}) == 1
    assert sums(port) == {"async-jobs": UsageCounts(1, pico=15 * 10**11)}
    assert port.recording.flusher.journal.open_calls == 0
    assert len({await start(port, "two"), await start(port), await start(port)}) == 3
    assert sums(port) == {"async-jobs": UsageCounts(4, pico=4 * 15 * 10**11)}


async def test_job_with_price_per_second_costs_its_seconds_once(port: DataPort) -> None:
    clip = {"modelId": "clip", "modelInput": {"videoGenerationConfig": {"durationSeconds": 6}}}
    assert len({await start(port, "one", **clip) for _ in range(2)}) == 1
    assert sums(port) == {"async-jobs": UsageCounts(1, pico=48 * 10**10, video_seconds=6)}


async def test_job_whose_seconds_are_not_known_is_refused(port: DataPort) -> None:
    with pytest.raises(ClientError, match="no price here"):
        await start(port, modelId="clip")
    assert sums(port) == {}
    assert port.recording.flusher.journal.open_calls == 0


async def test_job_whose_length_is_not_understood_is_refused(port: DataPort) -> None:
    with pytest.raises(ClientError, match="durationSeconds"):
        await start(port, modelId="clip", modelInput={"videoGenerationConfig": {"durationSeconds": "120.0"}})
    assert sums(port) == {}
    assert not port.bedrock.ledger
    assert port.recording.flusher.journal.open_calls == 0


@pytest.mark.parametrize(
    "body", [rb'{"prompt": "\ud800"}', b'\xef\xbb\xbf{"prompt": "a"}', '{"prompt": "a"}'.encode("utf-16")]
)
async def test_pictures_in_a_body_that_cannot_be_read_are_refused(port: DataPort, body: bytes) -> None:
    with pytest.raises(ClientError, match="no JSON"):
        await call(port.client(), "invoke_model", modelId="pictures", body=body)
    assert sums(port) == {}
    assert not port.bedrock.ledger
    assert port.recording.flusher.journal.open_calls == 0


async def test_pictures_in_an_unknown_form_are_estimated_as_one_of_the_dearest(port: DataPort) -> None:
    with pytest.raises(ClientError):
        await call(port.client(x_simulate_fault="reset"), "invoke_model", modelId="pictures", body='{"new": 1}')
    found = sums(port)["pictures"]
    assert found.requests == found.estimated_requests == found.images > 0
    assert found.pico == found.images * 8 * 10**10


async def test_refused_job_costs_nothing(port: DataPort) -> None:
    await start(port, "one")
    with pytest.raises(ClientError, match="ConflictException"):
        await start(port, "one", modelInput={"a": 2})
    with pytest.raises(ClientError):
        await start(port, client=port.client(x_simulate_fault="quota"))
    assert sums(port) == {"async-jobs": UsageCounts(1, pico=15 * 10**11)}
    assert port.recording.flusher.journal.open_calls == 0


async def test_job_with_lost_response_is_estimated(port: DataPort) -> None:
    with pytest.raises(Exception, match=r"."):
        await start(port, client=port.client(x_simulate_fault="reset"))
    found = sums(port)["async-jobs"]
    assert found.requests == found.estimated_requests == len(port.bedrock.ledger)


@pytest.mark.parametrize(
    ("operation", "arguments", "words"),
    [
        ("apply_guardrail", {**QUESTION, "content": [{"text": {"text": "x"}}]}, "guardrails have no prices here"),
        (
            "start_async_invoke",
            {"modelId": "economy", "modelInput": {}, "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://b/x"}}},
            "asynchronous jobs of 'economy' have no price here",
        ),
    ],
)
async def test_call_without_price_is_not_sent(tmp_path: Path, operation: str, arguments: Any, words: str) -> None:
    async with data_port(tmp_path) as port:
        with pytest.raises(ClientError, match=words):
            await call(port.client(), operation, **arguments)
        assert len(port.bedrock.ledger) == 0


async def chat(port: DataPort, **more: Any) -> bytes:
    body = CHAT | {"model": "chat"} | more
    headers = {"authorization": f"Bearer {port.token}"}
    async with aiohttp.ClientSession() as http, http.post(port.url + CHAT_PATH, json=body, headers=headers) as answer:
        assert answer.status == 200
        return await answer.read()


async def test_chat_stream_is_counted_with_or_without_usage_option(port: DataPort) -> None:
    whole = json.loads(await chat(port))
    with_usage = await chat(port, stream=True, stream_options={"include_usage": True})
    assert json.loads(with_usage.split(b"data: ")[-2])["usage"] == whole["usage"]
    before = sums(port)["chat"]
    untold = await chat(port, stream=True)
    assert b'"choices":[]' not in untold.replace(b" ", b"")
    assert untold.endswith(b"data: [DONE]\n\n")
    assert port.bedrock.ledger[-1].body.count(b"include_usage") == 1
    assert sums(port)["chat"] == before.plus(of_ledger(port, "chat", PICO["economy"]))
    assert sums(port)["chat"].estimated_requests == 0


@pytest.mark.parametrize("frames", [0, 1, 5])
async def test_error_in_chat_stream_charges_output_before_it(port: DataPort, frames: int) -> None:
    wishes = {"x-simulate-fault": "exception-frame", "x-simulate-after-frames": str(frames)}
    headers = {"authorization": f"Bearer {port.token}"} | wishes
    body = CHAT | {"model": "chat", "stream": True}
    async with aiohttp.ClientSession() as http, http.post(port.url + CHAT_PATH, json=body, headers=headers) as answer:
        assert b'"error"' in await answer.read()
    assert port.recording.flusher.journal.open_calls == 0
    found = sums(port)
    assert bool(found) is bool(frames)
    if found:
        assert (found["chat"].estimated_requests, found["chat"].output_tokens) == (1, 4 * frames)


async def test_errors_cost_nothing(port: DataPort) -> None:
    for fault in ("throttle", "quota", "error"):
        client = port.client(x_simulate_fault=fault)
        with pytest.raises(ClientError):
            await call(client, "converse", modelId="premium", **TURN)
    with pytest.raises(ClientError):
        await call(port.client(), "converse", modelId="nothing", **TURN)
    assert (sums(port), port.recording.flusher.journal.open_calls) == ({}, 0)


@pytest.mark.parametrize("frames", [0, 1, 3, 10])
async def test_cut_stream_is_estimated_from_received_frames(port: DataPort, frames: int) -> None:
    client = port.client(x_simulate_fault="cut", x_simulate_after_frames=str(frames))
    with pytest.raises(Exception, match=r"."):
        await call(client, "converse_stream", modelId="premium", **TURN)
    found = sums(port)["premium"]
    assert found.requests == found.estimated_requests >= 1
    assert found.input_tokens > 0
    assert found.pico == found.input_tokens * 3 * 10**6 + found.output_tokens * 15 * 10**6


async def test_disconnected_caller_is_charged_exactly(port: DataPort) -> None:
    headers = {"authorization": f"Bearer {port.token}", "x-simulate-frame-ms": "20"}
    async with aiohttp.ClientSession() as http:
        url = f"{port.url}/model/premium/converse-stream"
        answer = await http.post(url, json=TURN, headers=headers)
        await answer.content.read(50)
        answer.close()
    await eventually(lambda: port.recording.flusher.journal.open_calls == 0)
    assert sums(port) == {"premium": of_ledger(port, "premium", PICO["premium"])}


async def test_missing_response_is_estimated(port: DataPort) -> None:
    client = port.client(x_simulate_fault="reset")
    with pytest.raises(Exception, match=r"."):
        await call(client, "converse", modelId="premium", **TURN)
    found = sums(port)["premium"]
    assert found.requests == found.estimated_requests == len(port.bedrock.ledger)
    assert found.pico > 0


async def test_receipt_is_written_before_caller_has_everything(port: DataPort) -> None:
    """So that no answered call can be lost."""
    for operation in ("converse", "converse_stream"):
        for _ in range(20):
            before = port.recording.flusher.journal.recorded.requests
            await call(port.client(), operation, modelId="premium", **TURN)
            assert port.recording.flusher.journal.recorded.requests == before + 1
