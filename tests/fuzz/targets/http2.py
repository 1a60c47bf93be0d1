"""Callers' HTTP/2: frames made of the input, whole or spoilt. What is taken for a request was sent as just that."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpack import Encoder
from price_keeper.exchange import Request, Responder
from price_keeper.server.http2_stream import STREAM_BYTES
from price_keeper.server.server_limits import ServerLimits

from tests.fuzz.in_memory import connection, run
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces
from tests.fuzz.strict_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PRIORITY,
    PRIORITY_FRAME,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Heard,
    frames,
    heard,
    mistakes,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GREETING = b"\0\0\0\4\0\0\0\0\0"  # settings, all at their defaults
WIDE = ServerLimits()
NARROW = ServerLimits(
    head_bytes=400, body_bytes=600, requests_bytes=3000 + 3 * STREAM_BYTES, streams=3, stream_resets=4, control_frames=8
)
STREAMS = (1, 1, 3, 3, 5, 7, 0, 2, 2**31 - 1)
HEAD = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/model/a/converse"), (b":authority", b"here"))
HEADS = (
    *HEAD,
    (b"content-length", b"5"),
    (b"content-type", b"application/json"),
    (b":method", b"GET"),
    (b":method", b"HEAD"),
    (b":method", b"CONNECT"),
    (b":path", b"/large"),
    (b":path", b"/a b"),
    (b":path", b"*"),
    (b":path", b""),
    (b":protocol", b"websocket"),
    (b"host", b"here"),
    (b"host", b"there"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"),
    (b"te", b"trailers"),
    (b"te", b"gzip"),
    (b"expect", b"100-continue"),
    (b"X", b"y"),
    (b"x", b"y\r\nz: 1"),
    (b"x y", b"z"),
    (b"x", b" y "),
    (b"x", b"y\0"),
    (b"cookie", b"a=b"),
    (b"", b""),
    (b"upgrade", b"h2c"),
    (b"content-length", b"+5"),
    (b":status", b"200"),
    (b"x-amzn-bedrock-\xff", b"1"),
    (b"x", b"v" * 200),
    (b":path", b"/model/a/invoke-with-bidirectional-stream"),
)
SIZES = {PRIORITY_FRAME: 5, 6: 8, 7: 8}  # of other frames whose payload is as long as they say: a ping, a goodbye
MORE = (1, 65_535, 16_384, 65_536, 1000, 0, 2**31 - 1)
NUMBERS = (0, 1, 65_535, 65_536, 16_384, 2**31 - 1, 2**32 - 1)
LARGE = 200_000
WORDS = (PREFACE, GREETING)


def _raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class _Client:
    """Opens streams in their order, says something on the last ones, and now and then what no client would say."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._encoder = Encoder()
        self._newest = -1

    def sent(self) -> bytes:
        sent = b""
        while self._reader.left:
            sent += self._frame()
        return sent

    def _frame(self) -> bytes:
        reader = self._reader
        kind, flags = reader.byte() % 16, reader.byte()
        if kind in (HEADERS, 10, 11):
            stream = self._stream(opens=True)
            is_whole = flags & 0xC0 != 0xC0  # else others are to follow
            flags = flags & (END_STREAM | PRIORITY) | END_HEADERS * is_whole
            ahead = reader.take(5).ljust(5, b"\0") if flags & PRIORITY else b""
            return _raw(HEADERS, flags, stream, ahead + self._block())
        if kind == CONTINUATION:
            return _raw(kind, flags & END_HEADERS, self._stream(), self._block())
        if kind in (DATA, 12):
            return _raw(DATA, flags & (END_STREAM | PADDED), self._stream(), reader.some() * (1 + 40 * (flags >> 7)))
        if kind in (RST_STREAM, 14):
            return _raw(RST_STREAM, flags, self._stream(), reader.byte().to_bytes(4, "big"))
        if kind in (WINDOW_UPDATE, 13):
            return _raw(WINDOW_UPDATE, flags, reader.pick((0, self._stream())), reader.pick(MORE).to_bytes(4, "big"))
        if kind == SETTINGS:
            some = (reader.byte() % 10).to_bytes(2, "big") + reader.pick(NUMBERS).to_bytes(4, "big")
            return _raw(kind, flags & 1, 0, b"" if flags & 1 else some)
        if kind in SIZES:
            stream = self._stream() if kind == PRIORITY_FRAME else 0
            return _raw(kind, flags & 1, stream, reader.take(SIZES[kind]).ljust(SIZES[kind], b"\0"))
        return reader.some() if kind == 15 else _raw(kind, flags, self._stream(), reader.some())

    def _stream(self, *, opens: bool = False) -> int:
        how = self._reader.byte()
        if how >= 224:
            return STREAMS[how % len(STREAMS)]
        if opens and how < 160:
            self._newest += 2
        return max(1, self._newest - 2 * (how >= 160 and not opens))

    def _block(self) -> bytes:
        """A good head with something to it, or less than that, by one table for the whole connection."""
        reader = self._reader
        how = reader.byte()
        if how % 16 == 15:
            return reader.some()
        headers = list(HEAD) if how & 0x40 else []
        for _ in range(how % 4):
            headers.insert(len(headers) - reader.byte() % (len(headers) + 1), reader.pick(HEADS))
        if how & 0x20:
            headers.append((reader.some(), reader.some()))
        return self._encoder.encode(headers, huffman=bool(how & 0x10))


