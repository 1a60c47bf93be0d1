"""What server-sent events of chat completions say they used, however they are written and wherever they are cut."""

from __future__ import annotations

import json

import pytest
from price_keeper.usage.stream_usage import (
    BYTES_PER_TOKEN,
    MAX_EVENT_BYTES,
    ORDINARY_FRAME_BYTES,
    TOKENS_PER_FRAME,
    ChatStream,
    is_usage_only_event,
)
from price_keeper.usage.token_usage import Usage

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "openai.gpt-oss-120b-1:0"}
COUNTED = {
    "prompt_tokens": 100,
    "completion_tokens": 9,
    "total_tokens": 109,
    "prompt_tokens_details": {"cached_tokens": 60},
}
EXPECTED = Usage(40, 9, 60)


def sent(document, end=b"\n", begin=b"data: "):
    return begin + json.dumps(document).encode() + end + end


def spoken(text, reason=None, **more):
    return {**HEAD, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}], **more}


def telling(usage=COUNTED, **more):
    return {**HEAD, "choices": [], "usage": usage, **more}


DONE = b"data: [DONE]\n\n"
TYPICAL = b"".join((sent(spoken("hel", usage=None)), sent(spoken("lo", "stop", usage=None)), sent(telling()), DONE))


def fed(*pieces):
    stream = ChatStream()
    for piece in pieces:
        stream.feed(piece)
    return stream


def test_last_event_states_usage():
    stream = fed(TYPICAL)
    assert stream.usage() == stream.partial_usage() == EXPECTED
    assert stream.estimate_output() == 9


@pytest.mark.parametrize("wire", [TYPICAL, TYPICAL.replace(b"\n", b"\r\n")], ids=["LF", "CRLF"])
def test_events_split_anywhere_are_parsed(wire):
    for at in range(len(wire)):
        assert fed(wire[:at], wire[at:]).usage() == EXPECTED
    for size in (1, 2, 3, 5, 50):
        assert fed(*(wire[at : at + size] for at in range(0, len(wire), size))).usage() == EXPECTED


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize(
    "begin", [b"data: ", b"data:", b"event: chunk\ndata: ", b": a comment\ndata:", b"id: 1\ndata: "]
)
def test_every_line_ending_and_field_spacing_is_parsed(end, begin):
    begin = begin.replace(b"\n", end)
    wire = sent(spoken("hello"), end, begin) + sent(telling(), end, begin)
    assert fed(wire).usage() == EXPECTED


def test_data_in_several_lines_is_joined():
    lines = json.dumps(telling(), indent=1).split("\n")
    assert fed("".join(f"data: {line}\n" for line in lines).encode() + b"\n").usage() == EXPECTED


def test_comments_between_events_are_skipped():
    wire = b": keep alive\n\n" + sent(spoken("hello")) + b':"usage":{}\n\n' + sent(telling()) + b": bye\n\n"
    assert fed(wire).usage() == EXPECTED


def test_last_event_without_blank_line_is_parsed():
    for end in (b"", b"\n", b"\r\n"):
        assert fed(sent(spoken("hello")), sent(telling()).rstrip() + end).usage() == EXPECTED


def test_usage_in_last_content_chunk_is_used():
    assert fed(sent(spoken("hello")), sent(spoken("", "stop", usage=COUNTED)), DONE).usage() == EXPECTED


def test_growing_usage_is_final_only_at_end():
    stream = fed(sent(spoken("hel", usage=COUNTED | {"completion_tokens": 700})))
    assert stream.usage() is None
    assert stream.partial_usage() == Usage(40, 700, 60)
    assert stream.estimate_output() == 700
    stream.feed(sent(spoken("data: [DONE]")))
    assert stream.usage() is None
    stream.feed(sent(spoken("lo", usage=COUNTED | {"completion_tokens": 701})))
    assert stream.usage() is None
    stream.feed(DONE)
    assert stream.usage() == Usage(40, 701, 60)
    assert stream.estimate_output() == 701


def test_cut_stream_is_estimated_from_its_events():
    stream = fed(sent(spoken("hello")) * 10)
    assert stream.usage() is stream.partial_usage() is None
    assert stream.estimate_output() == 10 * TOKENS_PER_FRAME
    stream.feed(sent(spoken("x" * 40_000)))
    assert stream.estimate_output() == pytest.approx((40_000 - 9 * ORDINARY_FRAME_BYTES) / BYTES_PER_TOKEN, rel=0.1)
    assert ChatStream().estimate_output() == 0


def test_stream_without_usage_is_estimated():
    stream = fed(sent(spoken("hello")) * 10 + DONE)
    assert stream.usage() is None
    assert stream.estimate_output() == 11 * TOKENS_PER_FRAME


