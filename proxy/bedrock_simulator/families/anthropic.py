"""Claude: the messages API, as one body or as the events of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import validation_error
from bedrock_simulator.families.family import Family, Json, parse_stop_sequences
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.usage import Usage

_STOP_REASONS = {
    StopReason.END: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.SEQUENCE: "stop_sequence",
    StopReason.TOOL: "tool_use",
}

# Members of Anthropic's own endpoint; on Bedrock the path has both.
_FORBIDDEN_MEMBERS = ("model", "stream")


def _parse_prompt(body: Json) -> Prompt:
    for name in _FORBIDDEN_MEMBERS:
        if name in body:
            raise validation_error(f"{name}: Extra inputs are not permitted")
    for name in ("anthropic_version", "max_tokens", "messages"):
        if body.get(name) is None:
            raise validation_error(f"{name}: Field required")
    return Prompt(
        pieces=[
            *_parse_tools(body),
            *_parse_blocks(body.get("system") or [], "system"),
            *_parse_messages(body["messages"]),
        ],
        max_tokens=check_max_tokens(body["max_tokens"], "max_tokens", 0),
        stop_sequences=parse_stop_sequences(body, "stop_sequences"),
        tool=_find_forced_tool(body),
    )


def _parse_messages(messages: Any) -> list[Piece]:
    if not isinstance(messages, list) or not messages:
        raise validation_error("messages: at least one message is required")
    pieces = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise validation_error(f"messages.{index}.role: Input should be 'user' or 'assistant'")
        if index == 0 and role != "user":
            raise validation_error('messages: first message must use the "user" role')
        pieces.append(Piece(tokens.MESSAGE_TOKENS, role))
        pieces += _parse_blocks(message.get("content"), f"messages.{index}.content")
    return pieces


def _parse_blocks(content: Any, path: str) -> list[Piece]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise validation_error(f"{path}: Field required")
    return [_parse_block(block, path) for block in blocks]


def _parse_block(block: Any, path: str) -> Piece:
    if not isinstance(block, dict):
        raise validation_error(f"{path}: Input should be a valid dictionary")
    if block.get("type") == "text" and not block.get("text"):
        raise validation_error("messages: text content blocks must be non-empty")
    control = block.get("cache_control")
    if not control:
        return Piece(tokens.count_block_tokens(block), block)
    # The cache point itself is not part of the cached prefix: callers move it from turn to turn.
    bare = {name: value for name, value in block.items() if name != "cache_control"}
    return Piece(tokens.count_block_tokens(bare), bare, ttl=control.get("ttl", "5m"))


def _parse_tools(body: Json) -> list[Piece]:
    tools = body.get("tools") or []
    return [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), *_parse_blocks(tools, "tools")] if tools else []


def _find_forced_tool(body: Json) -> tuple[str, Json] | None:
    choice, tools = body.get("tool_choice") or {}, body.get("tools") or []
    if not tools or choice.get("type") not in ("any", "tool"):
        return None
    name = choice.get("name", tools[0].get("name"))
    return next(((name, tool.get("input_schema") or {}) for tool in tools if tool.get("name") == name), None)


def _build_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.input_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cache_read_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_write_5m_tokens,
            "ephemeral_1h_input_tokens": usage.cache_write_1h_tokens,
        },
        "output_tokens": usage.output_tokens,
    }


def _build_message(completion: Completion, model: Model) -> Json:
    return {
        "model": model.name.removeprefix("anthropic.").split("-v")[0],
        "id": f"msg_bdrk_{completion.id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _build_usage(completion.usage),
    }


def _build_tool_use(completion: Completion, tool_input: Json) -> Json:
    name = completion.tool.name if completion.tool else ""
    return {"type": "tool_use", "id": f"toolu_bdrk_{completion.id}", "name": name, "input": tool_input}


def _build_body(_: Json, completion: Completion, model: Model) -> Json:
    block = (
        _build_tool_use(completion, completion.tool.input)
        if completion.tool
        else {"type": "text", "text": completion.text}
    )
    return {
        **_build_message(completion, model),
        "content": [block],
        "stop_reason": _STOP_REASONS[completion.stop],
        "stop_sequence": completion.stop_sequence,
    }


def _build_chunks(_: Json, completion: Completion, model: Model) -> Iterator[Json]:
    message = _build_message(completion, model)
    message["usage"]["output_tokens"] = min(1, completion.usage.output_tokens)  # the final count is unknown
    yield {"type": "message_start", "message": message}
    block = _build_tool_use(completion, {}) if completion.tool else {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    kind, member = ("input_json_delta", "partial_json") if completion.tool else ("text_delta", "text")
    for text in completion.split_deltas():
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": kind, member: text}}
    yield {"type": "content_block_stop", "index": 0}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": _STOP_REASONS[completion.stop], "stop_sequence": completion.stop_sequence},
        "usage": {"output_tokens": completion.usage.output_tokens},
    }
    yield {"type": "message_stop"}


FAMILY = Family(_parse_prompt, _build_body, _build_chunks)
