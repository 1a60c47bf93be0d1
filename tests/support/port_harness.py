"""A port between clients and a scripted upstream server, on real sockets, with time that a test moves."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from price_keeper.errors import Refusal
from price_keeper.exchange import Handler, Header, Request, Responder
from price_keeper.local_responses import send_refusal
from price_keeper.server.listener import Listener
from price_keeper.server.server_limits import ServerLimits
from price_keeper.tasks import Tasks
from price_keeper.upstream.connection_pool import UpstreamConnection, UpstreamEndpoint
from price_keeper.upstream.forwarder import BearerAuthorizer, Forwarder, UpstreamCall, UpstreamTarget
from price_keeper.upstream.relay import ResponseOutcome
from price_keeper.upstream.retry_joiner import RetryJoiner

from tests.support.ports import free_port
from tests.support.raw_clients import RESET, Http2TestClient, RawConnection, eventually

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The loops differ in when they write, and in what they raise on closed connections."""

    @functools.wraps(test)
    def run(loop: str, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(test(**fixtures))

    signature = inspect.signature(test)
    own = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", list(LOOPS))(run)


class StepClock:
    """Time that moves only when a test says so; unlike `ManualClock` it needs nothing of the loop but turns."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    monotonic = now

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, awake))
        await awake

    def move(self, seconds: float) -> None:
        self._now += seconds
        for due, awake in self._sleepers:
            if due <= self._now and not awake.done():
                awake.set_result(None)
        self._sleepers = [sleeper for sleeper in self._sleepers if not sleeper[1].done()]


class UpstreamExchange:
    """One call as the upstream server sees it, for a script to answer."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort()


ExchangeScript = Callable[[UpstreamExchange], Awaitable[None]]


@dataclass
class ScriptedUpstream:
    port: int
    calls: list[UpstreamExchange] = field(default_factory=list)
    connections: int = 0  # ever made
    open_connections: int = 0

    @property
    def endpoint(self) -> UpstreamEndpoint:
        return UpstreamEndpoint("127.0.0.1", self.port, False)


def reply_with(*pieces: bytes, then: Callable[[UpstreamExchange], None] | None = None) -> ExchangeScript:
    async def script(exchange: UpstreamExchange) -> None:
        await exchange.send(*pieces)
        if then is not None:
            then(exchange)

    return script


def build_response(body: bytes, status: int = 200, extra_headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), extra_headers, body)


@asynccontextmanager
async def upstream(
    script: ExchangeScript, *, send_buffer: int | None = None, **how: Any
) -> AsyncIterator[ScriptedUpstream]:
    """Reads calls whole and has each answered by the script."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        server.connections += 1
        server.open_connections += 1
        if send_buffer is not None:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            writer.transport.set_write_buffer_limits(high=send_buffer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0)
                exchange = UpstreamExchange(head, await reader.readexactly(length), writer)
                server.calls.append(exchange)
                await script(exchange)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # Python 3.11 trips over a serving task that was cancelled
        finally:
            writer.close()
            server.open_connections -= 1
            serving.discard(task)

    server = ScriptedUpstream(0)
    listening = await asyncio.start_server(serve, "127.0.0.1", 0, **how)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in tuple(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def closed_endpoint() -> UpstreamEndpoint:
    """Refuses connections."""
    return UpstreamEndpoint("127.0.0.1", free_port(), False)


async def echo(request: Request, responder: Responder) -> None:
    """Answers with what it was asked."""
    responder.start(200, ((b"method", request.method), (b"target", request.target)), len(request.body))
    responder.write(request.body)
    responder.finish()


class GatedEcho:
    """Echoes once it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started = 0

    async def __call__(self, request: Request, responder: Responder) -> None:
        self.started += 1
        await self.gate.wait()
        await echo(request, responder)


