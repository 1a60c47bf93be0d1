"""Every member of every family's answers, as the providers document them: what a meter may come to rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_simulator_claude import TOOL
from tests.unit.test_simulator_families import CHAT, CLAUDE, FORMS, Form, chunks, whole


class Some:
    """Equal to any value of a type, and to any longer text that begins so."""

    def __init__(self, kind: type, beginning: str = "") -> None:
        self._kind, self._beginning = kind, beginning

    def __eq__(self, other: object) -> bool:
        if type(other) is not self._kind:
            return False
        return not isinstance(other, str) or (other.startswith(self._beginning) and other != self._beginning)

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return f"Some({self._kind.__name__}, {self._beginning!r})"


TEXT, NUMBER = Some(str), Some(int)
COMPLETION = {"id": Some(str, "chatcmpl-"), "object": "chat.completion", "created": 1_795_003_200}
CHUNK = COMPLETION | {"object": "chat.completion.chunk"}
COMPLETION_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 9,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 0},
}
MESSAGE = {"role": "assistant", "content": TEXT}
METRICS = {"inputTokenCount": NUMBER, "outputTokenCount": 9, "invocationLatency": 243, "firstByteLatency": 60}
CACHING_METRICS = METRICS | {"cacheReadInputTokenCount": 0, "cacheWriteInputTokenCount": 0}
CLAUDE_USAGE = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "output_tokens": 9,
}
NOVA_USAGE = {
    "inputTokens": 7,
    "outputTokens": 9,
    "totalTokens": 16,
    "cacheReadInputTokenCount": 0,
    "cacheWriteInputTokenCount": 0,
}
COHERE = {
    "response_id": Some(str, "resp-"),
    "text": TEXT,
    "generation_id": Some(str, "gen-"),
    "chat_history": [{"role": "USER", "message": "hello there"}, {"role": "CHATBOT", "message": TEXT}],
    "finish_reason": "MAX_TOKENS",
}


def completion(model: str) -> dict[str, Any]:
    choice = {"index": 0, "message": MESSAGE, "finish_reason": "length", "logprobs": None}
    return COMPLETION | {"model": model, "choices": [choice], "usage": COMPLETION_USAGE}


WHOLE: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "claude-sonnet-4-5-20250929",
        "id": Some(str, "msg_bdrk_"),
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": CLAUDE_USAGE | {"input_tokens": 7},
    },
    "nova": {
        "output": {"message": {"content": [{"text": TEXT}], "role": "assistant"}},
        "stopReason": "max_tokens",
        "usage": NOVA_USAGE,
    },
    "titan": {
        "inputTextTokenCount": 3,
        "results": [{"tokenCount": 9, "outputText": TEXT, "completionReason": "LENGTH"}],
    },
    "llama": {"generation": TEXT, "prompt_token_count": 3, "generation_token_count": 9, "stop_reason": "length"},
    "mistral text": {"outputs": [{"text": TEXT, "stop_reason": "length"}]},
    "mistral chat": {"choices": [{"index": 0, "message": MESSAGE, "stop_reason": "length"}]},
    "pixtral": completion("mistral.pixtral-large-2502-v1:0"),
    "cohere": COHERE,
    "ai21": completion("ai21.jamba-1-5-large-v1:0") | {"meta": {"requestDurationMillis": 243}},
    "deepseek r1": {"choices": [{"text": TEXT, "stop_reason": "length"}]},
    "deepseek v3": completion("deepseek.v3-v1:0"),
    "openai": completion("openai.gpt-oss-120b-1:0"),
}


def completion_chunks(model: str) -> list[dict[str, Any]]:
    def chunk(delta: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return CHUNK | {"model": model, "choices": [choice]}

    texts = [chunk({"content": TEXT}, None)] * 3
    end = CHUNK | {"model": model, "choices": [], "usage": COMPLETION_USAGE}
    return [chunk({"role": "assistant", "content": ""}, None), *texts, chunk({}, "length"), end]


def titan(*counts: Any) -> dict[str, Any]:
    names = ("inputTextTokenCount", "totalOutputTextTokenCount", "completionReason")
    return {"outputText": TEXT, "index": 0, **dict(zip(names, counts, strict=True))}


def llama(read: int | None, so_far: int, reason: str | None) -> dict[str, Any]:
    return {
        "generation": TEXT,
        "prompt_token_count": read,
        "generation_token_count": so_far,
        "stop_reason": reason,
    }


def nova_delta() -> dict[str, Any]:
    return {"contentBlockDelta": {"delta": {"text": TEXT}, "contentBlockIndex": 0}}


# Nine tokens come in three pieces.
CHUNKS: dict[str, list[dict[str, Any]]] = {
    "nova": [
        {"messageStart": {"role": "assistant"}},
        *[nova_delta()] * 3,
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {"messageStop": {"stopReason": "max_tokens"}},
        {"metadata": {"usage": NOVA_USAGE, "metrics": {}, "trace": {}}},
    ],
    "titan": [*[titan(None, None, None)] * 2, titan(3, 9, "LENGTH")],
    "llama": [llama(3, 3, None), llama(None, 6, None), llama(None, 9, "length")],
    "mistral text": [{"outputs": [{"text": TEXT, "stop_reason": reason}]} for reason in (None, None, "length")],
    "mistral chat": [
        {"choices": [{"index": 0, "message": MESSAGE, "stop_reason": reason}]} for reason in (None, None, "length")
    ],
    "pixtral": completion_chunks("mistral.pixtral-large-2502-v1:0"),
    "cohere": [
        {"is_finished": False, "event_type": "stream-start", "generation_id": Some(str, "gen-")},
        *[{"is_finished": False, "event_type": "text-generation", "text": TEXT}] * 3,
        {"is_finished": True, "event_type": "stream-end", "response": COHERE, "finish_reason": "MAX_TOKENS"},
    ],
    "ai21": completion_chunks("ai21.jamba-1-5-large-v1:0"),
    "deepseek r1": [{"choices": [{"text": TEXT, "stop_reason": reason}]} for reason in (None, None, "length")],
    "deepseek v3": completion_chunks("deepseek.v3-v1:0"),
    "openai": completion_chunks("openai.gpt-oss-120b-1:0"),
}


@pytest.mark.parametrize("name", FORMS)
def test_response_has_exactly_these_members(name):
    assert whole(FORMS[name], output_tokens="20") == WHOLE[name]


@pytest.mark.parametrize("name", CHUNKS)
def test_stream_has_exactly_these_chunks(name):
    *earlier, last = chunks(FORMS[name], output_tokens="20")
    metrics = last.pop("amazon-bedrock-invocationMetrics")
    assert [*earlier, last] == CHUNKS[name]
    assert metrics == (CACHING_METRICS if name == "nova" else METRICS)


def test_claude_tool_call_has_exactly_these_members():
    body = CLAUDE | {"max_tokens": 99, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    form = Form(FORMS["anthropic"].model, body, (), (), "", (), None)
    block = {"type": "tool_use", "id": Some(str, "toolu_bdrk_"), "name": "weather", "input": {"city": TEXT}}
    assert whole(form)["content"] == [block]
    _, opened, *deltas, _, _, _ = chunks(form)
    assert opened == {"type": "content_block_start", "index": 0, "content_block": block | {"input": {}}}
    for delta in deltas:
        assert delta == {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": TEXT},
        }


def test_chat_function_call_has_exactly_these_members():
    function = {"name": "weather", "parameters": TOOL["input_schema"]}
    choice = {"type": "function", "function": {"name": "weather"}}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    form = Form(FORMS["openai"].model, body, (), (), "", (), None)
    called = {"name": "weather", "arguments": Some(str, '{"city":')}
    call = {"id": Some(str, "chatcmpl-tool-"), "type": "function", "function": called}
    assert whole(form)["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chunks(form)[1]["choices"][0]["delta"] == {"tool_calls": [{"index": 0} | call]}
