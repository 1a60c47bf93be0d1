"""Several places of one response that state usage: body and headers, totals and parts, start and end of a stream."""

from __future__ import annotations

import json

import pytest
from bedrock_simulator.event_frames import encode_event as encoded
from price_keeper.operations import Operation
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.stream_usage import CACHE_BLOCK_TOKENS, ConverseStream, InvocationStream
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import build_reader

from tests.unit.test_model_families import (
    CLAUDE,
    INPUT,
    LATENCY,
    OUTPUT,
    PLAIN,
    READ,
    TIER,
    WRITTEN,
    conversation,
    openai,
)
from tests.unit.test_stream_usage import (
    COUNTED,
    DELTA,
    HEADERS,
    PING,
    SAID,
    START,
    STOP,
    chunk,
    event,
    fed,
    llama,
    metadata,
)

# ---------------------------------------------------------------- whole answers


@pytest.mark.parametrize(
    ("more", "headers", "tier", "latency"),
    [
        ({}, {TIER: b"flex", LATENCY: b"optimized"}, "flex", "optimized"),
        ({"serviceTier": {"type": "default"}}, {TIER: b"priority"}, "priority", ""),
        ({"serviceTier": "flex"}, {}, "flex", ""),
        ({"serviceTier": "standard", "performanceConfig": "optimized"}, {}, "default", ""),
    ],
)
def test_converse_tier_and_latency_in_headers_or_text_are_read(more, headers, tier, latency):
    answer = conversation(PLAIN, **more)
    assert model_families.read_converse(answer, headers) == Usage(1, 2, tier=tier, latency=latency)
    reader = build_reader(Operation.CONVERSE, "anthropic", b"application/json", headers)
    reader.feed(json.dumps(answer).encode())
    assert reader.usage() == Usage(1, 2, tier=tier, latency=latency)


@pytest.mark.parametrize(
    ("usage", "is_sound"),
    [
        ({"inputTokens": 5, "outputTokens": 6, "totalTokens": 11}, True),
        ({"inputTokens": 5, "outputTokens": 6, "totalTokens": 9}, True),
        ({"inputTokens": 5, "outputTokens": 6, "totalTokens": 18, "cacheReadInputTokens": 7}, True),
        ({"inputTokens": 5, "outputTokens": 6, "totalTokens": 19, "cacheReadInputTokens": 7}, False),
        ({"inputTokens": 5, "outputTokens": 1, "totalTokens": 500}, False),
        ({"inputTokens": 5, "outputTokens": 1, "totalTokens": -1}, False),
    ],
)
def test_total_above_sum_of_parts_is_contradictory(usage, is_sound):
    assert (model_families.read_converse(conversation(usage)) is not None) == is_sound
    assert (fast_parse.parse_converse(json.dumps(conversation(usage)).encode()) is not None) == is_sound


def test_chat_total_above_sum_of_parts_is_contradictory():
    assert model_families.read_chat(openai(prompt_tokens=5, completion_tokens=6, total_tokens=12)) is None
    details = {"cached_tokens": 60}
    more = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 76, "prompt_tokens_details": details}
    assert model_families.read_chat(openai(**more)) == Usage(10, 6, 60)


def test_event_stream_content_type_is_matched_in_any_case():
    frame = encoded("metadata", {"usage": PLAIN})
    reader = build_reader(Operation.CONVERSE_STREAM, "anthropic", b"Application/VND.Amazon.EventStream", {})
    reader.feed(frame)
    assert reader.usage() == Usage(1, 2)
    reader = build_reader(Operation.CHAT_COMPLETIONS, "openai", b"TEXT/Event-Stream; charset=utf-8", {})
    reader.feed(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(openai(prompt_tokens=5, completion_tokens=6)).encode())
    assert reader.usage() == Usage(5, 6)


