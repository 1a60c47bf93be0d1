"""Guardrails: which calls name one, however it is spelt; their units by trace or estimate; and what units cost."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from decimal import Decimal
from time import process_time
from typing import Any

import pytest
from bedrock_simulator.event_frames import encode_event
from price_keeper.config.config_sections import GuardrailsConfig, UnitPrices
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, LineKind, UsageCounts
from price_keeper.operations import Operation
from price_keeper.usage.guardrail_usage import (
    ESTIMATED_UNITS,
    GUARDRAIL_ESTIMATED,
    GUARDRAIL_HEADER,
    MAX_PIECE_BYTES,
    GuardrailUsageReader,
    build_guardrail_prices,
    estimate_request_units,
    estimate_units,
    may_name_guardrail,
    price_guardrail,
)
from price_keeper.usage.model_families import INVOCATION_METRICS
from price_keeper.usage.price_table import PRICE_UNKNOWN, Cost
from price_keeper.usage.usage_reader import EVENT_STREAM, SERVER_SENT_EVENTS, build_reader

UNKNOWN = frozenset((PRICE_UNKNOWN,))
NAMED = '{"guardrailIdentifier": "g", "guardrailVersion": "1"}'
HEADERS = {GUARDRAIL_HEADER: b"g"}


def is_named(operation: Operation, body: str | bytes, headers: dict[bytes, bytes] | None = None) -> bool:
    data = body.encode() if isinstance(body, str) else body
    return estimate_request_units(operation, headers or {}, data) > 0


# ---------------------------------------------------------------- calls that name one


@pytest.mark.parametrize(
    "key", ["guardrailConfig", "\\u0067uardrailConfig", "guardrail\\u0043onfig", "g\\u0075ardrailConfi\\u0067"]
)
@pytest.mark.parametrize("operation", [Operation.CONVERSE, Operation.CONVERSE_STREAM])
def test_converse_body_names_guardrail(operation: Operation, key: str) -> None:
    assert is_named(operation, f'{{"messages": [], "{key}": {NAMED}}}')


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": []}',
        '{"messages": [{"content": [{"text": "what is \\"guardrailConfig\\"?"}]}]}',
        '{"messages": [{"guardrailConfig": {"guardrailIdentifier": "g"}}]}',
        '{"messages": ["guardrailConfig"]}',
        '{"guardrailConfig": null}',
        '{"guardrailConfig": { }}',
        '{"messages": ["\\u0041n escaped letter"]}',
        '{"amazon-bedrock-guardrailConfig": {"tagSuffix": "x"}}',
    ],
)
def test_converse_body_without_guardrail(body: str) -> None:
    assert not is_named(Operation.CONVERSE, body)


def test_usual_json_escapes_need_no_full_parse() -> None:
    body = json.dumps({"messages": ["é\x1b<\x00>&'" * 9]}).replace("<", "\\u003c").encode()
    assert b"\\u00e9" in body
    assert b"\\u003c" in body
    assert not may_name_guardrail(Operation.CONVERSE, {}, body)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_guardrail_in_any_encoding_is_detected(encoding: str) -> None:
    assert is_named(Operation.CONVERSE, f'{{"guardrailConfig": {NAMED}}}'.encode(encoding))


@pytest.mark.parametrize("body", [f'{{"guardrailConfig": null, "guardrailConfig": {NAMED}}}', '{"guardrailConfig": {'])
def test_ambiguous_body_counts_as_naming_guardrail(body: str) -> None:
    assert is_named(Operation.CONVERSE, body)


@pytest.mark.parametrize(
    ("operation", "does"),
    [
        (Operation.INVOKE, True),
        (Operation.INVOKE_STREAM, True),
        (Operation.CHAT_COMPLETIONS, True),
        (Operation.CONVERSE, True),
        (Operation.COUNT_TOKENS, False),
        (Operation.APPLY_GUARDRAIL, False),  # it has units of its own
        (Operation.ASYNC_INVOKES, False),
    ],
)
def test_guardrail_in_header_is_detected(operation: Operation, does: bool) -> None:
    assert is_named(operation, "{}", HEADERS) is does
    assert not is_named(operation, "{}")


def test_model_specific_body_names_no_guardrail() -> None:
    assert not is_named(Operation.INVOKE, f'{{"guardrailConfig": {NAMED}}}')


@pytest.mark.parametrize(
    ("texts", "units"),
    [
        ([""], 1),
        (["x " * 400], 1),
        (["x " * 2000], 5),  # with what stands around it
        (["é " * 400], 1),  # six bytes each, as it is written
        (["a\\ " * 200, "\n " * 200], 2),
        ([{"bytes": b64encode(b"image" * 10_000).decode()}], 2),
        ([{"data": b64encode(b"image" * 10_000).decode()}, "word " * 1000], 7),
        (["tell_me_how_to_do_this_" * 1000], 24),  # words, whatever stands between them
        ([{"text": 'a "bytes": "' + "x" * 5000}], 6),
    ],
)
def test_request_units_are_estimated_per_thousand_characters(texts: list[Any], units: int) -> None:
    assert estimate_request_units(Operation.INVOKE, HEADERS, json.dumps(texts).encode()) == units


# ---------------------------------------------------------------- units by the trace

BEFORE = {"topicPolicyUnits": 3, "contentPolicyUnits": 3, "automatedReasoningPolicies": 2}
AFTER = {"topicPolicyUnits": 1, "wordPolicyUnits": 2, "automatedReasoningPolicies": 2}
BOTH = {"topicPolicyUnits": 4, "contentPolicyUnits": 3, "wordPolicyUnits": 2, "automatedReasoningPolicies": 2}


def assessed(usage: dict[str, Any]) -> dict[str, Any]:
    return {"topicPolicy": {"topics": []}, "invocationMetrics": {"guardrailProcessingLatency": 9, "usage": usage}}


def of_converse(before: dict[str, Any] = BEFORE, after: dict[str, Any] = AFTER) -> dict[str, Any]:
    trace = {"inputAssessment": {"g": assessed(before)}, "outputAssessments": {"g": [assessed(after)]}}
    return {"trace": {"guardrail": trace}, "usage": {"inputTokens": 7, "outputTokens": 300}}


def of_invoke(before: dict[str, Any] = BEFORE, after: dict[str, Any] = AFTER) -> dict[str, Any]:
    trace = {"modelOutput": ["x"], "input": {"g": assessed(before)}, "outputs": [{"g": assessed(after)}]}
    counted = {"inputTokenCount": 7, "outputTokenCount": 300}
    return {"amazon-bedrock-trace": {"guardrail": trace}, INVOCATION_METRICS: counted}


def chunk(document: dict[str, Any]) -> bytes:
    return encode_event("chunk", {"bytes": b64encode(json.dumps(document).encode()).decode()})


def sent(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


SAID = {"choices": [{"delta": {"content": "x"}}]}
OF_OPENAI = {"usage": {"prompt_tokens": 7, "completion_tokens": 300}}
OF_CLAUDE = {"usage": {"input_tokens": 7, "output_tokens": 300}}
LAST = {"choices": [], **OF_OPENAI}


def answers(converse: dict[str, Any], invoke: dict[str, Any]) -> Iterator[tuple[Operation, bytes, bytes]]:
    """Of every operation, in each form, with one of these traces."""
    plain = b"application/json"
    yield Operation.CONVERSE, plain, json.dumps(converse).encode()
    yield Operation.INVOKE, plain, json.dumps(invoke | OF_CLAUDE).encode()
    yield Operation.CHAT_COMPLETIONS, plain, json.dumps(invoke | OF_OPENAI).encode()
    delta = encode_event("contentBlockDelta", {"delta": {"text": "hello"}})
    yield Operation.CONVERSE_STREAM, EVENT_STREAM, delta + encode_event("metadata", converse)
    yield Operation.INVOKE_STREAM, EVENT_STREAM, chunk({"type": "x"}) + chunk({"type": "x"}) + chunk(invoke)
    chats = sent(SAID) + sent(SAID | invoke) + sent(LAST)
    yield Operation.CHAT_COMPLETIONS, SERVER_SENT_EVENTS, chats + b"data: [DONE]\n\n"
    yield Operation.CHAT_COMPLETIONS, SERVER_SENT_EVENTS, (sent(SAID) + sent(LAST | invoke)).strip()


def read(operation: Operation, kind: bytes, answer: bytes, size: int = 10**9) -> GuardrailUsageReader:
    reader = GuardrailUsageReader(build_reader(operation, "anthropic", kind, {b"content-type": kind}), kind, 5)
    for at in range(0, len(answer), size):
        reader.feed(answer[at : at + size])
    return reader


@pytest.mark.parametrize(("operation", "kind", "answer"), list(answers(of_converse(), of_invoke())))
def test_trace_states_units_of_input_and_output(operation: Operation, kind: bytes, answer: bytes) -> None:
    for size in (1, 97, 10**9):
        usage = read(operation, kind, answer, size).usage()
        assert usage is not None
        assert (usage.input, usage.output, usage.units) == (7, 300, BOTH)


NO_TRACE = ({"usage": of_converse()["usage"]}, {INVOCATION_METRICS: of_invoke()[INVOCATION_METRICS]})
NO_COUNT = (of_converse({"topicPolicyUnits": -1}), of_invoke({"topicPolicyUnits": "4"}))
EMPTY = (of_converse({}, {}), of_invoke({}, {}))
TOO_LONG = ({"x": "x" * MAX_PIECE_BYTES} | of_converse(), {"x": "x" * MAX_PIECE_BYTES} | of_invoke())


@pytest.mark.parametrize(
    ("operation", "kind", "answer"),
    [
        *(case for trace in (NO_TRACE, NO_COUNT, EMPTY) for case in answers(*trace)),
        *(case for case in answers(*TOO_LONG) if case[1] != b"application/json" and case[2].endswith(b"\n")),
    ],
)
def test_missing_trace_estimates_units_and_keeps_exact_tokens(operation: Operation, kind: bytes, answer: bytes) -> None:
    usage = read(operation, kind, answer, 65_537).usage()
    assert usage is not None
    assert (usage.input, usage.output) == (7, 300)
    assert usage.units == estimate_units(5, 300) == {ESTIMATED_UNITS: 5 + 2}


def test_traces_of_long_stream_are_summed_as_they_arrive() -> None:
    for kind, piece in ((SERVER_SENT_EVENTS, sent(SAID | of_invoke())), (EVENT_STREAM, chunk(of_invoke()))):
        reader = read(Operation.INVOKE_STREAM, kind, piece * 50)
        assert reader.reported_and_estimated_units(0) == ({"automatedReasoningPolicies": 2} | {
            name: 50 * units for name, units in BOTH.items() if name != "automatedReasoningPolicies"
        }, estimate_units(5, 0))  # fmt: skip
        assert len(reader._trace._units) == len(BOTH)  # type: ignore[attr-defined]


def test_line_in_tiny_pieces_takes_linear_time() -> None:
    """Each byte of it is looked at once, and not again with every piece."""
    kind = b"text/event-stream"
    guarded = GuardrailUsageReader(build_reader(Operation.CHAT_COMPLETIONS, "", kind, {}), kind, 1)
    trace = {"guardrail": {"input": {"id": {"invocationMetrics": {"usage": {"topicPolicyUnits": 7}}}}}}
    line = b"data: " + json.dumps({"text": "x" * 100_000, "amazon-bedrock-trace": trace}).encode() + b"\n"
    began = process_time()
    for at in range(len(line)):
        guarded.feed(line[at : at + 1])
    assert process_time() - began < 4
    assert guarded.reported_and_estimated_units(0)[0] == {"topicPolicyUnits": 7}


def test_response_without_trace_is_not_parsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it a second time would take as long as the first."""
    monkeypatch.setattr("price_keeper.usage.fast_parse.pick_trace_members", lambda _: pytest.fail("it was read"))
    usage = read(Operation.CONVERSE, b"application/json", json.dumps(NO_TRACE[0]).encode()).usage()
    assert usage is not None
    assert usage.units == estimate_units(5, 300)