class WarningLog(logging.Handler):
    """What was logged as a warning or worse, by anybody, the event loop included."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@dataclass
class PortHarness:
    """A running port. When a test is done with it, it must be empty: no connection, no body, no task, no complaint."""

    listener: Listener
    port: int
    clock: StepClock
    tasks: Tasks
    log: WarningLog
    clients: list[RawConnection] = field(default_factory=list)
    clock_watchers: int = 1  # of the time

    async def connect(self, **how: Any) -> RawConnection:
        self.clients.append(await RawConnection.connect(self.port, **how))
        return self.clients[-1]

    async def connect_http2(self, **how: Any) -> Http2TestClient:
        client = await Http2TestClient.connect(self.port, **how)
        self.clients.append(client.connection)
        return client

    @property
    def open_connections(self) -> int:
        return len(self.listener._connections)

    @property
    def running_requests(self) -> int:
        return self.listener.active_requests

    def shrink_send_buffers(self) -> None:
        """From now on the kernel keeps little for clients that do not read."""
        for connection in self.listener._connections:
            kernel = connection._transport.get_extra_info("socket")
            kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def pass_time(self, seconds: float) -> None:
        """And let tasks that watch the time see it."""
        await eventually(lambda: len(self.clock._sleepers) >= self.clock_watchers)
        self.clock.move(seconds)
        await eventually(lambda: len(self.clock._sleepers) >= self.clock_watchers)

    def disconnect_clients(self) -> None:
        for wire in self.clients:
            wire.close()

    async def wait_until_empty(self) -> None:
        await eventually(lambda: not self.open_connections)
        await eventually(lambda: not self.running_requests)
        assert self.listener.reserved_bytes == 0


@asynccontextmanager
async def open_port(
    handler: Handler,
    *,
    tls: ssl.SSLContext | None = None,
    refused_at_head: Callable[[Request], Refusal | None] | None = None,
    **limits: Any,
) -> AsyncIterator[PortHarness]:
    clock, log = StepClock(), WarningLog()
    logging.getLogger().addHandler(log)
    try:
        async with Tasks(clock) as tasks:
            options = {"check_head": refused_at_head} if refused_at_head is not None else {}
            listener = Listener(handler, clock, tasks, ServerLimits(**limits), **options)
            harness = PortHarness(listener, await listener.listen("127.0.0.1", 0, tls), clock, tasks, log)
            try:
                yield harness
                harness.disconnect_clients()
                await harness.wait_until_empty()
                await listener.drain(0)
            finally:
                for door in listener._acceptors:
                    door.close()
                for connection in tuple(listener._connections):
                    connection.abort()
                for wire in harness.clients:
                    wire.close()
        assert log.lines == []
    finally:
        logging.getLogger().removeHandler(log)


@dataclass
class RecordingObserver:
    """What a tap saw of one answer."""

    status: int = 0
    received: bytes = b""
    ends: list[bool] = field(default_factory=list)

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None: ...

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.received += data

    def on_end(self, is_whole: bool) -> None:
        self.ends.append(is_whole)


class ForwardingHandler:
    """A handler that forwards whatever comes, with nothing in between but, if asked for, the joining of retries."""

    def __init__(
        self,
        *endpoints: UpstreamEndpoint,
        joins_retries: bool = False,
        new_tap: Callable[[], Any] | None = None,
        **forwarder: Any,
    ) -> None:
        self.set_targets(*endpoints)
        self._joins_retries = joins_retries
        self._new_tap = new_tap or RecordingObserver
        self.retry_joiner: RetryJoiner | None = None
        self._options = forwarder
        self.forwarder: Forwarder | None = None
        self.taps: list[Any] = []
        self.outcomes: list[ResponseOutcome] = []
        self.added: tuple[Header, ...] = ((b"x-added", b"by us"),)

    def set_targets(self, *endpoints: UpstreamEndpoint) -> None:
        self._targets = [UpstreamTarget(endpoint, "here", "a-model", "/there") for endpoint in endpoints]

    def start_forwarder(self, clock: StepClock) -> None:
        self.forwarder = Forwarder(BearerAuthorizer("k"), clock, **self._options)
        self.retry_joiner = RetryJoiner(clock.monotonic) if self._joins_retries else None

    async def __call__(self, request: Request, responder: Responder) -> None:
        invocation = request.headers.get(b"invocation")
        if self.retry_joiner is not None and invocation is not None:
            key = (request.headers.get(b"caller"), request.target, request.body, invocation)
            if self.retry_joiner.join(key, responder):
                return
            responder = self.retry_joiner.open_shared(key, responder)
        tap = self._new_tap()
        self.taps.append(tap)
        call = UpstreamCall("POST", "", [("x-target", request.target.decode())], lambda _: request.body, self._targets)
        assert self.forwarder is not None
        try:
            self.outcomes.append(await self.forwarder.forward(call, responder, self.added, tap))
        except Refusal as refusal:
            send_refusal(responder, refusal)

    @property
    def idle_connections(self) -> list[UpstreamConnection]:
        assert self.forwarder is not None
        return [each for pool in self.forwarder._pools.values() for each in pool._idle]

    @property
    def busy_connections(self) -> list[UpstreamConnection]:
        assert self.forwarder is not None
        return [each for pool in self.forwarder._pools.values() for each in pool._busy]


@asynccontextmanager
async def open_forwarding_port(handler: ForwardingHandler, **limits: Any) -> AsyncIterator[PortHarness]:
    """A port that forwards. At the end, nothing may be left of its upstream connections either."""
    async with open_port(handler, **limits) as harness:
        handler.start_forwarder(harness.clock)
        harness.tasks.run_every("upstream", 1.0, handler.forwarder.check_timeouts)
        harness.clock_watchers += 1
        try:
            yield harness
        except BaseException:
            handler.forwarder.close()
            raise
    assert handler.forwarder is not None
    assert not any(each._is_paused or each._sink or each.deadline for each in handler.idle_connections)
    handler.forwarder.close()
    await eventually(lambda: not any(each.is_open for each in (*handler.busy_connections, *handler.idle_connections)))
    assert not handler.busy_connections
