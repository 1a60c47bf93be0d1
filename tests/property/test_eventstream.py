"""The watcher against botocore's own parser, on streams made here byte by byte and cut up in any way."""

from __future__ import annotations

import struct
from binascii import crc32
from itertools import pairwise

from botocore.eventstream import EventStreamBuffer, ParserError
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.upstream.eventstream import MAX_EXCEPTION_PAYLOAD, EventFrame, FrameWatcher, encode_frame

from tests.support.effort import tries

WANTED = {"metadata": 1000, "chunk": 20, "nothing": 0}
LENGTHS = 12  # bytes, with their CRC
MOST_HELD = 2 * 1000 + 12 + 2000  # what is wanted, and the largest head made here


# ---------------------------------------------------------------- streams


def framed(block: bytes, payload: bytes) -> bytes:
    prelude = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    prelude += struct.pack(">I", crc32(prelude))
    return prelude + block + payload + struct.pack(">I", crc32(prelude + block + payload))


def header(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack(">B", len(name.encode())) + name.encode() + struct.pack(">B", kind) + value


def counted(kind: int, value: bytes) -> tuple[int, bytes]:
    return kind, struct.pack(">H", len(value)) + value


def block_of(headers: list[tuple[str, tuple[int, bytes]]]) -> bytes:
    return b"".join(header(name, kind, value) for name, (kind, value) in headers)


texts = st.text(max_size=12).map(lambda text: counted(7, text.encode()))
values = st.one_of(
    texts,
    st.sampled_from([(0, b""), (1, b"")]),
    st.binary(max_size=30).map(lambda value: counted(6, value)),
    *(
        st.tuples(st.just(kind), st.binary(min_size=size, max_size=size))
        for kind, size in {2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}.items()
    ),
)


def routing(kind: str, name_header: str, name: str) -> list[tuple[str, tuple[int, bytes]]]:
    return [(name_header, counted(7, name.encode())), (":message-type", counted(7, kind.encode()))]


event_types = st.sampled_from(["metadata", "chunk", "nothing", "contentBlockDelta", "messageStop"])
routes = st.one_of(
    event_types.map(lambda name: routing("event", ":event-type", name)),
    st.just(routing("exception", ":exception-type", "throttlingException")),
    st.just(routing("error", ":error-code", "InternalError")),
)
other_headers = st.dictionaries(
    st.text(min_size=1, max_size=10).filter(lambda name: name[0] != ":"), values, max_size=4
)
headers = st.builds(lambda route, others: route + list(others.items()), routes, other_headers).flatmap(st.permutations)
payloads = st.one_of(st.binary(max_size=60), st.integers(0, 3000).map(lambda size: b"p" * size))
frames = st.builds(lambda some, payload: framed(block_of(some), payload), headers, payloads)


@st.composite
def cut_up(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    if draw(st.booleans()):
        size = draw(st.sampled_from([1, 2, 3, 5, 11, 12, 13, 16, 100]))
        return [stream[at : at + size] for at in range(0, len(stream), size)]
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return [stream[low:high] for low, high in pairwise([0, *cuts, len(stream)])]


def by_botocore(stream: bytes) -> list[EventFrame]:
    buffer = EventStreamBuffer()
    buffer.add_data(stream)
    found = []
    for message in buffer:
        kind = message.headers[":message-type"]
        name = message.headers[{"event": ":event-type", "exception": ":exception-type", "error": ":error-code"}[kind]]
        keep = WANTED.get(name) if kind == "event" else MAX_EXCEPTION_PAYLOAD
        if keep is not None:
            size = len(message.payload)
            found.append(EventFrame(kind, name, message.payload[max(0, size - keep) :], size))
    return found


def watched(parts: list[bytes]) -> tuple[FrameWatcher, list[EventFrame]]:
    """Feeds it all, and looks after each part at what must hold at any time."""
    watcher = FrameWatcher(WANTED)
    found: list[EventFrame] = []
    fed = 0
    for part in parts:
        found += watcher.feed(part)
        fed += len(part)
        assert watcher.retained <= MOST_HELD
        if watcher.failure is None:
            assert watcher.boundary + watcher.unfinished == fed
    return watcher, found


# ---------------------------------------------------------------- whole streams


@settings(max_examples=tries(200))
@given(st.data(), st.lists(frames, max_size=6))
def test_stream_split_anywhere_gives_same_frames(data, some):
    stream = b"".join(some)
    watcher, found = watched(data.draw(cut_up(stream)))
    assert found == by_botocore(stream)
    assert watcher.frames == len(some)
    assert watcher.close() is None


@settings(max_examples=tries(150))
@given(st.data(), st.lists(frames, min_size=1, max_size=4))
def test_truncated_stream_is_distinguished_from_complete(data, some):
    stream = b"".join(some)
    ends = [sum(map(len, some[:count])) for count in range(len(some) + 1)]
    end = data.draw(st.one_of(st.sampled_from(ends), st.integers(0, len(stream))))
    watcher, found = watched(data.draw(cut_up(stream[:end])))
    assert watcher.boundary == max(each for each in ends if each <= end)
    assert found == by_botocore(stream[: watcher.boundary])
    assert (watcher.close() is None) == (end in ends)


@given(
    st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=50), max_size=5),
    st.binary(max_size=200),
)
def test_encoded_frame_is_read_by_botocore(headers, payload):
    frame = encode_frame(headers, payload)
    assert frame == framed(block_of([(name, counted(7, text.encode())) for name, text in headers.items()]), payload)
    buffer = EventStreamBuffer()
    buffer.add_data(frame)
    (message,) = buffer
    assert (message.headers, message.payload) == (headers, payload)


