"""The operations ApplyGuardrail and InvokeGuardrailChecks, and the trace that a guardrail adds to other responses.

A simulated guardrail has every kind of policy and blocks one phrase, `BLOCKED_TEXT`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bedrock_simulator.aws_errors import constraint_violation, validation_error
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse
from bedrock_simulator.usage import Usage

BLOCKED_TEXT = "simulated forbidden words"  # the guardrail intervenes in a text with this phrase

_BLOCKED_MESSAGE = "Sorry, the model cannot answer this question."
_CHARACTERS_PER_UNIT = 1000
_LATENCY_MS = 110

_IDENTIFIER = re.compile(r"[a-z0-9]+|arn:aws(-[^:]+)?:bedrock:[a-z0-9-]{1,20}:[0-9]{12}:guardrail/[a-z0-9]+")
_VERSION = re.compile(r"[1-9][0-9]{0,7}|DRAFT")

_CHECKS = ("contentFilter", "promptAttack", "sensitiveInformation")

_HEADER, _TRACE = "X-Amzn-Bedrock-GuardrailIdentifier", "X-Amzn-Bedrock-Trace"
_TEXTS = ("messages", "content", "text", "prompt", "inputText", "message", "system", "texts")

Json = dict[str, Any]


def apply_guardrail(call: SimulatedCall) -> SimulatedResponse:
    identifier, version = call.route.labels
    if not _IDENTIFIER.fullmatch(identifier):
        raise constraint_violation(
            identifier, "guardrailIdentifier", f"satisfy regular expression pattern: {_IDENTIFIER.pattern}"
        )
    if not _VERSION.fullmatch(version):
        raise constraint_violation(
            version, "guardrailVersion", f"satisfy regular expression pattern: {_VERSION.pattern}"
        )
    body = call.parse_body()
    if body.get("source") not in ("INPUT", "OUTPUT"):
        raise constraint_violation(body.get("source"), "source", "satisfy enum value set: [INPUT, OUTPUT]")
    if not isinstance(body.get("content"), list):
        raise constraint_violation(body.get("content"), "content", "not be null")
    texts = [block["text"]["text"] for block in body["content"] if "text" in block]
    images = sum("image" in block for block in body["content"])
    is_blocked = any(BLOCKED_TEXT in text for text in texts)
    units = _count_units(sum(map(len, texts)), images)
    document: Json = {
        "usage": units,
        "action": "GUARDRAIL_INTERVENED" if is_blocked else "NONE",
        "outputs": [{"text": _BLOCKED_MESSAGE}] if is_blocked else [],
        "assessments": [_build_assessment(units, sum(map(len, texts)), is_blocked)],
        "guardrailCoverage": _build_coverage(sum(map(len, texts))),
    }
    if is_blocked:
        document["actionReason"] = "Guardrail blocked."
    return SimulatedResponse(call.render(document), usage=Usage(guardrail_units=units))


def run_guardrail_checks(call: SimulatedCall) -> SimulatedResponse:
    """InvokeGuardrailChecks: each requested check gets the score for no finding."""
    body = call.parse_body()
    messages, checks = body.get("messages"), body.get("checks")
    if not isinstance(messages, list) or not messages:
        raise constraint_violation(messages, "messages", "have length greater than or equal to 1")
    requested = {name: checks[name] for name in _CHECKS if checks.get(name)} if isinstance(checks, dict) else {}
    if not requested:
        raise validation_error("At least one check must be set in checks.")
    characters = sum(len(block["text"]) for message in messages for block in message["content"])
    units = _count_text_units(characters)
    document = {
        "results": {name: _build_result(name, wanted) for name, wanted in requested.items()},
        "usage": {name: {"textUnits": units} for name in requested},
    }
    return SimulatedResponse(call.render(document), usage=Usage(guardrail_units=dict.fromkeys(requested, units)))


def _build_result(name: str, options: Json) -> Json:
    if name == "sensitiveInformation":
        return {"results": [], "truncated": False}
    return {"results": [{"category": category["category"], "severityScore": 0.0} for category in options["categories"]]}


@dataclass(frozen=True, slots=True)
class GuardrailUse:
    """A model call with a guardrail: the lengths of input and output, and whether the response has a trace."""

    identifier: str
    input_length: int
    output_length: int
    has_trace: bool

    @property
    def usage(self) -> Usage:
        before, after = _count_units(self.input_length, 0), _count_units(self.output_length, 0)
        return Usage(guardrail_units={name: before[name] + after[name] for name in before})

    def build_assessments(self) -> tuple[Json, Json]:
        before, after = (
            _build_assessment(_count_units(length, 0), length, False)
            for length in (self.input_length, self.output_length)
        )
        return before, after


def find_in_conversation(body: Json, output_text: str) -> GuardrailUse | None:
    config = body.get("guardrailConfig") or {}
    if not config.get("guardrailIdentifier"):
        return None
    input_length = sum(len(block.get("text", "")) for message in body["messages"] for block in message["content"])
    has_trace = config.get("trace") in ("enabled", "enabled_full")
    return GuardrailUse(str(config["guardrailIdentifier"]), input_length, len(output_text), has_trace)


def find_in_headers(headers: Mapping[str, str], body: Json, output_text: str) -> GuardrailUse | None:
    """The guardrail of InvokeModel and chat completions, which name it in headers, not in the body."""
    if _HEADER not in headers:
        return None
    return GuardrailUse(
        headers[_HEADER],
        _count_characters(body),
        len(output_text),
        headers.get(_TRACE, "") in ("ENABLED", "ENABLED_FULL"),
    )


def _count_characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_count_characters(inner) for name, inner in value.items() if name in _TEXTS)
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    return len(value) if isinstance(value, str) else 0


def build_trace(guardrail: GuardrailUse | None) -> Json:
    """The trace of a Converse response, if it has a guardrail and requests a trace."""
    if guardrail is None or not guardrail.has_trace:
        return {}
    before, after = guardrail.build_assessments()
    assessments = {
        "inputAssessment": {guardrail.identifier: before},
        "outputAssessments": {guardrail.identifier: [after]},
    }
    return {"trace": {"guardrail": assessments}}


def build_members(guardrail: GuardrailUse | None) -> Json:
    """The members that InvokeModel adds to a body, or to a stream's last chunk, for a guardrail."""
    if guardrail is None:
        return {}
    members: Json = {"amazon-bedrock-guardrailAction": "NONE"}
    if guardrail.has_trace:
        before, after = guardrail.build_assessments()
        assessments = {"input": {guardrail.identifier: before}, "outputs": [{guardrail.identifier: after}]}
        members["amazon-bedrock-trace"] = {"guardrail": assessments}
    return members


