"""The operations InvokeModel and InvokeModelWithResponseStream.

Each model family has its own bodies. Token counts are in headers, and in a stream's last chunk.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bedrock_simulator import guardrails, request_metadata
from bedrock_simulator.aws_errors import validation_error
from bedrock_simulator.event_frames import encode_event
from bedrock_simulator.families import FAMILIES
from bedrock_simulator.families.family import Family
from bedrock_simulator.generation import Completion, ModelRunner
from bedrock_simulator.models import Model, resolve_model
from bedrock_simulator.simulated_call import (
    EVENT_STREAM,
    JSON,
    LATENCIES,
    TIERS,
    SimulatedCall,
    SimulatedResponse,
    check_choice,
)
from bedrock_simulator.usage import corrupt_count

_TIER = "X-Amzn-Bedrock-Service-Tier"
_LATENCY = "X-Amzn-Bedrock-PerformanceConfig-Latency"


def invoke(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    family, model, body, completion = _run_model(runner, call)
    guardrail = guardrails.find_in_headers(call.headers, body, completion.text)
    document = {**family.build_body(body, completion, model), **guardrails.build_members(guardrail)}
    headers = {"Content-Type": JSON, **_echo_headers(call)}
    headers["X-Amzn-Bedrock-Invocation-Latency"] = str(completion.latency_ms)
    headers.update(_build_count_headers(call, completion, model, family))
    return SimulatedResponse(
        call.render(document), headers=headers, usage=guardrails.add_guardrail_usage(completion.usage, guardrail)
    )


def invoke_stream(runner: ModelRunner, call: SimulatedCall) -> SimulatedResponse:
    family, model, body, completion = _run_model(runner, call)
    if family.build_chunks is None:
        raise validation_error("The model is unsupported for streaming.")
    chunks = family.build_chunks(body, completion, model)
    guardrail = guardrails.find_in_headers(call.headers, body, completion.text)

    def frames() -> Iterator[bytes]:
        held = next(chunks)
        for chunk in chunks:
            yield _encode_chunk(call, held)
            held = chunk
        metrics = _build_metrics(completion, model)
        yield _encode_chunk(
            call, {**held, **guardrails.build_members(guardrail), "amazon-bedrock-invocationMetrics": metrics}
        )

    headers = {"Content-Type": EVENT_STREAM, "X-Amzn-Bedrock-Content-Type": JSON, **_echo_headers(call)}
    return SimulatedResponse(
        frames=frames(), headers=headers, usage=guardrails.add_guardrail_usage(completion.usage, guardrail)
    )


def _run_model(runner: ModelRunner, call: SimulatedCall) -> tuple[Family, Model, dict[str, Any], Completion]:
    model, body = resolve_model(call.route.model), call.parse_body()
    family = FAMILIES.get(model.find_family(body))
    if family is None:
        raise validation_error(
            "The provided model is not supported by this simulator, or its request is of no known form."
        )
    _check_headers(call)
    prompt = family.parse_prompt(body)
    completion = runner.run(call, model, prompt)
    return family, model, body, completion if family.has_output else _without_output(completion)


def _without_output(completion: Completion) -> Completion:
    """The completion of an embedding: seed and input, but no text."""
    return replace(completion, text="", usage=replace(completion.usage, output_tokens=0))


def _check_headers(call: SimulatedCall) -> None:
    if _TIER in call.headers:
        check_choice(call.headers[_TIER], TIERS, _TIER)
    if _LATENCY in call.headers:
        check_choice(call.headers[_LATENCY], LATENCIES, _LATENCY)
    if request_metadata.HEADER in call.headers:
        request_metadata.check_header(call.headers[request_metadata.HEADER])


def _echo_headers(call: SimulatedCall) -> dict[str, str]:
    tier = call.fault_spec.tier or call.headers.get(_TIER)
    latency = call.fault_spec.performance or call.headers.get(_LATENCY)
    return {name: value for name, value in ((_TIER, tier), (_LATENCY, latency)) if value}


def _build_count_headers(call: SimulatedCall, completion: Completion, model: Model, family: Family) -> dict[str, str]:
    usage, fault = completion.usage, call.fault_spec.usage
    if fault == "none":
        return {}
    counts = {"Input-Token-Count": usage.input_tokens}
    if family.has_output and fault != "no-output":
        counts["Output-Token-Count"] = usage.output_tokens
    if model.can_cache or usage.cache_read_tokens or usage.cache_write_tokens:
        counts["Cache-Read-Input-Token-Count"] = usage.cache_read_tokens
        counts["Cache-Write-Input-Token-Count"] = usage.cache_write_tokens
    reported = {name: corrupt_count(count, fault, is_output="Output" in name) for name, count in counts.items()}
    return {f"X-Amzn-Bedrock-{name}": str(count) for name, count in reported.items() if count is not None}


def _build_metrics(completion: Completion, model: Model) -> dict[str, int]:
    usage = completion.usage
    metrics = {
        "inputTokenCount": usage.input_tokens,
        "outputTokenCount": usage.output_tokens,
        "invocationLatency": completion.latency_ms,
        "firstByteLatency": completion.latency_ms // 4,
    }
    if model.can_cache or usage.cache_read_tokens or usage.cache_write_tokens:
        metrics["cacheReadInputTokenCount"] = usage.cache_read_tokens
        metrics["cacheWriteInputTokenCount"] = usage.cache_write_tokens
    return metrics


def _encode_chunk(call: SimulatedCall, chunk: dict[str, Any]) -> bytes:
    return encode_event("chunk", {"bytes": b64encode(call.render(chunk)).decode()})
