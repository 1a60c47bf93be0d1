"""A client that stops waiting and sends its call again pays once: real boto3, the whole pipeline, a slow Bedrock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.data_port import DataPort, data_port

QUESTION = [{"role": "user", "content": [{"text": "A question with a marker: XYZZY"}]}]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path) as port:
        yield port


async def test_retry_after_timeout_is_one_call_with_one_response(rig: DataPort) -> None:
    client = rig.client(read_timeout=0.5, x_simulate_latency_ms="1200")
    answer = await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert answer["ResponseMetadata"]["RetryAttempts"] >= 1
    assert answer["output"]["message"]["content"][0]["text"]
    assert len(rig.bedrock.ledger) == 1
    assert rig.bedrock.ledger[-1].is_whole


async def test_two_calls_of_one_client_are_separate(rig: DataPort) -> None:
    client = rig.client()
    for _ in range(2):
        await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert len(rig.bedrock.ledger) == 2


async def test_error_is_not_replayed_to_retry(rig: DataPort) -> None:
    """boto3 repeats what was throttled under the same id, and the second try finds Bedrock well."""
    client = rig.client(x_simulate_fault="throttle", x_simulate_times="1")
    answer = await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert answer["ResponseMetadata"]["RetryAttempts"] == 1
    assert len(rig.bedrock.ledger) == 2


@pytest.mark.parametrize(
    ("model", "code", "tries"),
    [("nothing", "ValidationException", 0), ("premium", "ThrottlingException", 2)],
)
async def test_errors_are_what_boto3_expects(rig: DataPort, model: str, code: str, tries: int) -> None:
    client = rig.client(x_simulate_fault="throttle")
    with pytest.raises(ClientError) as refused:
        await asyncio.to_thread(client.converse, modelId=model, messages=QUESTION)
    assert refused.value.response["Error"]["Code"] == code
    assert refused.value.response["ResponseMetadata"]["RetryAttempts"] == tries


async def test_missing_token_is_denied_without_retry(rig: DataPort) -> None:
    client = replace(rig, token="no-token").client()
    with pytest.raises(ClientError) as refused:
        await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert refused.value.response["Error"]["Code"] == "AccessDeniedException"
    assert refused.value.response["ResponseMetadata"]["RetryAttempts"] == 0
    assert len(rig.bedrock.ledger) == 0


async def test_caller_credentials_never_go_upstream(rig: DataPort, caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.to_thread(rig.client().converse, modelId="premium", messages=QUESTION)
    entry = rig.bedrock.ledger[-1]
    sent = b"\n".join(name + b": " + value for name, value in entry.headers)
    assert rig.token.encode() not in sent
    assert b"any/" not in sent
    assert b"x-amz-security-token" not in sent.lower()
    assert rig.token not in caplog.text
    assert "XYZZY" not in caplog.text


async def test_stream_is_complete_and_cut_one_fails(rig: DataPort) -> None:
    def events(client: Any) -> list[Any]:
        return list(client.converse_stream(modelId="standard", messages=QUESTION)["stream"])

    whole = await asyncio.to_thread(events, rig.client())
    assert "metadata" in whole[-1]
    with pytest.raises(Exception, match=r"."):
        await asyncio.to_thread(events, rig.client(x_simulate_fault="cut", x_simulate_after_frames="3"))
