"""The way back for one request of an HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from price_keeper.exchange import FlowControl, Header

if TYPE_CHECKING:
    from price_keeper.surface.http1 import Http1Connection

_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS_STATUSES: Final = (204, 304)


class Http1Responder:
    """A responder for one request alone: whoever still holds it later cannot touch the next one's answer."""

    __slots__ = (
        "_connection",
        "_head",
        "_is_chunked",
        "_is_over",
        "_length",
        "_takes_chunks",
        "_transport",
        "_write_batcher",
        "flow",
        "has_started",
        "is_disconnected",
        "keeps_alive",
    )  # fmt: skip

    def __init__(
        self, connection: Http1Connection, transport: asyncio.Transport, keeps_alive: bool, takes_chunks: bool
    ) -> None:
        self._connection = connection
        self._write_batcher = connection.write_batcher
        self._transport = transport
        self._length: int | None = None
        self.keeps_alive = keeps_alive
        self._takes_chunks = takes_chunks
        self._is_chunked = False
        self._is_over = False
        self._head = b""
        self.flow: FlowControl | None = None
        self.has_started = False
        self.is_disconnected = False

    def attach(self, flow: FlowControl) -> None:
        self.flow = flow
        if self._connection.is_write_paused:
            flow.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.has_started = True
        self._length = length
        framing = b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif status not in _BODILESS_STATUSES:
            if self._takes_chunks:
                self._is_chunked = True
                framing = b"transfer-encoding: chunked\r\n"
            else:
                self.keeps_alive = False  # the end of the connection is the end of the body
        end = b"\r\n" if self.keeps_alive else b"connection: close\r\n\r\n"
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        lines = b"\r\n".join(map(b": ".join, headers))
        # It goes out with the first bytes of the body, in one packet.
        self._head = b"%b%b\r\n%b%b" % (line, lines, framing, end) if headers else line + framing + end

    def write(self, data: bytes) -> None:
        if self.is_disconnected or not data:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            is_all = len(data) == self._length
            data = self._head + data
            self._head = b""
            if is_all and self.keeps_alive:
                self._write_batcher.write(self._transport.write, data)
                return
        self._send(data)

    def flush(self) -> None:
        if self._head and not self.is_disconnected:
            self._send(self._head)
            self._head = b""

    def _send(self, data: bytes) -> None:
        self._write_batcher.flush()  # where something of an answer before this one may be
        self._transport.write(data)

    def finish(self) -> None:
        if self._is_over:
            return
        was_disconnected = self.is_disconnected
        if not was_disconnected:
            self._write_end()
        self._mark_over()
        if not was_disconnected:
            self._connection.on_response_finished(self.keeps_alive)

    def abort(self) -> None:
        if self._is_over:
            return
        flow, was_disconnected = self.flow, self.is_disconnected
        self._mark_over()
        if not was_disconnected:
            self._connection.on_response_aborted()
        if flow is not None:
            flow.on_disconnected()

    def on_disconnected(self) -> None:
        """The connection is gone."""
        self.is_disconnected = True
        flow, self.flow = self.flow, None  # it leads back here
        if flow is not None:
            flow.on_disconnected()

    def _write_end(self) -> None:
        self.flush()
        if self._is_chunked:
            self._send(b"0\r\n\r\n")

    def _mark_over(self) -> None:
        self._is_over = self.is_disconnected = self.has_started = True
        self.flow = None


class HeadResponder(Http1Responder):
    """To HEAD: the head that a body would have had."""

    __slots__ = ()

    def write(self, data: bytes) -> None:
        pass

    def _write_end(self) -> None:
        self.flush()
