"""Where connections come in: the event loop's own way for plain ones, and one that sees handshakes for TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Protocol

from price_keeper.server.sockets import BACKLOG
from price_keeper.surface.newcomer import ProtocolDetector
from price_keeper.tasks import Tasks

if TYPE_CHECKING:
    from price_keeper.surface.listener import Listener

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
