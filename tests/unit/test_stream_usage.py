"""The usage that event streams state: complete, cut anywhere, and with payloads of which only the end was kept."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest
from price_keeper.upstream.eventstream import EventFrame, FrameWatcher, encode_frame
from price_keeper.usage.stream_usage import (
    BYTES_PER_TOKEN,
    CONVERSE_FRAME_LIMITS,
    INVOCATION_FRAME_LIMITS,
    ORDINARY_FRAME_BYTES,
    TOKENS_PER_FRAME,
    ConverseStream,
    InvocationStream,
)
from price_keeper.usage.token_usage import Usage

METRICS = "amazon-bedrock-invocationMetrics"
HEADERS = {b"x-amzn-bedrock-service-tier": b"flex", b"x-amzn-bedrock-performanceconfig-latency": b"optimized"}


def event(name, payload, kept=None):
    """A frame; `kept` is how many bytes of its payload's end the watcher was asked for."""
    return EventFrame("event", name, payload if kept is None else payload[len(payload) - kept :], len(payload))


def chunk(document, kept=None):
    inner = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    payload = b'{"bytes":"%s","p":"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234"}' % b64encode(inner)
    return event("chunk", payload, kept)


def fed(stream, frames):
    for frame in frames:
        stream.add_frame(frame)
    return stream


# ---------------------------------------------------------------- Converse

SAID = event("contentBlockDelta", b'{"contentBlockIndex":0,"delta":{"text":"hello you"},"p":"abc"}', kept=0)
USAGE = {
    "inputTokens": 4,
    "outputTokens": 9,
    "totalTokens": 133,
    "cacheReadInputTokens": 10,
    "cacheWriteInputTokens": 110,
    "cacheDetails": [{"inputTokens": 100, "ttl": "1h"}, {"inputTokens": 10, "ttl": "5m"}],
}
GUARDED = {"guardrail": {"inputAssessment": {"gr": {"invocationMetrics": {"usage": {"topicPolicyUnits": 1}}}}}}


def metadata(usage=USAGE, kept=None, **more):
    document = {"metrics": {"latencyMs": 9}, "p": "abcdef", **more, "usage": usage}
    return event("metadata", json.dumps(document, separators=(",", ":")).encode(), kept)


def test_converse_metadata_states_usage():
    tier, latency = {"type": "flex"}, {"latency": "optimized"}
    stream = fed(ConverseStream(), [SAID, SAID, metadata(serviceTier=tier, performanceConfig=latency)])
    expected = Usage(4, 9, 10, 10, 100, "flex", "optimized")
    assert stream.usage() == stream.partial_usage() == expected
    assert stream.estimate_output() == 9


def test_converse_stream_cut_before_metadata_is_estimated():
    stream = fed(ConverseStream(), [SAID] * 10)
    assert stream.usage() is stream.partial_usage() is None
    assert stream.estimate_output() == 10 * TOKENS_PER_FRAME
    assert ConverseStream().estimate_output() == 0


def test_large_frame_counts_for_more():
    stream = fed(ConverseStream(), [SAID, event("contentBlockDelta", b"x" * (ORDINARY_FRAME_BYTES + 4000), kept=0)])
    assert stream.estimate_output() == 2 * TOKENS_PER_FRAME + 4000 // BYTES_PER_TOKEN


def test_other_frames_are_ignored():
    refused = EventFrame("exception", "metadata", b'{"usage":{"inputTokens":1,"outputTokens":1}}', 44)
    stream = fed(ConverseStream(), [refused])
    assert stream.usage() is None
    assert stream.estimate_output() == 0


@pytest.mark.parametrize("begun", ["messageStart", "contentBlockStart"])
def test_started_stream_has_output(begun: str):
    refused = EventFrame("exception", "modelStreamErrorException", b"{}", 2)
    assert fed(ConverseStream(), [event(begun, b"{}"), refused]).estimate_output() == TOKENS_PER_FRAME
    assert fed(ConverseStream(), [event(begun, b"{}"), SAID]).estimate_output() == TOKENS_PER_FRAME


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"5", b"null", b'"usage"', b'{"usage":[]}', b"\xff\xfe"])
def test_malformed_metadata_is_ignored(payload):
    assert fed(ConverseStream(), [event("metadata", payload)]).usage() is None


