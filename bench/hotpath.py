"""The hot path alone: a request's bytes in, the signed call out, Bedrock's answer in, the caller's answer out.

Everything is on and warm, and nothing of it is a stand-in but the two sockets: what the kernel costs is not in the
figures, so they hardly depend on what else the machine does. For looking closer there is `--profile`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, repeat
from pathlib import Path
from time import perf_counter
from typing import TypeAlias
from unittest.mock import patch

import uvloop
from hpack import Encoder
from price_keeper import app, data_port_wiring
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import parse_config
from price_keeper.server.acceptors import HTTP2_PREFACE, ProtocolDetector
from price_keeper.server.listener import Listener
from price_keeper.upstream.connection_pool import UpstreamConnection, UpstreamEndpoint
from price_keeper.upstream.forwarder import Forwarder

from bench.speed import frames
from bench.speed.contenders import (
    KEEPER,
    STREAMING,
    UNARY,
    Running,
    keeper_config,
    prepared,
    question,
    sdk_headers,
    token,
)
from bench.speed.upstream import ANSWER, QUESTION, REQUEST_ID

CONNECTIONS = 64
FRAMES = 60  # of one stream
KEPT_BYTES = 2**21  # of answers for retries: less than usual, so that soon each one that is kept drops the oldest
Then: TypeAlias = "Callable[[Wires], Awaitable[None]]"
UPSTREAM = UpstreamEndpoint("127.0.0.1", 9, False)
HEAD = (
    "HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: Thu, 19 Nov 2026 00:00:00 GMT\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(ANSWER)}\r\nConnection: keep-alive\r\nx-amzn-RequestId: {REQUEST_ID}\r\n\r\n"
)


class Wire(asyncio.Transport):
    """A socket that takes everything at once, and counts."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_write = on_write
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if bytes(data[:4]) == b"HTTP" and bytes(data[:12]) != b"HTTP/1.1 200":
            raise SystemExit(bytes(data[-200:]))  # a refusal is quick, and not what is measured
        self._on_write(bytes(data))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 40_000) if name == "peername" else default

    def close(self) -> None:
        if self.protocol is not None:
            lost, self.protocol = self.protocol, None
            asyncio.get_running_loop().call_soon(lost.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass(frozen=True)
class Traffic:
    """What callers send and Bedrock answers. `requests` are what one connection sends, turn after turn, beginning with
    what opens it; Bedrock's answer comes in `pieces`. `count_ends` is how many answers end in what was written."""

    title: str
    requests: Callable[[Running, bytes], Iterator[bytes]]
    pieces: tuple[bytes, ...]
    count_ends: Callable[[bytes], int]
    units: int = 1  # of what is counted, in one answer


def _count_whole_answers(written: bytes) -> int:
    return int(written.startswith(b"HTTP/1.1 200"))


def _count_last_chunks(written: bytes) -> int:
    return int(written.endswith(frames.END))


def _count_last_frames(written: bytes) -> int:
    """HTTP/2 frames with END_STREAM. Whole frames are written at once."""
    at = ends = 0
    while at < len(written):
        size, kind, flags = int.from_bytes(written[at : at + 3], "big"), written[at + 3], written[at + 4]
        if kind == _HEADERS and _STATUS_200 not in written[at + 9 : at + 11]:  # a table size may come first
            raise SystemExit(written)
        ends += kind in (_DATA, _HEADERS) and flags & _END_STREAM
        at += 9 + size
    return ends


def _bare_requests(running: Running, body: bytes) -> Iterator[bytes]:
    yield from repeat(question(running, body=body))


def _stream_requests(running: Running, body: bytes) -> Iterator[bytes]:
    yield from repeat(question(running, STREAMING, body))


def _sdk_requests(running: Running, body: bytes) -> Iterator[bytes]:
    """With the headers of botocore; each call has an id of its own, under which the SDK would repeat it."""
    while True:
        yield question(replace(running, headers=running.headers | sdk_headers()), body=body)


def _http2_requests(running: Running, body: bytes) -> Iterator[bytes]:
    """The same over HTTP/2, as the SDK for JavaScript sends it: most headers are in the encoder's table."""
    encoder = Encoder()
    opening = HTTP2_PREFACE + _frame(_SETTINGS, 0, 0, b"")
    window = _frame(_WINDOW_UPDATE, 0, 0, (1 << 20).to_bytes(4, "big"))
    for stream in count(1, 2):
        names = {":method": "POST", ":scheme": "http", ":path": UNARY, ":authority": f"127.0.0.1:{running.port}"}
        names |= {"content-type": "application/json", "content-length": str(len(body))}
        head = encoder.encode([*(names | running.headers | sdk_headers()).items()])
        asked = _frame(_HEADERS, _END_HEADERS, stream, head) + _frame(_DATA, _END_STREAM, stream, body)
        yield opening + window + asked
        opening = b""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _END_HEADERS = 1, 4
_STATUS_200 = 0x88  # in HPACK's static table
_UNARY = ((HEAD.encode() + ANSWER),)
_STREAM = tuple(frames.HEAD + frames.chunk(each) if not at else frames.chunk(each)
                for at, each in enumerate(frames.answer(FRAMES)))  # fmt: skip
BARE = Traffic("a request", _bare_requests, _UNARY, _count_whole_answers)
SDK = Traffic("a request with an SDK's headers", _sdk_requests, _UNARY, _count_whole_answers)
STREAM = Traffic("a frame of a stream", _stream_requests, (*_STREAM, frames.END), _count_last_chunks, FRAMES)
HTTP2 = Traffic("a request over HTTP/2 with an SDK's headers", _http2_requests, _UNARY, _count_last_frames)
ALL = {"request": BARE, "sdk": SDK, "stream": STREAM, "http2": HTTP2}


class Wires:
    """Both ends of some connections: callers' and Bedrock's."""

    def __init__(self, listener: Listener, forwarder: Forwarder, running: Running, body: bytes) -> None:
        self._listener, self._running, self._body = listener, running, body
        self.called: list[UpstreamConnection] = []
        pool = forwarder._pool(UPSTREAM)
        for _ in range(CONNECTIONS):
            connection = UpstreamConnection(pool)
            wire = Wire(lambda _, each=connection: self.called.append(each))
            wire.protocol = connection
            connection.connection_made(wire)
            pool.release(connection)

    async def open(self, traffic: Traffic) -> None:
        """New connections of callers; each has been answered once, and what the first calls look up is known."""
        self.traffic, self.answered, self.asked = traffic, 0, CONNECTIONS
        self._requests = [traffic.requests(self._running, self._body) for _ in range(CONNECTIONS)]
        self._callers = [self._open_caller(next(requests)) for requests in self._requests]
        while self.answered < self.asked:
            await self._answer_all()
            await asyncio.sleep(0.01)

    def _open_caller(self, first: bytes) -> asyncio.BaseProtocol:
        transport = Wire(self._hears)
        newcomer = ProtocolDetector(self._listener)
        newcomer.connection_made(transport)
        newcomer.data_received(first)
        assert transport.protocol is not None
        return transport.protocol

    def _hears(self, written: bytes) -> None:
        self.answered += self.traffic.count_ends(written)

    def asks(self, turns: int) -> list[list[bytes]]:
        """What is sent in so many turns, made beforehand, since it is not what is measured."""
        return [[next(requests) for requests in self._requests] for _ in range(turns)]

    async def turn(self, asks: list[bytes]) -> None:
        """Each caller asks once, and is answered."""
        for caller, ask in zip(self._callers, asks, strict=True):
            caller.data_received(ask)  # type: ignore[attr-defined]
        self.asked += len(asks)
        await self._answer_all()
        while self.answered < self.asked:
            await asyncio.sleep(0.001)  # some wait for a limit that a thread asks for: looking on would be counted
            await self._answer_all()

    async def _answer_all(self) -> None:
        await asyncio.sleep(0)
        called, self.called = self.called, []
        for piece in self.traffic.pieces:
            for connection in called:
                connection.data_received(piece)
        await asyncio.sleep(0)


@contextmanager
def _looking_in() -> Iterator[list[app._DataPort]]:
    """At the running parts, which nobody else needs to get at."""
    found: list[app._DataPort] = []
    composed = app._open_data_port

    async def kept(*parts: object) -> app._DataPort:
        port: app._DataPort = await composed(*parts)  # type: ignore[arg-type]
        found.append(port)
        return port

    with patch.object(app, "_open_data_port", kept):
        yield found


async def warm(folder: Path, then: Then, clock: Clock, body: bytes) -> None:
    text = keeper_config(folder, UPSTREAM.port, 0, 0)
    await prepared(folder / "store.db")
    done = asyncio.Event()

    async def started(_: app.StartedServer) -> None:
        port = found[0]
        running = Running(port.address.port, headers={"authorization": f"Bearer {token(text, clock=clock)}"})
        await then(Wires(port.listener, port.forwarder, running, body))
        done.set()
        os.kill(os.getpid(), 15)

    with _looking_in() as found, patch.object(data_port_wiring, "MAX_TOTAL_BYTES", KEPT_BYTES):
        os.environ.update(KEEPER)
        await app.run(parse_config(text, "the benchmark's", {}), os.environ, started, clock)
    assert done.is_set()


def run(then: Then, clock: Clock | None = None, body: bytes = QUESTION) -> None:
    """A clock of tests needs to see what asyncio's own loop has left to do."""
    made = uvloop.new_event_loop if clock is None else asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=made) as runner:
        runner.run(warm(Path(folder), then, clock or SystemClock(), body))