@pytest.mark.parametrize(
    ("first", "last", "tier"),
    [
        ({"service_tier": "flex"}, {"service_tier": "flex"}, "flex"),
        ({"service_tier": "priority"}, {}, "priority"),
        ({"service_tier": "auto"}, {"service_tier": "default"}, "default"),
        ({"service_tier": None}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_service_tier_in_any_event_is_read(first, last, tier):
    wire = b": hello\n\n" + sent(spoken("hello", **first)) + sent(telling(**last))
    assert fed(wire).usage().tier == fed(*(bytes([byte]) for byte in wire)).usage().tier == tier


@pytest.mark.parametrize(
    "text",
    [
        '"usage":{"prompt_tokens":1,"completion_tokens":1}',
        "data: [DONE]",
        '\n\ndata: {"usage":{}}\n\n',
        '"service_tier":"x"',
    ],
)
def test_model_text_resembling_usage_is_ignored(text):
    stream = fed(sent(spoken(text)))
    assert stream.usage() is stream.partial_usage() is None
    stream.feed(sent(telling()))
    assert stream.usage() == EXPECTED


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"usage":{\n\n',
        b'data: [{"usage":{}}]\n\n',
        b'data: "usage":{}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":"5","completion_tokens":1}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":-5,"completion_tokens":1}}\n\n',
        b"\xff\xfe\n\n",
        b"\n" * 9,
        b"\r\n" * 9,
        b"data\n\ndata:\n\n",
    ],
)
def test_malformed_events_are_ignored(event):
    stream = fed(event)
    assert stream.usage() is stream.partial_usage() is None
    assert fed(event, TYPICAL).usage() == fed(TYPICAL, event).usage() == EXPECTED


# ---------------------------------------------------------------- errors

ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": "ServiceUnavailable"}}


@pytest.mark.parametrize(
    "wire",
    [
        sent(ERROR),
        sent(ERROR, b"\r\n"),
        sent(ERROR).rstrip(),
        sent(ERROR) + DONE,
        b": keep alive\n\n" + sent(ERROR),
        b"event: error\n" + sent(ERROR) + sent(spoken("x" * 9999)),
        sent({"error": "no"}),
        sent({"error": {"message": "x" * 9999}}),
    ],
)
def test_error_before_any_output_costs_nothing(wire):
    for size in (1, 7, len(wire)):
        stream = fed(*(wire[at : at + size] for at in range(0, len(wire), size)))
        assert (stream.has_failed, stream.usage(), stream.estimate_output()) == (True, None, 0)


def test_output_before_error_counts_and_nothing_after_it():
    for end in (b"", DONE, sent(spoken("late"))):
        stream = fed(sent(spoken("hello")) * 3 + sent(ERROR), end)
        assert (stream.has_failed, stream.usage(), stream.estimate_output()) == (True, None, 3 * TOKENS_PER_FRAME)
    assert fed(sent(spoken("hello")), sent(ERROR)).estimate_output() == TOKENS_PER_FRAME


@pytest.mark.parametrize("more", [{"error": None}, {"error": {}}, {"x": {"error": {"message": "no"}}}])
def test_event_that_only_mentions_error_is_no_failure(more):
    stream = fed(sent(spoken('{"error": {"message": "no"}}', **more)))
    assert (stream.has_failed, stream.estimate_output()) == (False, TOKENS_PER_FRAME)
    stream.feed(sent(telling()))
    assert stream.usage() == EXPECTED


# ---------------------------------------------------------------- memory


def held(stream):
    return len(stream._splitter._buffer)


def test_oversized_event_is_skipped_without_buffering():
    large = sent(spoken("x" * 2 * MAX_EVENT_BYTES, usage=COUNTED))
    for size in (1000, MAX_EVENT_BYTES - 1, len(large)):
        stream = ChatStream()
        for at in range(0, len(large), size):
            stream.feed(large[at : at + size])
            assert held(stream) <= MAX_EVENT_BYTES + 1
        assert stream.partial_usage() is None
        assert held(stream) == 0
        assert fed(large, TYPICAL).usage() == EXPECTED
        for byte in TYPICAL:
            stream.feed(bytes([byte]))
        assert stream.usage() == EXPECTED


def test_end_of_oversized_event_is_found_across_pieces():
    large = b"data: " + b"x" * (2 * MAX_EVENT_BYTES) + b"\n"
    assert fed(large, b"\n" + sent(telling())).usage() == EXPECTED
    assert fed(large + b"\n" + sent(telling())).usage() == EXPECTED
    assert fed(large, sent(telling())).usage() is None  # one newline ends a line, no event


def test_event_of_maximum_size_is_read():
    event = sent(telling(filler=""))
    event = sent(telling(filler="x" * (MAX_EVENT_BYTES - len(event) + 2)))
    assert len(event) == MAX_EVENT_BYTES + 2
    assert fed(event).usage() == fed(event[:-1], event[-1:]).usage() == EXPECTED
    longer = event.replace(b"xx", b"xxx", 1)
    assert fed(longer).usage() is fed(longer[:-1], longer[-1:]).usage() is None


# ---------------------------------------------------------------- events that a caller did not ask for


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (sent(telling()), True),
        (sent(telling(), end=b"\r\n", begin=b"data:"), True),
        (b"event: x\n" + sent(telling()), True),
        (sent(telling()).rstrip(), True),
        (sent({"choices": [], "usage": {"any": "thing"}}), True),
        (sent(telling(usage=None)), False),
        (sent(telling(error={"message": "no"})), False),
        (sent(spoken("hello", usage=COUNTED)), False),
        (sent(spoken("hello", usage=None)), False),
        (sent({"usage": COUNTED}), False),
        (sent([telling()]), False),
        (sent({"choices": {}, "usage": COUNTED}), False),
        (sent(spoken('"usage":{}')), False),
        (sent(telling()) + sent(spoken("hello")), False),
        (b': {"choices":[],"usage":{}}\n\n', False),
        (DONE, False),
        (b"", False),
        (b"data: {\n\n", False),
        (b'data: {"choices":[],"usage":{}\n\n', False),
    ],
)
def test_usage_only_event_is_recognised(event, expected):
    assert is_usage_only_event(event) is expected
