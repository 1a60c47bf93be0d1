"""HTTP/2's bytes alone: what frames and header lists become, and where the port is stricter than the library h2."""

from __future__ import annotations

import struct

import pytest
from hpack import Decoder, Encoder
from price_keeper.errors import InvalidRequest
from price_keeper.exchange import Header
from price_keeper.server.http2_frames import (
    CONTINUATION,
    END_HEADERS,
    FRAME_EFFECTS,
    HEADERS,
    MAX_FRAME_BYTES,
    PADDED,
    Effect,
    ErrorCode,
    Frame,
    FrameReader,
    ProtocolViolation,
    StreamState,
    build_frame,
    build_headers,
    extract_content,
    parse_settings,
)
from price_keeper.server.http2_headers import EMPTY_TABLE, HeaderDecoder, build_request, encode_response_head
from price_keeper.server.server_limits import CACHED_STRINGS, MAX_CACHED_STRING_BYTES

HEAD: list[Header] = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"here"), (b":path", b"/a")]


def read_all(reader: FrameReader) -> list[Frame]:
    return list(iter(reader.read_frame, None))


def test_frames_in_any_pieces_are_read_alike() -> None:
    data = build_frame(HEADERS, 5, 1, b"abc") + build_frame(77, 0, 2**31 - 1) + build_frame(0, 0, 1, bytes(20_0))
    whole = FrameReader()
    whole.feed(data)
    expected = read_all(whole)
    assert [frame.stream_id for frame in expected] == [1, 2**31 - 1, 1]
    for size in (1, 2, 5, 9, 10, 100):
        reader, found = FrameReader(), []
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
            found += read_all(reader)
        assert found == expected
        assert reader.buffered_bytes == 0


def test_reader_buffers_no_more_than_incomplete_frame() -> None:
    reader = FrameReader()
    reader.feed(build_frame(0, 0, 1, bytes(1000)) * 3 + build_frame(0, 0, 1, bytes(100))[:50])
    assert len(read_all(reader)) == 3
    assert reader.buffered_bytes == 50


def test_frame_over_size_is_rejected_at_its_ninth_byte() -> None:
    reader = FrameReader()
    header = (MAX_FRAME_BYTES + 1).to_bytes(3) + bytes([0, 0, 0, 0, 0, 1])
    reader.feed(header[:8])
    assert reader.read_frame() is None
    reader.feed(header[8:])
    with pytest.raises(ProtocolViolation) as violation:
        reader.read_frame()
    assert violation.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_every_state_has_effect_for_every_frame_of_a_stream() -> None:
    assert set(FRAME_EFFECTS) == set(StreamState)
    assert {frozenset(effects) for effects in FRAME_EFFECTS.values()} == {frozenset({0, 1, 3, 8})}
    assert {effect for effects in FRAME_EFFECTS.values() for effect in effects.values()} == set(Effect)


@pytest.mark.parametrize(
    ("flags", "payload", "content"),
    [
        (PADDED, b"\2abc\0\0", b"abc"),
        (PADDED, b"\0", b""),
        (PADDED, b"\5\0\0\0\0\0", b""),  # padding alone, which h2 rejects in a head
        (0x20, bytes(5) + b"abc", b"abc"),
        (0x28, b"\1" + bytes(5) + b"abc\0", b"abc"),
        (PADDED, b"", ErrorCode.FRAME_SIZE_ERROR),
        (PADDED, b"\1", ErrorCode.PROTOCOL_ERROR),
        (0x20, bytes(4), ErrorCode.FRAME_SIZE_ERROR),
        (0x28, b"\3" + bytes(7), ErrorCode.PROTOCOL_ERROR),  # overlaps the priority; h2 lets it pass
    ],
)
def test_content_of_head_frame_is_without_padding_and_priority(
    flags: int, payload: bytes, content: bytes | ErrorCode
) -> None:
    frame = Frame(HEADERS, flags, 1, payload)
    if isinstance(content, bytes):
        assert extract_content(frame) == content
    else:
        with pytest.raises(ProtocolViolation) as violation:
            extract_content(frame)
        assert violation.value.code is content