def measured(traffic: Traffic, rounds: int, turns: int) -> float:
    """Microseconds for a request, or a frame, in the best of some rounds."""
    best = [float("inf")]

    async def measure(wires: Wires) -> None:
        await wires.open(traffic)
        gc.collect()
        for _ in range(rounds):
            asks = wires.asks(turns)
            began = perf_counter()
            for each in asks:
                await wires.turn(each)
            best[0] = min(best[0], (perf_counter() - began) / (turns * CONNECTIONS * traffic.units) * 1e6)

    run(measure)
    return best[0]


def profiled(traffic: Traffic, turns: int) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()

    async def measure(wires: Wires) -> None:
        await wires.open(traffic)
        asks = wires.asks(turns)
        profile.enable()
        for each in asks:
            await wires.turn(each)
        profile.disable()

    run(measure)
    pstats.Stats(profile).sort_stats("tottime").print_stats(80)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--turns", type=int, default=20, help="of so many connections each, in a round")
    options.add_argument("--traffic", choices=ALL, default="request")
    options.add_argument("--profile", action="store_true")
    chosen = options.parse_args()
    traffic = ALL[chosen.traffic]
    if chosen.profile:
        profiled(traffic, chosen.turns * 20 // traffic.units + 1)
    else:
        spent = measured(traffic, chosen.rounds, chosen.turns // traffic.units + 1)
        print(f"the hot path: {spent:.2f} us for {traffic.title}")


if __name__ == "__main__":
    main()
