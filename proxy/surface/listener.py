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
        self._has_emptied = asyncio.Event()

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """The port, which is a free one if 0 was asked for."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Newcomer(self), host, port, backlog=BACKLOG, ssl=tls)
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

    @property
    def is_full(self) -> bool:
        return len(self._connections) > self.limits.connections

    def begin(self, request: Request, responder: Responder) -> None:
        self._tasks.once(self._handled(request, responder))

    async def _handled(self, request: Request, responder: Responder) -> None:
        try:
            if self.is_full:
                raise Busy(f"there are {self.limits.connections} connections already", retry_after=1)
            await self._handler(request, responder)
        except Refusal as refusal:
            refuse(responder, refusal)
        except Exception as failure:
            _log.error("a request failed: %s", type(failure).__name__, exc_info=failure)
            refuse(responder, OurFault("an internal error; the sidecar's log has its cause"))

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
        self._listener.joined(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._listener.left(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        begun = self._data[: len(HTTP2_PREFACE)]
        if begun == HTTP2_PREFACE:
            self._become(Http2Connection(self._listener))
        elif not HTTP2_PREFACE.startswith(begun):
            self._become(Http1Connection(self._listener))

    def _become(self, connection: Http1Connection | Http2Connection) -> None:
        self._listener.left(self)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._data)

    def check_time(self, now: float) -> None:
        if now - self._since > self._listener.limits.head_seconds:
            self._transport.abort()

    def drain(self) -> None:
        self._transport.close()

    def cut(self) -> None:
        self._transport.abort()
