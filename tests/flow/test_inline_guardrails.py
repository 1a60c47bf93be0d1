"""Guardrails that calls of models name, through the whole data port: paid as the simulated Bedrock counts units."""

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
from price_keeper.config.config_sections import GuardrailsConfig, UnitPrices
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.usage.guardrail_usage import build_guardrail_prices, price_guardrail
from price_keeper.usage.model_families import UNBILLED_GUARDRAIL_COUNTS

from tests.support.data_port import DataPort, data_port
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE_BODY

GUARDRAILS = GuardrailsConfig(UnitPrices(*(Decimal(number) for number in (15, 20, 25, 30, 35, 40, 45, 50, 55))))
DEAREST = 55 * 10**9
UNITS = build_guardrail_prices(GUARDRAILS)
QUESTION = [{"role": "user", "content": [{"text": "a harmless text " * 200}]}]  # 3,200 characters
NAMED = {"guardrailIdentifier": "g1", "guardrailVersion": "1"}
HEADERS = {"x-amzn-bedrock-guardrailidentifier": "g1", "x-amzn-bedrock-guardrailversion": "1"}
CLAUDE = json.dumps(CLAUDE_BODY | {"messages": [{"role": "user", "content": "a harmless text " * 200}]})


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path, labels=_labels(), guardrails=GUARDRAILS) as opened:
        yield opened


def _labels() -> dict[str, Any]:
    labels = dict(Config.development().labels)
    return labels | {"chat": replace(labels["premium"], model=CHAT["model"], format="openai")}


async def call(client: Any, operation: str, **arguments: Any) -> None:
    def carried_out() -> None:
        answer = getattr(client, operation)(**arguments)
        for name in ("stream", "body"):
            list(answer.get(name, ()))

    await asyncio.to_thread(carried_out)


