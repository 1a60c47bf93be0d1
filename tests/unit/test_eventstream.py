"""Event-stream frames watched and made, against botocore's own parser."""

from __future__ import annotations

import struct
import time
from zlib import crc32

import pytest
from botocore.eventstream import EventStreamBuffer
from price_keeper.upstream import eventstream
from price_keeper.upstream.eventstream import (
    MAX_EXCEPTION_PAYLOAD,
    MAX_HEADERS,
    MAX_PAYLOAD,
    BrokenStream,
    EventFrame,
    FrameInterests,
    FrameWatcher,
    encode_frame,
)

JSON = "application/json"
USAGE = b'{"metrics":{"latencyMs":812},"usage":{"inputTokens":10,"outputTokens":20,"totalTokens":30}}'


def event(name: str, payload: bytes) -> bytes:
    return encode_frame({":event-type": name, ":content-type": JSON, ":message-type": "event"}, payload)


def exception(name: str, payload: bytes) -> bytes:
    return encode_frame({":exception-type": name, ":content-type": JSON, ":message-type": "exception"}, payload)


def framed(
    block: bytes,
    payload: bytes = b"",
    *,
    total: int | None = None,
    headers_size: int | None = None,
    lengths_crc: int | None = None,
) -> bytes:
    """A frame with right CRCs, unless told otherwise, whatever its headers and lengths say."""
    total = 16 + len(block) + len(payload) if total is None else total
    lengths = struct.pack("!II", total, len(block) if headers_size is None else headers_size)
    lengths_crc = crc32(lengths) if lengths_crc is None else lengths_crc
    frame = lengths + struct.pack("!I", lengths_crc) + block + payload
    return frame + struct.pack("!I", crc32(frame))


def header(name: bytes, kind: int, value: bytes) -> bytes:
    return bytes([len(name)]) + name + bytes([kind]) + value


def text(name: bytes, value: bytes) -> bytes:
    return header(name, 7, struct.pack("!H", len(value)) + value)


DELTA = event("contentBlockDelta", b'{"delta":{"text":"Hello"}}')
LAST = event("metadata", USAGE)
CONVERSATION = [
    event("messageStart", b'{"role":"assistant"}'),
    *[DELTA] * 5,
    event("messageStop", b'{"stopReason":"end_turn"}'),
    LAST,
]


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def watched(parts: list[bytes], wanted: dict[str, int] | None = None) -> tuple[FrameWatcher, list[EventFrame]]:
    watcher = FrameWatcher({"metadata": 4096} if wanted is None else wanted)
    return watcher, [frame for part in parts for frame in watcher.feed(part)]


# ---------------------------------------------------------------- what is reported


@pytest.mark.parametrize("size", [1, 2, 7, 11, 12, 13, 64, 10_000])
def test_only_requested_events_are_reported(size):
    watcher, found = watched(pieces(b"".join(CONVERSATION), size))
    assert found == [EventFrame("event", "metadata", USAGE, len(USAGE))]
    assert watcher.frames == len(CONVERSATION)
    assert watcher.boundary == sum(map(len, CONVERSATION))
    assert watcher.close() is None


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("keep", [0, 1, 10, len(USAGE), 10_000])
def test_tail_of_payload_is_kept(keep, size):
    _, found = watched(pieces(b"".join(CONVERSATION), size), {"metadata": keep})
    assert found == [EventFrame("event", "metadata", USAGE[max(0, len(USAGE) - keep) :], len(USAGE))]


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_exceptions_and_errors_are_always_reported(size):
    stream = (
        DELTA
        + exception("throttlingException", b'{"message":"slow down"}')
        + encode_frame({":message-type": "error", ":error-code": "InternalError", ":error-message": "x"}, b"")
    )
    _, found = watched(pieces(stream, size))
    assert found == [
        EventFrame("exception", "throttlingException", b'{"message":"slow down"}', 23),
        EventFrame("error", "InternalError", b"", 0),
    ]


@pytest.mark.parametrize("size", [1000, 10_000_000])
def test_huge_exception_is_truncated(size):
    watcher, found = watched(pieces(exception("x", b"y" * 200_000), size))
    assert found == [EventFrame("exception", "x", b"y" * MAX_EXCEPTION_PAYLOAD, 200_000)]
    assert watcher.close() is None