def test_response_without_usage_has_no_units() -> None:
    reader = read(Operation.CONVERSE, b"application/json", b'{"message": "no"}')
    assert (reader.usage(), reader.partial_usage(), reader.has_failed) == (None, None, False)


# ---------------------------------------------------------------- the intent


def test_intent_keeps_guardrail_units() -> None:
    account = ChargedCounters.from_counters([Counter("org", "premium", "DAY#20261118", 8)])
    for intent in (Intent(account, 1, 2, 3, 4), Intent(account, 1, 2, 3, 4, 5)):
        for kind in (LineKind.INTENT, LineKind.CARRIED):
            values = json.loads(intent.encode(9, kind.value))
            assert values[:2] == [kind.value, 9]
            again = Intent.from_values(values)
            assert (
                again.estimated_counts
                == intent.estimated_counts
                == UsageCounts(1, 1, 2, 3, guardrail_units=intent.guardrail_units, pico=4)
            )
            assert again.charged.counters == account.counters


# ---------------------------------------------------------------- what units cost

USD = "0.15 0.75 0.15 0.10 0.10 0.17 0.07 0.08 0.10"
UNITS = build_guardrail_prices(GuardrailsConfig(UnitPrices(*map(Decimal, USD.split()))))


@pytest.mark.parametrize(
    ("units", "micros"),
    [
        ({}, 0),
        ({"topicPolicyUnits": 1, "contentPolicyUnits": 2}, 450),
        ({"wordPolicyUnits": 1000, "sensitiveInformationPolicyFreeUnits": 1000}, 0),
        ({"sensitiveInformationPolicyUnits": 3, "contextualGroundingPolicyUnits": 1}, 400),
        ({"contentPolicyImageUnits": 2}, 1500),
        ({"automatedReasoningPolicyUnits": 1}, 170),
        ({"automatedReasoningPolicyUnits": 2, "automatedReasoningPolicies": 2}, 680),
        ({"automatedReasoningPolicyUnits": 2, "automatedReasoningPolicies": 0}, 340),
        ({"contentFilter": 1, "promptAttack": 1, "sensitiveInformation": 1}, 250),
    ],
)
def test_guardrail_units_are_priced(units: dict[str, int], micros: int) -> None:
    assert price_guardrail(UNITS, units) == Cost(micros * 10**6, frozenset())


def test_units_of_unknown_policy_cost_highest_price() -> None:
    assert price_guardrail(UNITS, {"newPolicyUnits": 2}) == Cost(1500 * 10**6, UNKNOWN)
    assert price_guardrail(UNITS, {"newPolicyUnits": 0}) == Cost(0, frozenset())


def test_estimated_units_cost_highest_price_and_are_flagged() -> None:
    flags = frozenset((GUARDRAIL_ESTIMATED,))
    assert price_guardrail(UNITS, {ESTIMATED_UNITS: 2}) == Cost(1500 * 10**6, flags)
    assert price_guardrail(UNITS, {ESTIMATED_UNITS: 1, "new": 1}) == Cost(1500 * 10**6, flags | UNKNOWN)