def test_larger_of_two_names_for_one_count_wins():
    usage = {"inputTokens": 6, "outputTokens": 30, "cacheReadInputTokens": 0, "cacheReadInputTokenCount": 500}
    usage |= {"cacheWriteInputTokens": 0, "cacheWriteInputTokenCount": 70, "totalTokens": 606}
    for operation in (Operation.CONVERSE, Operation.INVOKE):
        reader = build_reader(operation, "nova", b"application/json", {})
        reader.feed(json.dumps({"output": {}, "usage": usage}).encode())
        assert reader.usage() == Usage(6, 30, 500, 70)


def test_null_embedding_is_no_embedding():
    reader = build_reader(Operation.INVOKE, "titan", b"application/json", {})
    reader.feed(b'{"embedding":null,"embeddings": null,"inputTextTokenCount":9,"results":[{"outputText":"so"}]}')
    assert reader.usage() is None
    assert reader.has_output()


def test_larger_of_two_counts_wins():
    body = CLAUDE | {
        "usage": {
            "input_tokens": 50,
            "output_tokens": 9,
            "cache_read_input_tokens": 7,
            "cache_creation_input_tokens": 0,
        }
    }
    assert model_families.read_invocation(body, {INPUT: b"0", OUTPUT: b"0", READ: b"0", WRITTEN: b"0"}) == Usage(
        50, 9, 7
    )
    assert model_families.read_invocation(body, {INPUT: b"60", OUTPUT: b"8"}) == Usage(60, 9, 7)
    zeros = {"usage": dict.fromkeys(body["usage"], 0)}
    assert model_families.read_invocation(zeros, {INPUT: b"60", OUTPUT: b"8", READ: b"7"}) == Usage(60, 8, 7)


@pytest.mark.parametrize("counts", [{}, {READ: b"0", WRITTEN: b"0"}])
def test_cached_tokens_counted_as_input_in_headers_are_kept(counts):
    usage = {"input_tokens": 1000, "output_tokens": 9, "cache_read_input_tokens": 8000}
    headers = {INPUT: b"9000", OUTPUT: b"9", **counts}
    assert model_families.read_invocation(CLAUDE | {"usage": usage}, headers) == Usage(1000, 9, 8000)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "second",
    [
        event("metadata", b'{"metrics":{"latencyMs":9}}'),
        event("metadata", b"{"),
        metadata({"inputTokens": 0, "outputTokens": 0}),
        metadata({"inputTokens": 4, "outputTokens": -9}),
        metadata({"inputTokens": 4}),
    ],
)
def test_smaller_second_metadata_event_keeps_first(second):
    assert fed(ConverseStream(), [SAID, metadata(), second]).usage() == Usage(4, 9, 10, 10, 100)
    assert fed(ConverseStream(), [SAID, second, metadata()]).usage() == Usage(4, 9, 10, 10, 100)


def test_converse_stream_tier_and_latency_in_headers_alone_are_read():
    stream = fed(ConverseStream("anthropic", HEADERS), [SAID, metadata()])
    assert stream.usage() == Usage(4, 9, 10, 10, 100, "flex", "optimized")


def test_openai_converse_stream_keeps_uncached_input():
    usage = {"inputTokens": 5000, "outputTokens": 10, "totalTokens": 6010, "cacheReadInputTokens": 1000}
    assert fed(ConverseStream("openai"), [metadata(usage)]).usage() == Usage(5000, 10, 1000)
    usage = {"inputTokens": 1000 + CACHE_BLOCK_TOKENS, "outputTokens": 10, "cacheReadInputTokens": 1000}
    assert fed(ConverseStream("openai"), [metadata(usage)]).usage() == Usage(1000 + CACHE_BLOCK_TOKENS, 10, 1000)


def test_kept_chunks_are_bounded():
    stream = fed(InvocationStream(), map(chunk, [START, *[DELTA] * 2000, STOP]))
    assert len([*stream._iter_newest_first()]) == 10
    assert stream.usage() == COUNTED


def test_stream_with_unread_counts_is_estimated():
    stream = fed(InvocationStream(), map(chunk, [llama(1, 20), llama(2), llama(3, None, "stop"), *[PING] * 9]))
    assert stream.usage() is None
    assert stream.estimate_output() >= 3
