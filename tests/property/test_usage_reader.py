"""Whatever an answer holds, metering neither raises nor counts below zero; where a stream is cut up changes nothing."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.operations import Operation
from price_keeper.upstream.eventstream import EventFrame, FrameWatcher, encode_frame
from price_keeper.usage import model_families, stream_usage
from price_keeper.usage.model_families import INVOCATION_METRICS, MAX_TOKENS
from price_keeper.usage.stream_usage import (
    CONVERSE_FRAME_LIMITS,
    INVOCATION_FRAME_LIMITS,
    ChatStream,
    ConverseStream,
    InvocationStream,
)
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import EVENT_STREAM, build_reader

from tests.support.effort import tries

FAMILIES = ("anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai", "")

# Every member that some answer tells its usage in, so that what is made here is nearly an answer.
NAMES = re.findall(
    r"\S+",
    """
    usage inputTokens outputTokens cacheReadInputTokens cacheWriteInputTokens cacheReadInputTokenCount cacheDetails ttl
    serviceTier type performanceConfig latency input_tokens output_tokens cache_creation_input_tokens iterations
    cache_read_input_tokens cache_creation ephemeral_5m_input_tokens ephemeral_1h_input_tokens service_tier message
    inputTextTokenCount results tokenCount totalOutputTextTokenCount completionReason prompt_token_count stop_reason
    generation_token_count meta billed_units tokens prompt completions data prompt_tokens completion_tokens choices
    prompt_tokens_details cached_tokens cache_write_tokens inputTokenCount outputTokenCount finish_reason response
    metadata topicPolicyUnits textUnits contentFilter bytes p
    """,
)
VALUES = ("5m", "1h", "compaction", "message_delta", "message_start", "standard", "flex", "stop")

scalars = st.one_of(
    st.integers(0, 10**6),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(VALUES),
)
members = st.sampled_from((*NAMES, INVOCATION_METRICS))
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(members, inner, max_size=6)),
    max_leaves=25,
)
objects = st.dictionaries(members, documents, max_size=8)
header_values = st.one_of(st.integers(0, 10**6).map(lambda number: b"%d" % number), st.binary(max_size=20))
headers = st.dictionaries(
    st.sampled_from(
        (
            b"x-amzn-bedrock-input-token-count",
            b"x-amzn-bedrock-output-token-count",
            b"x-amzn-bedrock-cache-read-input-token-count",
            b"x-amzn-bedrock-cache-write-input-token-count",
            b"x-amzn-bedrock-service-tier",
            b"x-amzn-bedrock-performanceconfig-latency",
        )
    ),
    header_values,
)
counts = st.integers(0, MAX_TOKENS // 10)


def is_sound(usage: Usage | None) -> bool:
    if usage is None:
        return True
    tokens = (usage.input, usage.output, usage.cache_read, usage.cache_write_5m, usage.cache_write_1h)
    numbers = (*tokens, *usage.units.values())
    return all(type(number) is int and number >= 0 for number in numbers) and isinstance(
        usage.tier + usage.latency, str
    )


@st.composite
def cut_up(draw: st.DrawFn, wire: bytes) -> list[bytes]:
    if draw(st.booleans()):
        size = draw(st.sampled_from([1, 2, 3, 7, 50, 1000]))
        return [wire[at : at + size] for at in range(0, len(wire), size)]
    cuts = sorted(draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    return [wire[low:high] for low, high in pairwise([0, *cuts, len(wire)])]


# ---------------------------------------------------------------- bodies


@settings(max_examples=tries(200))
@given(st.one_of(objects, documents), headers, st.sampled_from(FAMILIES))
def test_no_response_breaks_the_meter(document, head, family):
    for read in (model_families.read_converse, model_families.read_chat, model_families.read_guardrail):
        assert is_sound(read(document))
    assert is_sound(model_families.read_invocation(document, head))


@settings(max_examples=tries(100))
@given(counts, counts, counts, counts, counts)
def test_usage_in_every_dialect_is_read(read, said, cached, for_5m, for_1h):
    """And in each the sum over all kinds of input is what the caller sent."""
    written = for_5m + for_1h
    usage = Usage(read, said, cached, for_5m, for_1h)
    together = Usage(read, said, cached, written)
    details = [{"ttl": "5m", "inputTokens": for_5m}, {"ttl": "1h", "inputTokens": for_1h}]
    stated = {
        "inputTokens": read,
        "outputTokens": said,
        "cacheReadInputTokens": cached,
        "cacheWriteInputTokens": written,
    }
    assert model_families.read_converse({"usage": stated | {"cacheDetails": details}}) == usage
    assert model_families.read_invocation({"usage": stated}, {}) == together
    creation = {"ephemeral_5m_input_tokens": for_5m, "ephemeral_1h_input_tokens": for_1h}
    stated = {
        "input_tokens": read,
        "output_tokens": said,
        "cache_read_input_tokens": cached,
        "cache_creation": creation,
    }
    assert model_families.read_invocation({"usage": stated}, {}) == usage
    whole = {"cached_tokens": cached, "cache_write_tokens": written}
    stated = {"prompt_tokens": read + cached + written, "completion_tokens": said, "prompt_tokens_details": whole}
    assert model_families.read_chat({"usage": stated}) == together


@settings(max_examples=tries(100))
@given(st.one_of(st.none(), st.integers(max_value=-1), st.integers(min_value=MAX_TOKENS + 1), st.floats(), st.text()))
def test_only_valid_counts_are_counted(value):
    assert model_families.read_converse({"usage": {"inputTokens": value, "outputTokens": 1}}) is None
    assert model_families.read_chat({"usage": {"prompt_tokens": 1, "completion_tokens": value}}) is None


# ---------------------------------------------------------------- streams of frames


def chunk(document, keep=None):
    inner = document if isinstance(document, bytes) else json.dumps(document).encode()
    payload = b'{"bytes":"%s","p":"abcdefgh"}' % b64encode(inner)
    return payload if keep is None else payload[len(payload) - min(keep, len(payload)) :]


payloads = st.one_of(
    st.binary(max_size=60),
    documents.map(lambda document: json.dumps(document).encode()),
    documents.map(chunk),
    objects.map(chunk),
    objects.map(lambda inner: chunk({INVOCATION_METRICS: inner})),
    st.binary(max_size=60).map(chunk),
)
frames = st.builds(
    lambda kind, name, payload, lost: EventFrame(kind, name, payload, len(payload) + lost),
    st.sampled_from(["event", "event", "event", "exception"]),
    st.sampled_from(["chunk", "metadata", "contentBlockDelta"]),
    payloads,
    st.sampled_from([0, 0, 0, 1, 10**6]),
)


@settings(max_examples=tries(150))
@given(st.lists(frames, max_size=9), headers, st.sampled_from(FAMILIES))
def test_no_frame_breaks_the_meter(given_frames, head, family):
    for stream in (ConverseStream(family), InvocationStream(head)):
        for frame in given_frames:
            stream.add_frame(frame)
            assert is_sound(stream.usage())
            assert is_sound(stream.partial_usage())
            assert stream.estimate_output() >= 0


@settings(max_examples=tries(60))
@given(st.lists(objects, min_size=1, max_size=8), st.data())
def test_frames_split_anywhere_give_same_usage(given_chunks, data):
    def wire(name, payload):
        return encode_frame({":event-type": name, ":message-type": "event"}, payload)

    invoked = b"".join(wire("chunk", chunk(each)) for each in given_chunks)
    conversed = b"".join(
        wire("contentBlockDelta", b"{}") + wire("metadata", json.dumps(e).encode()) for e in given_chunks
    )
    for make, wanted, sent in (
        (InvocationStream, INVOCATION_FRAME_LIMITS, invoked),
        (ConverseStream, CONVERSE_FRAME_LIMITS, conversed),
    ):
        found = set()
        for pieces in ([sent], data.draw(cut_up(sent))):
            stream, watcher = make(), FrameWatcher(wanted)
            for piece in pieces:
                for frame in watcher.feed(piece):
                    stream.add_frame(frame)
            found.add((repr(stream.usage()), repr(stream.partial_usage()), stream.estimate_output()))
        assert len(found) == 1


converse_events = st.sampled_from(("messageStart", "contentBlockStart", "contentBlockDelta", "messageStop", "metadata"))
payload_sizes = st.one_of(st.integers(0, 60), st.sampled_from((511, 512, 513, 515, 516, 2000)))


@settings(max_examples=tries(100))
@given(st.lists(st.tuples(converse_events, payload_sizes), max_size=20), objects, st.data())
def test_counted_frames_estimate_as_much_as_added_ones(events, last, data):
    """The reader has ordinary frames counted instead of adding each of them to the stream."""
    names_and_payloads = [(name, b"x" * size) for name, size in events]
    names_and_payloads.append(("metadata", json.dumps(last).encode()))
    sent = b"".join(
        encode_frame({":event-type": name, ":message-type": "event"}, payload) for name, payload in names_and_payloads
    )
    stream = ConverseStream()
    for frame in FrameWatcher(CONVERSE_FRAME_LIMITS).feed(sent):
        stream.add_frame(frame)
    for pieces in ([sent], data.draw(cut_up(sent))):
        reader = build_reader(Operation.CONVERSE_STREAM, "", EVENT_STREAM, {})
        for piece in pieces:
            reader.feed(piece)
        assert reader.usage() == stream.usage()
        assert reader.partial_usage() == stream.partial_usage()
        assert (reader.estimate_output(), reader.has_output()) == (stream.estimate_output(), stream.has_output())


@settings(max_examples=tries(50))
@given(counts, counts, st.text(max_size=3000), st.integers(150, 4000))
def test_invocation_metrics_are_found_at_end_of_any_chunk(read, said, text, keep):
    document = {"text": text, INVOCATION_METRICS: {"inputTokenCount": read, "outputTokenCount": said}}
    whole = chunk(document)
    stream = InvocationStream()
    stream.add_frame(EventFrame("event", "chunk", chunk(document, keep + 100), len(whole)))
    assert stream.usage() == Usage(read, said)


# ---------------------------------------------------------------- server-sent events

lines = st.one_of(
    objects.map(lambda document: b"data: " + json.dumps(document).encode()),
    st.builds(
        lambda usage, more: b"data:" + json.dumps({"choices": [], "usage": usage} | more).encode(),
        st.fixed_dictionaries({"prompt_tokens": counts, "completion_tokens": counts}),
        st.sampled_from([{}, {"service_tier": "flex"}, {"choices": [{"delta": {"content": "a"}}]}]),
    ),
    st.sampled_from(
        [b"data: [DONE]", b": comment", b"event: chunk", b"data", b"data:", b"id: 1", b'data: {"usage":{', b""]
    ),
    st.binary(max_size=30),
)
ends = st.sampled_from([b"\n", b"\n\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\n\r\n"])
wires = st.lists(st.tuples(lines, ends), max_size=10).map(lambda parts: b"".join(line + end for line, end in parts))


def fed(pieces):
    stream = ChatStream()
    for piece in pieces:
        stream.feed(piece)
    return stream


@settings(max_examples=tries(150))
@given(wires, st.data())
def test_events_split_anywhere_give_same_usage(wire, data):
    whole, cut = fed([wire]), fed(data.draw(cut_up(wire)))
    assert is_sound(whole.usage())
    assert is_sound(whole.partial_usage())
    assert (cut.usage(), cut.partial_usage(), cut.estimate_output()) == (
        whole.usage(),
        whole.partial_usage(),
        whole.estimate_output(),
    )


@settings(max_examples=tries(100))
@given(wires, st.data())
def test_oversized_events_are_buffered_up_to_limit(wire, data):
    """With a limit so low that most events are beyond it."""
    pieces = data.draw(cut_up(wire))
    limit = stream_usage.MAX_EVENT_BYTES
    stream_usage.MAX_EVENT_BYTES = 40
    try:
        stream = ChatStream()
        for piece in pieces:
            stream.feed(piece)
            assert len(stream._splitter._buffer) <= 41
        assert is_sound(stream.usage())
    finally:
        stream_usage.MAX_EVENT_BYTES = limit


@settings(max_examples=tries(100))
@given(st.one_of(st.binary(max_size=80), objects.map(lambda each: b"data: " + json.dumps(each).encode() + b"\n\n")))
def test_usage_only_event_is_distinguished(event):
    is_alone = stream_usage.is_usage_only_event(event)
    assert type(is_alone) is bool
    if is_alone:
        document = json.loads(event.removeprefix(b"data:"))
        assert document["choices"] == []
        assert isinstance(document["usage"], dict)
