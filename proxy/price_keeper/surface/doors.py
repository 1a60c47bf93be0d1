"""Where connections come in: the event loop's own way for plain ones, and one that sees handshakes for TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Protocol

from price_keeper.surface.newcomer import Newcomer
from price_keeper.surface.sockets import BACKLOG
from price_keeper.tasks import Tasks

if TYPE_CHECKING:
    from price_keeper.surface.listener import Listener

ACCEPTED_AT_ONCE = 16  # handshakes begun in one turn of the loop, so that those under way get on too
AGAIN_SECONDS = 1.0  # after the process has run out of descriptors

_log = logging.getLogger("price_keeper.surface")


class Door(Protocol):
    async def open(self) -> None: ...

    def close(self) -> None: ...


class PlainDoor:
    def __init__(self, listener: Listener, kernel: socket.socket) -> None:
        self._listener = listener
        self._kernel = kernel

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Newcomer(self._listener), sock=self._kernel, backlog=BACKLOG)

    def close(self) -> None:
        self._server.close()


class TlsDoor:
    """The event loop tells of a connection when its handshake is done, so it must not be the one that accepts it."""

    def __init__(self, listener: Listener, kernel: socket.socket, context: ssl.SSLContext, tasks: Tasks) -> None:
        self._listener = listener
        self._kernel = kernel
        self._context = context
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[Newcomer, None] = {}  # the oldest first
        self._is_open = False

    async def open(self) -> None:
        self._kernel.listen(BACKLOG)
        self._is_open = True
        self._accept_on()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._kernel.fileno())
            self._kernel.close()

    def _accept_on(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._kernel.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                kernel, _ = self._kernel.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                _log.error("cannot accept connections: %s", failure.strerror)
                self._loop.remove_reader(self._kernel.fileno())
                self._loop.call_later(AGAIN_SECONDS, self._accept_on)
                return
            self._greet(kernel)

    def _greet(self, kernel: socket.socket) -> None:
        kernel.setblocking(False)
        newcomer = Newcomer(self._listener, kernel)
        if newcomer.is_unheard:
            self._listener.left(newcomer)
            kernel.close()
            return
        if len(self._handshakes) >= self._listener.limits.handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cut()
        self._handshakes[newcomer] = None
        self._tasks.once(self._shake_hands(newcomer, kernel))

    async def _shake_hands(self, newcomer: Newcomer, kernel: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: newcomer, kernel, ssl=self._context)
        except OSError:  # which all failures of a handshake are; and it is the client's
            pass
        finally:
            self._handshakes.pop(newcomer, None)
            if not newcomer.has_shaken_hands:
                self._listener.left(newcomer)
