"""The cases that the conformance tester h2spec lists, by its numbers: `generic`, `http2` (of RFC 7540, most of which
RFC 9113 keeps) and `hpack`. Each sends raw frames to a real socket and looks at the frames that come back."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from price_keeper.exchange import Request, Responder

from tests.fuzz.strict_http2 import Frame, frames
from tests.support.port_harness import PortHarness, open_port
from tests.support.raw_clients import TIMEOUT_SECONDS, RawConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 32
NO, PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION, CALM = 0, 1, 3, 5, 6, 7, 9, 11

Header = tuple[bytes, bytes]
HEAD: list[Header] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"here")]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def block(headers: list[Header]) -> bytes:
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers)


def head(stream: int = 1, flags: int = END_STREAM | END_HEADERS, headers: list[Header] = HEAD) -> bytes:
    return frame(HEADERS, flags, stream, block(headers))


def with_field(name: bytes, value: bytes) -> bytes:
    return head(headers=[*HEAD, (name, value)])


def without(name: bytes) -> bytes:
    return head(headers=[header for header in HEAD if header[0] != name])


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in pairs))


def window(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">L", size))


def reset(stream: int = 1) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">L", 8))


PING_FRAME = frame(PING, 0, 0, b"h2spec\0\0")
OPEN = head(1, END_HEADERS)
HALF_CLOSED = head()
LARGEST_WINDOW = 2**31 - 1


class Case(NamedTuple):
    """`expected` is "answered" (a response on stream 1), "ignored" (a ping is still answered), or a code: of GOAWAY, or
    of RST_STREAM if `is_stream_error`."""

    number: str
    what: str
    sent: bytes
    expected: str | int
    is_stream_error: bool = False


def stream_error(number: str, what: str, sent: bytes, code: int) -> Case:
    return Case(number, what, sent, code, is_stream_error=True)


CASES = [
    Case("generic/1", "client preface", HALF_CLOSED, "answered"),
    Case(
        "generic/2/1", "priority on an idle stream", frame(PRIORITY, 0, 1, bytes(4) + b"\xff") + HALF_CLOSED, "answered"
    ),
    Case("generic/2/2", "window update on a half-closed stream", HALF_CLOSED + window(1, 100), "answered"),
    Case("generic/2/3", "priority on a half-closed stream", HALF_CLOSED + frame(PRIORITY, 0, 1, bytes(5)), "answered"),
    Case("generic/2/4", "reset of a half-closed stream", HALF_CLOSED + reset(), "ignored"),
    Case("generic/2/5", "priority on a closed stream", OPEN + reset() + frame(PRIORITY, 0, 1, bytes(5)), "ignored"),
    Case("generic/3.1/1", "data", OPEN + frame(DATA, END_STREAM, 1, b"test"), "answered"),
    Case("generic/3.1/2", "several data frames", OPEN + frame(DATA, 0, 1, b"a") * 3 + frame(DATA, 1, 1), "answered"),
    Case("generic/3.1/3", "padded data", OPEN + frame(DATA, PADDED | END_STREAM, 1, b"\6test" + bytes(6)), "answered"),
    Case("generic/3.2/1", "headers", HALF_CLOSED, "answered"),
    Case("generic/3.2/2", "padded headers", frame(HEADERS, 13, 1, b"\3" + block(HEAD) + bytes(3)), "answered"),
    Case("generic/3.2/3", "headers with priority", frame(HEADERS, 37, 1, bytes(4) + b"\xff" + block(HEAD)), "answered"),
    Case("generic/3.3/1", "priority 1", frame(PRIORITY, 0, 1, bytes(5)) + HALF_CLOSED, "answered"),
    Case("generic/3.3/3", "exclusive", frame(PRIORITY, 0, 1, b"\x80\0\0\0\xff") + HALF_CLOSED, "answered"),
    Case("generic/3.5", "settings", settings((3, 100)) + HALF_CLOSED, "answered"),
    Case("generic/3.7", "ping", PING_FRAME, "ignored"),
    Case("generic/3.8", "goaway", OPEN + frame(GOAWAY, 0, 0, bytes(8)) + frame(DATA, END_STREAM, 1), "answered"),
    Case("generic/3.9/1", "window update of the connection", window(0, 1) + HALF_CLOSED, "answered"),
    Case("generic/3.9/2", "window update of a stream", OPEN + window(1, 1) + frame(DATA, END_STREAM, 1), "answered"),
    Case(
        "generic/3.10",
        "continuations",
        head(1, END_STREAM) + frame(CONTINUATION, 0, 1, block([(b"x", b"y")])) + frame(CONTINUATION, 4, 1, b""),
        "answered",
    ),
    *(
        Case(f"generic/4/{method}", "methods", head(headers=[(b":method", method), *HEAD[1:]]), "answered")
        for method in (b"GET", b"HEAD", b"POST", b"OPTIONS")
    ),
    Case(
        "generic/4/4",
        "trailers",
        head(1, END_HEADERS, [*HEAD, (b"trailer", b"x")])
        + frame(DATA, 0, 1, b"test")
        + frame(HEADERS, END_STREAM | END_HEADERS, 1, block([(b"x", b"y")])),
        "answered",
    ),
    # 3.5, the preface, is below: it is decided before there is a connection.
    Case("4.1/1", "unknown type", frame(0x16, 0, 0, b"\0" * 8), "ignored"),
    Case("4.1/2", "undefined flags", frame(PING, 0x16, 0, b"\0" * 8), "ignored"),
    Case("4.1/3", "reserved bit", frame(PING, 0, 0x80000000, b"h2spec\0\0"), "ignored"),
    Case("4.2/1", "data of the largest size", OPEN + frame(DATA, END_STREAM, 1, bytes(16_384)), "answered"),
    Case("4.2/2", "data that is too large", OPEN + frame(DATA, 0, 1, bytes(16_385)), SIZE),
    Case("4.2/3", "headers that are too large", frame(HEADERS, 5, 1, bytes(16_385)), SIZE),
    Case("4.3/1", "invalid header block", frame(HEADERS, 5, 1, b"\x40"), COMPRESSION),
    Case("4.3/2", "priority within a head", head(1, END_STREAM) + frame(PRIORITY, 0, 1, bytes(5)), PROTOCOL),
    Case("4.3/3", "headers of another stream within a head", head(1, END_STREAM) + head(3), PROTOCOL),
    Case("5.1/1", "idle: data", frame(DATA, END_STREAM, 1, b"test"), PROTOCOL),
    Case("5.1/2", "idle: reset", reset(), PROTOCOL),
    Case("5.1/2b", "idle, after another stream: reset", OPEN + reset(3), PROTOCOL),
    Case("5.1/3", "idle: window update", window(1, 100), PROTOCOL),
    Case("5.1/4", "idle: continuation", frame(CONTINUATION, END_HEADERS, 1, block(HEAD)), PROTOCOL),
    stream_error("5.1/5", "half-closed: data", HALF_CLOSED + frame(DATA, 1, 1, b"test"), CLOSED),
    stream_error("5.1/6", "half-closed: headers", HALF_CLOSED + HALF_CLOSED, CLOSED),
    Case("5.1/7", "half-closed: continuation", HALF_CLOSED + frame(CONTINUATION, 4, 1, block(HEAD)), PROTOCOL),
    stream_error("5.1/8", "reset: data", OPEN + reset() + frame(DATA, END_STREAM, 1, b"test"), CLOSED),
    stream_error("5.1/9", "reset: headers", OPEN + reset() + head(), CLOSED),
    Case("5.1/10", "reset: continuation", OPEN + reset() + frame(CONTINUATION, 4, 1, block(HEAD)), PROTOCOL),
    Case("5.1.1/1", "even stream id", head(2), PROTOCOL),
    Case("5.1.1/2", "stream id that is lower than the last", head(5, END_HEADERS) + head(3), PROTOCOL),
    Case("5.1.2/1", "too many streams", b"".join(head(2 * n + 1, END_HEADERS) for n in range(257)), PROTOCOL),
    # RFC 9113 has deprecated priorities, and with them that a stream must not depend on itself.
    Case(
        "5.3.1/1", "headers that depend on themselves", frame(HEADERS, 37, 1, b"\0\0\0\1\0" + block(HEAD)), "answered"
    ),
    Case("5.3.1/2", "priority on itself", frame(PRIORITY, 0, 1, b"\0\0\0\1\0") + HALF_CLOSED, "answered"),
    Case("5.4.1/1", "goaway, then close", frame(PING, 0, 3, bytes(8)), PROTOCOL),
    Case("5.5/1", "unknown extension frame", frame(0xFF, 0xFF, 0, b"x") + PING_FRAME, "ignored"),
    Case("5.5/2", "unknown frame within a head", head(1, END_STREAM) + frame(0xFF, 0, 1, b"x"), PROTOCOL),
    Case("6.1/1", "data on stream 0", frame(DATA, END_STREAM, 0, b"test"), PROTOCOL),
    stream_error("6.1/2", "data on a stream that is not open", HALF_CLOSED + frame(DATA, 1, 1, b"test"), CLOSED),
    Case("6.1/3", "padding too long", OPEN + frame(DATA, PADDED | END_STREAM, 1, b"\x06test"), PROTOCOL),
    Case("6.2/1", "headers then priority", head(1, END_STREAM) + frame(PRIORITY, 0, 1, bytes(5)), PROTOCOL),
    Case("6.2/2", "headers within a head", head(1, END_STREAM) + head(3), PROTOCOL),
    Case("6.2/3", "headers on stream 0", head(0), PROTOCOL),
    Case("6.2/4", "padding too long", frame(HEADERS, 13, 1, b"\xff" + block(HEAD)), PROTOCOL),
    Case("6.3/1", "priority on stream 0", frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    Case("6.3/2", "priority of four bytes", frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    Case("6.4/1", "reset of stream 0", reset(0), PROTOCOL),
    Case("6.4/2", "reset of an idle stream", reset(1), PROTOCOL),
    Case("6.4/3", "reset of three bytes", OPEN + frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    Case("6.5/1", "acknowledgement with a payload", frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    Case("6.5/2", "settings on a stream", frame(SETTINGS, 0, 1, struct.pack(">HL", 3, 100)), PROTOCOL),
    Case("6.5/3", "settings of three bytes", frame(SETTINGS, 0, 0, bytes(3)), SIZE),
    Case("6.5.2/1", "enable push of 2", settings((2, 2)), PROTOCOL),
    Case("6.5.2/2", "initial window too large", settings((4, 2**31)), FLOW),
    Case("6.5.2/3", "frame size too small", settings((5, 16_383)), PROTOCOL),
    Case("6.5.2/4", "frame size too large", settings((5, 2**24)), PROTOCOL),
    Case("6.5.2/5", "unknown setting", settings((0xFF, 1)), "ignored"),
    Case(
        "6.5.3/1", "the last of repeated settings counts", settings((4, 2**31 - 1), (4, 1000)) + HALF_CLOSED, "answered"
    ),
    Case("6.7/1", "ping", PING_FRAME, "ignored"),
    Case("6.7/2", "ping that is an acknowledgement", frame(PING, ACK, 0, b"invalid!"), "ignored"),
    Case("6.7/3", "ping on a stream", frame(PING, 0, 1, bytes(8)), PROTOCOL),
    Case("6.7/4", "ping of six bytes", frame(PING, 0, 0, bytes(6)), SIZE),
    Case("6.8/1", "goaway on a stream", frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    Case("6.9/1", "window of nothing", window(0, 0), PROTOCOL),
    Case("6.9/2", "stream's window of nothing", OPEN + window(1, 0), PROTOCOL),
    Case("6.9/3", "window update of three bytes", frame(WINDOW_UPDATE, 0, 0, b"\0\0\1"), SIZE),
    Case("6.9.1/2", "connection's window too large", window(0, LARGEST_WINDOW) * 2, FLOW),
    stream_error("6.9.1/3", "stream's window too large", OPEN + window(1, LARGEST_WINDOW) * 2, FLOW),
    Case("6.9.2/3", "initial window too large", settings((4, 2**31)), FLOW),
    Case(
        "6.9.2/3b",
        "initial window too large for a stream",
        OPEN + window(1, 2**31 - 65_536) + settings((4, 65_536)),
        FLOW,
    ),
    Case(
        "6.10/1",
        "several continuations",
        head(1, END_STREAM) + frame(CONTINUATION, 0, 1) * 3 + frame(9, 4, 1),
        "answered",
    ),
    Case("6.10/2", "data within a head", head(1, 0) + frame(DATA, END_STREAM, 1, b"test"), PROTOCOL),
    Case("6.10/3", "continuation on stream 0", head(1, END_STREAM) + frame(CONTINUATION, 4, 0), PROTOCOL),
    Case(
        "6.10/4", "continuation behind a whole head", OPEN + frame(CONTINUATION, 4, 1, block([(b"x", b"y")])), PROTOCOL
    ),
    Case("6.10/5", "continuation behind a continued head", head(1, 0) + frame(CONTINUATION, 4, 1) * 2, PROTOCOL),
    Case("6.10/6", "continuation behind data", OPEN + frame(DATA, 0, 1, b"x") + frame(CONTINUATION, 4, 1), PROTOCOL),
    Case("7/1", "goaway with an unknown code", frame(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff") + PING_FRAME, NO),
    Case("7/2", "reset with an unknown code", OPEN + frame(RST_STREAM, 0, 1, b"\0\0\0\xff"), "ignored"),
    Case("8.1/1", "second headers without the end", OPEN + head(1, END_HEADERS, [(b"x", b"y")]), PROTOCOL),
    Case("8.1.2/1", "capitals in a name", with_field(b"X-TEST", b"ok"), PROTOCOL),
    Case("8.1.2.1/1", "unknown pseudo-header", with_field(b":test", b"ok"), PROTOCOL),
    Case("8.1.2.1/2", "pseudo-header of responses", with_field(b":status", b"200"), PROTOCOL),
    Case(
        "8.1.2.1/3",
        "pseudo-header in trailers",
        OPEN + head(1, END_STREAM | END_HEADERS, [(b":method", b"GET")]),
        PROTOCOL,
    ),
    Case("8.1.2.1/4", "pseudo-header behind others", head(headers=[*HEAD[:3], (b"x", b"y"), HEAD[3]]), PROTOCOL),
    Case("8.1.2.2/1", "header of the connection", with_field(b"connection", b"keep-alive"), PROTOCOL),
    Case("8.1.2.2/2", "TE that is not trailers", with_field(b"te", b"trailers, deflate"), PROTOCOL),
    Case("8.1.2.3/1", "empty path", head(headers=[*HEAD[:2], (b":path", b""), HEAD[3]]), PROTOCOL),
    Case("8.1.2.3/2", "no method", without(b":method"), PROTOCOL),
    Case("8.1.2.3/3", "no scheme", without(b":scheme"), PROTOCOL),
    Case("8.1.2.3/4", "no path", without(b":path"), PROTOCOL),
    Case("8.1.2.3/5", "two methods", head(headers=[HEAD[0], *HEAD]), PROTOCOL),
    Case("8.1.2.3/6", "two schemes", head(headers=[HEAD[1], *HEAD]), PROTOCOL),
    Case("8.1.2.3/7", "two paths", head(headers=[HEAD[2], *HEAD]), PROTOCOL),
    Case(
        "8.1.2.6/1",
        "body longer than content-length",
        head(1, END_HEADERS, [*HEAD, (b"content-length", b"1")]) + frame(DATA, END_STREAM, 1, b"test"),
        PROTOCOL,
    ),
    Case(
        "8.1.2.6/2",
        "bodies longer than content-length",
        head(1, END_HEADERS, [*HEAD, (b"content-length", b"5")])
        + frame(DATA, 0, 1, b"test")
        + frame(DATA, 1, 1, b"test"),
        PROTOCOL,
    ),
    Case("8.2/1", "push promise", OPEN + frame(PUSH, END_HEADERS, 1, struct.pack(">L", 2) + block(HEAD)), PROTOCOL),
    # hpack
    Case("hpack/2.3", "indexed", frame(HEADERS, 5, 1, b"\x83\x86\x84\x01\x04here"), "answered"),
    Case("hpack/2.3.3/1", "index beyond the tables", frame(HEADERS, 5, 1, b"\xbe"), COMPRESSION),
    Case("hpack/2.3.3/2", "name's index beyond the tables", frame(HEADERS, 5, 1, b"\x7e\x01x"), COMPRESSION),
    Case("hpack/4.2/1", "table size behind headers", frame(HEADERS, 5, 1, block(HEAD) + b"\x20"), COMPRESSION),
    Case(
        "hpack/5.2/1", "padding longer than seven bits", frame(HEADERS, 5, 1, b"\x00\x81\x1f\x82\x1f\xff"), COMPRESSION
    ),
    Case("hpack/5.2/2", "padding of zeros", frame(HEADERS, 5, 1, b"\x00\x81\x18\x01x"), COMPRESSION),
    Case(
        "hpack/5.2/3", "end-of-string in a string", frame(HEADERS, 5, 1, b"\x00\x84\xff\xff\xff\xff\x01x"), COMPRESSION
    ),
    Case("hpack/6.1/1", "index 0", frame(HEADERS, 5, 1, b"\x80"), COMPRESSION),
    Case("hpack/6.3/1", "table size too large", frame(HEADERS, 5, 1, b"\x3f\xe2\x1f" + block(HEAD)), COMPRESSION),
    Case(
        "hpack/6.3/2", "table size that is allowed", frame(HEADERS, 5, 1, b"\x3f\xe1\x1f\x20" + block(HEAD)), "answered"
    ),
]


@dataclass
class Heard:
    frames: list[Frame]
    is_closed: bool

    def codes(self, kind: int) -> list[int]:
        return [int.from_bytes(each.payload[-4:]) for each in self.frames if each.kind == kind]

    def has(self, kind: int, flags: int, stream: int) -> bool:
        return any((each.kind, each.flags & flags, each.stream) == (kind, flags, stream) for each in self.frames)


async def later(request: Request, responder: Responder) -> None:
    """Answers in the next turn of the loop, so that what comes in the same packet finds the stream half-closed."""
    await asyncio.sleep(0.01)
    responder.start(200, (), len(request.body))
    responder.write(request.body)
    responder.finish()


async def hear(rig: PortHarness, sent: bytes, case: Case) -> Heard:
    """Until what is expected has come, or the connection ends."""
    wire: RawConnection = await rig.connect()
    await wire.send(PREFACE + settings() + sent + (PING_FRAME if case.expected == "ignored" else b""))
    heard = Heard([], False)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not (heard.is_closed or _is_enough(heard, case)):
            try:
                heard.is_closed = not await wire.read_more()
            except ConnectionError:
                heard.is_closed = True
            heard.frames = list(frames(wire.received))
    wire.close()
    return heard


def _is_enough(heard: Heard, case: Case) -> bool:
    if case.expected == "answered":
        return heard.has(DATA, END_STREAM, 1)
    if case.expected == "ignored":
        return heard.has(PING, ACK, 0)
    return case.is_stream_error and bool(heard.codes(RST_STREAM))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number} {case.what}")
async def test_case_of_h2spec_ends_as_the_rfc_says(case: Case) -> None:
    async with open_port(later) as rig:
        heard = await hear(rig, case.sent, case)
        if isinstance(case.expected, str):
            assert not heard.is_closed
            assert heard.codes(GOAWAY) == []
        elif case.is_stream_error:
            assert heard.codes(RST_STREAM) == [case.expected]
            assert not heard.is_closed
        else:
            assert heard.codes(GOAWAY) == [case.expected] or (case.expected == NO and not heard.codes(GOAWAY))
            assert heard.is_closed


async def test_preface_that_is_none_is_no_http2() -> None:
    """h2spec 3.5: it may close, or answer as to HTTP/1.1."""
    async with open_port(later) as rig:
        wire = await rig.connect()
        await wire.send(b"INVALID CONNECTION PREFACE\r\n\r\n")
        assert (await wire.answer()).status == 400
        assert await wire.read_ending() in ("closed", "reset")


@pytest.mark.parametrize(
    ("number", "before", "grown"),
    [
        ("6.5.3/1, 6.9.1/1: one byte at a time", settings((4, 1)), window(1, 1) * 3),
        ("6.9.2/1: a larger initial window for open streams", settings((4, 0)), settings((4, 4))),
        ("6.9.2/2: a window below zero", settings((4, 3)), settings((4, 2)) + window(1, 2)),
    ],
)
async def test_case_of_h2spec_about_windows_sends_as_much_as_they_have(
    number: str, before: bytes, grown: bytes
) -> None:
    """Never more than the windows have together, and all of it once they have four bytes."""
    async with open_port(later) as rig:
        wire = await rig.connect()
        first = struct.unpack(">L", before[-4:])[0]
        await wire.send(PREFACE + before + OPEN + frame(DATA, END_STREAM, 1, b"four"))
        heard: list[Frame] = []
        while sum(len(each.payload) for each in heard if each.kind == DATA) < first or not any(
            each.kind == HEADERS for each in heard
        ):
            await wire.read_more()
            heard = list(frames(wire.received))
        assert b"".join(each.payload for each in heard if each.kind == DATA) == b"four"[:first]
        await wire.send(grown)
        while not any(each.kind == DATA and each.flags & END_STREAM for each in heard):
            await wire.read_more()
            heard = list(frames(wire.received))
        assert b"".join(each.payload for each in heard if each.kind == DATA) == b"four"
        wire.close()
