"""The conversation of Converse, which Nova's own body shares. Pure."""

from __future__ import annotations

from typing import Any

from price_keeper.errors import InvalidRequest
from price_keeper.hard.members import (
    REMOTE_CONTENT,
    require_object,
    read_json,
    ignore,
    make_counted_reader,
    require_list,
    make_members_reader,
    ignore_members,
    read_members,
    read_text,
    quote_name,
    build_unbounded_error,
)
from price_keeper.hard.tally import MESSAGE_TOKENS, TOOL_TOKENS, TOOL_BLOCK_TOKENS, TOOLS_TOKENS, MemberReader, TokenBound

_HERE = frozenset(("bytes", "text", "content"))  # where media may stand


def _media(what: str) -> MemberReader:
    def read(tally: TokenBound, value: Any) -> None:
        for name in require_object(require_object(value, what).get("source"), f"the source of {what}"):
            if name not in _HERE:
                raise build_unbounded_error(f"{what} in {quote_name(name)}", REMOTE_CONTENT)
        tally.leave_uncounted(what)

    return read


_MEDIA: dict[str, MemberReader] = {
    "image": _media("an image"),
    "document": _media("a document"),
    "video": _media("a video"),
    "audio": _media("a sound"),
    "searchResult": make_counted_reader("a search result", "source", "title", "content", "citations"),
}
_GUARDED: dict[str, MemberReader] = {"guardContent": make_counted_reader("guardContent", "text", "image")}

_RESULT: dict[str, MemberReader] = {"text": read_text, "json": read_json, **_MEDIA}
_REASONING: dict[str, MemberReader] = {
    "reasoningText": make_members_reader("reasoningText", {"text": read_text, "signature": ignore}),
    "redactedContent": lambda tally, _: tally.leave_uncounted("redacted reasoning"),
}
_TOOL_USE: dict[str, MemberReader] = {"toolUseId": ignore, "name": ignore, "input": read_json}


def _tool_use(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_BLOCK_TOKENS
    read_members(tally, value, _TOOL_USE, "toolUse")


def _results(tally: TokenBound, value: Any) -> None:
    for each in require_list(value, "results of tools"):
        read_members(tally, each, _RESULT, "a result of a tool")


_TOOL_RESULT: dict[str, MemberReader] = {"toolUseId": ignore, "status": ignore, "content": _results}


def _tool_result(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_BLOCK_TOKENS
    read_members(tally, value, _TOOL_RESULT, "toolResult")


_BLOCK: dict[str, MemberReader] = {
    "text": read_text,
    "cachePoint": ignore,
    "toolUse": _tool_use,
    "toolResult": _tool_result,
    "reasoningContent": make_members_reader("reasoningContent", _REASONING),
    "citationsContent": make_counted_reader("citations", "content", "citations"),
    **_GUARDED,
    **_MEDIA,
}
_SYSTEM: dict[str, MemberReader] = {"text": read_text, "cachePoint": ignore, **_GUARDED}


def _content(tally: TokenBound, value: Any) -> None:
    for block in require_list(value, "blocks"):
        read_members(tally, block, _BLOCK, "a block")


_MESSAGE: dict[str, MemberReader] = {"role": ignore, "content": _content}


def messages(tally: TokenBound, value: Any) -> None:
    for message in require_list(value, "messages"):
        tally.tokens += MESSAGE_TOKENS
        read_members(tally, message, _MESSAGE, "a message")


def system(tally: TokenBound, value: Any) -> None:
    for block in require_list(value, "system blocks"):
        read_members(tally, block, _SYSTEM, "a system block")


def _specification(tally: TokenBound, value: Any) -> None:
    tally.tokens += TOOL_TOKENS
    read_members(tally, value, _SPECIFICATION, "toolSpec")


_SPECIFICATION: dict[str, MemberReader] = {"name": ignore, "description": read_text, "inputSchema": read_json, "strict": ignore}
_TOOL: dict[str, MemberReader] = {"toolSpec": _specification, "cachePoint": ignore}


def _tools(tally: TokenBound, value: Any) -> None:
    listing = require_list(value, "tools")
    tally.tokens += TOOLS_TOKENS if listing else 0
    for tool in listing:
        if type(tool) is dict and "systemTool" in tool:
            raise build_unbounded_error("'systemTool' among the tools", "Bedrock runs such a tool, and the model again after it")
        read_members(tally, tool, _TOOL, "a tool")


tool_config = make_members_reader("toolConfig", {"tools": _tools, "toolChoice": ignore})


def no_reasoning(_: TokenBound, value: Any) -> None:
    """Nova's, which has an effort and no limit: its highest takes no maximum of tokens at all."""
    if value is not None and require_object(value, "reasoningConfig").get("type") != "disabled":
        raise build_unbounded_error("'reasoningConfig'", "its reasoning is charged, and no maximum is known to hold for it")


inference_config = make_members_reader("inferenceConfig", ignore_members("maxTokens", "temperature", "topP", "stopSequences"))
nova_inference_config = make_members_reader(
    "inferenceConfig",
    {
        **ignore_members("maxTokens", "max_new_tokens", "temperature", "topP", "top_p", "topK", "top_k", "stopSequences"),
        "reasoningConfig": no_reasoning,
    },
)


def no_prompt_variables(_: TokenBound, value: Any) -> None:
    if value:
        raise build_unbounded_error("'promptVariables'", "the prompt that they are for is not in the request")


def no_stored_prompt(model: str) -> None:
    if ":prompt/" in model:
        raise InvalidRequest("this budget is hard, and a stored prompt cannot be bounded: it is not in the request")
