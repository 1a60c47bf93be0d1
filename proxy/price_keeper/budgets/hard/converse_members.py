"""Readers of the members of Converse, which Nova's own body shares. Pure.

`request_forms` assigns these readers to the members of a body.
"""

from __future__ import annotations

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
    make_counted_reader,
    make_list_reader,
    make_members_reader,
    make_messages_reader,
    make_object_reader,
    quote_name,
    read_json,
    read_members,
    read_text,
    require_object,
    require_tools,
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


_TOOL_RESULT_MEMBERS: dict[str, MemberReader] = {
    "toolUseId": ignore,
    "status": ignore,
    "content": make_list_reader("results of tools", make_object_reader("a result of a tool", _RESULT_MEMBERS)),
}
_BLOCK_MEMBERS: dict[str, MemberReader] = {
    "text": read_text,
    "cachePoint": ignore,
    "toolUse": make_object_reader("toolUse", _TOOL_USE_MEMBERS, TOOL_BLOCK_TOKENS),
    "toolResult": make_object_reader("toolResult", _TOOL_RESULT_MEMBERS, TOOL_BLOCK_TOKENS),
    "reasoningContent": make_members_reader("reasoningContent", _REASONING_MEMBERS),
    "citationsContent": make_counted_reader("citations", "content", "citations"),
    **_GUARD_MEMBERS,
    **_MEDIA_MEMBERS,
}
_SYSTEM_MEMBERS: dict[str, MemberReader] = {"text": read_text, "cachePoint": ignore, **_GUARD_MEMBERS}


_MESSAGE_MEMBERS: dict[str, MemberReader] = {
    "role": ignore,
    "content": make_list_reader("blocks", make_object_reader("a block", _BLOCK_MEMBERS)),
}

read_messages = make_messages_reader(_MESSAGE_MEMBERS)
read_system = make_list_reader("system blocks", make_object_reader("a system block", _SYSTEM_MEMBERS))

_SPECIFICATION_MEMBERS: dict[str, MemberReader] = {
    "name": ignore,
    "description": read_text,
    "inputSchema": read_json,
    "strict": ignore,
}
_TOOL_MEMBERS: dict[str, MemberReader] = {
    "toolSpec": make_object_reader("toolSpec", _SPECIFICATION_MEMBERS, TOOL_TOKENS),
    "cachePoint": ignore,
}


def _read_tools(bound: TokenBound, value: Any) -> None:
    for tool in require_tools(bound, value):
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