def test_end_of_truncated_payload_suffices():
    """A guardrail's trace comes before the usage, and has usages of its own."""
    more = {"serviceTier": {"type": "flex"}, "trace": GUARDED | {"modelOutput": ["x" * 500], "all": [GUARDED] * 20}}
    whole = metadata(**more)
    needed = len(json.dumps({"usage": USAGE}, separators=(",", ":"))) - 1
    for kept in range(len(whole.payload)):
        found = fed(ConverseStream(), [metadata(kept=kept, **more)]).usage()
        if kept < needed:
            assert found is None
        else:
            assert found in (Usage(4, 9, 10, 10, 100), Usage(4, 9, 10, 10, 100, tier="flex"))
    assert fed(ConverseStream(), [whole]).usage().tier == "flex"


def test_trace_after_usage_is_ignored():
    usage, trace = json.dumps(USAGE), json.dumps(GUARDED)
    payload = f'{"x" * 500}","usage":{usage},"trace":{trace},"p":"ab"}}'.encode()
    assert fed(ConverseStream(), [EventFrame("event", "metadata", payload, 10**6)]).usage() == Usage(4, 9, 10, 10, 100)


def test_truncated_payload_without_usage_is_ignored():
    payload = (
        b'"modelOutput":["\\"usage\\":{\\"inputTokens\\":1,\\"outputTokens\\":1}"],"usage":{"topicPolicyUnits":1}}'
    )
    assert fed(ConverseStream(), [EventFrame("event", "metadata", payload, 10**6)]).usage() is None
    nested = b'{"usage":' * 20_000
    assert fed(ConverseStream(), [EventFrame("event", "metadata", nested, 10**6)]).usage() is None
    deep = b'{"usage":{"a":' + b"[" * 50_000
    assert fed(ConverseStream(), [EventFrame("event", "metadata", deep, 10**6)]).usage() is None


def test_openai_streams_count_cached_tokens_as_input():
    usage = {"inputTokens": 4995, "outputTokens": 19, "totalTokens": 10007, "cacheWriteInputTokens": 4993}
    assert fed(ConverseStream("openai"), [metadata(usage)]).usage() == Usage(2, 19, 0, 4993)
    assert fed(ConverseStream("anthropic"), [metadata(usage)]).usage() == Usage(4995, 19, 0, 4993)


def test_openai_streams_with_inconsistent_cache_count_are_believed():
    usage = {"inputTokens": 2, "outputTokens": 19, "totalTokens": 5014, "cacheReadInputTokens": 4993}
    assert fed(ConverseStream("openai"), [metadata(usage)]).usage() == Usage(2, 19, 4993)
    usage = {"inputTokens": 2, "outputTokens": 19, "totalTokens": 21}
    assert fed(ConverseStream("openai"), [metadata(usage)]).usage() == Usage(2, 19)


# ---------------------------------------------------------------- InvokeModel, by family


def counted(read, written, **more):
    return {METRICS: {"inputTokenCount": read, "outputTokenCount": written, "invocationLatency": 9, **more}}


CACHED = {"cacheReadInputTokenCount": 10, "cacheWriteInputTokenCount": 110}
START = {
    "type": "message_start",
    "message": {
        "id": "msg_bdrk_01",
        "content": [],
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 110,
            "cache_read_input_tokens": 10,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 100},
            "output_tokens": 3,
            "service_tier": "standard",
        },
    },
}
PLAIN_START = {"type": "message_start", "message": {"usage": {"input_tokens": 8, "output_tokens": 1}}}
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello"}}
DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 90}}
STOP = {"type": "message_stop"}
PING = {"type": "ping"}
COUNTED = Usage(4, 90, 10, 10, 100, "default")
RUNS = [
    {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3500},
    {"type": "message", "input_tokens": 23_000, "output_tokens": 1000},
]
WORDS = {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": None}], "usage": None}
LAST_WORD = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def llama(count, prompt=None, reason=None):
    return {"generation": "a", "prompt_token_count": prompt, "generation_token_count": count, "stop_reason": reason}


def titan(read=None, written=None, reason=None):
    return {
        "outputText": "a",
        "index": 0,
        "inputTextTokenCount": read,
        "totalOutputTextTokenCount": written,
        "completionReason": reason,
    }


def used(prompt, completion, **details):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details or None}
    return {"choices": [], "usage": usage}