async def chat(port: DataPort, trace: str = "", **more: Any) -> int:
    body = CHAT | {"model": "chat", "messages": [{"role": "user", "content": "a harmless text " * 200}]} | more
    headers = {"authorization": f"Bearer {port.token}", **HEADERS} | ({"x-amzn-bedrock-trace": trace} if trace else {})
    async with aiohttp.ClientSession() as http, http.post(port.url + CHAT_PATH, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def ask(port: DataPort, form: str, *, is_traced: bool) -> None:
    """The same question by each operation that can name a guardrail."""
    if form.startswith("converse"):
        config = NAMED | ({"trace": "enabled"} if is_traced else {})
        await call(port.client(), form, modelId="premium", messages=QUESTION, guardrailConfig=config)
    elif form.startswith("invoke"):
        trace = {"trace": "ENABLED"} if is_traced else {}
        await call(port.client(), form, modelId="premium", body=CLAUDE, **NAMED, **trace)
    else:
        assert await chat(port, "ENABLED" if is_traced else "", stream=form == "chat stream") == 200


FORMS = ["converse", "converse_stream", "invoke_model", "invoke_model_with_response_stream", "chat", "chat stream"]


def recorded(port: DataPort) -> UsageCounts:
    """The one counter that all was counted in: the call's own label's."""
    (found,) = port.recording.flusher.journal.tally.sums().items()
    assert found[0].label in ("premium", "chat")
    return found[1]


def of_tokens(port: DataPort) -> tuple[UsageCounts, dict[str, int]]:
    usage = port.bedrock.ledger[-1].usage
    assert usage is not None
    pico = (usage.input_tokens * 3 + usage.output_tokens * 15) * 10**6
    return UsageCounts(1, 0, usage.input_tokens, usage.output_tokens, pico=pico), dict(usage.guardrail_units)


@pytest.mark.parametrize("form", FORMS)
async def test_traced_guardrail_units_are_charged_with_tokens(port: DataPort, form: str) -> None:
    await ask(port, form, is_traced=True)
    tokens, units = of_tokens(port)
    charged = sum(count for name, count in units.items() if name not in UNBILLED_GUARDRAIL_COUNTS)
    assert charged > 2 * 4
    pico = price_guardrail(UNITS, units).pico
    assert pico > 0
    assert recorded(port) == tokens._replace(guardrail_units=charged, pico=tokens.pico + pico)


@pytest.mark.parametrize("form", FORMS)
async def test_missing_trace_estimates_units_and_keeps_exact_tokens(port: DataPort, form: str) -> None:
    await ask(port, form, is_traced=False)
    tokens, units = of_tokens(port)
    found = recorded(port)
    assert found.guardrail_units >= units["contentPolicyUnits"]  # the longest policy, which all have here
    assert found.guardrail_units < 3 * units["contentPolicyUnits"]
    paid = tokens.pico + found.guardrail_units * DEAREST
    assert found == tokens._replace(guardrail_units=found.guardrail_units, pico=paid)
    assert _receipt(port)["flags"] == "guardrail_estimated"


def _receipt(port: DataPort) -> dict[str, str]:
    """What the newest line about a call says of it beside its counts."""
    data = port.recording.flusher.journal._segment.path.read_bytes()
    lines = [line[9:] for line in data.replace(b"\0", b"").split(b"\n") if line]
    about: dict[str, str] = json.loads(lines[-1])[3]
    return about


@pytest.mark.parametrize("form", FORMS)
async def test_missing_guardrail_prices_refuse_call(tmp_path: Path, form: str) -> None:
    async with data_port(tmp_path, labels=_labels()) as port:
        if form.startswith("chat"):
            assert await chat(port, stream=form == "chat stream") == 400
        else:
            with pytest.raises(ClientError, match="guardrails have no prices here"):
                await ask(port, form, is_traced=True)
        assert (len(port.bedrock.ledger), port.recording.flusher.journal.open_calls) == (0, 0)


async def test_escaped_guardrail_key_is_charged(tmp_path: Path) -> None:
    body = json.dumps({"messages": QUESTION, "guardrailConfig": NAMED}).replace(
        '"guardrailC', '"\\u0067uardrail\\u0043'
    )
    async with data_port(tmp_path) as port, aiohttp.ClientSession() as http:
        url, headers = f"{port.url}/model/premium/converse", {"authorization": f"Bearer {port.token}"}
        async with http.post(url, data=body, headers=headers | {"content-type": "application/json"}) as answer:
            assert answer.status == 400
            assert b"guardrails have no prices here" in await answer.read()
        assert len(port.bedrock.ledger) == 0


async def test_lost_response_costs_units_of_intent(port: DataPort) -> None:
    client = port.client(x_simulate_fault="reset")
    with pytest.raises(Exception, match=r"."):
        await call(client, "converse", modelId="premium", messages=QUESTION, guardrailConfig=NAMED)
    found, calls = recorded(port), len(port.bedrock.ledger)
    assert found.requests == found.estimated_requests == calls
    assert found.guardrail_units >= 4 * calls
    paid = found.input_tokens * 3 * 10**6 + found.output_tokens * 15 * 10**6
    assert found.pico == paid + found.guardrail_units * DEAREST


@pytest.mark.parametrize("form", ["converse_stream", "invoke_model_with_response_stream"])
async def test_cut_stream_is_estimated_with_units(port: DataPort, form: str) -> None:
    client = port.client(x_simulate_fault="cut", x_simulate_after_frames="3")
    named = {"guardrailConfig": NAMED, "messages": QUESTION} if form == "converse_stream" else {"body": CLAUDE, **NAMED}
    with pytest.raises(Exception, match=r"."):
        await call(client, form, modelId="premium", **named)
    found = recorded(port)
    assert found.requests == found.estimated_requests
    assert found.guardrail_units >= 4 * found.requests


async def test_call_without_guardrail_has_no_units(port: DataPort) -> None:
    text = [{"role": "user", "content": [{"text": 'of "guardrailConfig" only the name'}]}]
    await call(port.client(), "converse", modelId="premium", messages=text)
    assert recorded(port) == of_tokens(port)[0]
