"""Faults as boto3 sees them. Whatever befalls an answer, what it used is owed: the ledger has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
from bedrock_simulator import SimulatedBedrock
from bedrock_simulator.fault_spec import STREAM_EXCEPTIONS
from botocore.eventstream import ChecksumMismatch
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EventStreamError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from urllib3.exceptions import ProtocolError
from urllib3.exceptions import ReadTimeoutError as StreamTimeoutError

from tests.support.simulated import (
    CLAUDE,
    CLAUDE_BODY,
    TURN,
    BotoCaller,
    boto_client,
    open_caller,
    simulated_bedrock,
)


@pytest.fixture
async def bedrock() -> AsyncIterator[SimulatedBedrock]:
    async with simulated_bedrock() as running:
        yield running


@pytest.fixture
async def ask(bedrock: SimulatedBedrock) -> AsyncIterator[BotoCaller]:
    async with open_caller(bedrock.url) as caller:
        yield caller


ERRORS = [
    ({"fault": "throttle"}, "ThrottlingException", 429),
    ({"fault": "5xx"}, "ServiceUnavailableException", 503),
    ({"fault": "5xx", "status": 500}, "InternalServerException", 500),
    ({"fault": "5xx", "status": 502}, "502", 502),
    ({"fault": "5xx", "status": 504}, "504", 504),
    ({"fault": "model-not-ready"}, "ModelNotReadyException", 429),
    ({"fault": "model-timeout"}, "ModelTimeoutException", 408),
    ({"fault": "model-error"}, "ModelErrorException", 424),
    ({"fault": "quota"}, "ServiceQuotaExceededException", 400),
    ({"fault": "access-denied"}, "AccessDeniedException", 403),
]


@pytest.mark.parametrize("operation", ["converse", "converse_stream"])
@pytest.mark.parametrize(("wishes", "code", "status"), ERRORS)
async def test_error_replaces_response(bedrock, ask, operation, wishes, code, status):
    ask.set_faults(**wishes)
    with pytest.raises(ClientError) as failed:
        await ask(operation, modelId=CLAUDE, **TURN)
    assert failed.value.response["Error"]["Code"] == code
    assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    (entry,) = bedrock.ledger
    assert (entry.status, entry.usage, entry.fault) == (status, None, wishes["fault"])


BROKEN_STREAMS = [
    ({"fault": "cut"}, ProtocolError),
    ({"fault": "cut", "after_frames": 0}, ProtocolError),
    ({"fault": "cut", "after_bytes": 150}, ProtocolError),
    ({"fault": "reset", "after_frames": 2}, ProtocolError),
    ({"fault": "bad-crc"}, ChecksumMismatch),
    ({"fault": "exception-frame"}, EventStreamError),
    ({"fault": "reset"}, ConnectionClosedError),
    ({"fault": "half-head"}, (ConnectionClosedError, ProtocolError)),
]


@pytest.mark.parametrize(("wishes", "error"), BROKEN_STREAMS)
async def test_stream_breaks_as_requested(bedrock, ask, caplog, wishes, error):
    ask.set_faults(**wishes)
    with pytest.raises(error):
        await ask("converse_stream", modelId=CLAUDE, **TURN)
    (entry,) = bedrock.ledger
    assert not entry.is_whole
    assert entry.usage.output_tokens > 0
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []  # it broke on purpose


@pytest.mark.parametrize(
    "wishes",
    [
        {"fault": "cut"},
        {"fault": "cut", "after_bytes": 3},
        {"fault": "reset", "after_bytes": 3},
        {"fault": "half-head"},
    ],
)
@pytest.mark.parametrize(
    ("operation", "arguments"), [("converse", TURN), ("invoke_model", {"body": json.dumps(CLAUDE_BODY)})]
)
async def test_single_response_breaks_as_requested(bedrock, ask, operation, arguments, wishes):
    ask.set_faults(**wishes)
    with pytest.raises((ConnectionClosedError, ResponseStreamingError, IncompleteReadError)):
        await ask(operation, modelId=CLAUDE, **arguments)
    (entry,) = bedrock.ledger
    assert not entry.is_whole
    assert entry.usage.output_tokens > 0


async def test_frames_pass_until_fault_strikes(ask):
    ask.set_faults(fault="exception-frame", after_frames=3, exception="throttlingException")
    events: list[Any] = []
    stream = (await asyncio.to_thread(ask.client.converse_stream, modelId=CLAUDE, **TURN))["stream"]
    with closing(stream), pytest.raises(EventStreamError, match="throttlingException"):
        await asyncio.to_thread(events.extend, stream)
    assert [next(iter(event)) for event in events] == ["messageStart", "contentBlockDelta", "contentBlockDelta"]


async def test_exception_of_single_response_is_an_error(ask):
    ask.set_faults(fault="exception-frame", exception="modelTimeoutException")
    with pytest.raises(ask.client.exceptions.ModelTimeoutException):
        await ask("converse", modelId=CLAUDE, **TURN)


@pytest.mark.parametrize("wishes", [{"fault": "stall"}, {"fault": "stall", "after_frames": 2}])
async def test_stall_lasts_until_caller_gives_up(bedrock, wishes):
    async with open_caller(bedrock.url, read_timeout=0.2) as ask:
        ask.set_faults(**wishes)
        with pytest.raises((ReadTimeoutError, StreamTimeoutError)):
            await ask("converse_stream", modelId=CLAUDE, **TURN)
    (entry,) = bedrock.ledger
    assert not entry.is_whole
    assert entry.usage.output_tokens > 0


async def test_fault_may_strike_only_first_attempts(bedrock):
    async with open_caller(bedrock.url, retries={"total_max_attempts": 3, "mode": "standard"}) as ask:
        ask.set_faults(fault="reset", times=1)
        for _ in range(2):
            await ask("converse", modelId=CLAUDE, **TURN)
    first, again, second, once_more = bedrock.ledger
    assert [entry.fault for entry in bedrock.ledger] == ["reset", "", "reset", ""]
    assert first.invocation_id == again.invocation_id != second.invocation_id == once_more.invocation_id
    assert again.is_whole


async def test_faults_can_be_planned_for_callers_without_headers(bedrock, ask):
    bedrock.plan({"fault": "throttle"}, {"output_tokens": 3})
    with pytest.raises(ask.client.exceptions.ThrottlingException):
        await ask("converse", modelId=CLAUDE, **TURN)
    assert (await ask("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] == 3
    bedrock.always(tier="flex", output_tokens=4)
    for _ in range(2):
        assert (await ask("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] == 4
    bedrock.always()
    assert (await ask("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] > 4


def test_stream_exceptions_match_service_model():
    with closing(boto_client("http://127.0.0.1:9")) as client:
        model = client.meta.service_model
    stream = model.operation_model("InvokeModelWithResponseStream").output_shape.members["body"]
    assert set(STREAM_EXCEPTIONS) == {name for name in stream.members if name != "chunk"}
