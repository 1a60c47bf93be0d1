"""The conversation of Converse, which Nova's own body shares. Pure."""

from __future__ import annotations

from typing import Any

from price_keeper.errors import InvalidRequest
from price_keeper.hard.members import (
    ELSEWHERE,
    an_object,
    free,
    ignored,
    left_to_count,
    listed,
    of_members,
    parameters,
    read_members,
    text,
    told,
    unbounded,
)
from price_keeper.hard.tally import MESSAGE, TOOL, TOOL_BLOCK, TOOLS, Reader, Tally

_HERE = frozenset(("bytes", "text", "content"))  # where media may stand


def _media(what: str) -> Reader:
    def read(tally: Tally, value: Any) -> None:
        for name in an_object(an_object(value, what).get("source"), f"the source of {what}"):
            if name not in _HERE:
                raise unbounded(f"{what} in {told(name)}", ELSEWHERE)
        tally.leave(what)

    return read


_MEDIA: dict[str, Reader] = {
    "image": _media("an image"),
    "document": _media("a document"),
    "video": _media("a video"),
    "audio": _media("a sound"),
    "searchResult": left_to_count("a search result", "source", "title", "content", "citations"),
}
_GUARDED: dict[str, Reader] = {"guardContent": left_to_count("guardContent", "text", "image")}

_RESULT: dict[str, Reader] = {"text": text, "json": free, **_MEDIA}
_REASONING: dict[str, Reader] = {
    "reasoningText": of_members("reasoningText", {"text": text, "signature": ignored}),
    "redactedContent": lambda tally, _: tally.leave("redacted reasoning"),
}
_TOOL_USE: dict[str, Reader] = {"toolUseId": ignored, "name": ignored, "input": free}


def _tool_use(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL_BLOCK
    read_members(tally, value, _TOOL_USE, "toolUse")


def _results(tally: Tally, value: Any) -> None:
    for each in listed(value, "results of tools"):
        read_members(tally, each, _RESULT, "a result of a tool")


_TOOL_RESULT: dict[str, Reader] = {"toolUseId": ignored, "status": ignored, "content": _results}


def _tool_result(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL_BLOCK
    read_members(tally, value, _TOOL_RESULT, "toolResult")


_BLOCK: dict[str, Reader] = {
    "text": text,
    "cachePoint": ignored,
    "toolUse": _tool_use,
    "toolResult": _tool_result,
    "reasoningContent": of_members("reasoningContent", _REASONING),
    "citationsContent": left_to_count("citations", "content", "citations"),
    **_GUARDED,
    **_MEDIA,
}
_SYSTEM: dict[str, Reader] = {"text": text, "cachePoint": ignored, **_GUARDED}


def _content(tally: Tally, value: Any) -> None:
    for block in listed(value, "blocks"):
        read_members(tally, block, _BLOCK, "a block")


_MESSAGE: dict[str, Reader] = {"role": ignored, "content": _content}


def messages(tally: Tally, value: Any) -> None:
    for message in listed(value, "messages"):
        tally.tokens += MESSAGE
        read_members(tally, message, _MESSAGE, "a message")


def system(tally: Tally, value: Any) -> None:
    for block in listed(value, "system blocks"):
        read_members(tally, block, _SYSTEM, "a system block")


def _specification(tally: Tally, value: Any) -> None:
    tally.tokens += TOOL
    read_members(tally, value, _SPECIFICATION, "toolSpec")


_SPECIFICATION: dict[str, Reader] = {"name": ignored, "description": text, "inputSchema": free, "strict": ignored}
_TOOL: dict[str, Reader] = {"toolSpec": _specification, "cachePoint": ignored}


def _tools(tally: Tally, value: Any) -> None:
    listing = listed(value, "tools")
    tally.tokens += TOOLS if listing else 0
    for tool in listing:
        if type(tool) is dict and "systemTool" in tool:
            raise unbounded("'systemTool' among the tools", "Bedrock runs such a tool, and the model again after it")
        read_members(tally, tool, _TOOL, "a tool")


tool_config = of_members("toolConfig", {"tools": _tools, "toolChoice": ignored})


def no_reasoning(_: Tally, value: Any) -> None:
    """Nova's, which has an effort and no limit: its highest takes no maximum of tokens at all."""
    if value is not None and an_object(value, "reasoningConfig").get("type") != "disabled":
        raise unbounded("'reasoningConfig'", "its reasoning is charged, and no maximum is known to hold for it")


inference_config = of_members("inferenceConfig", parameters("maxTokens", "temperature", "topP", "stopSequences"))
nova_inference_config = of_members(
    "inferenceConfig",
    {
        **parameters("maxTokens", "max_new_tokens", "temperature", "topP", "top_p", "topK", "top_k", "stopSequences"),
        "reasoningConfig": no_reasoning,
    },
)


def no_prompt_variables(_: Tally, value: Any) -> None:
    if value:
        raise unbounded("'promptVariables'", "the prompt that they are for is not in the request")


def no_stored_prompt(model: str) -> None:
    if ":prompt/" in model:
        raise InvalidRequest("this budget is hard, and a stored prompt cannot be bounded: it is not in the request")