def add_guardrail_usage(usage: Usage, guardrail: GuardrailUse | None) -> Usage:
    return usage if guardrail is None else usage + guardrail.usage


def _count_text_units(characters: int) -> int:
    return -(-characters // _CHARACTERS_PER_UNIT)


def _count_units(characters: int, images: int) -> dict[str, int]:
    units = _count_text_units(characters)
    return {
        "topicPolicyUnits": units,
        "contentPolicyUnits": units,
        "wordPolicyUnits": units,
        "sensitiveInformationPolicyUnits": units,
        "sensitiveInformationPolicyFreeUnits": units,
        "contextualGroundingPolicyUnits": 0,
        "contentPolicyImageUnits": images,
    }


def _build_assessment(units: dict[str, int], characters: int, is_blocked: bool) -> Json:
    metrics = {
        "guardrailProcessingLatency": _LATENCY_MS,
        "usage": units,
        "guardrailCoverage": _build_coverage(characters),
    }
    topic = {"name": "simulated", "type": "DENY", "action": "BLOCKED", "detected": True}
    return {"invocationMetrics": metrics, **({"topicPolicy": {"topics": [topic]}} if is_blocked else {})}


def _build_coverage(characters: int) -> Json:
    return {"textCharacters": {"guarded": characters, "total": characters}}
