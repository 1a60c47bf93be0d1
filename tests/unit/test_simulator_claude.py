"""What only Claude has: tools by its own names, cached prefixes of two lifetimes, and a strict request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import parse_fault_spec
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import SimulatedCall
from multidict import CIMultiDict

from tests.support.clock import ManualClock
from tests.unit.test_simulator_families import CLAUDE, FORMS, Form, ask, chunks, whole

TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_claude_calls_tool_whole_and_in_pieces():
    body = CLAUDE | {"max_tokens": 99, "tools": [TOOL], "tool_choice": {"type": "any"}}
    form = Form(FORMS["anthropic"].model, body, (), (), "", (), None)
    answer = whole(form)
    assert answer["stop_reason"] == "tool_use"
    block = answer["content"][0]
    assert (block["type"], block["name"], set(block["input"])) == ("tool_use", "weather", {"city"})
    brought = chunks(form)
    partial = "".join(chunk["delta"]["partial_json"] for chunk in brought if chunk["type"] == "content_block_delta")
    assert json.loads(partial) == block["input"]


def test_claude_stream_has_every_event_of_its_api():
    start, opened, *deltas, closed, changed, stopped = chunks(FORMS["anthropic"], output_tokens="20")
    answer = whole(FORMS["anthropic"], output_tokens="20")
    assert start["message"] | {"usage": 0} == answer | {"content": [], "stop_reason": None, "usage": 0}
    assert start["message"]["usage"] == answer["usage"] | {"output_tokens": 1}
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(delta["type"], delta["index"], delta["delta"]["type"]) for delta in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert closed == {"type": "content_block_stop", "index": 0}
    assert changed == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    }
    assert stopped["type"] == "message_stop"


def test_tools_count_more_than_their_text():
    without = ask(FORMS["anthropic"], "invoke").usage.input_tokens
    with_tools = ask(FORMS["anthropic"], "invoke", CLAUDE | {"tools": [TOOL]}).usage.input_tokens
    assert with_tools - without > len(json.dumps(TOOL)) / 4


def test_claude_reports_both_cache_lifetimes():
    def text(length: int, ttl: str) -> dict[str, Any]:
        return {"type": "text", "text": "x" * length, "cache_control": {"type": "ephemeral", "ttl": ttl}}

    body = CLAUDE | {"system": [text(8000, "1h"), text(4000, "5m")]}
    usage = whole(Form(FORMS["anthropic"].model, body, (), (), "", (), None))["usage"]
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 1000, "ephemeral_1h_input_tokens": 2000}
    assert usage["cache_creation_input_tokens"] == 3000


@pytest.mark.parametrize("extra", ["model", "stream"])
def test_claude_refuses_members_already_in_path(extra):
    with pytest.raises(AwsError, match=f"{extra}: Extra inputs are not permitted"):
        ask(FORMS["anthropic"], "invoke", CLAUDE | {extra: True})


@pytest.mark.parametrize("missing", ["anthropic_version", "max_tokens", "messages"])
def test_claude_names_missing_field(missing):
    with pytest.raises(AwsError, match=f"{missing}: Field required"):
        ask(FORMS["anthropic"], "invoke", {name: value for name, value in CLAUDE.items() if name != missing})


def test_moved_cache_point_finds_cached_prefix():
    """Callers mark the last block of each turn: the mark is no part of what is kept."""
    service = Service(ManualClock(), "us-east-1", 1024)
    route = find_route("POST", f"/model/{FORMS['anthropic'].model}/invoke")
    assert route is not None

    def usage(*texts: str) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        body = json.dumps(CLAUDE | {"messages": [{"role": "user", "content": blocks}]}).encode()
        return dict(
            json.loads(service.handle(SimulatedCall(route, CIMultiDict(), body, parse_fault_spec({}))).body)["usage"]
        )

    first = usage("x" * 8000)
    second = usage("x" * 8000, "y" * 400)
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 2000
    assert second["cache_creation_input_tokens"] == 100


def test_claude_conversation_needs_both_roles():
    def roles(*names: str) -> dict[str, Any]:
        return CLAUDE | {"messages": [{"role": name, "content": "x"} for name in names]}

    ask(FORMS["anthropic"], "invoke", roles("user", "assistant", "user"))
    for wrong in (("assistant",), ("user", "tool")):
        with pytest.raises(AwsError, match="role"):
            ask(FORMS["anthropic"], "invoke", roles(*wrong))
