"""Chat completions: gpt-oss, and the many that took over its form. Also what the OpenAI path of Bedrock speaks."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, required, spoken_by, stops
from bedrock_simulator.generation import Completion, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.refusals import malformed_request
from bedrock_simulator.usage import Usage

_DEFAULT_MAX_TOKENS = 16_384

_REASONS = {StopReason.END: "stop", StopReason.LENGTH: "length", StopReason.SEQUENCE: "stop", StopReason.TOOL: "tool_calls"}


def _read(body: Json) -> Prompt:
    messages = required(body, "messages", list)
    if not messages:
        raise malformed_request("#/messages: expected at least one message")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return Prompt(
        pieces=[*_tools(body), *(piece for message in messages for piece in spoken_by(message))],
        max_tokens=check_max_tokens(limit, "max_completion_tokens", _DEFAULT_MAX_TOKENS),
        stop_sequences=stops(body, "stop"),
        tool=_forced_tool(body),
    )


def _tools(body: Json) -> list[Piece]:
    tools = body.get("tools") or []
    return [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), Piece(tokens.count_block_tokens(tools), tools)] if tools else []


def _forced_tool(body: Json) -> tuple[str, Json] | None:
    choice = body.get("tool_choice")
    functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or [] if "function" in tool}
    if choice == "required" and functions:
        name = next(iter(functions))
    elif isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
    else:
        return None
    return (name, functions[name].get("parameters") or {}) if name in functions else None


def usage(used: Usage) -> Json:
    """Here, unlike anywhere else, the prompt's tokens include those of a cache."""
    details = {"cached_tokens": used.cache_read_tokens}
    if used.cache_write_tokens:
        details["cache_write_tokens"] = used.cache_write_tokens
    return {
        "prompt_tokens": used.total_input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.total_input_tokens + used.output_tokens,
        "prompt_tokens_details": details,
    }


def message(said: Completion) -> Json:
    return {"role": "assistant", "content": None if said.tool else said.text, **_tool_calls(said, indexed=False)}


def _tool_calls(said: Completion, indexed: bool) -> Json:
    if said.tool is None:
        return {}
    function = {"name": said.tool.name, "arguments": orjson.dumps(said.tool.input).decode()}
    call = {"id": f"chatcmpl-tool-{said.id}", "type": "function", "function": function}
    return {"tool_calls": [{"index": 0, **call} if indexed else call]}


def _head(kind: str, said: Completion, model: Model) -> Json:
    return {"id": f"chatcmpl-{said.id}", "object": kind, "created": said.created, "model": model.name}


def _whole(_: Json, said: Completion, model: Model) -> Json:
    choice = {"index": 0, "message": message(said), "finish_reason": _REASONS[said.stop], "logprobs": None}
    return {**_head("chat.completion", said, model), "choices": [choice], "usage": usage(said.usage)}


def bare_chunks(said: Completion, model: Model) -> Iterator[Json]:
    """The chunks of a stream, none of which tells what was used."""
    head = _head("chat.completion.chunk", said, model)
    yield _chunk(head, {"role": "assistant", "content": ""}, None)
    if said.tool:
        yield _chunk(head, _tool_calls(said, indexed=True), None)
    else:
        for text in said.split_deltas():
            yield _chunk(head, {"content": text}, None)
    yield _chunk(head, {}, _REASONS[said.stop])


def usage_chunk(said: Completion, model: Model) -> Json:
    return {**_head("chat.completion.chunk", said, model), "choices": [], "usage": usage(said.usage)}


def chunks(_: Json, said: Completion, model: Model) -> Iterator[Json]:
    yield from bare_chunks(said, model)
    yield usage_chunk(said, model)


def _chunk(head: Json, delta: Json, reason: str | None) -> Json:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


FAMILY = Family(_read, _whole, chunks)
