"""Claude's messages. Pure."""

from __future__ import annotations

import re
from typing import Any

from price_keeper.hard.members import (
    ELSEWHERE,
    an_object,
    free,
    ignored,
    listed,
    of_members,
    parameters,
    read_members,
    text,
    text_or_blocks,
    told,
    unbounded,
)
from price_keeper.hard.tally import MESSAGE, TOOL, TOOL_BLOCK, TOOLS, Reader, Tally

# Tools whose use is the caller's own business, though what they are is written on Anthropic's side.
_OF_ANTHROPIC = re.compile(r"(?:bash|text_editor|computer|memory)_[0-9]{8}")
_PLAIN_TOOL = (None, "custom")
_SERVER = "the server runs it, and the model again after it"


def _cited(tally: Tally, value: Any) -> None:
    if value:
        tally.leave("citations")


def _source(what: str) -> Reader:
    def read(tally: Tally, value: Any) -> None:
        kind = an_object(value, f"the source of {what}").get("type")
        if kind == "content":
            content(tally, value.get("content"))
        elif kind not in ("base64", "text"):
            raise unbounded(f"{what} by {told(kind)}", ELSEWHERE)
        tally.leave(what)

    return read


def _found(tally: Tally, value: Any) -> None:
    content(tally, value)
    tally.leave("a search result")


def content(tally: Tally, value: Any) -> None:
    text_or_blocks(tally, value, _BLOCKS)


def _result(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL_BLOCK
    content(tally, value)


def _input(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL_BLOCK
    tally.json(value)


_ANY: dict[str, Reader] = {"type": ignored, "cache_control": ignored}
_BLOCKS: dict[str, dict[str, Reader]] = {
    "text": {**_ANY, "text": text, "citations": _cited},
    # Who calls is told where code of the server's did, which takes a tool that is refused.
    "tool_use": {**_ANY, "id": ignored, "name": ignored, "input": _input, "caller": ignored},
    "tool_result": {**_ANY, "tool_use_id": ignored, "is_error": ignored, "content": _result},
    # The signature holds the thinking that the text only sums up, encrypted, so it is longer than that.
    "thinking": {"type": ignored, "thinking": text, "signature": ignored},
    "redacted_thinking": {"type": ignored, "data": lambda tally, _: tally.leave("redacted thinking")},
    "image": {**_ANY, "source": _source("an image")},
    "document": {
        **_ANY,
        "source": _source("a document"),
        "title": text,
        "context": text,
        "citations": ignored,
    },
    "search_result": {**_ANY, "source": text, "title": text, "content": _found, "citations": ignored},
}

_MESSAGE: dict[str, Reader] = {"role": ignored, "content": content}


def messages(tally: Tally, value: Any) -> None:
    for message in listed(value, "messages"):
        tally.tokens += MESSAGE
        read_members(tally, message, _MESSAGE, "a message")


_TOOL: dict[str, Reader] = {
    **_ANY,
    "name": ignored,
    "description": text,
    "input_schema": free,
    "input_examples": free,
    "strict": ignored,
    "eager_input_streaming": ignored,
}


def tools(tally: Tally, value: Any) -> None:
    listing = listed(value, "tools")
    tally.tokens += TOOLS if listing else 0
    for tool in listing:
        tally.tokens += TOOL
        kind = an_object(tool, "a tool").get("type")
        if kind in _PLAIN_TOOL:
            read_members(tally, tool, _TOOL, "a tool")
        elif type(kind) is str and _OF_ANTHROPIC.fullmatch(kind):
            tally.leave(f"a tool of type {kind!r}")
        else:
            raise unbounded(f"a tool of type {told(kind)}", _SERVER)


def only_clearing(_: Tally, value: Any) -> None:
    """What is cleared makes the input shorter. To compact it is another run of the model, which is charged."""
    if value is None:
        return
    for edit in listed(an_object(value, "context_management").get("edits"), "edits"):
        kind = an_object(edit, "an edit").get("type")
        if type(kind) is not str or not kind.startswith("clear_"):
            raise unbounded(f"an edit of type {told(kind)} in 'context_management'", "it may run the model once more")


MEMBERS: dict[str, Reader] = {
    **parameters("anthropic_version", "anthropic_beta", "max_tokens", "metadata", "temperature", "top_p", "top_k"),
    **parameters("stop_sequences", "tool_choice", "thinking", "reasoning_config", "stream", "model"),
    "messages": messages,
    "system": content,
    "tools": tools,
    "output_config": of_members("output_config", {"effort": ignored, "format": free}),
    "output_format": free,
    "context_management": only_clearing,
}
EXTRA = ("anthropic_version", "anthropic_beta", "max_tokens", "max_tokens_to_sample", "metadata", "temperature",
         "top_p", "top_k", "stop_sequences", "thinking", "reasoning_config", "output_config", "output_format",
         "context_management")  # fmt: skip
