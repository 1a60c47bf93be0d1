"""Readers of the members of chat completions, and of the model families that adopted their messages. Pure.

`MEMBERS` maps each accepted member to its reader; `ADDITIONAL_NAMES` may also be in Converse's additional fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from price_keeper.budgets.hard.token_bound import (
    MESSAGE_TOKENS,
    REMOTE_CONTENT,
    TOOL_BLOCK_TOKENS,
    TOOL_TOKENS,
    MemberReader,
    TokenBound,
    build_unbounded_error,
    ignore,
    ignore_members,
    make_messages_reader,
    quote_name,
    read_json,
    read_members,
    read_text,
    read_text_or_blocks,
    read_tool_call,
    require_list,
    require_object,
    require_tools,
)


def _read_image(bound: TokenBound, value: Any) -> None:
    url = value.get("url") if type(value) is dict else value
    if type(url) is not str or not url.startswith("data:"):
        raise build_unbounded_error("an image by its URL", REMOTE_CONTENT)
    bound.leave_uncounted("an image")


_BLOCK_MEMBERS: dict[str, dict[str, MemberReader]] = {
    "text": {"type": ignore, "text": read_text, "cache_control": ignore},
    "refusal": {"type": ignore, "refusal": read_text},
    "image_url": {"type": ignore, "image_url": _read_image},
}


def _read_content(bound: TokenBound, value: Any) -> None:
    read_text_or_blocks(bound, value, _BLOCK_MEMBERS)


def _read_tool_calls(bound: TokenBound, value: Any) -> None:
    calls = require_list(value, "calls of tools")
    bound.tokens += TOOL_BLOCK_TOKENS * len(calls)
    bound.add_json(calls)


_MESSAGE_MEMBERS: dict[str, MemberReader] = {
    **ignore_members("role", "name", "index"),
    "content": _read_content,
    "refusal": read_text,
    "reasoning": read_text,
    "reasoning_content": read_text,
    "tool_calls": _read_tool_calls,
    "function_call": read_tool_call,
    "tool_call_id": read_tool_call,
}


read_messages = make_messages_reader(_MESSAGE_MEMBERS)


_TOOL_MEMBERS: dict[str, MemberReader] = {"type": ignore, "function": read_json}


def make_tools_reader(readers: Mapping[str, MemberReader]) -> MemberReader:
    """A reader of tools with these members, each of which has to be a function."""

    def read(bound: TokenBound, value: Any) -> None:
        for tool in require_tools(bound, value):
            kind = require_object(tool, "a tool").get("type")
            if kind != "function":
                raise build_unbounded_error(
                    f"a tool of type {quote_name(kind)}", "only functions are known to be the caller's own"
                )
            bound.tokens += TOOL_TOKENS
            read_members(bound, tool, readers, "a tool")

    return read


read_tools = make_tools_reader(_TOOL_MEMBERS)


def read_documents(bound: TokenBound, value: Any) -> None:
    """Documents, functions or results: a template writes them in its own form, whatever theirs."""
    documents = require_tools(bound, value, "documents")
    bound.tokens += TOOL_BLOCK_TOKENS * len(documents)
    bound.add_json(documents)


def read_history(bound: TokenBound, value: Any) -> None:
    turns = require_list(value, "turns")
    bound.tokens += MESSAGE_TOKENS * len(turns)
    bound.add_json(turns)


SAMPLING = ignore_members(
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "min_tokens",
    "parallel_tool_calls",
    "presence_penalty",
    "random_seed",
    "reasoning_effort",
    "safe_prompt",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "top_k",
    "top_logprobs",
    "top_p",
)
MEMBERS: dict[str, MemberReader] = {
    **SAMPLING,
    **ignore_members("max_tokens", "max_completion_tokens", "n", "model", "user", "metadata", "service_tier", "store"),
    **ignore_members("function_call", "include_reasoning", "prompt_cache_key", "safety_identifier", "verbosity"),
    "messages": read_messages,
    "tools": read_tools,
    "functions": read_documents,
    "response_format": read_json,
}
ADDITIONAL_NAMES = ("max_tokens", "max_completion_tokens", "n", *SAMPLING)