@dataclass
class Talk:
    taken: list[tuple[int, Request]] = field(default_factory=list)
    said: bytes = b""
    is_over: bool = False

    def answers(self, request: Request, responder: Responder) -> None:
        self.taken.append((responder.id, request))  # type: ignore[attr-defined]
        body = b"a" * LARGE if request.target == b"/large" else request.body
        responder.start(200, ((b"x", b"y"),), len(body))
        responder.write(body)
        responder.finish()


async def _talk(parts: list[bytes], limits: ServerLimits) -> Talk:
    talk = Talk()
    async with connection(talk.answers, limits) as wire:
        await wire.hear(*parts)
        await wire.settle()
        talk.said, talk.is_over = wire.written, wire.is_closed
    return talk


def one(data: bytes) -> None:
    reader = Reader(data)
    limits, seed = (WIDE, NARROW)[reader.byte() % 2], reader.byte()
    sent = GREETING + _Client(reader).sent()
    expected = heard(sent)
    whole, split = run(_talk([PREFACE + sent], limits)), run(_talk([PREFACE, *pieces(sent, seed)], limits))
    for talk in (whole, split):
        for number, request in talk.taken:
            _same(number, request, expected)
        same(len({number for number, _ in talk.taken}), len(talk.taken), "streams that were taken")
        _check_answers(talk, expected)
    if not (whole.is_over or split.is_over):
        same(*(sorted(number for number, _ in talk.taken) for talk in (split, whole)), "requests in pieces")


def _same(number: int, request: Request, expected: Heard) -> None:
    stream = expected.streams.get(number)
    holds(stream is not None and stream.headers is not None, f"nothing was sent on {number}")
    assert stream is not None
    assert stream.headers is not None
    same(mistakes(stream), [], f"a request on stream {number} with {stream.headers}")
    pseudo = dict(header for header in stream.headers if header[0].startswith(b":"))
    plain = [header for header in stream.headers if not header[0].startswith(b":")]
    same((request.method, request.target), (pseudo[b":method"], pseudo[b":path"]), "the first line")
    same(request.body, stream.body, "the body")
    first = dict(reversed(plain))
    if b":authority" in pseudo:
        first.setdefault(b"host", pseudo[b":authority"])
    same(request.headers, first, "the headers")
    names = [name for name, _ in plain]
    same(request.repeated, {name for name in names if names.count(name) > 1}, "those that come more than once")


def _check_answers(talk: Talk, expected: Heard) -> None:
    """Complete frames alone; to a stream one head, and at most as much body as its client accepts."""
    answers: dict[int, list[int]] = {}
    size = 0
    for frame in frames(talk.said):
        size += 9 + len(frame.payload)
        if frame.kind == HEADERS:
            same(answers.setdefault(frame.stream, []), [], f"heads on stream {frame.stream}")
            holds(expected.streams.get(frame.stream), f"an answer to stream {frame.stream}, which was never opened")
            answers[frame.stream].append(0)
        elif frame.kind == DATA:
            holds(answers.get(frame.stream), f"a body without a head on stream {frame.stream}")
            answers[frame.stream].append(len(frame.payload))
    same(size, len(talk.said), "bytes of whole frames")
    for number, sizes in answers.items():
        holds(sum(sizes) <= expected.window_of(number), f"more than stream {number} would take")
    holds(sum(map(sum, answers.values())) <= expected.window, "more than the client would take")
