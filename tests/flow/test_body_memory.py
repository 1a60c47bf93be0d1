"""Copies that are made of a body on its way count in the memory that all requests share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import orjson
import pytest
from price_keeper.budgets.label_selector import LARGE_BODY_BYTES, run_in_thread_if_large
from price_keeper.config import Config
from price_keeper.config.config_sections import UpstreamConfig
from price_keeper.data_port_wiring import SIMULATED

from tests.support.data_port import DataPort, data_port
from tests.support.raw_clients import eventually
from tests.support.simulated import CHAT_PATH

TEXT = "x" * 1_000_000
CHAT = {"model": "premium", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 9}
TURN = {"messages": [{"role": "user", "content": [{"text": TEXT}]}]}
CONVERSE_PATH = "/model/premium/converse"


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    labels = Config.development().labels
    labels = {"premium": replace(labels["premium"], model="openai.gpt-oss-120b-1:0")}
    async with data_port(tmp_path, labels=labels) as opened:
        yield opened


async def answered_in(port: DataPort, room: float, path: str, body: dict[str, object]) -> tuple[int, str]:
    """Status and body, with room for so many of these bodies."""
    size = len(orjson.dumps(body))
    port.listener.limits = replace(port.listener.limits, requests_bytes=int(room * size))
    headers = {"authorization": f"Bearer {port.token}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(port.url + path, headers=headers, data=orjson.dumps(body)) as answer,
    ):
        text = await answer.text()
    await eventually(lambda: port.listener.reserved_bytes == 0)
    return answer.status, text


@pytest.mark.parametrize(
    ("path", "body", "times"),
    [
        (CONVERSE_PATH, TURN, 1),
        (CHAT_PATH, CHAT, 2),  # its label's model takes the place of its own
        (CHAT_PATH, CHAT | {"stream": True}, 3),  # and Bedrock is asked for the usage
    ],
)
async def test_request_reserves_memory_for_each_copy_of_body(
    port: DataPort, path: str, body: dict[str, object], times: int
) -> None:
    status, text = await answered_in(port, times - 0.2, path, body)
    assert status == 503
    assert "memory" in text
    assert len([entry for entry in port.bedrock.ledger if entry.body_size]) == 0
    assert (await answered_in(port, times + 0.2, path, body))[0] == 200
    assert len([entry for entry in port.bedrock.ledger if entry.body_size]) == 1


async def test_copy_with_caller_metadata_reserves_memory(tmp_path: Path) -> None:
    async with data_port(tmp_path, upstream=UpstreamConfig(endpoint=SIMULATED, request_metadata=True)) as port:
        assert (await answered_in(port, 1.8, CONVERSE_PATH, TURN))[0] == 503
        assert (await answered_in(port, 2.2, CONVERSE_PATH, TURN))[0] == 200


async def test_large_bodies_are_parsed_one_at_a_time() -> None:
    """Each may take several times its memory while it is parsed."""
    inside, most = 0, 0
    lock = threading.Lock()

    def look() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.001)  # in which another thread runs
        with lock:
            inside -= 1

    body = bytes(LARGE_BODY_BYTES)
    await asyncio.gather(*(run_in_thread_if_large(body, look) for _ in range(20)))
    assert most == 1
