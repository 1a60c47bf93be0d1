"""Whatever stands in a request: it is answered or refused, and never makes the simulator crash."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import HEALTHY
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import SimulatedCall
from multidict import CIMultiDict

from tests.support.clock import ManualClock
from tests.support.simulated import CLAUDE

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}, "days": {"type": "integer"}}}
CONVERSATION = {
    "messages": [{"role": "user", "content": [{"text": "hello"}, {"cachePoint": {"type": "default", "ttl": "5m"}}]}],
    "system": [{"text": "be brief"}],
    "inferenceConfig": {"maxTokens": 9, "stopSequences": ["a"]},
    "toolConfig": {
        "tools": [{"toolSpec": {"name": "weather", "inputSchema": {"json": SCHEMA}}}],
        "toolChoice": {"tool": {"name": "weather"}},
    },
    "serviceTier": {"type": "flex"},
    "performanceConfig": {"latency": "standard"},
    "guardrailConfig": {"guardrailIdentifier": "gr1", "guardrailVersion": "1", "trace": "enabled"},
}
MESSAGES = {
    "anthropic_version": "bedrock-2023-05-31",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather"},
    "stop_sequences": ["a"],
}
COMPLETIONS = {
    "model": "openai.gpt-oss-120b-1:0",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}], "tool_calls": [1]}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "stop": ["a"],
    "service_tier": "flex",
}
REQUESTS: dict[str, Any] = {
    f"/model/{CLAUDE}/converse": CONVERSATION,
    f"/model/{CLAUDE}/converse-stream": CONVERSATION,
    f"/model/{CLAUDE}/invoke": MESSAGES,
    f"/model/{CLAUDE}/invoke-with-response-stream": MESSAGES,
    f"/model/{CLAUDE}/count-tokens": {"input": {"converse": CONVERSATION}},
    "/model/amazon.nova-lite-v1:0/count-tokens": {"input": {"invokeModel": {"body": b64encode(b"{}").decode()}}},
    "/model/amazon.titan-embed-text-v2:0/invoke": {
        "inputText": "hello",
        "embeddingTypes": ["float"],
        "dimensions": 256,
    },
    "/model/cohere.embed-english-v3/invoke": {"texts": ["hello"], "input_type": "x", "embedding_types": ["float"]},
    "/openai/v1/chat/completions": COMPLETIONS,
    "/guardrail/gr1/version/1/apply": {"source": "INPUT", "content": [{"text": {"text": "x"}}, {"image": {}}]},
    "/guardrail-checks/invoke": {
        "messages": [{"role": "user", "content": [{"text": "x"}]}],
        "checks": {"contentFilter": {"categories": [{"category": "HATE"}]}},
    },
    "/async-invoke": {
        "modelId": "amazon.nova-reel-v1:0",
        "modelInput": {},
        "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://bucket"}},
        "clientRequestToken": "once",
    },
}
JUNK = [None, True, 5, -1, 1.5, 10**20, "", "x", "5m", [], [5], [None], [[]], [{}], {}, {"a": 1}, {"type": []}]


def places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for step, value in inner:
        yield from places(value, (*place, step))


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = replaced(document[place[0]], place[1:], value)
    return copy


@pytest.mark.parametrize("path", REQUESTS)
def test_junk_anywhere_in_request_never_crashes(path):
    service, route = Service(ManualClock(), "us-east-1", min_cache_tokens=1), find_route("POST", path)
    assert route is not None
    for place in places(REQUESTS[path]):
        for junk in JUNK:
            body = json.dumps(replaced(REQUESTS[path], place, junk)).encode()
            with suppress(AwsError):
                answer = service.handle(SimulatedCall(route, CIMultiDict(), body, HEALTHY))
                assert answer.body or b"".join(answer.frames or ())


@pytest.mark.parametrize("path", REQUESTS)
def test_unchanged_request_is_answered(path):
    service, route = Service(ManualClock(), "us-east-1", min_cache_tokens=1), find_route("POST", path)
    assert route is not None
    body = REQUESTS[path]
    if "invokeModel" in body.get("input", {}):
        body = {"input": {"invokeModel": {"body": b64encode(json.dumps(CONVERSATION).encode()).decode()}}}
    answer = service.handle(SimulatedCall(route, CIMultiDict(), json.dumps(body).encode(), HEALTHY))
    assert answer.status == 200