def spoken(text, reason=None):
    return {"outputs": [{"text": text, "stop_reason": reason}]}


STREAMS = {
    "claude": ([START, TEXT, TEXT, DELTA, STOP | counted(4, 90, **CACHED)], Usage(4, 90, 10, 10, 100, "default")),
    "claude without Bedrock's counts": ([START, TEXT, TEXT, DELTA, STOP], Usage(4, 90, 10, 10, 100, "default")),
    "claude before caches": ([PLAIN_START, TEXT, DELTA, STOP | counted(8, 90)], Usage(8, 90)),
    "claude, started late": ([{"type": "ping"}, PLAIN_START, *[TEXT] * 9, DELTA, STOP], Usage(8, 90)),
    "claude, more after all": ([PLAIN_START, *[TEXT] * 9, DELTA, STOP, {"type": "ping"}], Usage(8, 90)),
    "bedrock counted more": (
        [START, TEXT, DELTA, STOP | counted(5, 91, **CACHED)],
        Usage(5, 91, 10, 10, 100, "default"),
    ),
    "bedrock wrote more": (
        [START, TEXT, DELTA, STOP | counted(4, 90, cacheWriteInputTokenCount=300)],
        Usage(4, 90, 10, 200, 100, "default"),
    ),
    "bedrock wrote less": (
        [START, TEXT, DELTA, STOP | counted(4, 90, cacheWriteInputTokenCount=60)],
        Usage(4, 90, 10, 10, 100, "default"),
    ),
    "claude used tools": (
        [PLAIN_START, TEXT, DELTA | {"usage": {"input_tokens": 800, "output_tokens": 90}}, STOP],
        Usage(800, 90),
    ),
    "claude compacted": (
        [
            PLAIN_START,
            TEXT,
            DELTA | {"usage": {"input_tokens": 23_000, "output_tokens": 1000, "iterations": RUNS}},
            STOP | counted(23_000, 1000),
        ],
        Usage(203_000, 4500),
    ),
    "claude compacted cheaply": (
        [START, TEXT, DELTA | {"usage": {"output_tokens": 1000, "iterations": RUNS}}, STOP | counted(23_000, 1000)],
        Usage(203_000, 4500, 10, 10, 100, "default"),
    ),
    "claude compacted, told twice": (
        [
            PLAIN_START,
            DELTA | {"usage": {"input_tokens": 1, "output_tokens": 1, "iterations": RUNS[:1]}},
            DELTA | {"usage": {"input_tokens": 23_000, "output_tokens": 1000, "iterations": RUNS}},
        ],
        Usage(203_000, 4500),
    ),
    "bedrock counted nothing": ([PLAIN_START, TEXT, DELTA, STOP | counted(0, 0)], Usage(8, 90)),
    "bedrock counted cached tokens as plain input": (
        [START, TEXT, DELTA, STOP | counted(124, 90, cacheReadInputTokenCount=0, cacheWriteInputTokenCount=0)],
        Usage(4, 90, 10, 10, 100, "default"),
    ),
    "claude, started very late": ([*[PING] * 9, START, *[TEXT] * 9, DELTA, STOP | counted(4, 90, **CACHED)], COUNTED),
    "claude, much after all": ([START, *[TEXT] * 9, DELTA, STOP | counted(4, 90, **CACHED), *[PING] * 9], COUNTED),
    "claude, much before and after": ([*[PING] * 9, START, *[TEXT] * 9, DELTA, STOP, *[PING] * 9], COUNTED),
    "nova, much after all": (
        [{"metadata": {"usage": {"inputTokens": 4, "outputTokens": 90}}}, *[PING] * 9],
        Usage(4, 90),
    ),
    "nova, much before and after": (
        [*[PING] * 9, {"metadata": {"usage": {"inputTokens": 4, "outputTokens": 90}}}, *[PING] * 9],
        Usage(4, 90),
    ),
    "nova": (
        [
            {"messageStart": {"role": "assistant"}},
            {"contentBlockDelta": {"delta": {"text": "hello"}, "contentBlockIndex": 0}},
            {"messageStop": {"stopReason": "end_turn"}},
            {
                "metadata": {
                    "usage": {"inputTokens": 4, "outputTokens": 90, "cacheReadInputTokenCount": 10},
                    "metrics": {},
                }
            },
        ],
        Usage(4, 90, 10),
    ),
    "titan": ([titan(), titan(5, 90, "FINISH")], Usage(5, 90)),
    "titan, counted": ([titan(), titan(reason="FINISH") | counted(5, 90)], Usage(5, 90)),
    "llama": ([llama(1, 20), llama(2), llama(3), llama(4), llama(5), llama(6, None, "stop")], Usage(20, 6)),
    "llama, counted": ([llama(1, 20), llama(2), llama(6, None, "stop") | counted(20, 6)], Usage(20, 6)),
    "llama, counted otherwise": ([llama(1, 20), llama(6, 20, "stop") | counted(21, 7)], Usage(21, 7)),
    "mistral": ([spoken("a"), spoken("b", "stop") | counted(5, 90)], Usage(5, 90)),
    "cohere": (
        [
            {"is_finished": False, "event_type": "text-generation", "text": "a"},
            {
                "is_finished": True,
                "event_type": "stream-end",
                "response": {"meta": {"billed_units": {"input_tokens": 5, "output_tokens": 6}}},
            },
        ],
        Usage(5, 6),
    ),
    "jamba": ([WORDS, WORDS, LAST_WORD | {"usage": used(5, 90)["usage"]}], Usage(5, 90)),
    "gpt-oss": ([WORDS, LAST_WORD, used(100, 90, cached_tokens=60)], Usage(40, 90, 60)),
    "gpt-oss, counted without caches": (
        [WORDS, LAST_WORD, used(100, 90, cached_tokens=60), counted(100, 90)],
        Usage(40, 90, 60),
    ),
    "gpt-oss with a tier": ([WORDS, LAST_WORD, used(5, 90) | {"service_tier": "flex"}], Usage(5, 90, tier="flex")),
    "of no known family": ([{"words": "a"}, {"words": "b"}, counted(5, 90)], Usage(5, 90)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_invoke_stream_usage_per_family(name):
    chunks, expected = STREAMS[name]
    stream = fed(InvocationStream(), map(chunk, chunks))
    assert stream.usage() == stream.partial_usage() == expected
    assert stream.estimate_output() == expected.output


@pytest.mark.parametrize("name", STREAMS)
def test_invoke_stream_split_anywhere_is_parsed(name):
    chunks, expected = STREAMS[name]
    headers = {":event-type": "chunk", ":content-type": "application/json", ":message-type": "event"}
    wire = b"".join(encode_frame(headers, chunk(each).payload) for each in chunks)
    for size in (1, 7, 100, len(wire)):
        stream, watcher = InvocationStream(), FrameWatcher(INVOCATION_FRAME_LIMITS)
        for at in range(0, len(wire), size):
            fed(stream, watcher.feed(wire[at : at + size]))
        assert stream.usage() == expected


@pytest.mark.parametrize("name", STREAMS)
def test_cut_stream_never_claims_more_input_than_whole(name):
    chunks, expected = STREAMS[name]
    for length in range(len(chunks)):
        stream = fed(InvocationStream(), map(chunk, chunks[:length]))
        final, partial = stream.usage(), stream.partial_usage()
        if final is not None:
            assert final == expected or length == len(chunks) - 1  # all that was missing is Bedrock's own count
        if partial is not None and "compacted" not in name:
            assert partial.input <= expected.input
        assert stream.estimate_output() >= 0


def test_tier_and_latency_come_from_headers():
    stream = fed(InvocationStream(HEADERS), map(chunk, STREAMS["claude"][0]))
    assert stream.usage() == Usage(4, 90, 10, 10, 100, "flex", "optimized")


# ---------------------------------------------------------------- InvokeModel, cut


def test_start_event_states_input_and_frames_are_counted():
    stream = fed(InvocationStream(HEADERS), map(chunk, [START, *[TEXT] * 9]))
    assert stream.usage() is None
    assert stream.partial_usage() == Usage(4, 0, 10, 10, 100, "flex", "optimized")
    assert stream.estimate_output() == 10 * TOKENS_PER_FRAME


def test_stream_cut_after_start_has_output_of_start():
    assert fed(InvocationStream(), [chunk(START)]).estimate_output() == 3


def test_family_with_running_counts_needs_no_estimate():
    stream = fed(InvocationStream(), map(chunk, [llama(1, 20), *map(llama, range(2, 200))]))
    assert stream.usage() is None
    assert stream.partial_usage() == Usage(20)
    assert stream.estimate_output() == 199


def test_estimate_is_never_below_last_count():
    stream = fed(InvocationStream(), map(chunk, [llama(5000, 20), {"generation": "a"}]))
    assert stream.estimate_output() == 5000


def test_large_chunk_counts_for_more():
    large = chunk({"text": "x" * 4000})
    stream = fed(InvocationStream(), [chunk(TEXT), large])
    assert stream.estimate_output() == pytest.approx(2 * TOKENS_PER_FRAME + 4000 / BYTES_PER_TOKEN, rel=0.15)


def test_stream_without_events_has_no_usage():
    stream = fed(InvocationStream(), [EventFrame("exception", "chunk", b'{"message":"no"}', 16), event("other", b"{}")])
    assert stream.usage() is stream.partial_usage() is None
    assert stream.estimate_output() == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b'"bytes"',
        b"null",
        b"{}",
        b'{"bytes":5}',
        b'{"bytes":"x"}',
        b'{"bytes":"\xff"}',
        b'{"bytes":"W10="}',
    ],
)
def test_malformed_chunks_are_ignored(payload):
    stream = fed(InvocationStream(), [event("chunk", payload)] * 3)
    assert stream.usage() is stream.partial_usage() is None
    assert stream.estimate_output() == 3 * TOKENS_PER_FRAME
    assert fed(stream, [chunk(STOP | counted(1, 2))]).usage() == Usage(1, 2)