def test_settings_repeated_in_frame_have_their_last_value() -> None:
    assert parse_settings(Frame(4, 0, 0, struct.pack(">HLHL", 4, 5, 4, 6))) == {4: 6}


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES])
def test_header_block_of_any_length_is_sent_in_frames_that_fit(size: int) -> None:
    reader, block = FrameReader(), bytes(range(256)) * (size // 256) + bytes(size % 256)
    reader.feed(build_headers(1, block, MAX_FRAME_BYTES))
    frames = read_all(reader)
    assert [frame.type for frame in frames] == [HEADERS] + [CONTINUATION] * (len(frames) - 1)
    assert [bool(frame.flags & END_HEADERS) for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert b"".join(frame.payload for frame in frames) == block


@pytest.mark.parametrize("status", [200, 204, 206, 304, 400, 404, 500, 201, 403, 503])
def test_response_head_is_read_by_hpack(status: int) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-empty", b""), (b"X-Long", b" " + b"v" * 40_000 + b"\t")]
    headers += [(b"n" * length, b"v" * length) for length in (126, 127, 128, 254, 255, 256)]
    read = Decoder(10**6).decode(EMPTY_TABLE + encode_response_head(status, headers, 17), raw=True)
    expected = [(name.lower(), value.strip()) for name, value in headers]
    assert read == [(b":status", b"%d" % status), *expected, (b"content-length", b"17")]
    assert Decoder().decode(encode_response_head(status, (), None), raw=True) == [(b":status", b"%d" % status)]


def test_client_without_table_reads_the_first_head() -> None:
    """A decoder whose table was forbidden expects to hear that it is empty."""
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    assert decoder.decode(EMPTY_TABLE + encode_response_head(200, (), None), raw=True) == [(b":status", b"200")]


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ([*HEAD, (b":protocol", b"websocket")], ProtocolViolation),
        ([(b":method", b"CONNECT"), *HEAD[1:], (b"x", b"y")], ProtocolViolation),
        ([(b":method", b"CONNECT"), HEAD[1], HEAD[2], HEAD[3], (b":protocol", b"websocket")], ProtocolViolation),
        ([(b":method", b"CONNECT"), (b":authority", b"here:443")], InvalidRequest),
        ([(b"cookie", b"a=b"), *HEAD], ProtocolViolation),
        ([*HEAD, (b"content-length", b"1" * 19)], ProtocolViolation),
        ([*HEAD, (b"content-length", "\N{SUPERSCRIPT TWO}".encode())], ProtocolViolation),
        ([*HEAD, (b"x", b"a\x1fb")], InvalidRequest),
        ([*HEAD, (b"x", b"a\x7fb")], InvalidRequest),
        ([*HEAD, (b"te", b"Trailers"), (b"te", b"gzip")], ProtocolViolation),
    ],
    ids=str,
)
def test_request_that_is_not_served_is_malformed_or_refused(headers: list[Header], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_request(headers, 10_000)


def test_cookies_of_several_fields_are_one() -> None:
    request = build_request([*HEAD, (b"cookie", b"a=b"), (b"x", b"y"), (b"cookie", b"c=d")], 10_000)
    assert request.headers == {b"host": b"here", b"x": b"y", b"cookie": b"a=b; c=d"}
    assert request.repeated == frozenset()


def test_head_counts_its_names_values_and_entries() -> None:
    size = sum(len(name) + len(value) + 32 for name, value in HEAD)
    assert build_request(HEAD, size).target == b"/a"
    with pytest.raises(InvalidRequest, match=f"at most {size - 1} bytes"):
        build_request(HEAD, size - 1)


def test_header_list_far_beyond_limit_is_a_bomb_however_short_its_block() -> None:
    """One entry of the table, named over and over."""
    decoder = HeaderDecoder(100_000)
    decoder.decode(b"\x40\x01a\x7f\x80\x1e" + bytes(3967))
    with pytest.raises(ProtocolViolation) as violation:
        decoder.decode(b"\xbe" * 30)
    assert violation.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_remembered_strings_are_bounded_in_number_and_size() -> None:
    from price_keeper.server.http2_headers import _decode_huffman_cached

    decoder = HeaderDecoder(10**6)
    for number in range(CACHED_STRINGS + 100):
        decoder.decode(Encoder().encode([(b"x", b"%d" % number)]))
    assert _decode_huffman_cached.cache_info().currsize <= CACHED_STRINGS
    before = _decode_huffman_cached.cache_info().misses
    decoder.decode(Encoder().encode([(b"x", b"a" * 2 * MAX_CACHED_STRING_BYTES)]))
    assert _decode_huffman_cached.cache_info().misses == before  # its name is remembered, and its value is too long
