"""Claude's messages. Pure."""

from __future__ import annotations

import re
from typing import Any

from price_keeper.hard.members import (
    REMOTE_CONTENT,
    require_object,
    read_json,
    ignore,
    require_list,
    make_members_reader,
    ignore_members,
    read_members,
    read_text,
    read_text_or_blocks,
    quote_name,
    build_unbounded_error,
)
from price_keeper.hard.tally import MESSAGE_TOKENS, TOOL_TOKENS, TOOL_BLOCK_TOKENS, TOOLS_TOKENS, MemberReader, TokenBound

# Tools whose use is the caller's own business, though what they are is written on Anthropic's side.
_OF_ANTHROPIC = re.compile(r"(?:bash|text_editor|computer|memory)_[0-9]{8}")
_PLAIN_TOOL = (None, "custom")
_SERVER = "the server runs it, and the model again after it"


def _cited(tally: TokenBound, value: Any) -> None:
    if value:
        tally.leave_uncounted("citations")


def _source(what: str) -> MemberReader:
    def read(tally: TokenBound, value: Any) -> None:
        kind = require_object(value, f"the source of {what}").get("type")
        if kind == "content":
            content(tally, value.get("content"))
        elif kind not in ("base64", "text"):
            raise build_unbounded_error(f"{what} by {quote_name(kind)}", REMOTE_CONTENT)
        tally.leave_uncounted(what)

    return read


def _found(tally: TokenBound, value: Any) -> None:
    content(tally, value)
    tally.leave_uncounted("a search result")


def content(tally: TokenBound, value: Any) -> None:
    read_text_or_blocks(tally, value, _BLOCKS)


def _result(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_BLOCK_TOKENS
    content(tally, value)


def _input(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_BLOCK_TOKENS
    tally.add_json(value)


_ANY: dict[str, MemberReader] = {"type": ignore, "cache_control": ignore}
_BLOCKS: dict[str, dict[str, MemberReader]] = {
    "text": {**_ANY, "text": read_text, "citations": _cited},
    # Who calls is told where code of the server's did, which takes a tool that is refused.
    "tool_use": {**_ANY, "id": ignore, "name": ignore, "input": _input, "caller": ignore},
    "tool_result": {**_ANY, "tool_use_id": ignore, "is_error": ignore, "content": _result},
    # The signature holds the thinking that the text only sums up, encrypted, so it is longer than that.
    "thinking": {"type": ignore, "thinking": read_text, "signature": ignore},
    "redacted_thinking": {"type": ignore, "data": lambda tally, _: tally.leave_uncounted("redacted thinking")},
    "image": {**_ANY, "source": _source("an image")},
    "document": {
        **_ANY,
        "source": _source("a document"),
        "title": read_text,
        "context": read_text,
        "citations": ignore,
    },
    "search_result": {**_ANY, "source": read_text, "title": read_text, "content": _found, "citations": ignore},
}

_MESSAGE: dict[str, MemberReader] = {"role": ignore, "content": content}


def messages(tally: TokenBound, value: Any) -> None:
    for message in require_list(value, "messages"):
        tally.tokens += MESSAGE_TOKENS
        read_members(tally, message, _MESSAGE, "a message")


_TOOL: dict[str, MemberReader] = {
    **_ANY,
    "name": ignore,
    "description": read_text,
    "input_schema": read_json,
    "input_examples": read_json,
    "strict": ignore,
    "eager_input_streaming": ignore,
}


def tools(tally: TokenBound, value: Any) -> None:
    listing = require_list(value, "tools")
    tally.tokens += TOOLS_TOKENS if listing else 0
    for tool in listing:
        tally.tokens += TOOL_TOKENS
        kind = require_object(tool, "a tool").get("type")
        if kind in _PLAIN_TOOL:
            read_members(tally, tool, _TOOL, "a tool")
        elif type(kind) is str and _OF_ANTHROPIC.fullmatch(kind):
            tally.leave_uncounted(f"a tool of type {kind!r}")
        else:
            raise build_unbounded_error(f"a tool of type {quote_name(kind)}", _SERVER)


def only_clearing(_: TokenBound, value: Any) -> None:
    """What is cleared makes the input shorter. To compact it is another run of the model, which is charged."""
    if value is None:
        return
    for edit in require_list(require_object(value, "context_management").get("edits"), "edits"):
        kind = require_object(edit, "an edit").get("type")
        if type(kind) is not str or not kind.startswith("clear_"):
            raise build_unbounded_error(f"an edit of type {quote_name(kind)} in 'context_management'", "it may run the model once more")


MEMBERS: dict[str, MemberReader] = {
    **ignore_members("anthropic_version", "anthropic_beta", "max_tokens", "metadata", "temperature", "top_p", "top_k"),
    **ignore_members("stop_sequences", "tool_choice", "thinking", "reasoning_config", "stream", "model"),
    "messages": messages,
    "system": content,
    "tools": tools,
    "output_config": make_members_reader("output_config", {"effort": ignore, "format": read_json}),
    "output_format": read_json,
    "context_management": only_clearing,
}
EXTRA = ("anthropic_version", "anthropic_beta", "max_tokens", "max_tokens_to_sample", "metadata", "temperature",
         "top_p", "top_k", "stop_sequences", "thinking", "reasoning_config", "output_config", "output_format",
         "context_management")  # fmt: skip
