"""Answers of the simulator, held to botocore's model of the service; and the same answer to the same request."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from botocore.eventstream import EventStreamBuffer
from botocore.model import ListShape, MapShape, Shape, StructureShape
from yarl import URL

from tests.support.simulated import (
    CALLING,
    CLAUDE,
    CLAUDE_BODY,
    EVERYTHING,
    GUARDED,
    JOB,
    NOVA,
    TURN,
    post,
    simulated_bedrock,
)

# The service's model, as far as the pinned botocore knows it.

YOUNGER = {"serviceTier", "cacheDetails", "p"}  # what Bedrock sends and the pinned model does not know; p in none does


def assert_fits(document: Any, shape: Shape, place: str = "") -> None:
    """Every required member is there, and no member that the model does not know."""
    if isinstance(shape, StructureShape) and not shape.is_document_type:
        assert isinstance(document, dict), place
        assert set(document) - YOUNGER <= set(shape.members), place
        assert set(shape.required_members) <= set(document), place
        for name, value in document.items():
            if name in shape.members:
                assert_fits(value, shape.members[name], f"{place}/{name}")
    elif isinstance(shape, ListShape):
        for value in document:
            assert_fits(value, shape.member, f"{place}/[]")
    elif isinstance(shape, MapShape):
        for value in document.values():
            assert_fits(value, shape.value, f"{place}/{{}}")
    elif shape.type_name in ("integer", "long"):
        assert isinstance(document, int), place
    elif shape.type_name in ("string", "timestamp", "blob"):
        assert isinstance(document, str), place
        assert not getattr(shape, "enum", None) or document in shape.enum, place


@pytest.mark.parametrize(
    ("operation", "path", "body"),
    [
        ("Converse", f"/model/{CLAUDE}/converse", TURN),
        ("Converse", f"/model/{CLAUDE}/converse", EVERYTHING),
        ("Converse", f"/model/{CLAUDE}/converse", CALLING),
        ("CountTokens", f"/model/{CLAUDE}/count-tokens", {"input": {"converse": TURN}}),
        ("ApplyGuardrail", "/guardrail/gr1/version/1/apply", GUARDED),
        ("ApplyGuardrail", "/guardrail/gr1/version/DRAFT/apply", {"source": "OUTPUT", "content": []}),
        ("StartAsyncInvoke", "/async-invoke", JOB),
    ],
)
async def test_response_fits_service_model(simulator, simulator_session, ask_simulator, operation, path, body):
    status, _, raw = await post(simulator_session, simulator.url + path, body)
    assert status == 200, raw
    assert_fits(json.loads(raw), ask_simulator.client.meta.service_model.operation_model(operation).output_shape)


async def test_job_responses_fit_service_model(simulator, simulator_session, ask_simulator):
    _, _, raw = await post(simulator_session, f"{simulator.url}/async-invoke", JOB | {"clientRequestToken": "once"})
    model = ask_simulator.client.meta.service_model
    for path, operation in (
        (quote(json.loads(raw)["invocationArn"], safe=""), "GetAsyncInvoke"),
        ("", "ListAsyncInvokes"),
    ):
        async with simulator_session.get(
            URL(f"{simulator.url}/async-invoke/{path}".rstrip("/"), encoded=True)
        ) as answer:
            assert_fits(await answer.json(), model.operation_model(operation).output_shape)


@pytest.mark.parametrize("body", [TURN, EVERYTHING, CALLING])
async def test_every_converse_stream_event_fits_service_model(simulator, simulator_session, ask_simulator, body):
    _, headers, raw = await post(simulator_session, f"{simulator.url}/model/{CLAUDE}/converse-stream", body)
    assert headers["Content-Type"] == "application/vnd.amazon.eventstream"
    buffer = EventStreamBuffer()
    buffer.add_data(raw)
    union = ask_simulator.client.meta.service_model.operation_model("ConverseStream").output_shape.members["stream"]
    for frame in buffer:
        assert_fits(json.loads(frame.payload), union.members[frame.headers[":event-type"]])


# The same request, the same answer.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/model/{CLAUDE}/converse", TURN),
        (f"/model/{CLAUDE}/converse-stream", TURN),
        (f"/model/{CLAUDE}/invoke", CLAUDE_BODY),
        (f"/model/{CLAUDE}/invoke-with-response-stream", CLAUDE_BODY),
        (f"/model/{NOVA}/invoke", TURN),
    ],
)
async def test_same_request_gets_same_bytes_from_another_simulator(simulator, simulator_session, path, body):
    async with simulated_bedrock() as other:
        answers = {
            (await post(simulator_session, url + path, body))[2] for url in (simulator.url, simulator.url, other.url)
        }
        changed = (await post(simulator_session, simulator.url + path, json.loads(json.dumps(body).replace("h", "H"))))[
            2
        ]
    assert len(answers) == 1
    assert changed not in answers
