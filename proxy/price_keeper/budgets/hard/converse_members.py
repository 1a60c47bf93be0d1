"""Readers of the members of Converse, which Nova's own body shares. Pure.

`request_forms` assigns these readers to the members of a body.
"""

from __future__ import annotations

from typing import Any

from price_keeper.budgets.hard.token_bound import (
    MESSAGE_TOKENS,
    REMOTE_CONTENT,
    TOOL_BLOCK_TOKENS,
    TOOL_TOKENS,
    TOOLS_TOKENS,
    MemberReader,
    TokenBound,
    build_unbounded_error,
    ignore,
    ignore_members,
    make_counted_reader,
    make_members_reader,
    quote_name,
    read_json,
    read_members,
    read_text,
    require_list,
    require_object,
)
from price_keeper.errors import InvalidRequest

_INLINE_SOURCES = frozenset(("bytes", "text", "content"))  # forms of media that are in the request itself


def _make_media_reader(what: str) -> MemberReader:
    def read(bound: TokenBound, value: Any) -> None:
        for name in require_object(require_object(value, what).get("source"), f"the source of {what}"):
            if name not in _INLINE_SOURCES:
                raise build_unbounded_error(f"{what} in {quote_name(name)}", REMOTE_CONTENT)
        bound.leave_uncounted(what)

    return read


_MEDIA_MEMBERS: dict[str, MemberReader] = {
    "image": _make_media_reader("an image"),
    "document": _make_media_reader("a document"),
    "video": _make_media_reader("a video"),
    "audio": _make_media_reader("a sound"),
    "searchResult": make_counted_reader("a search result", "source", "title", "content", "citations"),
}
_GUARD_MEMBERS: dict[str, MemberReader] = {"guardContent": make_counted_reader("guardContent", "text", "image")}

_RESULT_MEMBERS: dict[str, MemberReader] = {"text": read_text, "json": read_json, **_MEDIA_MEMBERS}
_REASONING_MEMBERS: dict[str, MemberReader] = {
    "reasoningText": make_members_reader("reasoningText", {"text": read_text, "signature": ignore}),
    "redactedContent": lambda bound, _: bound.leave_uncounted("redacted reasoning"),
}
_TOOL_USE_MEMBERS: dict[str, MemberReader] = {"toolUseId": ignore, "name": ignore, "input": read_json}


def _read_tool_use(bound: TokenBound, value: Any) -> None:
    bound.tokens += TOOL_BLOCK_TOKENS
    read_members(bound, value, _TOOL_USE_MEMBERS, "toolUse")


def _read_results(bound: TokenBound, value: Any) -> None:
    for content in require_list(value, "results of tools"):
        read_members(bound, content, _RESULT_MEMBERS, "a result of a tool")


_TOOL_RESULT_MEMBERS: dict[str, MemberReader] = {"toolUseId": ignore, "status": ignore, "content": _read_results}


def _read_tool_result(bound: TokenBound, value: Any) -> None:
    bound.tokens += TOOL_BLOCK_TOKENS
    read_members(bound, value, _TOOL_RESULT_MEMBERS, "toolResult")


_BLOCK_MEMBERS: dict[str, MemberReader] = {
    "text": read_text,
    "cachePoint": ignore,
    "toolUse": _read_tool_use,
    "toolResult": _read_tool_result,
    "reasoningContent": make_members_reader("reasoningContent", _REASONING_MEMBERS),
    "citationsContent": make_counted_reader("citations", "content", "citations"),
    **_GUARD_MEMBERS,
    **_MEDIA_MEMBERS,
}
_SYSTEM_MEMBERS: dict[str, MemberReader] = {"text": read_text, "cachePoint": ignore, **_GUARD_MEMBERS}


def _read_content(bound: TokenBound, value: Any) -> None:
    for block in require_list(value, "blocks"):
        read_members(bound, block, _BLOCK_MEMBERS, "a block")


_MESSAGE_MEMBERS: dict[str, MemberReader] = {"role": ignore, "content": _read_content}


def read_messages(bound: TokenBound, value: Any) -> None:
    for message in require_list(value, "messages"):
        bound.tokens += MESSAGE_TOKENS
        read_members(bound, message, _MESSAGE_MEMBERS, "a message")


def read_system(bound: TokenBound, value: Any) -> None:
    for block in require_list(value, "system blocks"):
        read_members(bound, block, _SYSTEM_MEMBERS, "a system block")


def _read_specification(bound: TokenBound, value: Any) -> None:
    bound.tokens += TOOL_TOKENS
    read_members(bound, value, _SPECIFICATION_MEMBERS, "toolSpec")


_SPECIFICATION_MEMBERS: dict[str, MemberReader] = {
    "name": ignore,
    "description": read_text,
    "inputSchema": read_json,
    "strict": ignore,
}
_TOOL_MEMBERS: dict[str, MemberReader] = {"toolSpec": _read_specification, "cachePoint": ignore}


def _read_tools(bound: TokenBound, value: Any) -> None:
    tool_list = require_list(value, "tools")
    bound.tokens += TOOLS_TOKENS if tool_list else 0
    for tool in tool_list:
        if type(tool) is dict and "systemTool" in tool:
            raise build_unbounded_error(
                "'systemTool' among the tools", "Bedrock runs such a tool, and the model again after it"
            )
        read_members(bound, tool, _TOOL_MEMBERS, "a tool")


read_tool_config = make_members_reader("toolConfig", {"tools": _read_tools, "toolChoice": ignore})


def reject_reasoning(_: TokenBound, value: Any) -> None:
    """Nova's reasoning has an effort and no limit; with the highest effort Nova accepts no maximum of tokens at all."""
    if value is not None and require_object(value, "reasoningConfig").get("type") != "disabled":
        raise build_unbounded_error(
            "'reasoningConfig'", "its reasoning is charged, and no maximum is known to hold for it"
        )


read_inference_config = make_members_reader(
    "inferenceConfig", ignore_members("maxTokens", "temperature", "topP", "stopSequences")
)
read_nova_inference_config = make_members_reader(
    "inferenceConfig",
    {
        **ignore_members(
            "maxTokens", "max_new_tokens", "temperature", "topP", "top_p", "topK", "top_k", "stopSequences"
        ),
        "reasoningConfig": reject_reasoning,
    },
)


def reject_prompt_variables(_: TokenBound, value: Any) -> None:
    if value:
        raise build_unbounded_error("'promptVariables'", "the prompt that they are for is not in the request")


def reject_stored_prompt(model: str) -> None:
    if ":prompt/" in model:
        raise InvalidRequest("this budget is hard, and a stored prompt cannot be bounded: it is not in the request")