def test_impossible_count_falls_back_to_next_source():
    stream = fed(InvocationStream(), map(chunk, [PLAIN_START, TEXT, DELTA, STOP | counted(-8, 90)]))
    assert stream.usage() == Usage(8, 90)


# ---------------------------------------------------------------- InvokeModel, with only the end of the payload kept


@pytest.mark.parametrize("text", ["x" * 3000, "ü€" * 900, '"' + METRICS + '":{"inputTokenCount":0}' * 60])
def test_truncated_chunk_with_metrics_suffices(text):
    document = {"response": {"text": text}, **counted(5, 90, cacheReadInputTokenCount=3)}
    whole = chunk(document)
    for kept in (*range(400), *range(400, len(whole.payload), 7), len(whole.payload)):
        found = fed(InvocationStream(), [chunk(PLAIN_START), chunk(document, kept)]).usage()
        if kept >= 300:
            assert found == Usage(5, 90, 3)
        else:
            assert found in (None, Usage(5, 90, 3))


def test_base64_with_escaped_slashes_is_decoded():
    whole = chunk({"text": "~~?" * 300, **counted(5, 90)}).payload
    assert whole.count(b"/") > 100
    kept = whole.replace(b"/", b"\\/")[-1000:]
    stream = fed(InvocationStream(), [chunk(PLAIN_START), EventFrame("event", "chunk", kept, 10**6)])
    assert stream.usage() == Usage(8, 90)


def test_truncated_chunk_without_metrics_is_ignored():
    stream = fed(InvocationStream(), [chunk(PLAIN_START), chunk({"text": "x" * 3000}, kept=1000)])
    assert stream.usage() is None
    assert stream.partial_usage() == Usage(8)


def test_frame_limits_are_bounded():
    assert all(
        kept <= 64 * 1024 for wanted in (CONVERSE_FRAME_LIMITS, INVOCATION_FRAME_LIMITS) for kept in wanted.values()
    )
