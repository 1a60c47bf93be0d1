"""The data port: takes connections, tells which protocol each speaks, counts and times them, and drains."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from proxy.answers import refuse
from proxy.clock import Clock
from proxy.errors import Busy, ListenFailed, OurFault, Refusal
from proxy.exchange import Handler, Request, Responder
from proxy.surface.http1 import Http1Connection
from proxy.surface.http2 import Http2Connection
from proxy.surface.limits import DEFAULT, Limits
from proxy.tasks import Tasks

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BACKLOG = 1024  # connections the kernel holds for us while the loop is busy
CHECK_SECONDS = 1.0  # how often waits are looked at: limits are in tens of seconds
CUT_SECONDS = 1.0  # what a connection gets to close after it was cut

_log = logging.getLogger("proxy.surface")


class Connection(Protocol):
    def check_time(self, now: float) -> None: ...

    def drain(self) -> None: ...

    def cut(self) -> None: ...


class Listener:
    def __init__(self, handler: Handler, clock: Clock, tasks: Tasks, limits: Limits = DEFAULT) -> None:
        self._handler = handler
        self._clock = clock
        self._tasks = tasks
        self.limits = limits
        self.now: Callable[[], float] = clock.monotonic
        self.is_draining = False
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.held_bytes = 0  # of the bodies of all requests that are coming in, waiting or under way
        self.too_many = Busy(f"there are {limits.connections} connections already", retry_after=1)
        self.full = Busy("the requests under way fill the memory set aside for them", retry_after=1)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """The port, which is a free one if 0 was asked for."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Newcomer(self),
                host,
                port,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_seconds if tls else None,
            )
        except OSError as failure:
            reason = os.strerror(failure.errno) if failure.errno else str(failure)
            raise ListenFailed(f"cannot listen on {host}:{port}: {reason}") from None
        self._tasks.every("time of connections", CHECK_SECONDS, self._check_time)
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def drain(self, seconds: float) -> None:
        """Takes no more, lets what is under way end, and cuts what has not after so many seconds."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.drain()
        await self._emptied(seconds)
        for connection in tuple(self._connections):
            connection.cut()
        await self._emptied(CUT_SECONDS)

    async def _emptied(self, seconds: float) -> None:
        deadline = self.now() + seconds
        while self._connections and self.now() < deadline:
            await self._clock.sleep(0.05)

    # What connections call.

    def joined(self, connection: Connection) -> None:
        self._connections.add(connection)

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def surplus(self) -> int:
        """How many connections there are too many, with one more."""
        return len(self._connections) + 1 - self.limits.connections

    def holds(self, more: int) -> bool:
        """Counts so much more of a body; whether there is room for it."""
        self.held_bytes += more
        return self.held_bytes <= self.limits.bodies_bytes

    def let_go(self, size: int) -> None:
        self.held_bytes -= size

    def begin(self, request: Request, responder: Responder) -> None:
        self._tasks.once(self._handled(request, responder))

    async def _handled(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except Refusal as refusal:
            refuse(responder, refusal)
        except Exception as failure:
            _log.error("a request failed: %s", type(failure).__name__, exc_info=failure)
            refuse(responder, OurFault("an internal error; the sidecar's log has its cause"))
        finally:
            self.held_bytes -= len(request.body)

    async def _check_time(self) -> None:
        now = self.now()
        for connection in tuple(self._connections):
            connection.check_time(now)


class _Newcomer(asyncio.Protocol):
    """A connection until its first bytes tell what it speaks; HTTP/2 begins with a line no HTTP/1.1 request can be."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._since = listener.now()
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        surplus = self._listener.surplus()
        self._is_surplus = surplus > 0
        self._listener.joined(self)
        if self._listener.is_draining or surplus > self._listener.limits.surplus:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._listener.left(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        begun = self._data[: len(HTTP2_PREFACE)]
        if begun == HTTP2_PREFACE:
            self._become(Http2Connection(self._listener, self._is_surplus))
        elif not HTTP2_PREFACE.startswith(begun):
            self._become(Http1Connection(self._listener, self._is_surplus))

    def _become(self, connection: Http1Connection | Http2Connection) -> None:
        self._listener.left(self)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._data)

    def check_time(self, now: float) -> None:
        if now - self._since > self._listener.limits.head_seconds:
            self._transport.abort()

    def drain(self) -> None:
        self._transport.abort()

    def cut(self) -> None:
        self._transport.abort()
