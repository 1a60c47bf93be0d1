"""The OpenAI-compatible path: chat completions as JSON, or as server-sent events that end with [DONE].

Also builds errors in the form in which clients of this API expect them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bedrock_simulator import guardrails
from bedrock_simulator.aws_errors import AwsError, validation_error
from bedrock_simulator.families import openai
from bedrock_simulator.families.family import get_required
from bedrock_simulator.generation import Completion, ModelRunner
from bedrock_simulator.models import Model, resolve_model
from bedrock_simulator.simulated_call import SERVER_SENT_EVENTS, TIERS, SimulatedCall, SimulatedResponse, check_choice

_DONE = b"data: [DONE]\n\n"

_ERROR_TYPES = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def complete_chat(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    body = call.parse_body()
    model = resolve_model(get_required(body, "model", str))
    if not model.can_converse:
        raise validation_error("The provided model doesn't support chat completions.")
    prompt = openai.FAMILY.parse_prompt(body)
    tier = _choose_tier(call, body)
    completion = runner.run(call, model, prompt)
    guardrail = guardrails.find_in_headers(call.headers, body, completion.text)
    total_usage = guardrails.add_guardrail_usage(completion.usage, guardrail)
    if body.get("stream"):
        options = body.get("stream_options")
        reports_usage = (
            isinstance(options, dict) and options.get("include_usage") is True and call.fault_spec.usage != "none"
        )
        usage_chunk = call.apply_usage_fault(openai.build_usage_chunk(completion, model)) if reports_usage else None
        frames = _build_frames(completion, model, tier, usage_chunk, guardrails.build_members(guardrail))
        return SimulatedResponse(frames=frames, headers={"Content-Type": SERVER_SENT_EVENTS}, usage=total_usage)
    document = {**openai.FAMILY.build_body(body, completion, model), **tier, **guardrails.build_members(guardrail)}
    return SimulatedResponse(call.render(document), usage=total_usage)


def _choose_tier(call: SimulatedCall, body: dict[str, Any]) -> dict[str, str]:
    requested_tier = body.get("service_tier")
    if requested_tier is not None and requested_tier != "auto":
        check_choice(requested_tier, TIERS, "service_tier")
    return {"service_tier": tier} if (tier := call.fault_spec.tier or requested_tier) else {}


def _build_frames(
    completion: Completion,
    model: Model,
    tier: dict[str, str],
    usage_chunk: dict[str, Any] | None,
    marks: dict[str, Any],
) -> Iterator[bytes]:
    """In a stream with usage, every chunk before the usage chunk has `usage: null`."""
    pending = {"usage": None} if usage_chunk is not None else {}
    *chunks, last = openai.build_chunks_without_usage(completion, model)
    for chunk in chunks:
        yield encode_server_sent_event(chunk | tier | pending)
    yield encode_server_sent_event(last | tier | pending | marks)
    if usage_chunk is not None:
        yield encode_server_sent_event(usage_chunk | tier)
    yield _DONE


def encode_server_sent_event(document: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(document)


def build_error_document(failure: AwsError) -> dict[str, Any]:
    """An error in the form that clients of this API expect."""
    kind = _ERROR_TYPES.get(failure.status, "server_error")
    return {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.kind}}
