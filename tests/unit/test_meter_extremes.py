"""What no answer should say, and some may: the call is recorded all the same, once, and for a sum that can be true."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from bedrock_simulator.event_frames import encode_event, encode_exception
from price_keeper.config.config_sections import PricesConfig
from price_keeper.domain import PICO_PER_USD
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.operations import Operation
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.eventstream import encode_frame
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.guardrail_usage import estimate_units
from price_keeper.usage.meter import (
    MAX_CALL_PICO,
    GuardedMeter,
    Meter,
    OperationPricing,
    UsageForecast,
    add_guardrail_prices,
)
from price_keeper.usage.price_table import Cost, Pricer, build_price_table
from price_keeper.usage.token_usage import make_plain_usage
from price_keeper.usage.usage_reader import EVENT_STREAM

TOKENS = build_price_table(
    PricesConfig(input="3", output="15", cache_read="0.3", cache_write_5m="3.75", cache_write_1h="6")
).pricer  # type: ignore[arg-type]
UNIT = 150_000_000
UNITS = {"topicPolicyUnits": UNIT, "contentPolicyUnits": UNIT, "automatedReasoningPolicyUnits": UNIT}
BOTH = add_guardrail_prices(TOKENS, UNITS)
TARGET = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
ACCOUNT = ChargedCounters.from_counters([Counter("ORG#a", "premium", "DAY#20261118", 8)])
GUESS = make_plain_usage(100, 500, 0)
GUARDED = GUESS._replace(units=estimate_units(5, 500))


def ulids() -> UlidFactory:
    return UlidFactory(lambda: 1_795_003_200.0, os.urandom, "")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path, ulids())
    yield made
    made.close()


def terms(operation: Operation, price: Pricer) -> OperationPricing:
    return OperationPricing("premium", operation, "anthropic", lambda _: price, lambda _: GUESS, UsageForecast())


def recorded(meter: Meter, journal: Journal, kind: bytes, *answer: bytes, is_whole: bool = True) -> UsageCounts:
    headers = {b"content-type": kind}
    meter.on_sent(TARGET)
    meter.on_head(200, headers)
    for piece in answer:
        meter.on_data(piece)
    meter.on_end(is_whole)
    meter.close()
    assert (journal.open_calls, journal.tally.requests) == (0, 1)
    return journal.tally.total()


def plain(journal: Journal, operation: Operation) -> Meter:
    return Meter(journal, terms(operation, TOKENS), ACCOUNT, TARGET, GUESS, 1.0)


def guarded(journal: Journal, operation: Operation) -> Meter:
    return GuardedMeter(5, journal, terms(operation, BOTH), ACCOUNT, TARGET, GUARDED, 1.0)


def chunk(document: Any) -> bytes:
    return encode_event("chunk", {"bytes": b64encode(orjson.dumps(document)).decode()})


def test_intent_of_guardrail_call_has_units_and_cost(journal: Journal, tmp_path: Path) -> None:
    guarded(journal, Operation.CONVERSE)
    (left,) = recover(tmp_path).sealed  # as after a kill
    counts = left.seal.parts[0][0][1]
    assert counts.guardrail_units == sum(GUARDED.units.values()) > 5
    assert left.seal.pico == BOTH.price(GUARDED).pico > TOKENS.price(GUESS).pico


def test_tier_too_long_for_journal_line_is_unknown(journal: Journal) -> None:
    end = b'","usage":{"inputTokens":1000,"outputTokens":5},"serviceTier":{"type":"\\ud800"}}'
    answer = encode_frame({":message-type": "event", ":event-type": "metadata"}, b'{"trace":"' + b"x" * 70_000 + end)
    counts = recorded(plain(journal, Operation.CONVERSE_STREAM), journal, EVENT_STREAM, answer)
    assert (counts.input_tokens, counts.output_tokens, counts.estimated_requests) == (1000, 5, 0)
    assert counts.pico > 0


@pytest.mark.parametrize("unwritable", [Cost(1, frozenset({"\ud800"})), Cost(-(2**70))])
def test_unwritable_receipt_is_estimated(journal: Journal, caplog: pytest.LogCaptureFixture, unwritable: Cost) -> None:
    odd = Pricer(lambda usage: TOKENS.price(usage) if usage == GUESS else unwritable, "config")
    meter = Meter(journal, terms(Operation.CONVERSE, odd), ACCOUNT, TARGET, GUESS, 1.0)
    answer = b'{"usage":{"inputTokens":1,"outputTokens":1}}'
    found = recorded(meter, journal, b"application/json", answer)
    assert found == UsageCounts(1, 1, GUESS.input, GUESS.output, pico=TOKENS.price(GUESS).pico)
    usd = f"{found.pico / PICO_PER_USD:.6f} USD of {ACCOUNT.counters[0].scope}, label premium"
    assert f"is estimated: {usd}" in caplog.text


def test_impossible_units_of_cut_response_are_ignored(journal: Journal) -> None:
    usage = {"automatedReasoningPolicyUnits": 10**9, "automatedReasoningPolicies": 10**9}
    trace = {"trace": {"guardrail": {"inputAssessment": {"a": {"invocationMetrics": {"usage": usage}}}}}}
    counts = recorded(
        guarded(journal, Operation.CONVERSE_STREAM), journal, EVENT_STREAM, encode_event("metadata", trace)
    )
    assert counts.pico == BOTH.price(GUARDED).pico


def test_estimate_is_limited_to_highest_call_cost(journal: Journal, tmp_path: Path) -> None:
    dear = Pricer(lambda _: TOKENS.price(GUESS)._replace(pico=2**70), "config")
    meter = Meter(journal, terms(Operation.CONVERSE, dear), ACCOUNT, TARGET, GUESS, 1.0)
    assert recover(tmp_path).sealed[0].seal.pico == MAX_CALL_PICO
    assert recorded(meter, journal, b"application/json", b"{}").pico == MAX_CALL_PICO


@pytest.mark.parametrize("make", [plain, guarded])
def test_too_many_images_are_estimated(journal: Journal, make: Any) -> None:
    image = b'"' + b64encode(os.urandom(4_000_000)) + b'"'
    answer = b'{"images":[' + b",".join([image] * 4) + b"]}"
    pieces = [answer[at : at + 65_536] for at in range(0, len(answer), 65_536)]
    counts = recorded(make(journal, Operation.INVOKE), journal, b"application/json", *pieces)
    assert (counts.output_tokens, counts.estimated_requests) == (GUESS.output, 1)
    assert counts.guardrail_units == (sum(GUARDED.units.values()) if make is guarded else 0)


def test_input_trace_alone_of_cut_response_is_completed_by_estimate(journal: Journal) -> None:
    trace = {"guardrail": {"input": {"g": {"invocationMetrics": {"usage": {"topicPolicyUnits": 5}}}}}}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1000, "output_tokens": 1}}}
    said = chunk({"type": "content_block_delta", "delta": {"text": "word " * 5}})
    first = chunk(start | {"amazon-bedrock-trace": trace})
    meter = guarded(journal, Operation.INVOKE_STREAM)
    counts = recorded(meter, journal, EVENT_STREAM, first, *[said] * 3000, is_whole=False)
    assert counts.input_tokens == 1000
    assert counts.guardrail_units == sum(estimate_units(5, counts.output_tokens).values()) > 50


def test_trace_above_estimate_is_used(journal: Journal) -> None:
    trace = {"guardrail": {"input": {"g": {"invocationMetrics": {"usage": {"topicPolicyUnits": 900}}}}}}
    first = chunk({"type": "x", "amazon-bedrock-trace": trace})
    meter = guarded(journal, Operation.INVOKE_STREAM)
    assert recorded(meter, journal, EVENT_STREAM, first, is_whole=False).guardrail_units == 900


def test_tool_call_before_error_is_charged(journal: Journal) -> None:
    block = encode_event(
        "contentBlockStart", {"start": {"toolUse": {"toolUseId": "x", "name": "y"}}, "contentBlockIndex": 0}
    )
    begun = (
        encode_event("messageStart", {"role": "assistant"})
        + block
        + encode_event("messageStop", {"stopReason": "tool_use"})
    )
    broken = encode_exception("modelStreamErrorException", "no")
    counts = recorded(plain(journal, Operation.CONVERSE_STREAM), journal, EVENT_STREAM, begun + broken)
    assert (counts.estimated_requests, counts.input_tokens) == (1, GUESS.input)
    assert counts.output_tokens > 0
