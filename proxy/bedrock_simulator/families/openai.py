"""Chat completions: gpt-oss and the many models that use its format; also the OpenAI-compatible path of Bedrock."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import malformed_request
from bedrock_simulator.families.family import Family, Json, get_required, parse_chat_message, parse_stop_sequences
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.usage import Usage

_DEFAULT_MAX_TOKENS = 16_384

_STOP_REASONS = {
    StopReason.END: "stop",
    StopReason.LENGTH: "length",
    StopReason.SEQUENCE: "stop",
    StopReason.TOOL: "tool_calls",
}


def _parse_prompt(body: Json) -> Prompt:
    messages = get_required(body, "messages", list)
    if not messages:
        raise malformed_request("#/messages: expected at least one message")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return Prompt(
        pieces=[*_parse_tools(body), *(piece for message in messages for piece in parse_chat_message(message))],
        max_tokens=check_max_tokens(limit, "max_completion_tokens", _DEFAULT_MAX_TOKENS),
        stop_sequences=parse_stop_sequences(body, "stop"),
        tool=_find_forced_tool(body),
    )


def _parse_tools(body: Json) -> list[Piece]:
    tools = body.get("tools") or []
    return [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), Piece(tokens.count_block_tokens(tools), tools)] if tools else []


def _find_forced_tool(body: Json) -> tuple[str, Json] | None:
    choice = body.get("tool_choice")
    functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or [] if "function" in tool}
    if choice == "required" and functions:
        name = next(iter(functions))
    elif isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
    else:
        return None
    return (name, functions[name].get("parameters") or {}) if name in functions else None


def build_usage(total: Usage) -> Json:
    """In this format, unlike all others, the prompt tokens include cached ones."""
    details = {"cached_tokens": total.cache_read_tokens}
    if total.cache_write_tokens:
        details["cache_write_tokens"] = total.cache_write_tokens
    return {
        "prompt_tokens": total.total_input_tokens,
        "completion_tokens": total.output_tokens,
        "total_tokens": total.total_input_tokens + total.output_tokens,
        "prompt_tokens_details": details,
    }


def build_message(completion: Completion) -> Json:
    return {
        "role": "assistant",
        "content": None if completion.tool else completion.text,
        **_build_tool_calls(completion, indexed=False),
    }


def _build_tool_calls(completion: Completion, indexed: bool) -> Json:
    if completion.tool is None:
        return {}
    function = {"name": completion.tool.name, "arguments": orjson.dumps(completion.tool.input).decode()}
    call = {"id": f"chatcmpl-tool-{completion.id}", "type": "function", "function": function}
    return {"tool_calls": [{"index": 0, **call} if indexed else call]}


def _build_head(kind: str, completion: Completion, model: Model) -> Json:
    return {"id": f"chatcmpl-{completion.id}", "object": kind, "created": completion.created, "model": model.name}


def _build_body(_: Json, completion: Completion, model: Model) -> Json:
    choice = {
        "index": 0,
        "message": build_message(completion),
        "finish_reason": _STOP_REASONS[completion.stop],
        "logprobs": None,
    }
    return {
        **_build_head("chat.completion", completion, model),
        "choices": [choice],
        "usage": build_usage(completion.usage),
    }


def build_chunks_without_usage(completion: Completion, model: Model) -> Iterator[Json]:
    """The chunks of a stream without the usage chunk."""
    head = _build_head("chat.completion.chunk", completion, model)
    yield _build_chunk(head, {"role": "assistant", "content": ""}, None)
    if completion.tool:
        yield _build_chunk(head, _build_tool_calls(completion, indexed=True), None)
    else:
        for text in completion.split_deltas():
            yield _build_chunk(head, {"content": text}, None)
    yield _build_chunk(head, {}, _STOP_REASONS[completion.stop])


def build_usage_chunk(completion: Completion, model: Model) -> Json:
    return {
        **_build_head("chat.completion.chunk", completion, model),
        "choices": [],
        "usage": build_usage(completion.usage),
    }


def build_chunks(_: Json, completion: Completion, model: Model) -> Iterator[Json]:
    yield from build_chunks_without_usage(completion, model)
    yield build_usage_chunk(completion, model)


def _build_chunk(head: Json, delta: Json, reason: str | None) -> Json:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


FAMILY = Family(_parse_prompt, _build_body, build_chunks)
