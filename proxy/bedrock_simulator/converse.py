"""The operations Converse, ConverseStream and CountTokens."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterator
from typing import Any

from bedrock_simulator import converse_format, guardrails, request_metadata
from bedrock_simulator.aws_errors import validation_error
from bedrock_simulator.event_frames import encode_event
from bedrock_simulator.families import FAMILIES
from bedrock_simulator.generation import Completion, ModelRunner, Prompt
from bedrock_simulator.models import Model, resolve_model
from bedrock_simulator.simulated_call import (
    EVENT_STREAM,
    LATENCIES,
    TIERS,
    SimulatedCall,
    SimulatedResponse,
    check_choice,
    parse_json_object,
)
from bedrock_simulator.usage import Usage

_DEFAULT_MAX_TOKENS = 4096


def converse(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    model, body, completion = _run_model(runner, call)
    guardrail = guardrails.find_in_conversation(body, completion.text)
    document = {
        "output": {"message": {"role": "assistant", "content": [converse_format.build_block(completion)]}},
        "stopReason": converse_format.STOP_REASONS[completion.stop],
        **_build_closing(call, body, completion, model),
        **guardrails.build_trace(guardrail),
    }
    return SimulatedResponse(call.render(document), usage=guardrails.add_guardrail_usage(completion.usage, guardrail))


def converse_stream(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    model, body, completion = _run_model(runner, call)
    guardrail = guardrails.find_in_conversation(body, completion.text)
    closing = call.apply_usage_fault(_build_closing(call, body, completion, model) | guardrails.build_trace(guardrail))

    def frames() -> Iterator[bytes]:
        for kind, content in converse_format.build_events(completion):
            yield encode_event(kind, content)
        yield encode_event("metadata", closing)

    total_usage = guardrails.add_guardrail_usage(completion.usage, guardrail)
    return SimulatedResponse(frames=frames(), headers={"Content-Type": EVENT_STREAM}, usage=total_usage)


def count_tokens(call: SimulatedCall) -> SimulatedResponse:
    """The count that the call itself would report as its total input; the prompt cache is not consulted."""
    model = resolve_model(call.route.model)
    document = call.parse_body().get("input")
    if not isinstance(document, dict) or len(document) != 1:
        raise validation_error("The input field is required: it has either invokeModel or converse.")
    prompt = _parse_prompt_to_count(document, model)
    return SimulatedResponse(call.render({"inputTokens": sum(piece.tokens for piece in prompt.pieces)}))


def _parse_prompt_to_count(document: dict[str, Any], model: Model) -> Prompt:
    if "converse" in document:
        return converse_format.parse_prompt(document["converse"], _DEFAULT_MAX_TOKENS)
    if "invokeModel" not in document:
        raise validation_error("The input field has neither invokeModel nor converse.")
    try:
        body = parse_json_object(b64decode(document["invokeModel"]["body"], validate=True))
    except NotBase64:
        raise validation_error("input.invokeModel.body is not base64.") from None
    family = FAMILIES.get(model.find_family(body))
    if family is None:
        raise validation_error("The provided model doesn't support counting tokens.")
    return family.parse_prompt(body)


def _run_model(runner: ModelRunner, call: SimulatedCall) -> tuple[Model, dict[str, Any], Completion]:
    model, body = resolve_model(call.route.model), call.parse_body()
    if not model.can_converse:
        raise validation_error(
            "This action doesn't support the model that you provided. Try again with a supported text or chat model."
        )
    _check_options(body)
    prompt = converse_format.parse_prompt(body, _DEFAULT_MAX_TOKENS)
    return model, body, runner.run(call, model, prompt)


def _check_options(body: dict[str, Any]) -> None:
    if body.get("requestMetadata") is not None:
        request_metadata.check_metadata(body["requestMetadata"])
    if body.get("serviceTier") is not None:
        check_choice(body["serviceTier"].get("type"), TIERS, "serviceTier.type")
    if body.get("performanceConfig") is not None:
        check_choice(body["performanceConfig"].get("latency", "standard"), LATENCIES, "performanceConfig.latency")


def _build_closing(call: SimulatedCall, body: dict[str, Any], completion: Completion, model: Model) -> dict[str, Any]:
    """Usage and metrics at the end of a response: in its body, or in a stream's last event."""
    closing: dict[str, Any] = {
        "usage": _build_usage(completion.usage, model),
        "metrics": {"latencyMs": completion.latency_ms},
    }
    latency = call.fault_spec.performance or (body.get("performanceConfig") or {}).get("latency")
    if latency:
        closing["performanceConfig"] = {"latency": latency}
    tier = call.fault_spec.tier or (body.get("serviceTier") or {}).get("type")
    if tier:
        closing["serviceTier"] = {"type": tier}
    return closing


def _build_usage(usage: Usage, model: Model) -> dict[str, Any]:
    document: dict[str, Any] = {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_input_tokens + usage.output_tokens,
    }
    if model.can_cache or usage.cache_read_tokens or usage.cache_write_tokens:
        document["cacheReadInputTokens"] = usage.cache_read_tokens
        document["cacheWriteInputTokens"] = usage.cache_write_tokens
    writes = (("5m", usage.cache_write_5m_tokens), ("1h", usage.cache_write_1h_tokens))
    details = [{"ttl": ttl, "inputTokens": tokens} for ttl, tokens in writes if tokens]
    if details:
        document["cacheDetails"] = details
    return document
