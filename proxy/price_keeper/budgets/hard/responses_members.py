"""Readers of the members of OpenAI's responses. Pure.

What is kept on the server (an earlier response, a file, a stored prompt) is refused: its tokens are not in the request.
"""

from __future__ import annotations

from typing import Any

from price_keeper.budgets.hard.chat_members import make_tools_reader
from price_keeper.budgets.hard.token_bound import (
    MESSAGE_TOKENS,
    TOOL_BLOCK_TOKENS,
    MemberReader,
    TokenBound,
    build_unbounded_error,
    ignore,
    ignore_members,
    quote_name,
    read_json,
    read_members,
    read_text,
    read_text_or_blocks,
    require_list,
    require_object,
)

_TEXT_MEMBERS: dict[str, MemberReader] = {**ignore_members("type", "annotations", "logprobs"), "text": read_text}
_BLOCK_MEMBERS: dict[str, dict[str, MemberReader]] = {
    "input_text": _TEXT_MEMBERS,
    "output_text": _TEXT_MEMBERS,
    "refusal": {"type": ignore, "refusal": read_text},
}


def _read_content(bound: TokenBound, value: Any) -> None:
    bound.tokens += MESSAGE_TOKENS
    read_text_or_blocks(bound, value, _BLOCK_MEMBERS)


def _read_arguments(bound: TokenBound, value: Any) -> None:
    bound.tokens += TOOL_BLOCK_TOKENS
    read_text(bound, value)
    bound.add_json(value)


def _read_output(bound: TokenBound, value: Any) -> None:
    """Of a function: a text, or blocks like those of a message."""
    bound.tokens += TOOL_BLOCK_TOKENS
    _read_content(bound, value)
    bound.add_json(value)


_CALL_MEMBERS: dict[str, MemberReader] = {**ignore_members("type", "id", "call_id", "status", "name")}
_ITEM_MEMBERS: dict[str, dict[str, MemberReader]] = {
    "message": {**ignore_members("type", "id", "role", "status", "phase"), "content": _read_content},
    "function_call": {**_CALL_MEMBERS, "arguments": _read_arguments},
    "function_call_output": {**_CALL_MEMBERS, "output": _read_output},
}


def _read_input(bound: TokenBound, value: Any) -> None:
    """A text, or items; one without a type is a message."""
    if type(value) is str:
        read_text(bound, value)
        return
    for item in require_list(value, "items"):
        kind = require_object(item, "an item").get("type", "message")
        members = _ITEM_MEMBERS.get(kind) if type(kind) is str else None
        if members is None:
            raise build_unbounded_error(f"an item of type {quote_name(kind)}")
        read_members(bound, item, members, f"an item of type {kind!r}")


_TOOL_MEMBERS: dict[str, MemberReader] = {
    **ignore_members("type", "name", "strict"),
    "description": read_text,
    "parameters": read_json,
}


MEMBERS: dict[str, MemberReader] = {
    **ignore_members("background", "include", "max_output_tokens", "max_tool_calls", "metadata", "model"),
    **ignore_members("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    **ignore_members("service_tier", "store", "stream", "stream_options", "temperature", "tool_choice"),
    **ignore_members("top_logprobs", "top_p", "truncation", "user", "reasoning"),
    "input": _read_input,
    "instructions": read_text,
    "text": read_json,
    "tools": make_tools_reader(_TOOL_MEMBERS),
}