# ---------------------------------------------------------------- damage


@settings(max_examples=tries(75))
@given(st.data(), st.lists(frames, min_size=1, max_size=3))
def test_flipped_bit_is_detected_or_its_frame_is_not_reported(data, some):
    stream = b"".join(some)
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    damaged = bytearray(stream)
    damaged[bit // 8] ^= 1 << bit % 8
    watcher, found = watched(data.draw(cut_up(bytes(damaged))))
    if watcher.close() is not None:
        assert watcher.boundary <= bit // 8
        assert found == by_botocore(stream[: watcher.boundary])
        return
    starts = [sum(map(len, some[:number])) for number in range(len(some))]
    number = max(each for each, start in enumerate(starts) if start <= bit // 8)
    assert bit // 8 >= starts[number] + LENGTHS
    before, after = by_botocore(b"".join(some[:number])), by_botocore(b"".join(some[number + 1 :]))
    of_damaged = [frame for frame in by_botocore(some[number]) if not frame.payload]  # nothing was wanted of it
    assert found in ([*before, *after], [*before, *of_damaged, *after])


def test_every_single_flipped_bit_is_detected_or_its_frame_is_not_reported():
    some = [
        encode_frame({":event-type": "chunk", ":message-type": "event"}, b"one"),
        encode_frame({":event-type": "metadata", ":message-type": "event"}, b"two"),
    ]
    stream = b"".join(some)
    for bit in range(8 * len(stream)):
        damaged = bytearray(stream)
        damaged[bit // 8] ^= 1 << bit % 8
        number = 0 if bit // 8 < len(some[0]) else 1
        place = bit // 8 - number * len(some[0])
        is_in_headers = LENGTHS <= place < len(some[number]) - len(b"two") - 4
        for parts in ([bytes(damaged)], [bytes([byte]) for byte in damaged]):
            watcher, found = watched(parts)
            if watcher.close() is None:
                assert is_in_headers
                assert found == by_botocore(some[1 - number])
            else:
                assert (watcher.frames, len(found)) == (number, number)


@settings(max_examples=tries(150))
@given(st.data(), st.lists(st.one_of(st.binary(max_size=300), frames), max_size=4))
def test_garbage_fails_without_crash(data, some):
    stream = b"".join(some)
    (whole, found), (split, found_split) = watched([stream]), watched(data.draw(cut_up(stream)))
    assert found == found_split
    assert (whole.frames, whole.boundary) == (split.frames, split.boundary)
    assert str(whole.close()) == str(split.close())


@settings(max_examples=tries(250))
@given(
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda some, at, junk: block_of(some)[:at] + junk, headers, st.integers(0, 60), st.binary(max_size=10)
        ),
        st.builds(lambda some, more: block_of(some + more), headers, headers),
    )
)
def test_accepted_headers_mean_what_botocore_reads(block):
    """Right CRCs around any block of headers. Where botocore is laxer, as with a value cut short, a fault is right."""
    frame = framed(block, b"payload")
    watcher, found = watched([frame])
    split, found_split = watched([frame[:15], frame[15:]])
    assert (found, str(watcher.failure)) == (found_split, str(split.failure))
    buffer = EventStreamBuffer()
    buffer.add_data(frame)
    try:
        (message,) = buffer
    except (ParserError, KeyError, struct.error, UnicodeDecodeError):
        assert watcher.failure is not None
        return
    if watcher.failure is None:
        kind = message.headers.get(":message-type")
        assert all(frame.kind == (kind if isinstance(kind, str) else "event") for frame in found)
        assert all(frame.name in message.headers.values() for frame in found if frame.name)
