"""The Responses API, in OpenAI's form: one JSON document, or server-sent events that end with `response.completed`.

As on bedrock-runtime: nothing runs in the background, and no tool runs on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import malformed_request, validation_error
from bedrock_simulator.families.family import Json, get_required
from bedrock_simulator.generation import Completion, ModelRunner, Prompt, StopReason, check_max_tokens
from bedrock_simulator.models import Model, resolve_model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.simulated_call import SERVER_SENT_EVENTS, TIERS, SimulatedCall, SimulatedResponse, check_choice
from bedrock_simulator.usage import Usage

_DEFAULT_MAX_TOKENS = 16_384


def respond(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    body = call.parse_body()
    model = resolve_model(get_required(body, "model", str))
    if not model.can_converse:
        raise validation_error("The provided model doesn't support the Responses API.")
    if body.get("background"):
        raise validation_error("background: this endpoint has no background responses.")
    if body.get("service_tier") not in (None, "auto"):
        check_choice(body["service_tier"], TIERS, "service_tier")
    completion = runner.run(call, model, _parse_prompt(body))
    document = call.apply_usage_fault(_build_document(body, completion, model, call.fault_spec.tier))
    if body.get("stream"):
        return SimulatedResponse(
            frames=_build_events(document, completion),
            headers={"Content-Type": SERVER_SENT_EVENTS},
            usage=completion.usage,
        )
    return SimulatedResponse(orjson.dumps(document), usage=completion.usage)


def _parse_prompt(body: Json) -> Prompt:
    given = get_required(body, "input", (str, list))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise malformed_request("#/input: expected at least one item")
    if body.get("instructions"):
        items = [{"role": "system", "content": body["instructions"]}, *items]
    tools = body.get("tools") or []
    if any(tool.get("type") != "function" for tool in tools):
        raise validation_error("tools: this endpoint runs no tools; only functions are supported.")
    pieces = (
        [Piece(tokens.TOOL_PROMPT_TOKENS, "tools"), Piece(tokens.count_block_tokens(tools), tools)] if tools else []
    )
    return Prompt(
        pieces=[*pieces, *(piece for item in items for piece in _parse_item(item))],
        max_tokens=check_max_tokens(body.get("max_output_tokens"), "max_output_tokens", _DEFAULT_MAX_TOKENS),
        tool=_find_forced_tool(body, tools),
    )


def _parse_item(item: Any) -> list[Piece]:
    if not isinstance(item, dict):
        raise malformed_request("#/input: expected items")
    content = item.get("content", item)
    blocks = content if isinstance(content, list) else [content]
    role = item.get("role", item.get("type"))
    return [
        Piece(tokens.MESSAGE_TOKENS, role),
        *(Piece(tokens.count_block_tokens(block), (role, block)) for block in blocks),
    ]


def _find_forced_tool(body: Json, tools: list[Json]) -> tuple[str, Json] | None:
    choice = body.get("tool_choice")
    name = choice.get("name") if isinstance(choice, dict) else None
    if choice == "required" and tools:
        name = tools[0]["name"]
    return next(((tool["name"], tool.get("parameters") or {}) for tool in tools if tool["name"] == name), None)


def _build_document(body: Json, completion: Completion, model: Model, tier: str | None) -> Json:
    is_cut = completion.stop is StopReason.LENGTH
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": completion.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": model.name,
        "output": [_build_item(completion, is_cut=is_cut)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": tier or body.get("service_tier") or "default",
        "store": bool(body.get("store", True)),
        "temperature": body.get("temperature", 1.0),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": _build_usage(completion.usage),
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


def _build_item(completion: Completion, *, is_cut: bool) -> Json:
    status = "incomplete" if is_cut else "completed"
    if completion.tool:
        return {
            "type": "function_call",
            "id": f"fc_{completion.id}",
            "call_id": f"call_{completion.id}",
            "name": completion.tool.name,
            "arguments": orjson.dumps(completion.tool.input).decode(),
            "status": status,
        }
    text = {"type": "output_text", "text": completion.text, "annotations": []}
    return {"type": "message", "id": f"msg_{completion.id}", "role": "assistant", "status": status, "content": [text]}


def _build_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.total_input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_input_tokens + usage.output_tokens,
    }


def _build_events(document: Json, completion: Completion) -> Iterator[bytes]:
    begun = {**document, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    item = document["output"][0]
    place: Json = {"item_id": item["id"], "output_index": 0}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    if completion.tool:
        open_item = {**item, "arguments": "", "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": 0, "item": open_item})
        kind = "response.function_call_arguments"
        events += [{"type": f"{kind}.delta", **place, "delta": text} for text in completion.split_deltas()]
        events.append({"type": f"{kind}.done", **place, "name": item["name"], "arguments": item["arguments"]})
    else:
        open_item, place = {**item, "content": [], "status": "in_progress"}, {**place, "content_index": 0}
        part = item["content"][0]
        events.append({"type": "response.output_item.added", "output_index": 0, "item": open_item})
        events.append({"type": "response.content_part.added", **place, "part": {**part, "text": ""}})
        kind = "response.output_text"
        events += [
            {"type": f"{kind}.delta", **place, "delta": text, "logprobs": []} for text in completion.split_deltas()
        ]
        events.append({"type": f"{kind}.done", **place, "text": part["text"], "logprobs": []})
        events.append({"type": "response.content_part.done", **place, "part": part})
    events.append({"type": "response.output_item.done", "output_index": 0, "item": item})
    events.append({"type": f"response.{document['status']}", "response": document})
    for number, event in enumerate(events):
        yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event | {"sequence_number": number}))
