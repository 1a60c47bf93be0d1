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
from pathlib import Path
from time import perf_counter
from typing import TypeAlias
from unittest.mock import patch

import uvloop
from price_keeper import app
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import parse_config
from price_keeper.server.acceptors import ProtocolDetector
from price_keeper.server.listener import Listener
from price_keeper.upstream.connection_pool import UpstreamConnection, UpstreamEndpoint
from price_keeper.upstream.forwarder import Forwarder

from bench.speed.contenders import KEEPER, Running, keeper_config, prepared, question, token
from bench.speed.upstream import ANSWER, QUESTION, REQUEST_ID

CONNECTIONS = 64
Then: TypeAlias = "Callable[[Wires], Awaitable[None]]"
UPSTREAM = UpstreamEndpoint("127.0.0.1", 9, False)
HEAD = (
    "HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: Thu, 19 Nov 2026 00:00:00 GMT\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(ANSWER)}\r\nConnection: keep-alive\r\nx-amzn-RequestId: {REQUEST_ID}\r\n\r\n"
)


class Wire(asyncio.Transport):
    """A socket that takes everything at once, and counts."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if bytes(data[:4]) == b"HTTP" and bytes(data[:12]) != b"HTTP/1.1 200":
            raise AssertionError(bytes(data[-200:]))  # a refusal is quick, and not what is measured
        self._told()

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


class Wires:
    """Both ends of some connections: callers' and Bedrock's."""

    def __init__(self, listener: Listener, forwarder: Forwarder, asked: bytes) -> None:
        self.asked = asked
        self.answer = HEAD.encode() + ANSWER
        self.called: list[UpstreamConnection] = []
        self.answered, self.asked_for = 0, CONNECTIONS
        pool = forwarder._pool(UPSTREAM)
        for _ in range(CONNECTIONS):
            connection = UpstreamConnection(pool)
            wire = Wire(lambda each=connection: self.called.append(each))
            wire.protocol = connection
            connection.connection_made(wire)
            pool.release(connection)
        self.callers = [self._caller(listener) for _ in range(CONNECTIONS)]

    def _caller(self, listener: Listener) -> asyncio.BaseProtocol:
        transport = Wire(self._hears)
        newcomer = ProtocolDetector(listener)
        newcomer.connection_made(transport)
        newcomer.data_received(self.asked)
        assert transport.protocol is not None
        return transport.protocol

    def _hears(self) -> None:
        self.answered += 1

    async def turn(self) -> None:
        """Each caller asks once, and is answered."""
        for caller in self.callers:
            caller.data_received(self.asked)  # type: ignore[attr-defined]
        self.asked_for += len(self.callers)
        while self.answered < self.asked_for:  # a few of them wait for more of a limit
            await self.answer_all()

    async def answer_all(self) -> None:
        await asyncio.sleep(0)
        called, self.called = self.called, []
        for connection in called:
            connection.data_received(self.answer)
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
        running = Running(port.address.port, headers={"authorization": f"Bearer {token(text)}"})
        asked = question(running, body=body)
        path = Wires(port.listener, port.forwarder, asked)
        while path.answered < CONNECTIONS:  # the first ones look things up
            await path.answer_all()
            await asyncio.sleep(0.01)
        await then(path)
        done.set()
        os.kill(os.getpid(), 15)

    with _looking_in() as found:
        os.environ.update(KEEPER)
        await app.run(parse_config(text, "the benchmark's", {}), os.environ, started, clock)
    assert done.is_set()


def run(then: Then, clock: Clock | None = None, body: bytes = QUESTION) -> None:
    """A clock of tests needs to see what asyncio's own loop has left to do."""
    made = uvloop.new_event_loop if clock is None else asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=made) as runner:
        runner.run(warm(Path(folder), then, clock or SystemClock(), body))


def measured(rounds: int, turns: int) -> float:
    """Microseconds for a request, in the best of some rounds."""
    best = [float("inf")]

    async def measure(path: Wires) -> None:
        gc.collect()
        for _ in range(rounds):
            began, before = perf_counter(), path.answered
            for _ in range(turns):
                await path.turn()
            assert path.answered - before == turns * CONNECTIONS
            best[0] = min(best[0], (perf_counter() - began) / (turns * CONNECTIONS) * 1e6)

    run(measure)
    return best[0]


def profiled(turns: int) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()

    async def measure(path: Wires) -> None:
        profile.enable()
        for _ in range(turns):
            await path.turn()
        profile.disable()

    run(measure)
    pstats.Stats(profile).sort_stats("tottime").print_stats(80)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--turns", type=int, default=20, help="of so many connections each, in a round")
    options.add_argument("--profile", action="store_true")
    chosen = options.parse_args()
    if chosen.profile:
        profiled(chosen.turns * 20)
    else:
        print(f"the hot path: {measured(chosen.rounds, chosen.turns):.2f} us a request")


if __name__ == "__main__":
    main()
