"""Bedrock's HTTP/1.1: what reaches a caller as a whole answer is exactly the one that a strict reader sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from price_keeper.exchange import FlowControl, Header
from price_keeper.upstream.connection_pool import ConnectionPool, UpstreamConnection, UpstreamEndpoint
from price_keeper.upstream.relay import Relay, ResponseOutcome

from tests.fuzz import strict_http1
from tests.fuzz.in_memory import Wire, run
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces
from tests.fuzz.strict_http1 import Message, More, NoHttp

WORDS = (b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"content-length: 5\r\n",
         b"\r\n\r\n", b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"connection: close\r\n",
         b"HTTP/1.1 204 \r\n", b"connection: keep-alive, x-hop\r\n", b"x-hop: 1\r\n", b"HTTP/1.1 304 \r\n",
         b"transfer-encoding: gzip, chunked", b"HTTP/1.1 101 \r\n", b"upgrade: h2c\r\n", b"connection: upgrade\r\n",
         b"trailer: x\r\n", b";ext=1")  # fmt: skip
HOP_BY_HOP = {b"connection", b"content-length", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te",
              b"trailer", b"transfer-encoding", b"upgrade"}  # fmt: skip


class Caller:
    """The responder, and the tap: what goes by is what is shown."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.length: int | None = None
        self.body = self.tapped = b""
        self.on_end = ""
        self.tapped_whole: bool | None = None
        self.outcome: ResponseOutcome | None = None
        self.has_started = self.is_disconnected = False

    def attach(self, flow: FlowControl) -> None: ...

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        same(self.has_started, False, "started before")
        self.has_started = True
        self.status, self.headers, self.length = status, list(headers), length

    def write(self, data: bytes) -> None:
        self.body += data

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.on_end += "finished"

    def abort(self) -> None:
        self.on_end += "aborted"

    class Tap:
        def __init__(self, caller: Caller) -> None:
            self._caller = caller

        def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

        def on_data(self, data: bytes) -> None:
            self._caller.tapped += data

        def on_end(self, is_whole: bool) -> None:
            same(self._caller.tapped_whole, None, "ended before")
            self._caller.tapped_whole = is_whole

    def over(self, outcome: ResponseOutcome) -> None:
        same(self.outcome, None, "over before")
        self.outcome = outcome


async def _heard(parts: list[bytes], *, is_clean_end: bool) -> tuple[Caller, bool]:
    """And whether the connection was taken for good enough to carry another call."""
    pool = ConnectionPool(UpstreamEndpoint("127.0.0.1", 9, False), lambda: 0.0, None)
    connection, wire, caller = UpstreamConnection(pool), Wire(), Caller()
    wire.protocol = connection
    connection.connection_made(wire)
    relay = Relay(caller, connection, (), Caller.Tap(caller), None, lambda: 0.0, caller.over)
    connection.call(relay, b"POST / HTTP/1.1\r\n\r\n", b"")
    await wire.hear(*parts)
    is_pooled = pool.take_idle() is connection
    if is_clean_end and not wire.is_closed:
        connection.eof_received()
    connection.connection_lost(None)
    return caller, is_pooled


def one(data: bytes) -> None:
    reader = Reader(data)
    is_clean_end, seed, sent = reader.byte() % 2 > 0, reader.byte(), reader.rest()
    whole, is_pooled = run(_heard([sent], is_clean_end=is_clean_end))
    split, _ = run(_heard(pieces(sent, seed), is_clean_end=is_clean_end))
    for caller in (whole, split):
        _check(caller, sent, is_clean_end=is_clean_end)
    same(_summary(split), _summary(whole), "the answer in pieces")
    if is_pooled:
        message, end = strict_http1.answer(sent, 0, is_over=False)
        rest = sent[end:].strip(b"\r\n")  # empty lines belong to the next answer
        holds(not message.is_last and not rest, "a connection is used again that is not at an answer's end")


def _summary(caller: Caller) -> tuple[object, ...]:
    """Of what was cut more or less may have gone by."""
    is_whole = caller.on_end == "finished"
    return caller.status, caller.headers, caller.length, caller.on_end, caller.tapped_whole, is_whole and caller.body


def _check(caller: Caller, sent: bytes, *, is_clean_end: bool) -> None:
    expected: Message | None = None
    with suppress(NoHttp, More):
        expected, _ = strict_http1.answer(sent, 0, is_over=is_clean_end)
    same(caller.tapped, caller.body, "what is metered")
    holds(caller.outcome is not None, "the listener got no outcome")
    assert caller.outcome is not None
    same(
        caller.on_end,
        {True: "finished", False: "aborted" if caller.has_started else ""}[caller.outcome.is_whole],
        "the end",
    )
    same(caller.tapped_whole, caller.outcome.is_whole if caller.has_started else None, "the end of what is metered")
    if caller.on_end != "finished":
        return
    holds(expected is not None, f"whole to the caller, and to no strict reader: {caller.status} {caller.body!r}")
    assert expected is not None
    same(b"%d" % caller.status, expected.first[0], "the status")
    same(caller.body, expected.body, "the body")
    left_out = HOP_BY_HOP | expected.connection
    shown = [(name, value) for name, value in expected.headers if name not in left_out]
    same([(name, value.rstrip(b" \t")) for name, value in caller.headers], shown, "the headers")
    lengths = expected.all(b"content-length")
    same(caller.length, int(lengths[0]) if lengths else None, "the length")
