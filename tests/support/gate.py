"""A way to a server that can be shut, so that the server is away, and opened again, under one address."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PIECE = 64 * 1024


class Gate:
    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._port = 0
        self._listener: socket.socket | None = None
        self._pairs: set[socket.socket] = set()
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.shut()

    def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port), reuse_port=False)
        self._listener, self._port = listener, listener.getsockname()[1]
        threading.Thread(target=self._take, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """New connections are refused, and those there are break."""
        if self._listener is not None:
            _end(self._listener)
            self._listener = None
        for each in tuple(self._pairs):
            _end(each)

    def _take(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(self._upstream)
            except OSError:
                return
            self._pairs |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                sink.sendall(data)
        for each in (source, sink):
            self._pairs.discard(each)
            _end(each)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