def test_exception_is_not_mistaken_for_event_of_same_name():
    headers = {":message-type": "exception", ":event-type": "metadata", ":exception-type": "modelStreamErrorException"}
    _, found = watched([encode_frame(headers, USAGE)])
    assert found == [EventFrame("exception", "modelStreamErrorException", USAGE, len(USAGE))]


def test_unknown_message_kinds_pass():
    watcher, found = watched(
        [
            encode_frame({":message-type": "novelty", ":event-type": "metadata"}, b"x"),
            encode_frame({}, b"x"),
            framed(header(b":event-type", 4, b"meta")),
        ]
    )
    assert (watcher.frames, found, watcher.failure) == (3, [], None)


def test_frame_without_message_type_is_an_event():
    _, found = watched([encode_frame({":event-type": "metadata"}, b"x")])
    assert found == [EventFrame("event", "metadata", b"x", 1)]


def test_every_header_type_is_skipped():
    block = b"".join(
        [
            header(b"true", 0, b""),
            header(b"false", 1, b""),
            header(b"byte", 2, b"\x80"),
            header(b"short", 3, b"\x07\x07"),
            header(b"int", 4, b"\x07" * 4),
            header(b"long", 5, b"\x07" * 8),
            header(b"bytes", 6, b"\x00\x05\x00\x01\x02\x03\xff"),
            text(b"text", "é".encode()),
            header(b"time", 8, b"\x07" * 8),
            header(b"uuid", 9, b"\x07" * 16),
            text(b":event-type", b"metadata"),
        ]
    )
    for size in (1, 1000):
        watcher, found = watched(pieces(framed(block, b"x"), size))
        assert found == [EventFrame("event", "metadata", b"x", 1)]
        assert watcher.close() is None


def test_stream_with_many_event_kinds_keeps_cache_bounded():
    """More kinds of blocks than are remembered, short ones and long ones."""
    frames = [
        encode_frame({":event-type": "metadata", ":message-type": "event", "n": f"{n}" * repeat}, b"%d" % n)
        for n in range(300)
        for repeat in (1, 600)
    ]
    for parts in (frames, [b"".join(frames)]):
        watcher, found = watched(parts)
        assert [frame.payload for frame in found] == [b"%d" % n for n in range(300) for _ in range(2)]
        assert len(watcher._interests) <= 64


def test_stream_with_many_frame_lengths_keeps_cache_bounded():
    frames = [event("metadata", b"x" * size) for size in range(3000)]
    _, found = watched([b"".join(frames)])
    assert [frame.payload_size for frame in found] == [*range(3000)]
    assert 0 < len(eventstream._preludes) <= 1024


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_small_events_of_counted_type_are_only_counted(size):
    interests = FrameInterests({"metadata": 4096, "contentBlockDelta": 0}, {"contentBlockDelta": 10})
    small, large = (event("contentBlockDelta", bytes(length)) for length in (9, 10))
    other = exception("contentBlockDelta", b"{}")
    for _ in range(2):  # the second stream uses what is cached of the first
        watcher = FrameWatcher(interests)
        stream = b"".join([small, small, large, other, small, LAST])
        found = [frame for part in pieces(stream, size) for frame in watcher.feed(part)]
        assert found == [
            EventFrame("event", "contentBlockDelta", b"", 10),
            EventFrame("exception", "contentBlockDelta", b"{}", 2),
            EventFrame("event", "metadata", USAGE, len(USAGE)),
        ]
        assert (watcher.counted, watcher.frames, watcher.close()) == (3, 6, None)


def test_known_lengths_with_wrong_crc_fail():
    """The lengths of an earlier frame are cached under their CRC too."""
    for at in range(12):
        damaged = bytearray(DELTA)
        damaged[at] ^= 1
        watcher, _ = watched([DELTA + bytes(damaged)])
        assert watcher.frames == 1
        assert LENGTHS_ONLY_CRC in str(watcher.failure)


# ---------------------------------------------------------------- where in the stream it stands


