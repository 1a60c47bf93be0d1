"""Chat completions, and the families that took over their messages. Pure."""

from __future__ import annotations

from typing import Any

from price_keeper.hard.members import (
    ELSEWHERE,
    an_object,
    free,
    ignored,
    listed,
    parameters,
    read_members,
    text,
    text_or_blocks,
    told,
    unbounded,
)
from price_keeper.hard.tally import MESSAGE, TOOL, TOOL_BLOCK, TOOLS, Reader, Tally


def _image(tally: Tally, value: Any) -> None:
    url = value.get("url") if type(value) is dict else value
    if type(url) is not str or not url.startswith("data:"):
        raise unbounded("an image by its URL", ELSEWHERE)
    tally.leave("an image")


_BLOCKS: dict[str, dict[str, Reader]] = {
    "text": {"type": ignored, "text": text, "cache_control": ignored},
    "refusal": {"type": ignored, "refusal": text},
    "image_url": {"type": ignored, "image_url": _image},
}


def _content(tally: Tally, value: Any) -> None:
    text_or_blocks(tally, value, _BLOCKS)


def _calls(tally: Tally, value: Any) -> None:
    calls = listed(value, "calls of tools")
    tally.tokens += TOOL_BLOCK * len(calls)
    tally.json(calls)


def _call(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL_BLOCK
    tally.json(value)


_MESSAGE: dict[str, Reader] = {
    **parameters("role", "name", "index"),
    "content": _content,
    "refusal": text,
    "reasoning": text,
    "reasoning_content": text,
    "tool_calls": _calls,
    "function_call": _call,
    "tool_call_id": _call,
}


def messages(tally: Tally, value: Any) -> None:
    for message in listed(value, "messages"):
        tally.tokens += MESSAGE
        read_members(tally, message, _MESSAGE, "a message")


_TOOL: dict[str, Reader] = {"type": ignored, "function": free}


def tools(tally: Tally, value: Any) -> None:
    listing = listed(value, "tools")
    tally.tokens += TOOLS if listing else 0
    for tool in listing:
        kind = an_object(tool, "a tool").get("type")
        if kind != "function":
            raise unbounded(f"a tool of type {told(kind)}", "only functions are known to be the caller's own")
        tally.tokens += TOOL
        read_members(tally, tool, _TOOL, "a tool")


def material(tally: Tally, value: Any) -> None:
    """Documents, functions, results: whatever their form, a template writes them out in its own."""
    listing = listed(value, "documents")
    tally.tokens += TOOLS if listing else 0
    tally.tokens += TOOL_BLOCK * len(listing)
    tally.json(listing)


def history(tally: Tally, value: Any) -> None:
    turns = listed(value, "turns")
    tally.tokens += MESSAGE * len(turns)
    tally.json(turns)


SAMPLING = parameters(
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
MEMBERS: dict[str, Reader] = {
    **SAMPLING,
    **parameters("max_tokens", "max_completion_tokens", "n", "model", "user", "metadata", "service_tier", "store"),
    **parameters("function_call", "include_reasoning", "prompt_cache_key", "safety_identifier", "verbosity"),
    "messages": messages,
    "tools": tools,
    "functions": material,
    "response_format": free,
}
EXTRA = ("max_tokens", "max_completion_tokens", "n", *SAMPLING)
