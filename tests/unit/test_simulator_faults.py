"""Faults as boto3 sees them. Whatever befalls an answer, what it used is owed: the ledger has it."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
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
    boto_client,
    open_caller,
)

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
async def test_error_replaces_response(simulator, ask_simulator, operation, wishes, code, status):
    ask_simulator.set_faults(**wishes)
    with pytest.raises(ClientError) as failed:
        await ask_simulator(operation, modelId=CLAUDE, **TURN)
    assert failed.value.response["Error"]["Code"] == code
    assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    (entry,) = simulator.ledger
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
async def test_stream_breaks_as_requested(simulator, ask_simulator, caplog, wishes, error):
    ask_simulator.set_faults(**wishes)
    with pytest.raises(error):
        await ask_simulator("converse_stream", modelId=CLAUDE, **TURN)
    (entry,) = simulator.ledger
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
async def test_single_response_breaks_as_requested(simulator, ask_simulator, operation, arguments, wishes):
    ask_simulator.set_faults(**wishes)
    with pytest.raises((ConnectionClosedError, ResponseStreamingError, IncompleteReadError)):
        await ask_simulator(operation, modelId=CLAUDE, **arguments)
    (entry,) = simulator.ledger
    assert not entry.is_whole
    assert entry.usage.output_tokens > 0


async def test_frames_pass_until_fault_strikes(ask_simulator):
    ask_simulator.set_faults(fault="exception-frame", after_frames=3, exception="throttlingException")
    events: list[Any] = []
    stream = (await asyncio.to_thread(ask_simulator.client.converse_stream, modelId=CLAUDE, **TURN))["stream"]
    with closing(stream), pytest.raises(EventStreamError, match="throttlingException"):
        await asyncio.to_thread(events.extend, stream)
    assert [next(iter(event)) for event in events] == ["messageStart", "contentBlockDelta", "contentBlockDelta"]


async def test_exception_of_single_response_is_an_error(ask_simulator):
    ask_simulator.set_faults(fault="exception-frame", exception="modelTimeoutException")
    with pytest.raises(ask_simulator.client.exceptions.ModelTimeoutException):
        await ask_simulator("converse", modelId=CLAUDE, **TURN)


@pytest.mark.parametrize("wishes", [{"fault": "stall"}, {"fault": "stall", "after_frames": 2}])
async def test_stall_lasts_until_caller_gives_up(simulator, wishes):
    async with open_caller(simulator.url, read_timeout=0.2) as ask_simulator:
        ask_simulator.set_faults(**wishes)
        with pytest.raises((ReadTimeoutError, StreamTimeoutError)):
            await ask_simulator("converse_stream", modelId=CLAUDE, **TURN)
    (entry,) = simulator.ledger
    assert not entry.is_whole
    assert entry.usage.output_tokens > 0


async def test_fault_may_strike_only_first_attempts(simulator):
    async with open_caller(simulator.url, retries={"total_max_attempts": 3, "mode": "standard"}) as ask_simulator:
        ask_simulator.set_faults(fault="reset", times=1)
        for _ in range(2):
            await ask_simulator("converse", modelId=CLAUDE, **TURN)
    first, again, second, once_more = simulator.ledger
    assert [entry.fault for entry in simulator.ledger] == ["reset", "", "reset", ""]
    assert first.invocation_id == again.invocation_id != second.invocation_id == once_more.invocation_id
    assert again.is_whole


async def test_faults_can_be_planned_for_callers_without_headers(simulator, ask_simulator):
    simulator.plan({"fault": "throttle"}, {"output_tokens": 3})
    with pytest.raises(ask_simulator.client.exceptions.ThrottlingException):
        await ask_simulator("converse", modelId=CLAUDE, **TURN)
    assert (await ask_simulator("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] == 3
    simulator.always(tier="flex", output_tokens=4)
    for _ in range(2):
        assert (await ask_simulator("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] == 4
    simulator.always()
    assert (await ask_simulator("converse", modelId=CLAUDE, **TURN))["usage"]["outputTokens"] > 4


def test_stream_exceptions_match_service_model():
    with closing(boto_client("http://127.0.0.1:9")) as client:
        model = client.meta.service_model
    stream = model.operation_model("InvokeModelWithResponseStream").output_shape.members["body"]
    assert set(STREAM_EXCEPTIONS) == {name for name in stream.members if name != "chunk"}
