"""The format that Converse and Nova share: parses prompts, builds the blocks and events of a response. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import constraint_violation, validation_error
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.prompt_cache import Piece

STOP_REASONS = {
    StopReason.END: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.SEQUENCE: "stop_sequence",
    StopReason.TOOL: "tool_use",
}

_ROLES = ("user", "assistant", "system")


def parse_prompt(body: Mapping[str, Any], default_max_tokens: int) -> Prompt:
    config = _get_structure(body, "inferenceConfig")
    maximum = config.get("maxTokens")
    if isinstance(maximum, int) and maximum < 1:
        raise constraint_violation(maximum, "inferenceConfig.maxTokens", "have value greater than or equal to 1")
    return Prompt(
        pieces=[
            *_parse_tools(body),
            *_parse_blocks(body.get("system") or [], "system"),
            *_parse_messages(body.get("messages")),
        ],
        max_tokens=check_max_tokens(maximum, "inferenceConfig.maxTokens", default_max_tokens),
        stop_sequences=_parse_stop_sequences(config.get("stopSequences") or []),
        tool=_find_forced_tool(body),
    )


def _get_structure(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise constraint_violation(value, name, "be a structure")
    return value


def _parse_stop_sequences(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise constraint_violation(values, "inferenceConfig.stopSequences", "have length greater than or equal to 1")
    return values


def _parse_messages(messages: Any) -> list[Piece]:
    if not isinstance(messages, list) or not messages:
        raise validation_error("The messages field is required: a conversation has at least one message.")
    pieces = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise constraint_violation(
                role, f"messages.{index + 1}.member.role", f"satisfy enum value set: {list(_ROLES)}"
            )
        if index == 0 and role == "assistant":
            raise validation_error(
                "A conversation must start with a user message. Try again with a conversation that starts with a "
                "user message."
            )
        content = message.get("content")
        if not content:
            raise validation_error(f"The content field in the Message object at messages.{index} is empty.")
        pieces.append(Piece(tokens.MESSAGE_TOKENS, role))
        pieces += _parse_blocks(content, f"messages.{index}.content")
    return pieces


def _parse_blocks(blocks: Any, path: str) -> list[Piece]:
    """The blocks as pieces. A cache point is not a piece but marks the end of the preceding one."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and block for block in blocks):
        raise constraint_violation(blocks, path, "be a list of blocks")
    pieces: list[Piece] = []
    for block in blocks:
        if "cachePoint" not in block:
            pieces.append(Piece(tokens.count_block_tokens(block), block))
        elif pieces:
            pieces[-1].ttl = block["cachePoint"].get("ttl", "5m")
    return pieces


def _parse_tools(body: Mapping[str, Any]) -> list[Piece]:
    tools = _get_structure(body, "toolConfig").get("tools")
    if not tools:
        return []
    return [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), *_parse_blocks(tools, "toolConfig.tools")]


def _find_forced_tool(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    config = _get_structure(body, "toolConfig")
    choice = config.get("toolChoice") or {}
    specs = {spec["name"]: spec for tool in config.get("tools") or [] if (spec := tool.get("toolSpec"))}
    if "tool" in choice:
        name = choice["tool"].get("name")
    elif "any" in choice and specs:
        name = next(iter(specs))
    else:
        return None
    if name not in specs:
        raise validation_error(f"The tool {name!r} that toolChoice names is not among the tools.")
    return name, specs[name].get("inputSchema", {}).get("json") or {}


def build_block(completion: Completion) -> dict[str, Any]:
    if completion.tool is None:
        return {"text": completion.text}
    return {"toolUse": {**_build_tool_head(completion), "input": completion.tool.input}}


def _build_tool_head(completion: Completion) -> dict[str, Any]:
    return {"toolUseId": f"tooluse_{completion.id}", "name": completion.tool.name if completion.tool else ""}


def build_events(completion: Completion) -> Iterator[tuple[str, dict[str, Any]]]:
    """All events of a stream except the last one, which has the usage. Only a tool's block has a start event."""
    yield "messageStart", {"role": "assistant"}
    if completion.tool:
        yield "contentBlockStart", {"start": {"toolUse": _build_tool_head(completion)}, "contentBlockIndex": 0}
    for text in completion.split_deltas():
        delta = {"toolUse": {"input": text}} if completion.tool else {"text": text}
        yield "contentBlockDelta", {"delta": delta, "contentBlockIndex": 0}
    yield "contentBlockStop", {"contentBlockIndex": 0}
    yield "messageStop", {"stopReason": STOP_REASONS[completion.stop]}