def test_unfinished_is_true_between_frame_boundaries():
    watcher = FrameWatcher({})
    for part, unfinished in [
        (b"", 0),
        (DELTA, 0),
        (DELTA[:5], 5),
        (b"", 5),
        (DELTA[5:30], 30),
        (DELTA[30:], 0),
        (DELTA + DELTA[:-1], len(DELTA) - 1),
        (DELTA[-1:] + DELTA[:1], 1),
    ]:
        watcher.feed(part)
        assert watcher.unfinished == unfinished
    assert watcher.frames == 4
    assert watcher.boundary == 4 * len(DELTA)


@pytest.mark.parametrize("cut", range(1, len(DELTA)))
def test_truncated_stream_fails_at_close(cut):
    for parts in ([DELTA + DELTA[:cut]], [DELTA, DELTA[:cut]], pieces(DELTA + DELTA[:cut], 1)):
        watcher, _ = watched(parts)
        assert watcher.failure is None
        failure = watcher.close()
        assert isinstance(failure, BrokenStream)
        assert failure is watcher.failure
        assert failure.offset == len(DELTA)
        assert "ends too early" in str(failure)


def test_empty_stream_is_complete():
    watcher, found = watched([b"", b""])
    assert (watcher.close(), found) == (None, [])


# ---------------------------------------------------------------- faults

LENGTHS_ONLY_CRC = "the CRC of the lengths is wrong"


@pytest.mark.parametrize("size", [1, 13, 100_000_000])
@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (b"{" * 40, LENGTHS_ONLY_CRC),
        (b'{"message":"not an event stream at all"}', LENGTHS_ONLY_CRC),
        (bytes(16), LENGTHS_ONLY_CRC),
        (framed(b"", b"x" * 20, lengths_crc=0), LENGTHS_ONLY_CRC),
        (DELTA[:4] + bytes(4) + DELTA[8:], LENGTHS_ONLY_CRC),
        (LAST[:-1] + bytes([LAST[-1] ^ 1]), "the CRC of the frame is wrong"),
        (LAST[:-20] + bytes([LAST[-20] ^ 1]) + LAST[-19:], "the CRC of the frame is wrong"),
        (exception("x", b"y")[:-1] + b"?", "the CRC of the frame is wrong"),
        (framed(b"", total=0), "not possible"),
        (framed(b"", total=15), "not possible"),
        (framed(b"", total=16, headers_size=1), "not possible"),
        (framed(b"", total=2**32 - 1, headers_size=2**32 - 1), "not possible"),
        (framed(b"", total=16 + MAX_PAYLOAD + 1), "not possible"),
        (framed(b"", total=16 + MAX_HEADERS + 1, headers_size=MAX_HEADERS + 1), "not possible"),
        (framed(b"\x00"), "headers cannot be read"),
        (framed(b"\x05ab"), "headers cannot be read"),
        (framed(b"\x02ab"), "headers cannot be read"),
        (framed(header(b"ab", 10, b"")), "headers cannot be read"),
        (framed(header(b"ab", 7, b"")), "headers cannot be read"),
        (framed(header(b"ab", 7, b"\x00")), "headers cannot be read"),
        (framed(header(b"ab", 7, b"\x00\x03xy")), "headers cannot be read"),
        (framed(header(b"ab", 6, b"\xff\xffxy")), "headers cannot be read"),
        (framed(header(b"ab", 9, b"x" * 15)), "headers cannot be read"),
        (framed(text(b"ab", b"\xff")), "headers cannot be read"),
        (framed(text(b"\xff", b"ab")), "headers cannot be read"),
        (framed(text(b"ab", b"x") + text(b"ab", b"y")), "the header 'ab' comes twice"),
    ],
)
def test_malformed_frame_fails_once_and_ends_parsing(broken, fault, size):
    before = event("metadata", b"first")
    watcher, found = watched(pieces(before + broken + event("metadata", b"last"), size))
    assert found == [EventFrame("event", "metadata", b"first", 5)]
    assert isinstance(watcher.failure, BrokenStream)
    assert isinstance(watcher.failure, ValueError)
    assert fault in str(watcher.failure)
    assert watcher.failure.offset == watcher.boundary == len(before)
    failure = watcher.failure
    assert watcher.feed(event("metadata", b"more")) == []
    assert (watcher.failure, watcher.close()) == (failure, failure)
    assert (watcher.frames, watcher.unfinished, watcher.retained) == (1, 0, 0)


