"""Answers that state no output, or zeros: what a call is recorded as then, and which zeros are right."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bedrock_simulator.event_frames import encode_event, encode_exception
from price_keeper.config.config_sections import PricesConfig
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import estimate_units, price_guardrail
from price_keeper.usage.meter import GuardedMeter, Meter, OperationPricing, UsageForecast, add_guardrail_prices
from price_keeper.usage.model_families import INVOCATION_METRICS
from price_keeper.usage.price_table import Pricer, build_price_table
from price_keeper.usage.token_usage import Usage, make_plain_usage
from price_keeper.usage.usage_reader import EVENT_STREAM, JSON, SERVER_SENT_EVENTS

TOKENS = build_price_table(
    PricesConfig(input="3", output="15", cache_read="0.3", cache_write_5m="3.75", cache_write_1h="6")
).pricer  # type: ignore[arg-type]
CLAUDE = "claude-sonnet-4-5-20250929"
UNIT_PRICES = {"topicPolicyUnits": 150_000_000, "wordPolicyUnits": 0}
UNITS = Pricer(lambda usage: price_guardrail(UNIT_PRICES, usage.units), "config")
TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
ACCOUNT = ChargedCounters.from_counters([Counter("ORG#a", "premium", "DAY#20261118", 8)])
GUESS = make_plain_usage(100, 500, 0)
WORST = 7_050_000_000  # pico-dollars, reserved for the call under a hard budget
TEXT = "every word of it was paid for " * 50
INPUT, OUTPUT = b"x-amzn-bedrock-input-token-count", b"x-amzn-bedrock-output-token-count"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path, UlidFactory(lambda: 1_795_003_200.0, os.urandom, ""))
    yield made
    made.close()


Ask = Callable[..., UsageCounts]


@pytest.fixture
def record(journal: Journal) -> Ask:
    def recorded(
        operation: Operation,
        answer: bytes | dict[str, Any],
        kind: bytes = JSON,
        headers: dict[bytes, bytes] | None = None,
        *,
        most: int | None = None,
        price: Pricer = TOKENS,
        guess: Usage = GUESS,
        asked_units: int = 0,
        status: int = 200,
    ) -> UsageCounts:
        before = journal.tally.total()
        terms = OperationPricing("premium", operation, "anthropic", lambda _: price, lambda _: guess, UsageForecast())
        if asked_units:
            meter: Meter = GuardedMeter(asked_units, journal, terms, ACCOUNT, TARGET, guess, 1.0, ceiling_pico=most)
        else:
            meter = Meter(journal, terms, ACCOUNT, TARGET, guess, 1.0, ceiling_pico=most)
        meter.on_sent(TARGET)
        meter.on_head(status, {b"content-type": kind, **(headers or {})})
        meter.on_data(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        meter.on_end(True)
        meter.close()
        return journal.tally.total().less(before)

    return recorded


def chunk(document: Any) -> bytes:
    return encode_event("chunk", {"bytes": b64encode(json.dumps(document).encode()).decode()})


def chats(*documents: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in documents) + b"data: [DONE]\n\n"


# ---------------------------------------------------------------- no count of the output

CHOICE = {"message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
NO_OUTPUT: dict[str, tuple[dict[str, Any], dict[bytes, bytes]]] = {
    "llama": ({"generation": TEXT, "prompt_token_count": 90, "stop_reason": "stop"}, {}),
    "titan": ({"inputTextTokenCount": 90, "results": [{"outputText": TEXT, "completionReason": "FINISH"}]}, {}),
    "mistral": ({"choices": [CHOICE], "usage": {"prompt_tokens": 90}}, {}),
    "nova": ({"output": {"message": {"content": [{"text": TEXT}]}}, "usage": {"inputTokens": 90}}, {}),
    "anthropic": ({"content": [{"type": "text", "text": TEXT}], "usage": {"input_tokens": 90}}, {}),
    "cohere": ({"text": TEXT, "meta": {"billed_units": {"input_tokens": 90}}}, {}),
    "headers alone": ({"outputs": [{"text": TEXT}]}, {INPUT: b"90"}),
    "an image": ({"images": [b64encode(bytes(9000)).decode()]}, {INPUT: b"90"}),
    "a ranking": ({"results": [{"index": 0, "relevance_score": 0.5, "document": {"text": TEXT}}]}, {INPUT: b"90"}),
}


@pytest.mark.parametrize("family", NO_OUTPUT)
def test_missing_output_count_costs_ceiling_under_hard_budget(record: Ask, family: str) -> None:
    answer, headers = NO_OUTPUT[family]
    counts = record(Operation.INVOKE, answer, headers=headers, most=WORST)
    assert (counts.pico, counts.estimated_requests) == (WORST, 1)


@pytest.mark.parametrize("family", NO_OUTPUT)
def test_missing_output_count_is_estimated_from_text(record: Ask, family: str) -> None:
    answer, headers = NO_OUTPUT[family]
    counts = record(Operation.INVOKE, answer, headers=headers)
    assert (counts.input_tokens, counts.estimated_requests) == (90, 1)
    assert counts.output_tokens >= len(TEXT) // 4


def test_chat_stream_without_output_count_keeps_stated_input(record: Ask) -> None:
    stream = chats({"choices": [{"delta": {"content": TEXT}}]}, {"choices": [], "usage": {"prompt_tokens": 7000}})
    counts = record(Operation.CHAT_COMPLETIONS, stream, SERVER_SENT_EVENTS)
    assert (counts.input_tokens, counts.estimated_requests) == (7000, 1)
    assert record(Operation.CHAT_COMPLETIONS, stream, SERVER_SENT_EVENTS, most=WORST).pico == WORST


@pytest.mark.parametrize("document", [{"embedding": [0.5]}, {"embeddings": [[0.5]]}, {"embeddingsByType": {}}])
def test_embedding_without_output_count_is_exact(record: Ask, document: dict[str, Any]) -> None:
    counts = record(Operation.INVOKE, document, headers={INPUT: b"90"}, most=WORST)
    assert counts == UsageCounts(1, 0, 90, pico=90 * 3_000_000)


# ---------------------------------------------------------------- zeros

ZERO = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
SAID = encode_event("contentBlockDelta", {"delta": {"text": TEXT}, "contentBlockIndex": 0})
STREAM = (
    encode_event("messageStart", {"role": "assistant"}) + SAID + encode_event("messageStop", {"stopReason": "end_turn"})
)
ZEROS: dict[str, tuple[Operation, bytes, Any, dict[bytes, bytes]]] = {
    "Converse": (Operation.CONVERSE, JSON, {"output": {"message": {"content": [{"text": TEXT}]}}, "usage": ZERO}, {}),
    "ConverseStream": (Operation.CONVERSE_STREAM, EVENT_STREAM, STREAM + encode_event("metadata", {"usage": ZERO}), {}),
    "chat": (Operation.CHAT_COMPLETIONS, JSON, {"choices": [CHOICE], "usage": NO_TOKENS}, {}),
    "chat stream": (
        Operation.CHAT_COMPLETIONS,
        SERVER_SENT_EVENTS,
        chats({"choices": [{"delta": {"content": TEXT}}]}, {"choices": [], "usage": NO_TOKENS}),
        {},
    ),
    "an image's embedding": (Operation.INVOKE, JSON, {"embedding": [0.5], "inputTextTokenCount": 0}, {}),
    "a ranking": (
        Operation.INVOKE,
        JSON,
        {"results": [{"index": 0, "relevance_score": 0.5}]},
        {INPUT: b"0", OUTPUT: b"0"},
    ),
    "a guardrail": (Operation.APPLY_GUARDRAIL, JSON, {"usage": {"topicPolicyUnits": 0, "wordPolicyUnits": 0}}, {}),
}


@pytest.mark.parametrize("what", ZEROS)
def test_successful_response_with_zero_usage_is_estimated(record: Ask, what: str) -> None:
    operation, kind, answer, headers = ZEROS[what]
    is_guardrail = operation is Operation.APPLY_GUARDRAIL
    more = {"price": UNITS, "guess": Usage(units={"unknown": 3})} if is_guardrail else {}
    soft = record(operation, answer, kind, headers, **more)
    assert soft.estimated_requests == 1
    assert soft.pico > 0
    assert is_guardrail or soft.input_tokens == GUESS.input
    hard = record(operation, answer, kind, headers, most=WORST, **more)
    assert (hard.pico, hard.estimated_requests) == (WORST, 1)


@pytest.mark.parametrize("usage", [{"inputTokens": 90, "outputTokens": 0}, {"inputTokens": 0, "outputTokens": 90}])
def test_zero_count_beside_text_is_estimated(record: Ask, usage: dict[str, int]) -> None:
    answer = {"output": {"message": {"content": [{"text": TEXT}]}}, "usage": usage, "stopReason": "end_turn"}
    counts = record(Operation.CONVERSE, answer)
    assert (counts.input_tokens, counts.estimated_requests) == (usage["inputTokens"] or GUESS.input, 1)
    assert counts.output_tokens >= len(TEXT) // 4
    streamed = STREAM + encode_event("metadata", {"usage": usage})
    assert record(Operation.CONVERSE_STREAM, streamed, EVENT_STREAM).estimated_requests == 1


@pytest.mark.parametrize(
    ("operation", "kind", "answer"),
    [
        (Operation.CONVERSE, JSON, {"output": {"message": {"role": "assistant", "content": []}}, "usage": {}}),
        (Operation.INVOKE, JSON, {"type": "message", "content": [], "stop_reason": "max_tokens", "usage": {}}),
        (Operation.INVOKE, JSON, {"type": "message", "content": [{"type": "text", "text": ""}], "usage": {}}),
    ],
)
def test_zero_output_of_empty_response_is_exact(
    record: Ask, operation: Operation, kind: bytes, answer: dict[str, Any]
) -> None:
    spelt = {"inputTokens": 90, "outputTokens": 0} if operation is Operation.CONVERSE else {"input_tokens": 90}
    answer = answer | {"usage": spelt if operation is Operation.CONVERSE else spelt | {"output_tokens": 0}}
    assert record(operation, answer, kind, most=WORST) == UsageCounts(1, 0, 90, pico=90 * 3_000_000)


def test_zero_output_of_empty_stream_is_exact(record: Ask) -> None:
    usage = {"inputTokens": 90, "outputTokens": 0}
    conversed = encode_event("messageStart", {"role": "assistant"}) + encode_event(
        "messageStop", {"stopReason": "max_tokens"}
    )
    conversed += encode_event("metadata", {"usage": usage})
    expected = UsageCounts(1, 0, 90, pico=90 * 3_000_000)
    assert record(Operation.CONVERSE_STREAM, conversed, EVENT_STREAM, most=WORST) == expected
    start = {"type": "message_start", "message": {"id": "1", "content": [], "usage": {"input_tokens": 90}}}
    delta = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 0}}
    invoked = chunk(start) + chunk(delta) + chunk({"type": "message_stop"})
    assert record(Operation.INVOKE_STREAM, invoked, EVENT_STREAM, most=WORST) == expected


REFUSED = {"stop_reason": "refusal", "stop_details": {"type": "refusal", "explanation": "Not on this topic."}}


def test_refusal_before_any_output_is_exact(record: Ask) -> None:
    usage: dict[str, Any] = {"input_tokens": 90, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usage["cache_creation"] = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    message = {"id": "msg_bdrk_" + "0" * 24, "model": CLAUDE, "type": "message", "role": "assistant", "content": []}
    expected = UsageCounts(1, 0, 90, pico=90 * 3_000_000)
    answer = message | REFUSED | {"usage": usage | {"output_tokens": 0}}
    assert record(Operation.INVOKE, answer, most=WORST) == expected
    start = chunk({"type": "message_start", "message": message | {"stop_reason": None, "usage": usage}})
    assert len(start) > 550  # a large chunk, but one that says nothing
    delta = chunk({"type": "message_delta", "delta": REFUSED, "usage": {"output_tokens": 0}})
    stream = start + delta + chunk({"type": "message_stop"})
    assert record(Operation.INVOKE_STREAM, stream, EVENT_STREAM, most=WORST) == expected


@pytest.mark.parametrize("answer", [TEXT.encode(), b'{"generation":"' + TEXT.encode(), b'{"generation":"x","p":NaN}'])
def test_zero_output_of_malformed_response_is_estimated(record: Ask, answer: bytes) -> None:
    counts = record(Operation.INVOKE, answer, headers={INPUT: b"90", OUTPUT: b"0"}, most=WORST)
    assert (counts.pico, counts.estimated_requests) == (WORST, 1)
    sound = encode_event("chunk", {"bytes": b64encode(answer).decode()})
    stream = sound + chunk({INVOCATION_METRICS: {"inputTokenCount": 90, "outputTokenCount": 0}})
    assert record(Operation.INVOKE_STREAM, stream, EVENT_STREAM, most=WORST).pico == WORST


def test_zero_output_of_stream_with_oversized_chunk_is_estimated(record: Ask) -> None:
    stream = chunk({"outputText": TEXT * 20}) + chunk(
        {INVOCATION_METRICS: {"inputTokenCount": 90, "outputTokenCount": 0}}
    )
    assert record(Operation.INVOKE_STREAM, stream, EVENT_STREAM, most=WORST).pico == WORST


def test_tool_call_without_text_is_output(record: Ask) -> None:
    block = encode_event(
        "contentBlockStart", {"start": {"toolUse": {"toolUseId": "x", "name": "y"}}, "contentBlockIndex": 0}
    )
    usage = encode_event("metadata", {"usage": {"inputTokens": 90, "outputTokens": 0}})
    stream = encode_event("messageStart", {"role": "assistant"}) + block + usage
    assert record(Operation.CONVERSE_STREAM, stream, EVENT_STREAM, most=WORST).pico == WORST
    call = {"content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}]}
    answer = call | {"usage": {"input_tokens": 90, "output_tokens": 0}}
    assert record(Operation.INVOKE, answer, most=WORST).pico == WORST


def test_error_with_zero_usage_costs_nothing(record: Ask) -> None:
    assert record(Operation.CONVERSE, {"message": "no", "usage": ZERO}, status=400, most=WORST).pico == 0


FAILED = encode_exception("modelStreamErrorException", "no")


@pytest.mark.parametrize("usage", [{"inputTokens": 90}, {"inputTokens": 90, "outputTokens": 0}])
def test_failed_stream_with_stated_input_is_charged(record: Ask, usage: dict[str, int]) -> None:
    stream = encode_event("metadata", {"usage": usage}) + FAILED
    assert record(Operation.CONVERSE_STREAM, stream, EVENT_STREAM).input_tokens == 90
    assert record(Operation.CONVERSE_STREAM, stream, EVENT_STREAM, most=WORST).pico >= 90 * 3_000_000


def test_stream_failing_at_once_costs_nothing_even_with_zero_usage(record: Ask) -> None:
    error = {"error": {"message": "no"}}
    for stream in (chats(error), chats(error | {"usage": NO_TOKENS})):
        assert record(Operation.CHAT_COMPLETIONS, stream, SERVER_SENT_EVENTS, most=WORST) == UsageCounts()
    stream = FAILED + encode_event("metadata", {"usage": ZERO})
    assert record(Operation.CONVERSE_STREAM, stream, EVENT_STREAM, most=WORST) == UsageCounts()


def test_units_of_free_policies_and_free_labels_cost_nothing(record: Ask) -> None:
    words = {"usage": {"wordPolicyUnits": 2, "topicPolicyUnits": 0}}
    counts = record(Operation.APPLY_GUARDRAIL, words, price=UNITS, guess=Usage(units={"unknown": 3}), most=WORST)
    assert (counts.pico, counts.guardrail_units, counts.estimated_requests) == (0, 2, 0)
    free = build_price_table(PricesConfig(input="0", output="0")).pricer  # type: ignore[arg-type]
    answer = {"output": {}, "usage": {"inputTokens": 9, "outputTokens": 9}}
    assert record(Operation.CONVERSE, answer, price=free) == UsageCounts(1, 0, 9, 9)
    units = {"invocationMetrics": {"usage": {"wordPolicyUnits": 1}}}
    answer["trace"] = {"guardrail": {"inputAssessment": {"g": units}}}
    more = {
        "price": add_guardrail_prices(free, UNIT_PRICES),
        "guess": GUESS._replace(units=estimate_units(9, 500)),
        "asked_units": 9,
    }
    assert record(Operation.CONVERSE, answer, most=WORST, **more) == UsageCounts(1, 0, 9, 9, guardrail_units=1)


# ---------------------------------------------------------------- calls that a guardrail blocked

BLOCKED_TEXT = "Sorry, the model cannot answer this question."
TRACE = {"guardrail": {"inputAssessment": {"g": {"invocationMetrics": {"usage": {"topicPolicyUnits": 5}}}}}}
BLOCKED: dict[str, tuple[Operation, bytes, Any]] = {
    "Converse": (
        Operation.CONVERSE,
        JSON,
        {
            "output": {"message": {"content": [{"text": BLOCKED_TEXT}]}},
            "stopReason": "guardrail_intervened",
            "usage": ZERO,
            "trace": TRACE,
        },
    ),
    "ConverseStream": (
        Operation.CONVERSE_STREAM,
        EVENT_STREAM,
        encode_event("messageStart", {"role": "assistant"})
        + encode_event("contentBlockDelta", {"delta": {"text": BLOCKED_TEXT}})
        + encode_event("messageStop", {"stopReason": "guardrail_intervened"})
        + encode_event("metadata", {"usage": ZERO, "trace": TRACE}),
    ),
    "InvokeModel": (
        Operation.INVOKE,
        JSON,
        {
            "content": [{"type": "text", "text": BLOCKED_TEXT}],
            "usage": {"input_tokens": 0, "output_tokens": 0},
            "amazon-bedrock-guardrailAction": "INTERVENED",
            "amazon-bedrock-trace": TRACE,
        },
    ),
    "InvokeModel's stream": (
        Operation.INVOKE_STREAM,
        EVENT_STREAM,
        chunk(
            {
                "completion": BLOCKED_TEXT,
                "amazon-bedrock-guardrailAction": "INTERVENED",
                "amazon-bedrock-trace": TRACE,
                INVOCATION_METRICS: {"inputTokenCount": 0, "outputTokenCount": 0},
            }
        ),
    ),
    "chat stream": (
        Operation.CHAT_COMPLETIONS,
        SERVER_SENT_EVENTS,
        chats(
            {"choices": [{"delta": {"content": BLOCKED_TEXT}}], "amazon-bedrock-guardrailAction": "INTERVENED"},
            {"choices": [], "usage": NO_TOKENS, "amazon-bedrock-trace": TRACE},
        ),
    ),
}


@pytest.mark.parametrize("what", BLOCKED)
def test_call_blocked_by_guardrail_costs_its_units_alone(record: Ask, what: str) -> None:
    operation, kind, answer = BLOCKED[what]
    guess = GUESS._replace(units=estimate_units(9, 500))
    more = {"price": add_guardrail_prices(TOKENS, UNIT_PRICES), "guess": guess, "asked_units": 9}
    assert record(operation, answer, kind, **more) == UsageCounts(1, 0, guardrail_units=5, pico=5 * 150_000_000)


@pytest.mark.parametrize("what", BLOCKED)
def test_zero_usage_of_unblocked_guarded_call_is_estimated(record: Ask, what: str) -> None:
    operation, kind, answer = BLOCKED[what]
    wire = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    if operation is Operation.CONVERSE_STREAM:
        wire = STREAM + encode_event("contentBlockDelta", {"delta": {"text": "guardrail_intervened"}})
        wire += encode_event("metadata", {"usage": ZERO})
    elif operation is Operation.INVOKE_STREAM:
        wire = chunk({"completion": '"amazon-bedrock-guardrailAction":"INTERVENED"'})
        wire += chunk({INVOCATION_METRICS: {"inputTokenCount": 0, "outputTokenCount": 0}})
    else:
        wire = wire.replace(b"INTERVENED", b"NONE").replace(b"guardrail_intervened", b"end_turn")
    guess = GUESS._replace(units=estimate_units(9, 500))
    more = {"price": add_guardrail_prices(TOKENS, UNIT_PRICES), "guess": guess, "asked_units": 9}
    counts = record(operation, wire, kind, **more)
    assert (counts.estimated_requests, counts.input_tokens) == (1, GUESS.input)
    assert counts.pico > TOKENS.price(GUESS._replace(output=0)).pico
