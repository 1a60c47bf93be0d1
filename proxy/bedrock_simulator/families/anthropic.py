"""Claude: the messages API, in one piece or as the events of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, stops
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.refusals import validation_error
from bedrock_simulator.usage import Usage

_STOP_REASONS = {
    StopReason.END: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.SEQUENCE: "stop_sequence",
    StopReason.TOOL: "tool_use",
}

# They belong to Anthropic's own endpoint; here the path says both.
_EXTRA = ("model", "stream")


def _read(body: Json) -> Prompt:
    for name in _EXTRA:
        if name in body:
            raise validation_error(f"{name}: Extra inputs are not permitted")
    for name in ("anthropic_version", "max_tokens", "messages"):
        if body.get(name) is None:
            raise validation_error(f"{name}: Field required")
    return Prompt(
        pieces=[*_tools(body), *_blocks(body.get("system") or [], "system"), *_messages(body["messages"])],
        max_tokens=check_max_tokens(body["max_tokens"], "max_tokens", 0),
        stop_sequences=stops(body, "stop_sequences"),
        tool=_forced_tool(body),
    )


def _messages(messages: Any) -> list[Piece]:
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
        pieces += _blocks(message.get("content"), f"messages.{index}.content")
    return pieces


def _blocks(content: Any, place: str) -> list[Piece]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise validation_error(f"{place}: Field required")
    return [_piece(block, place) for block in blocks]


def _piece(block: Any, place: str) -> Piece:
    if not isinstance(block, dict):
        raise validation_error(f"{place}: Input should be a valid dictionary")
    if block.get("type") == "text" and not block.get("text"):
        raise validation_error("messages: text content blocks must be non-empty")
    control = block.get("cache_control")
    if not control:
        return Piece(tokens.count_block_tokens(block), block)
    # The mark itself is not part of what is kept: callers move it from turn to turn.
    bare = {name: value for name, value in block.items() if name != "cache_control"}
    return Piece(tokens.count_block_tokens(bare), bare, ttl=control.get("ttl", "5m"))


def _tools(body: Json) -> list[Piece]:
    tools = body.get("tools") or []
    return [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), *_blocks(tools, "tools")] if tools else []


def _forced_tool(body: Json) -> tuple[str, Json] | None:
    choice, tools = body.get("tool_choice") or {}, body.get("tools") or []
    if not tools or choice.get("type") not in ("any", "tool"):
        return None
    name = choice.get("name", tools[0].get("name"))
    return next(((name, tool.get("input_schema") or {}) for tool in tools if tool.get("name") == name), None)


def _usage(usage: Usage) -> Json:
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


def _message(said: Completion, model: Model) -> Json:
    return {
        "model": model.name.removeprefix("anthropic.").split("-v")[0],
        "id": f"msg_bdrk_{said.id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(said.usage),
    }


def _tool_use(said: Completion, given: Json) -> Json:
    name = said.tool.name if said.tool else ""
    return {"type": "tool_use", "id": f"toolu_bdrk_{said.id}", "name": name, "input": given}


def _whole(_: Json, said: Completion, model: Model) -> Json:
    block = _tool_use(said, said.tool.input) if said.tool else {"type": "text", "text": said.text}
    return {
        **_message(said, model),
        "content": [block],
        "stop_reason": _STOP_REASONS[said.stop],
        "stop_sequence": said.stop_sequence,
    }


def _chunks(_: Json, said: Completion, model: Model) -> Iterator[Json]:
    message = _message(said, model)
    message["usage"]["output_tokens"] = min(1, said.usage.output_tokens)  # a stream does not know its end yet
    yield {"type": "message_start", "message": message}
    block = _tool_use(said, {}) if said.tool else {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    kind, member = ("input_json_delta", "partial_json") if said.tool else ("text_delta", "text")
    for text in said.split_deltas():
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": kind, member: text}}
    yield {"type": "content_block_stop", "index": 0}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": _STOP_REASONS[said.stop], "stop_sequence": said.stop_sequence},
        "usage": {"output_tokens": said.usage.output_tokens},
    }
    yield {"type": "message_stop"}


FAMILY = Family(_read, _whole, _chunks)
