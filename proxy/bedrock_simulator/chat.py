"""The OpenAI path: chat completions as JSON, or as server-sent events that end with [DONE]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bedrock_simulator import guardrails
from bedrock_simulator.call import SERVER_SENT_EVENTS, TIERS, SimulatedResponse, SimulatedCall, check_choice
from bedrock_simulator.families import openai
from bedrock_simulator.families.family import required
from bedrock_simulator.generation import Completion
from bedrock_simulator.models import Model, resolve
from bedrock_simulator.refusals import AwsError, validation_error
from bedrock_simulator.turns import ModelRunner

_DONE = b"data: [DONE]\n\n"

_ERROR_TYPES = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def complete(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    body = call.parse_body()
    model = resolve(required(body, "model", str))
    if not model.can_converse:
        raise validation_error("The provided model doesn't support chat completions.")
    prompt = openai.FAMILY.read(body)
    tier = _tier(call, body)
    said = runner.run(call, model, prompt)
    watched = guardrails.of_headers(call.headers, body, said.text)
    used = guardrails.used(said.usage, watched)
    if body.get("stream"):
        options = body.get("stream_options")
        tells = isinstance(options, dict) and options.get("include_usage") is True and call.fault_spec.usage != "none"
        usage_chunk = call.apply_usage_fault(openai.usage_chunk(said, model)) if tells else None
        frames = _frames(said, model, tier, usage_chunk, guardrails.marks(watched))
        return SimulatedResponse(frames=frames, headers={"Content-Type": SERVER_SENT_EVENTS}, usage=used)
    document = {**openai.FAMILY.whole(body, said, model), **tier, **guardrails.marks(watched)}
    return SimulatedResponse(call.render(document), usage=used)


def _tier(call: SimulatedCall, body: dict[str, Any]) -> dict[str, str]:
    asked = body.get("service_tier")
    if asked is not None and asked != "auto":
        check_choice(asked, TIERS, "service_tier")
    return {"service_tier": tier} if (tier := call.fault_spec.tier or asked) else {}


def _frames(
    said: Completion, model: Model, tier: dict[str, str], usage_chunk: dict[str, Any] | None, marks: dict[str, Any]
) -> Iterator[bytes]:
    """A stream that will tell its usage says so in every chunk before the one that does."""
    pending = {"usage": None} if usage_chunk is not None else {}
    *chunks, last = openai.bare_chunks(said, model)
    for chunk in chunks:
        yield sent(chunk | tier | pending)
    yield sent(last | tier | pending | marks)
    if usage_chunk is not None:
        yield sent(usage_chunk | tier)
    yield _DONE


def sent(document: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(document)


def error(refusal: AwsError) -> dict[str, Any]:
    """A refusal in the form in which clients of this API look for it."""
    kind = _ERROR_TYPES.get(refusal.status, "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.kind}}
