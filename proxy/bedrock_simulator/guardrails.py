"""Guardrails: applied to a text, checked without one, and the trace they leave in other answers.

A simulated guardrail has every kind of policy and minds one phrase only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bedrock_simulator.call import SimulatedResponse, SimulatedCall
from bedrock_simulator.refusals import constraint_violation, validation_error
from bedrock_simulator.usage import Usage

FORBIDDEN = "simulated forbidden words"  # a text that has them is intervened in

_BLOCKED = "Sorry, the model cannot answer this question."
_CHARACTERS_A_UNIT = 1000
_MILLISECONDS = 110

_IDENTIFIER = re.compile(r"[a-z0-9]+|arn:aws(-[^:]+)?:bedrock:[a-z0-9-]{1,20}:[0-9]{12}:guardrail/[a-z0-9]+")
_VERSION = re.compile(r"[1-9][0-9]{0,7}|DRAFT")

_CHECKS = ("contentFilter", "promptAttack", "sensitiveInformation")

_HEADER, _TRACE = "X-Amzn-Bedrock-GuardrailIdentifier", "X-Amzn-Bedrock-Trace"
_TEXTS = ("messages", "content", "text", "prompt", "inputText", "message", "system", "texts")

Json = dict[str, Any]


def apply(call: SimulatedCall) -> SimulatedResponse:
    identifier, version = call.route.labels
    if not _IDENTIFIER.fullmatch(identifier):
        raise constraint_violation(
            identifier, "guardrailIdentifier", f"satisfy regular expression pattern: {_IDENTIFIER.pattern}"
        )
    if not _VERSION.fullmatch(version):
        raise constraint_violation(version, "guardrailVersion", f"satisfy regular expression pattern: {_VERSION.pattern}")
    body = call.parse_body()
    if body.get("source") not in ("INPUT", "OUTPUT"):
        raise constraint_violation(body.get("source"), "source", "satisfy enum value set: [INPUT, OUTPUT]")
    if not isinstance(body.get("content"), list):
        raise constraint_violation(body.get("content"), "content", "not be null")
    texts = [block["text"]["text"] for block in body["content"] if "text" in block]
    images = sum("image" in block for block in body["content"])
    is_blocked = any(FORBIDDEN in text for text in texts)
    units = _units(sum(map(len, texts)), images)
    document: Json = {
        "usage": units,
        "action": "GUARDRAIL_INTERVENED" if is_blocked else "NONE",
        "outputs": [{"text": _BLOCKED}] if is_blocked else [],
        "assessments": [_assessment(units, sum(map(len, texts)), is_blocked)],
        "guardrailCoverage": _coverage(sum(map(len, texts))),
    }
    if is_blocked:
        document["actionReason"] = "Guardrail blocked."
    return SimulatedResponse(call.render(document), usage=Usage(guardrail_units=units))


def check(call: SimulatedCall) -> SimulatedResponse:
    """InvokeGuardrailChecks: a score of nothing found for each check that was asked for."""
    body = call.parse_body()
    messages, checks = body.get("messages"), body.get("checks")
    if not isinstance(messages, list) or not messages:
        raise constraint_violation(messages, "messages", "have length greater than or equal to 1")
    asked = {name: checks[name] for name in _CHECKS if checks.get(name)} if isinstance(checks, dict) else {}
    if not asked:
        raise validation_error("At least one check must be set in checks.")
    characters = sum(len(block["text"]) for message in messages for block in message["content"])
    units = _text_units(characters)
    document = {
        "results": {name: _result(name, wanted) for name, wanted in asked.items()},
        "usage": {name: {"textUnits": units} for name in asked},
    }
    return SimulatedResponse(call.render(document), usage=Usage(guardrail_units=dict.fromkeys(asked, units)))


def _result(name: str, wanted: Json) -> Json:
    if name == "sensitiveInformation":
        return {"results": [], "truncated": False}
    return {"results": [{"category": each["category"], "severityScore": 0.0} for each in wanted["categories"]]}


@dataclass(frozen=True, slots=True)
class Watched:
    """A call of a model that a guardrail watches over: how long what was asked and said is, and whether it tells."""

    identifier: str
    asked: int
    said: int
    tells: bool

    @property
    def usage(self) -> Usage:
        before, after = _units(self.asked, 0), _units(self.said, 0)
        return Usage(guardrail_units={name: before[name] + after[name] for name in before})

    def assessments(self) -> tuple[Json, Json]:
        before, after = (_assessment(_units(length, 0), length, False) for length in (self.asked, self.said))
        return before, after


def of_conversation(body: Json, said: str) -> Watched | None:
    config = body.get("guardrailConfig") or {}
    if not config.get("guardrailIdentifier"):
        return None
    asked = sum(len(block.get("text", "")) for message in body["messages"] for block in message["content"])
    tells = config.get("trace") in ("enabled", "enabled_full")
    return Watched(str(config["guardrailIdentifier"]), asked, len(said), tells)


def of_headers(headers: Mapping[str, str], body: Json, said: str) -> Watched | None:
    """Of InvokeModel and chat completions, whose bodies say nothing of guardrails."""
    if _HEADER not in headers:
        return None
    return Watched(headers[_HEADER], _text(body), len(said), headers.get(_TRACE, "") in ("ENABLED", "ENABLED_FULL"))


def _text(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_text(inner) for name, inner in value.items() if name in _TEXTS)
    if isinstance(value, list):
        return sum(map(_text, value))
    return len(value) if isinstance(value, str) else 0


def trace(watched: Watched | None) -> Json:
    """What a conversation tells about its guardrail, if it has one and asks for that."""
    if watched is None or not watched.tells:
        return {}
    before, after = watched.assessments()
    told = {"inputAssessment": {watched.identifier: before}, "outputAssessments": {watched.identifier: [after]}}
    return {"trace": {"guardrail": told}}


def marks(watched: Watched | None) -> Json:
    """What InvokeModel adds to a body, or to a stream's last chunk, when a guardrail watches over it."""
    if watched is None:
        return {}
    marked: Json = {"amazon-bedrock-guardrailAction": "NONE"}
    if watched.tells:
        before, after = watched.assessments()
        told = {"input": {watched.identifier: before}, "outputs": [{watched.identifier: after}]}
        marked["amazon-bedrock-trace"] = {"guardrail": told}
    return marked


def used(usage: Usage, watched: Watched | None) -> Usage:
    return usage if watched is None else usage + watched.usage


def _text_units(characters: int) -> int:
    return -(-characters // _CHARACTERS_A_UNIT)


def _units(characters: int, images: int) -> dict[str, int]:
    units = _text_units(characters)
    return {
        "topicPolicyUnits": units,
        "contentPolicyUnits": units,
        "wordPolicyUnits": units,
        "sensitiveInformationPolicyUnits": units,
        "sensitiveInformationPolicyFreeUnits": units,
        "contextualGroundingPolicyUnits": 0,
        "contentPolicyImageUnits": images,
    }


def _assessment(units: dict[str, int], characters: int, is_blocked: bool) -> Json:
    metrics = {
        "guardrailProcessingLatency": _MILLISECONDS,
        "usage": units,
        "guardrailCoverage": _coverage(characters),
    }
    topic = {"name": "simulated", "type": "DENY", "action": "BLOCKED", "detected": True}
    return {"invocationMetrics": metrics, **({"topicPolicy": {"topics": [topic]}} if is_blocked else {})}


def _coverage(characters: int) -> Json:
    return {"textCharacters": {"guarded": characters, "total": characters}}
