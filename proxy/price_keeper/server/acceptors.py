"""Accept connections, plain or over TLS, and detect their protocol from the first bytes.

A TLS connection counts against the limits, and its head timeout runs, from before its handshake. When the limit on
handshakes is reached, the oldest unfinished one is aborted to make room for the new one. The HTTP/2 module is imported
with the first connection that needs it. Start with `ProtocolDetector`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

from price_keeper.server import http2_frames
from price_keeper.server.http1 import Http1Connection
from price_keeper.server.sockets import BACKLOG, get_peer_address
from price_keeper.tasks import Tasks
from price_keeper.telemetry.incident import Incident

if TYPE_CHECKING:
    from price_keeper.server.http2 import Http2Connection
    from price_keeper.server.listener import Listener

MAX_ACCEPTS_PER_TURN = 16  # handshakes started in one loop iteration, so that those already running also progress
ACCEPT_RETRY_SECONDS = 1.0  # pause in accepting after `accept` failed, usually because descriptors ran out
HTTP2_PREFACE = http2_frames.PREFACE  # no HTTP/1.1 request starts so

_log = logging.getLogger("price_keeper.surface")


class Acceptor(Protocol):
    """Accepts the connections of one listening socket."""

    async def open(self) -> None: ...

    def close(self) -> None: ...


class PlainAcceptor:
    """Accepts connections without TLS through the event loop's own server."""

    def __init__(self, listener: Listener, listening_socket: socket.socket) -> None:
        self._listener = listener
        self._socket = listening_socket

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ProtocolDetector(self._listener), sock=self._socket, backlog=BACKLOG
        )

    def close(self) -> None:
        self._server.close()


class TlsAcceptor:
    """Accepts TLS connections itself: the event loop's server would report a connection only after its handshake,
    so unfinished handshakes could be neither counted nor timed."""

    def __init__(
        self, listener: Listener, listening_socket: socket.socket, context: ssl.SSLContext, tasks: Tasks
    ) -> None:
        self._listener = listener
        self._socket = listening_socket
        self._context = context
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[ProtocolDetector, None] = {}  # unfinished ones, oldest first
        self._is_open = False
        self._incident = Incident(_log, self._loop.time, logging.ERROR)

    async def open(self) -> None:
        self._socket.listen(BACKLOG)
        self._is_open = True
        self._resume_accepting()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _resume_accepting(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_PER_TURN):
            try:
                client_socket, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                self._incident.report(
                    "data port cannot accept connections (%s); it accepts none for %g s, then tries again",
                    failure.strerror,
                    ACCEPT_RETRY_SECONDS,
                )
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume_accepting)
                return
            self._incident.end("data port accepts connections again")
            self._start_handshake(client_socket)

    def _start_handshake(self, client_socket: socket.socket) -> None:
        client_socket.setblocking(False)
        detector = ProtocolDetector(self._listener, client_socket)
        if detector.must_abort:
            self._listener.remove_connection(detector)
            client_socket.close()
            return
        if len(self._handshakes) >= self._listener.limits.handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.abort()
        self._handshakes[detector] = None
        self._tasks.spawn(self._run_handshake(detector, client_socket))

    async def _run_handshake(self, detector: ProtocolDetector, client_socket: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: detector, client_socket, ssl=self._context)
        except OSError:  # every handshake failure is an OSError, and its cause lies with the client
            pass
        finally:
            self._handshakes.pop(detector, None)
            if not detector.is_handshake_done:
                self._listener.remove_connection(detector)


class ProtocolDetector(asyncio.Protocol):
    """A connection whose protocol is not known yet; hands it over to HTTP/1.1 or HTTP/2 after its first bytes.

    Over TLS it is registered with the listener, and times out, from before its handshake, because the event loop
    reports nothing about a connection until the handshake is done.
    """

    def __init__(self, listener: Listener, handshake_socket: socket.socket | None = None) -> None:
        """`handshake_socket` is given for a TLS connection that still has to do its handshake."""
        self.protocol = "unknown"
        self.open_streams = 0
        self._listener = listener
        self._handshake_socket = handshake_socket
        self._connected_at = listener.now()
        self._data = b""
        if handshake_socket is not None:
            self._register(_read_peer_address(handshake_socket))

    def _register(self, peer: str) -> None:
        surplus = self._listener.count_surplus(peer)
        self._is_surplus = surplus > 0
        self.must_abort = surplus > self._listener.limits.surplus_connections or self._listener.is_draining
        self._listener.add_connection(self, peer)

    @property
    def is_handshake_done(self) -> bool:
        return self._handshake_socket is None

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass, but works as one
        if self._handshake_socket is None:
            self._register(get_peer_address(transport))
        self._handshake_socket = None
        if self.must_abort:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._listener.remove_connection(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        prefix = self._data[: len(HTTP2_PREFACE)]
        if prefix == HTTP2_PREFACE:
            self._hand_over(_create_http2_connection(self._listener, self._is_surplus), self._data[len(prefix) :])
        elif not HTTP2_PREFACE.startswith(prefix):
            self._hand_over(Http1Connection(self._listener, self._is_surplus), self._data)

    def _hand_over(self, connection: Http1Connection | Http2Connection, data: bytes) -> None:
        self._listener.remove_connection(self)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(data)

    # Called by the listener.

    def check_timeouts(self, now: float) -> None:
        if now - self._connected_at > self._listener.limits.head_seconds:
            self.abort()

    def drain(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._handshake_socket is None:
            self._transport.abort()
        else:
            with suppress(OSError):  # the client may have disconnected already
                self._handshake_socket.shutdown(socket.SHUT_RDWR)  # makes the handshake fail


def _read_peer_address(connected_socket: socket.socket) -> str:
    try:
        return str(connected_socket.getpeername()[0])
    except OSError:  # the client has disconnected already
        return ""


def _create_http2_connection(listener: Listener, is_surplus: bool) -> Http2Connection:
    from price_keeper.server.http2 import Http2Connection  # importing hpack would slow every start

    return Http2Connection(listener, is_surplus)
