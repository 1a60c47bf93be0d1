"""A connection until its first bytes tell what it speaks."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from price_keeper.server.sockets import get_peer_address
from price_keeper.surface.http1 import Http1Connection

if TYPE_CHECKING:
    from price_keeper.surface.http2 import Http2Connection
    from price_keeper.surface.listener import Listener

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
    from price_keeper.surface.http2 import Http2Connection  # its library is a tenth of a start that has no use for it

    return Http2Connection(listener, is_surplus)
