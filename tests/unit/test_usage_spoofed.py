"""What a model says is no usage. Callers decide what that is: by asking for it word for word, or by a tool whose input
has the names under which responses state usage.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from price_keeper.operations import Operation
from price_keeper.upstream.eventstream import encode_frame
from price_keeper.usage.stream_usage import INVOCATION_METRICS
from price_keeper.usage.usage_reader import EVENT_STREAM, JSON, SERVER_SENT_EVENTS, build_reader

# The true figures, and what a model was made to say in every dialect.
INPUT, OUTPUT = 1000, 500
SPOOF: dict[str, Any] = {
    "usage": {"inputTokens": 1, "outputTokens": 1, "input_tokens": 1, "output_tokens": 1, "prompt_tokens": 1},
    INVOCATION_METRICS: {"inputTokenCount": 1, "outputTokenCount": 1},
    "serviceTier": {"type": "flex"},
    "service_tier": "flex",
    "error": {"message": "none of it happened"},
    "inputTextTokenCount": 1,
    "prompt_token_count": 1,
    "generation_token_count": 1,
}
TEXT = json.dumps(SPOOF)
CONVERSED = {"inputTokens": INPUT, "outputTokens": OUTPUT, "totalTokens": INPUT + OUTPUT}
CLAUDES = {"input_tokens": INPUT, "output_tokens": OUTPUT}
CHATS = {"prompt_tokens": INPUT, "completion_tokens": OUTPUT}


def _frame(name: str, document: Any) -> bytes:
    kind = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
    return encode_frame(kind, json.dumps(document).encode())


def _chunk(document: Any) -> bytes:
    return _frame("chunk", {"bytes": b64encode(json.dumps(document).encode()).decode()})


def _event(document: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


BLOCKS = [{"text": TEXT}, {"toolUse": {"toolUseId": "1", "name": "x", "input": SPOOF}}]
CLAUDE_BLOCKS = [{"type": "text", "text": TEXT}, {"type": "tool_use", "id": "1", "name": "x", "input": SPOOF}]
ANSWERS: dict[str, tuple[Operation, str, bytes, bytes]] = {
    "a conversation": (
        Operation.CONVERSE,
        "anthropic",
        JSON,
        json.dumps({"output": {"message": {"content": BLOCKS}}, "usage": CONVERSED, "stopReason": TEXT}).encode(),
    ),
    "an invocation": (
        Operation.INVOKE,
        "anthropic",
        JSON,
        json.dumps({"content": CLAUDE_BLOCKS, "usage": CLAUDES, "stop_sequence": TEXT}).encode(),
    ),
    "a chat": (
        Operation.CHAT_COMPLETIONS,
        "openai",
        JSON,
        json.dumps({"choices": [{"message": {"content": TEXT, "tool_calls": [SPOOF]}}], "usage": CHATS}).encode(),
    ),
    "a conversation's stream": (
        Operation.CONVERSE_STREAM,
        "anthropic",
        EVENT_STREAM,
        _frame("messageStart", {"role": "assistant", **SPOOF})
        + _frame("contentBlockDelta", {"delta": {"text": TEXT}, **SPOOF})
        + _frame("messageStop", {"stopReason": "end_turn", **SPOOF})
        + _frame("metadata", {"trace": {"guardrail": {"modelOutput": [TEXT * 500]}}, "usage": CONVERSED}),
    ),
    "an invocation's stream": (
        Operation.INVOKE_STREAM,
        "anthropic",
        EVENT_STREAM,
        _chunk({"type": "message_start", "message": {"usage": {"input_tokens": INPUT, "output_tokens": 1}}})
        + _chunk({"type": "content_block_start", "content_block": {"type": "tool_use", "input": SPOOF}})
        + _chunk({"type": "content_block_delta", "delta": {"partial_json": TEXT, "text": TEXT}})
        + _chunk({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": OUTPUT}})
        + _chunk({"type": "message_stop", INVOCATION_METRICS: {"inputTokenCount": INPUT, "outputTokenCount": OUTPUT}}),
    ),
    "a chat's stream": (
        Operation.CHAT_COMPLETIONS,
        "openai",
        SERVER_SENT_EVENTS,
        _event({"choices": [{"delta": {"content": TEXT, "tool_calls": [SPOOF]}}]})
        + _event({"choices": [{"delta": {"content": f"\n\ndata: {TEXT}\n\ndata: [DONE]\n\n"}}]})
        + _event({"choices": [], "usage": CHATS})
        + b"data: [DONE]\n\n",
    ),
}


@pytest.mark.parametrize("size", [1, 7, 10_000_000])
@pytest.mark.parametrize("what", ANSWERS)
def test_model_text_is_never_taken_for_usage(what: str, size: int) -> None:
    operation, format, kind, answer = ANSWERS[what]
    reader = build_reader(operation, format, kind, {})
    for at in range(0, len(answer), size):
        reader.feed(answer[at : at + size])
    usage = reader.usage()
    assert usage is not None
    assert (usage.input, usage.output, usage.tier) == (INPUT, OUTPUT, "")
    assert not reader.has_failed
