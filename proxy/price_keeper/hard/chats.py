"""Chat completions, and the families that took over their messages. Pure."""

from __future__ import annotations

from typing import Any

from price_keeper.hard.members import (
    REMOTE_CONTENT,
    require_object,
    read_json,
    ignore,
    require_list,
    ignore_members,
    read_members,
    read_text,
    read_text_or_blocks,
    quote_name,
    build_unbounded_error,
)
from price_keeper.hard.tally import MESSAGE_TOKENS, TOOL_TOKENS, TOOL_BLOCK_TOKENS, TOOLS_TOKENS, MemberReader, TokenBound


def _image(tally: TokenBound, value: Any) -> None:
    url = value.get("url") if type(value) is dict else value
    if type(url) is not str or not url.startswith("data:"):
        raise build_unbounded_error("an image by its URL", REMOTE_CONTENT)
    tally.leave_uncounted("an image")


_BLOCKS: dict[str, dict[str, MemberReader]] = {
    "text": {"type": ignore, "text": read_text, "cache_control": ignore},
    "refusal": {"type": ignore, "refusal": read_text},
    "image_url": {"type": ignore, "image_url": _image},
}


def _content(tally: TokenBound, value: Any) -> None:
    read_text_or_blocks(tally, value, _BLOCKS)


def _calls(tally: TokenBound, value: Any) -> None:
    calls = require_list(value, "calls of tools")
    tally.tokens += TOOL_BLOCK_TOKENS * len(calls)
    tally.add_json(calls)


def _call(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_BLOCK_TOKENS
    tally.add_json(value)


_MESSAGE: dict[str, MemberReader] = {
    **ignore_members("role", "name", "index"),
    "content": _content,
    "refusal": read_text,
    "reasoning": read_text,
    "reasoning_content": read_text,
    "tool_calls": _calls,
    "function_call": _call,
    "tool_call_id": _call,
}


def messages(tally: TokenBound, value: Any) -> None:
    for message in require_list(value, "messages"):
        tally.tokens += MESSAGE_TOKENS
        read_members(tally, message, _MESSAGE, "a message")


_TOOL: dict[str, MemberReader] = {"type": ignore, "function": read_json}


def tools(tally: TokenBound, value: Any) -> None:
    listing = require_list(value, "tools")
    tally.tokens += TOOLS_TOKENS if listing else 0
    for tool in listing:
        kind = require_object(tool, "a tool").get("type")
        if kind != "function":
            raise build_unbounded_error(f"a tool of type {quote_name(kind)}", "only functions are known to be the caller's own")
        tally.tokens += TOOL_TOKENS
        read_members(tally, tool, _TOOL, "a tool")


def material(tally: TokenBound, value: Any) -> None:
    """Documents, functions, results: whatever their form, a template writes them out in its own."""
    listing = require_list(value, "documents")
    tally.tokens += TOOLS_TOKENS if listing else 0
    tally.tokens += TOOL_BLOCK_TOKENS * len(listing)
    tally.add_json(listing)


def history(tally: TokenBound, value: Any) -> None:
    turns = require_list(value, "turns")
    tally.tokens += MESSAGE_TOKENS * len(turns)
    tally.add_json(turns)


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
    "messages": messages,
    "tools": tools,
    "functions": material,
    "response_format": read_json,
}
EXTRA = ("max_tokens", "max_completion_tokens", "n", *SAMPLING)
