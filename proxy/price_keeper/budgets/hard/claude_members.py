"""Readers of the members of Claude's messages. Pure.

`MEMBERS` maps each accepted member to its reader; `ADDITIONAL_NAMES` may also be in Converse's additional fields.
"""

from __future__ import annotations

import re
from typing import Any

from price_keeper.budgets.hard.token_bound import (
    REMOTE_CONTENT,
    TOOL_BLOCK_TOKENS,
    TOOL_TOKENS,
    MemberReader,
    TokenBound,
    build_unbounded_error,
    ignore,
    ignore_members,
    make_members_reader,
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

# Tools that the caller runs, although Anthropic defines them. Their definition is added on Anthropic's side.
_ANTHROPIC_TOOL_TYPE = re.compile(r"(?:bash|text_editor|computer|memory)_[0-9]{8}")
_CUSTOM_TOOL_TYPES = (None, "custom")
_SERVER_TOOL_REASON = "the server runs it, and the model again after it"


def _read_citations(bound: TokenBound, value: Any) -> None:
    if value:
        bound.leave_uncounted("citations")


def _make_source_reader(what: str) -> MemberReader:
    def read(bound: TokenBound, value: Any) -> None:
        kind = require_object(value, f"the source of {what}").get("type")
        if kind == "content":
            read_content(bound, value.get("content"))
        elif kind not in ("base64", "text"):
            raise build_unbounded_error(f"{what} by {quote_name(kind)}", REMOTE_CONTENT)
        bound.leave_uncounted(what)

    return read


def _read_search_result(bound: TokenBound, value: Any) -> None:
    read_content(bound, value)
    bound.leave_uncounted("a search result")


def read_content(bound: TokenBound, value: Any) -> None:
    read_text_or_blocks(bound, value, _BLOCK_MEMBERS)


def _read_tool_result(bound: TokenBound, value: Any) -> None:
    bound.tokens += TOOL_BLOCK_TOKENS
    read_content(bound, value)


_COMMON_MEMBERS: dict[str, MemberReader] = {"type": ignore, "cache_control": ignore}
_BLOCK_MEMBERS: dict[str, dict[str, MemberReader]] = {
    "text": {**_COMMON_MEMBERS, "text": read_text, "citations": _read_citations},
    # `caller` is present where code on the server called the tool, which requires a tool that is refused.
    "tool_use": {**_COMMON_MEMBERS, "id": ignore, "name": ignore, "input": read_tool_call, "caller": ignore},
    "tool_result": {**_COMMON_MEMBERS, "tool_use_id": ignore, "is_error": ignore, "content": _read_tool_result},
    # The signature is the encrypted thinking that the text only summarises, so it is longer than the thinking itself.
    "thinking": {"type": ignore, "thinking": read_text, "signature": ignore},
    "redacted_thinking": {"type": ignore, "data": lambda bound, _: bound.leave_uncounted("redacted thinking")},
    "image": {**_COMMON_MEMBERS, "source": _make_source_reader("an image")},
    "document": {
        **_COMMON_MEMBERS,
        "source": _make_source_reader("a document"),
        "title": read_text,
        "context": read_text,
        "citations": ignore,
    },
    "search_result": {
        **_COMMON_MEMBERS,
        "source": read_text,
        "title": read_text,
        "content": _read_search_result,
        "citations": ignore,
    },
}

_MESSAGE_MEMBERS: dict[str, MemberReader] = {"role": ignore, "content": read_content}


read_messages = make_messages_reader(_MESSAGE_MEMBERS)


_TOOL_MEMBERS: dict[str, MemberReader] = {
    **_COMMON_MEMBERS,
    "name": ignore,
    "description": read_text,
    "input_schema": read_json,
    "input_examples": read_json,
    "strict": ignore,
    "eager_input_streaming": ignore,
}


def read_tools(bound: TokenBound, value: Any) -> None:
    for tool in require_tools(bound, value):
        bound.tokens += TOOL_TOKENS
        kind = require_object(tool, "a tool").get("type")
        if kind in _CUSTOM_TOOL_TYPES:
            read_members(bound, tool, _TOOL_MEMBERS, "a tool")
        elif type(kind) is str and _ANTHROPIC_TOOL_TYPE.fullmatch(kind):
            bound.leave_uncounted(f"a tool of type {kind!r}")
        else:
            raise build_unbounded_error(f"a tool of type {quote_name(kind)}", _SERVER_TOOL_REASON)


def read_context_management(_: TokenBound, value: Any) -> None:
    """Clearing shortens the input. Compacting is another run of the model, which is charged."""
    if value is None:
        return
    for edit in require_list(require_object(value, "context_management").get("edits"), "edits"):
        kind = require_object(edit, "an edit").get("type")
        if type(kind) is not str or not kind.startswith("clear_"):
            raise build_unbounded_error(
                f"an edit of type {quote_name(kind)} in 'context_management'", "it may run the model once more"
            )


MEMBERS: dict[str, MemberReader] = {
    **ignore_members("anthropic_version", "anthropic_beta", "max_tokens", "metadata", "temperature", "top_p", "top_k"),
    **ignore_members("stop_sequences", "tool_choice", "thinking", "reasoning_config", "stream", "model"),
    "messages": read_messages,
    "system": read_content,
    "tools": read_tools,
    "output_config": make_members_reader("output_config", {"effort": ignore, "format": read_json}),
    "output_format": read_json,
    "context_management": read_context_management,
}
ADDITIONAL_NAMES = (
    "anthropic_version",
    "anthropic_beta",
    "max_tokens",
    "max_tokens_to_sample",
    "metadata",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "thinking",
    "reasoning_config",
    "output_config",
    "output_format",
    "context_management",
)
