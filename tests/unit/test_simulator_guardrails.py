"""Guardrails: units by the thousand characters, one phrase that is forbidden, and a trace for who asks for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import HEALTHY
from bedrock_simulator.guardrails import BLOCKED_TEXT
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse
from multidict import CIMultiDict

from tests.support.clock import ManualClock
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE, CLAUDE_BODY, TURN

APPLY = "/guardrail/gr1/version/DRAFT/apply"
CHECKS = "/guardrail-checks/invoke"


NAMED = {"X-Amzn-Bedrock-GuardrailIdentifier": "gr1", "X-Amzn-Bedrock-GuardrailVersion": "1"}


def answered(path: str, body: dict[str, Any], **headers: str) -> SimulatedResponse:
    route = find_route("POST", path)
    assert route is not None
    call = SimulatedCall(route, CIMultiDict(headers), json.dumps(body).encode(), HEALTHY)
    return Service(ManualClock(), "us-east-1", 1024).handle(call)


def ask(path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    return dict(json.loads(answered(path, body, **headers).body))


def texts(*lengths: int) -> dict[str, Any]:
    return {"source": "INPUT", "content": [{"text": {"text": "x" * length}} for length in lengths]}


@pytest.mark.parametrize(("lengths", "units"), [((0,), 0), ((1,), 1), ((1000,), 1), ((600, 401), 2), ((5000,), 5)])
def test_guardrail_unit_is_a_started_thousand_characters(lengths, units):
    answer = ask(APPLY, texts(*lengths))
    assert answer["usage"] == {
        "topicPolicyUnits": units,
        "contentPolicyUnits": units,
        "wordPolicyUnits": units,
        "sensitiveInformationPolicyUnits": units,
        "sensitiveInformationPolicyFreeUnits": units,
        "contextualGroundingPolicyUnits": 0,
        "contentPolicyImageUnits": 0,
    }
    assert answer["guardrailCoverage"] == {"textCharacters": {"guarded": sum(lengths), "total": sum(lengths)}}
    assert answer["assessments"][0]["invocationMetrics"]["usage"] == answer["usage"]


def test_each_image_is_a_guardrail_unit():
    body = {"source": "OUTPUT", "content": [{"image": {"format": "png", "source": {"bytes": ""}}}] * 2}
    assert ask(APPLY, body)["usage"]["contentPolicyImageUnits"] == 2


def test_forbidden_phrase_is_blocked():
    fine, blocked = (
        ask(APPLY, {"source": "INPUT", "content": [{"text": {"text": text}}]}) for text in ("x", f"so {BLOCKED_TEXT}!")
    )
    assert (fine["action"], fine["outputs"], "actionReason" in fine) == ("NONE", [], False)
    assert (blocked["action"], len(blocked["outputs"]), "actionReason" in blocked) == ("GUARDRAIL_INTERVENED", 1, True)
    assert blocked["assessments"][0]["topicPolicy"]["topics"][0]["action"] == "BLOCKED"
    assert "topicPolicy" not in fine["assessments"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/guardrail/GR1/version/1/apply", texts(1)),
        ("/guardrail/gr1/version/0/apply", texts(1)),
        ("/guardrail/gr1/version/draft/apply", texts(1)),
        (APPLY, texts(1) | {"source": "BOTH"}),
        (APPLY, {"source": "INPUT"}),
        (CHECKS, {"messages": [], "checks": {"promptAttack": {"categories": []}}}),
        (CHECKS, {"messages": [{"role": "user", "content": [{"text": "x"}]}], "checks": {"others": {}}}),
    ],
)
def test_invalid_guardrail_request_is_refused(path, body):
    with pytest.raises(AwsError) as refused:
        ask(path, body)
    assert refused.value.kind == "ValidationException"


def test_guardrail_may_be_named_by_arn():
    arn = "arn%3Aaws%3Abedrock%3Aus-east-1%3A123456789012%3Aguardrail%2Fabc"
    assert ask(f"/guardrail/{arn}/version/12/apply", texts(1))["action"] == "NONE"


def conversation(**config: str) -> dict[str, Any]:
    return ask(f"/model/{CLAUDE}/converse", TURN | {"guardrailConfig": config})


def test_converse_trace_covers_both_directions():
    trace = conversation(guardrailIdentifier="gr1", guardrailVersion="1", trace="enabled")["trace"]["guardrail"]
    before, (after,) = trace["inputAssessment"]["gr1"], trace["outputAssessments"]["gr1"]
    characters = before["invocationMetrics"]["guardrailCoverage"]["textCharacters"]
    assert characters["total"] == len(TURN["messages"][0]["content"][0]["text"])
    assert after["invocationMetrics"]["guardrailCoverage"]["textCharacters"]["total"] > 0
    assert before["invocationMetrics"]["usage"]["topicPolicyUnits"] == 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"guardrailIdentifier": "gr1", "guardrailVersion": "1"},
        {"guardrailIdentifier": "gr1", "guardrailVersion": "1", "trace": "disabled"},
        {"trace": "enabled"},
    ],
)
def test_trace_is_returned_only_on_request(config):
    assert "trace" not in conversation(**config)


def test_invoke_response_states_guardrail_action():
    path = f"/model/{CLAUDE}/invoke"
    assert "amazon-bedrock-guardrailAction" not in ask(path, CLAUDE_BODY)
    watched = ask(path, CLAUDE_BODY, **NAMED)
    assert watched["amazon-bedrock-guardrailAction"] == "NONE"
    assert "amazon-bedrock-trace" not in watched
    traced = ask(path, CLAUDE_BODY, **NAMED, **{"X-Amzn-Bedrock-Trace": "ENABLED"})["amazon-bedrock-trace"]
    (after,) = traced["guardrail"]["outputs"]
    for assessed in (traced["guardrail"]["input"], after):
        assert assessed["gr1"]["invocationMetrics"]["usage"]["contentPolicyUnits"] == 1


def test_guardrail_units_are_used_with_or_without_trace() -> None:
    for config in ({}, {"trace": "enabled"}):
        document = TURN | {"guardrailConfig": {"guardrailIdentifier": "gr1", "guardrailVersion": "1", **config}}
        for operation in ("converse", "converse-stream"):
            assert units_used(f"/model/{CLAUDE}/{operation}", document) == 2
    assert units_used(f"/model/{CLAUDE}/converse", TURN) == 0
    for operation in ("invoke", "invoke-with-response-stream"):
        assert units_used(f"/model/{CLAUDE}/{operation}", CLAUDE_BODY, **NAMED) == 2
        assert units_used(f"/model/{CLAUDE}/{operation}", CLAUDE_BODY) == 0
    for streams in (False, True):
        assert units_used(CHAT_PATH, CHAT | {"stream": streams}, **NAMED) == 2
        assert units_used(CHAT_PATH, CHAT | {"stream": streams}) == 0


def units_used(path: str, body: dict[str, Any], **headers: str) -> int:
    """Of the topic policy, as the ledger has them: one each way."""
    usage = answered(path, body, **headers).usage
    assert usage is not None
    return usage.guardrail_units.get("topicPolicyUnits", 0)