@pytest.mark.parametrize("size", [1, 13, 100_000_000])
@pytest.mark.parametrize("at", [20, -10, -1])
def test_damage_to_frame_without_wanted_payload_passes(at, size):
    """Its lengths are right, so what follows is read; the client finds the damage."""
    damaged = bytearray(DELTA)
    damaged[at] ^= 1
    watcher, found = watched(pieces(bytes(damaged) + LAST, size))
    assert found == [EventFrame("event", "metadata", USAGE, len(USAGE))]
    assert (watcher.frames, watcher.close()) == (2, None)


def test_frame_of_maximum_size_is_read():
    largest = framed(text(b"a", b"x" * 65_531) + text(b"b", b"y" * 65_531), bytes(MAX_PAYLOAD))
    assert len(largest) == 16 + MAX_HEADERS + MAX_PAYLOAD
    for parts in ([largest], pieces(largest, 1 << 20)):
        watcher, _ = watched(parts)
        assert (watcher.frames, watcher.close()) == (1, None)


@pytest.mark.parametrize(
    "too_large", [framed(text(b"a", b"x" * 65_535) + text(b"b", b"y" * 65_528)), framed(b"", bytes(MAX_PAYLOAD + 1))]
)
def test_frame_above_maximum_size_fails(too_large):
    for parts in ([too_large], pieces(too_large, 1 << 20), pieces(too_large, 100)):
        watcher, _ = watched(parts)
        assert watcher.frames == 0
        assert "not possible" in str(watcher.failure)


# ---------------------------------------------------------------- bounds


def most_retained(parts: list[bytes], wanted: dict[str, int]) -> int:
    watcher = FrameWatcher(wanted)
    most = 0
    for part in parts:
        watcher.feed(part)
        most = max(most, watcher.retained)
    assert watcher.close() is None
    return most


def test_unwanted_frame_is_not_buffered():
    assert most_retained(pieces(event("contentBlockDelta", bytes(10_000_000)), 1024), {"metadata": 4096}) < 120


def test_partly_wanted_frame_is_buffered_in_part():
    assert most_retained(pieces(event("chunk", bytes(10_000_000)), 1024), {"chunk": 4096}) <= 2 * 4096 + 4


@pytest.mark.parametrize("keep", [0, 5000, MAX_PAYLOAD])
def test_large_frame_in_small_pieces_takes_linear_time(keep):
    """Were each piece joined to all before it, this would copy some 300 GB."""
    parts = pieces(event("chunk", bytes(MAX_PAYLOAD)), 1024)
    begun = time.process_time()
    _, found = watched(parts, {"chunk": keep})
    assert time.process_time() - begun < 5
    assert len(found[0].payload) == keep


# ---------------------------------------------------------------- frames of our own


def test_published_frames_are_encoded_exactly():
    assert encode_frame({}, b"").hex() == "000000100000000005c248eb7d98c8ff"
    assert encode_frame({}, b"{'foo':'bar'}").hex() == "0000001d00000000fd528c5a7b27666f6f273a27626172277dc3653936"
    assert encode_frame({"content-type": JSON}, b"{'foo':'bar'}").hex() == (
        "0000003d0000002007fd83960c636f6e74656e742d747970650700106170706c69636174696f6e2f6a736f6e"
        "7b27666f6f273a27626172277d8d9c08b1"
    )


def test_encoded_frames_are_read_by_botocore():
    buffer = EventStreamBuffer()
    buffer.add_data(exception("validationException", '{"message":"trop cher, désolé"}'.encode()))
    message = next(buffer)
    assert message.to_response_dict() == {
        "status_code": 400,
        "headers": {
            ":exception-type": "validationException",
            ":content-type": JSON,
            ":message-type": "exception",
        },
        "body": '{"message":"trop cher, désolé"}'.encode(),
    }


@pytest.mark.parametrize(
    ("headers", "payload"),
    [
        ({"": "x"}, b""),
        ({"n" * 256: "x"}, b""),
        ({"é" * 128: "x"}, b""),
        ({"n": "x" * 2**15}, b""),
        ({f"n{number}": "x" * 30_000 for number in range(5)}, b""),
        ({}, bytes(MAX_PAYLOAD + 1)),
    ],
)
def test_frame_no_client_accepts_is_not_encoded(headers, payload):
    with pytest.raises(ValueError, match="at most"):
        encode_frame(headers, payload)
