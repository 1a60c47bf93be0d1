"""Accepts connections, plain or over TLS, and detects their protocol by the first bytes.

TLS connections are counted and timed from before their handshake, and the oldest handshake makes room for a new one.
The module for HTTP/2 is imported with the first connection that needs it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Protocol

from price_keeper.server.sockets import BACKLOG
from price_keeper.tasks import Tasks

if TYPE_CHECKING:
    from price_keeper.server.listener import Listener
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from price_keeper.server.http1 import Http1Connection
from price_keeper.server.sockets import get_peer_address

if TYPE_CHECKING:
    from price_keeper.server.http2 import Http2Connection
    from price_keeper.server.listener import Listener

MAX_ACCEPTS_PER_TURN = 16  # handshakes begun in one turn of the loop, so that those under way get on too
ACCEPT_RETRY_SECONDS = 1.0  # after the process has run out of descriptors

_log = logging.getLogger("price_keeper.surface")


class Acceptor(Protocol):
    async def open(self) -> None: ...

    def close(self) -> None: ...


class PlainAcceptor:
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
    """The event loop tells of a connection when its handshake is done, so it must not be the one that accepts it."""

    def __init__(
        self, listener: Listener, listening_socket: socket.socket, context: ssl.SSLContext, tasks: Tasks
    ) -> None:
        self._listener = listener
        self._socket = listening_socket
        self._context = context
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[ProtocolDetector, None] = {}  # the oldest first
        self._is_open = False

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
                _log.error("cannot accept connections: %s", failure.strerror)
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume_accepting)
                return
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
        except OSError:  # which all failures of a handshake are; and it is the client's
            pass
        finally:
            self._handshakes.pop(detector, None)
            if not detector.is_handshake_done:
                self._listener.remove_connection(detector)


# HTTP/2 begins with a line that no HTTP/1.1 request can be.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class ProtocolDetector(asyncio.Protocol):
    """Over TLS it is counted and timed from before its handshake, of which the event loop tells nothing."""

    def __init__(self, listener: Listener, handshake_socket: socket.socket | None = None) -> None:
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

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
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
            self._hand_over(_create_http2_connection(self._listener, self._is_surplus))
        elif not HTTP2_PREFACE.startswith(prefix):
            self._hand_over(Http1Connection(self._listener, self._is_surplus))

    def _hand_over(self, connection: Http1Connection | Http2Connection) -> None:
        self._listener.remove_connection(self)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._data)

    # What the listener calls.

    def check_timeouts(self, now: float) -> None:
        if now - self._connected_at > self._listener.limits.head_seconds:
            self.abort()

    def drain(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._handshake_socket is None:
            self._transport.abort()
        else:
            with suppress(OSError):  # the client may just have gone
                self._handshake_socket.shutdown(socket.SHUT_RDWR)  # and so the handshake fails


def _read_peer_address(connected_socket: socket.socket) -> str:
    try:
        return str(connected_socket.getpeername()[0])
    except OSError:  # the client has just gone
        return ""


def _create_http2_connection(listener: Listener, is_surplus: bool) -> Http2Connection:
    from price_keeper.server.http2 import Http2Connection  # its library is a tenth of a start that has no use for it

    return Http2Connection(listener, is_surplus)
