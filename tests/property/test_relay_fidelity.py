"""Whatever upstream answers, however framed and cut, callers get those bytes, in order, once, and theirs alone."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.operations import Operation
from price_keeper.upstream.eventstream import encode_frame
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.usage_reader import UsageReader, build_reader

from tests.support.effort import tries
from tests.support.port_harness import (
    LOOPS,
    ForwardingHandler,
    PortHarness,
    UpstreamExchange,
    open_forwarding_port,
    upstream,
)
from tests.support.raw_clients import Http2TestClient, RawConnection, WireResponse, ask, eventually

FRAMING = {"content-length", "transfer-encoding", "connection"}
HOP_BY_HOP = {"keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "upgrade"}
OURS = FRAMING | HOP_BY_HOP | {"x-added", "x-hop"}

names = st.text(st.sampled_from("abcXYZ019-_.!~'"), min_size=1, max_size=12).filter(
    lambda name: name.lower() not in OURS
)
values = st.binary(max_size=20).map(lambda raw: bytes(32 + byte % 224 for byte in raw).replace(b"\x7f", b"!").strip())
real = st.sampled_from(
    [("x-amzn-RequestId", b"1-2-3"), ("Content-Type", b"application/json"), ("X-Amzn-Bedrock-Input-Token-Count", b"12")]
)
heads = st.lists(st.one_of(st.tuples(names, values), real), max_size=8)


def streamed(payloads: list[bytes]) -> bytes:
    return b"".join(encode_frame({":message-type": "event", ":event-type": "chunk"}, payload) for payload in payloads)


# Around the sizes of frames, windows, buffers and reads.
sizes = st.sampled_from([1, 16_383, 16_384, 16_385, 65_535, 65_536, 65_537, 262_144, 400_000]) | st.integers(0, 200_000)
bodies = st.one_of(
    st.binary(max_size=300),
    st.tuples(sizes, st.integers(0, 99)).map(lambda made: random.Random(made[1]).randbytes(made[0])),
    st.lists(st.binary(max_size=2000), max_size=30).map(streamed),
)


@dataclass(frozen=True)
class Answer:
    status: int
    head: list[tuple[str, bytes]]
    body: bytes
    chunks: list[int] | None  # where chunks end; None: a length instead
    cuts: list[int]  # where packets end, as far as that can be said
    hop: bool

    @property
    def has_body(self) -> bool:
        return self.status not in (204, 304)

    def pieces(self) -> list[bytes]:
        lines = [b"HTTP/1.1 %d Some Reason\r\n" % self.status]
        lines += [b"%b: %b\r\n" % (name.encode(), value) for name, value in self.head]
        if self.hop:
            lines.append(b"Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: for you alone\r\n")
        if self.has_body:
            lines.append(self._framing())
        raw = b"".join(lines) + b"\r\n" + (self._framed() if self.has_body else b"")
        at = sorted({cut % (len(raw) + 1) for cut in self.cuts} | {0, len(raw)})
        return [raw[start:end] for start, end in pairwise(at)]

    def _framing(self) -> bytes:
        return b"content-length: %d\r\n" % len(self.body) if self.chunks is None else b"Transfer-Encoding: chunked\r\n"

    def _framed(self) -> bytes:
        if self.chunks is None:
            return self.body
        at = sorted({end % (len(self.body) + 1) for end in self.chunks} | {0, len(self.body)})
        parts = [self.body[start:end] for start, end in pairwise(at)]
        return b"".join(b"%X;of=us\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nx-trailer: 1\r\n\r\n"

    def is_matched_by(self, heard: WireResponse) -> None:
        assert heard.status == self.status
        seen = [(name.decode(), value) for name, value in heard.headers if name.decode() not in FRAMING]
        assert seen == [(name.lower(), value) for name, value in self.head] + [("x-added", b"by us")]
        assert heard.body == (self.body if self.has_body else b"")
        if self.has_body and self.chunks is None:
            assert heard[b"content-length"] == b"%d" % len(self.body)


answers = st.builds(
    Answer,
    status=st.sampled_from([200, 200, 200, 201, 204, 299, 302, 304, 400, 404, 429, 500, 599]),
    head=heads,
    body=bodies,
    chunks=st.none() | st.lists(st.integers(0, 1_000_000), max_size=10),
    cuts=st.lists(st.integers(0, 1_000_000), max_size=8),
    hop=st.booleans(),
)


@dataclass(frozen=True)
class Asked:
    """One call: by which of the clients, with which body, and what upstream says to it."""

    client: int
    body: bytes
    answer: Answer


calls = st.lists(
    st.builds(Asked, client=st.integers(0, 3), body=st.binary(max_size=100) | bodies, answer=answers),
    min_size=1,
    max_size=8,
)


@dataclass
class Bench:
    """Two HTTP/1.1 and two HTTP/2 connections that live as long as they can, before one sidecar."""

    rig: PortHarness
    clients: list[RawConnection | Http2TestClient] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)

    async def script(self, exchange: UpstreamExchange) -> None:
        number = int(exchange.head.partition(b"x-target: /")[2].partition(b"\r\n")[0])
        self.bodies[number] = exchange.body
        await exchange.send(*self.answers[number].pieces())

    async def check(self, asked: list[Asked]) -> None:
        self.answers[:] = [each.answer for each in asked]
        self.bodies.clear()
        await asyncio.gather(*(self._client(number, asked) for number in range(len(self.clients))))
        assert self.bodies == {number: each.body for number, each in enumerate(asked)}

    async def _client(self, client: int, asked: list[Asked]) -> None:
        """All that it asks is in flight at once."""
        mine = [(number, each) for number, each in enumerate(asked) if each.client == client]
        wire = self.clients[client]
        if isinstance(wire, RawConnection):
            sending = asyncio.create_task(wire.send(*(ask(each.body, path=b"/%d" % number) for number, each in mine)))
            for _, each in mine:
                each.answer.is_matched_by(await wire.answer(has_body=each.answer.has_body))
            await sending
            assert wire.received == b""
            return
        streams = [(wire.open(b"/%d" % number, ends=not each.body), each) for number, each in mine]
        for stream, each in streams:
            await wire.body(stream, each.body)
        for stream, each in streams:
            each.answer.is_matched_by(await wire.answer(stream))
            del wire.streams[stream]


class Reading:
    """Reads every answer for its usage, as the meter does, and forgets it."""

    def __init__(self) -> None:
        self._reader: UsageReader | None = None

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None: ...

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._reader = build_reader(Operation.INVOKE_STREAM, "", headers.get(b"content-type", b""), headers)

    def on_data(self, data: bytes) -> None:
        assert self._reader is not None
        self._reader.feed(data)

    def on_end(self, is_whole: bool) -> None:
        assert self._reader is not None
        self._reader.usage()
        self._reader.estimate_output()


@asynccontextmanager
async def bench(narrow: bool) -> AsyncIterator[Bench]:
    through = ForwardingHandler(new_tap=Reading)
    made: list[Bench] = []
    async with upstream(lambda exchange: made[0].script(exchange)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            made.append(Bench(rig))
            how = {"receive_buffer": 4096} if narrow else {}
            made[0].clients += [
                await rig.connect(**how),
                await rig.connect(),
                await rig.connect_http2(**how),
                await rig.connect_http2(),
            ]
            await eventually(lambda: rig.open_connections == 4)
            if narrow:
                rig.shrink_send_buffers()
            yield made[0]
            assert rig.open_connections == 4  # none was ever closed
            assert server.connections <= 8
            rig.log.lines.clear()  # the watcher says which of these streams it took for broken


def with_one(check: Callable[[Bench, list[Asked]], Awaitable[None]], loop: str, *, narrow: bool) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        opened = bench(narrow)
        one = runner.run(opened.__aenter__())

        @settings(max_examples=tries(75))
        @given(calls)
        def examples(asked: list[Asked]) -> None:
            runner.run(check(one, asked))

        examples()
        runner.run(opened.__aexit__(None, None, None))


@pytest.mark.parametrize("loop", LOOPS)
def test_every_response_is_relayed_byte_for_byte(loop: str) -> None:
    with_one(Bench.check, loop, narrow=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_irregularly_read_response_is_relayed_byte_for_byte(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream is then paused and resumed at random places."""
    chance = random.Random(11)
    reads = RawConnection.read_more

    @functools.wraps(reads)
    async def more(wire: RawConnection, most: int = 65536) -> bool:
        if chance.random() < 0.1:
            await asyncio.sleep(0.002)
        return await reads(wire, chance.randrange(1, 20_000))

    monkeypatch.setattr(RawConnection, "read_more", more)
    with_one(Bench.check, loop, narrow=True)
