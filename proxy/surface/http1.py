"""HTTP/1.1 on the data port: an asyncio protocol over llhttp's parser, one request after another on a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias, cast

import httptools

from proxy.answers import refuse
from proxy.errors import InvalidRequest, Refusal, TooLarge
from proxy.exchange import Flow, Header, Request

if TYPE_CHECKING:
    from proxy.surface.listener import Listener

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_NO_BODY = (204, 304)

# A request, whether the connection lives on after it, and whether its client understands chunks; or why there is none.
_Entry: TypeAlias = "tuple[Request, bool, bool] | Refusal"


class Http1Connection(asyncio.Protocol):
    """Reads requests, and is the responder of the one under way; those sent ahead wait their turn."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._limits = listener.limits
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[_Entry] = deque()
        self._is_deaf = False  # what still comes in is thrown away
        self._is_reading_paused = False
        self._is_serving = False
        self._keeps_alive = True
        self._is_chunked = False
        self._head = b""
        self._refusal: Refusal | None = None
        self._flow: Flow | None = None
        self.is_gone = False
        self.has_started = False
        self.since = listener.now()  # when the present wait began: for a head, a body, the next request, a reader
        self._is_write_paused = False
        self._begin_head()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(self._limits.write_buffer_bytes)
        self._listener.joined(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.is_gone = True
        self._waiting.clear()
        self._listener.left(self)
        if self._flow is not None:
            self._flow.caller_left()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._is_in_body:
            if self._head_bytes == 0:
                self.since = self._listener.now()
            room = self._limits.head_bytes - self._head_bytes
            if len(data) > room:
                self._feed(data[:room])
                if not self._is_in_body and not self._is_deaf:
                    self._stop_hearing(InvalidRequest(f"a request's head has at most {self._limits.head_bytes} bytes"))
                    return
                data = data[room:]
        self._feed(data)

    def eof_received(self) -> bool:
        # A client may close its half after its last request and still wait for the answer.
        self._is_deaf = True
        self._keeps_alive = False
        return self._is_serving

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.since = self._listener.now()
        if self._flow is not None:
            self._flow.pause()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._flow is not None:
            self._flow.resume()

    def check_time(self, now: float) -> None:
        """Called every second or so: ends what has waited too long."""
        waited = now - self.since
        if self._is_serving:
            if self._is_write_paused and waited > self._limits.stalled_seconds:
                self._transport.abort()
        elif self._is_in_body:
            if waited > self._limits.body_seconds:
                self._stop_hearing(InvalidRequest(f"the body took more than {self._limits.body_seconds:g} seconds"))
        elif self._head_bytes:
            if waited > self._limits.head_seconds:
                self._stop_hearing(InvalidRequest(f"the head took more than {self._limits.head_seconds:g} seconds"))
        elif waited > self._limits.idle_seconds:
            self._transport.close()

    def drain(self) -> None:
        """Finishes the request under way and takes no other."""
        self._is_deaf = True
        self._waiting.clear()
        self._keeps_alive = False
        if not self._is_serving:
            self._transport.close()

    def cut(self) -> None:
        self._transport.abort()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            return  # a trailer, which nothing here has a use for
        name = name.lower()
        if name in self._headers:
            self._repeated.add(name)
        else:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        headers = self._headers
        if int(headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            self._refuse_now(self._too_large())
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            self._refuse_now(InvalidRequest("a request needs a Host header"))
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue" and not self._is_serving:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_now(self._too_large())

    def on_message_complete(self) -> None:
        request = Request(self._parser.get_method(), self._target, self._headers, frozenset(self._repeated))
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        is_modern = self._parser.get_http_version() == "1.1"
        # An answer to HEAD would have no body, but every answer here has one: what follows it would be misread.
        keeps_alive = is_modern and request.method != b"HEAD" and self._parser.should_keep_alive()
        self._begin_head()
        self._take((request, keeps_alive, is_modern))

    def _begin_head(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._repeated: set[bytes] = set()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._is_in_body = False

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request that asked for it was taken; what follows it is in no language spoken here.
            self._is_deaf = True
        except httptools.HttpParserError as failure:
            self._stop_hearing(self._refusal or InvalidRequest(f"this is no HTTP request: {failure}"))
        else:
            if not self._is_in_body:
                self._head_bytes += len(data) if self._target or self._headers else 0

    def _refuse_now(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise ValueError  # stops the parser, which wraps it in an error of its own

    def _too_large(self) -> Refusal:
        return TooLarge(f"a request's body has at most {self._limits.body_bytes} bytes")

    # From a request to its answer.

    def _stop_hearing(self, refusal: Refusal) -> None:
        """The connection cannot be read any further: answers what was understood, then says why, then closes."""
        self._is_deaf = True
        self._begin_head()
        self._take(refusal)

    def _take(self, entry: _Entry) -> None:
        if self._is_serving:
            self._waiting.append(entry)
            if len(self._waiting) >= self._limits.pipelined and not self._is_reading_paused:
                self._is_reading_paused = True
                self._transport.pause_reading()
        else:
            self._serve(entry)

    def _serve(self, entry: _Entry) -> None:
        self._is_serving = True
        self.has_started = False
        self._is_chunked = False
        self._head = b""
        if isinstance(entry, Refusal):
            self._keeps_alive = self._takes_chunks = False
            refuse(self, entry)
            return
        request, self._keeps_alive, self._takes_chunks = entry
        if self._listener.is_draining:
            self._keeps_alive = False
        self._listener.begin(request, self)

    # The responder.

    def attach(self, flow: Flow) -> None:
        self._flow = flow
        if self._is_write_paused:
            flow.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.has_started = True
        head = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            head += (name, b": ", value, b"\r\n")
        if length is not None:
            head.append(b"content-length: %d\r\n" % length)
        elif self._takes_chunks and status not in _NO_BODY:
            self._is_chunked = True
            head.append(b"transfer-encoding: chunked\r\n")
        head.append(b"\r\n" if self._keeps_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(head)  # goes out with the first bytes of the body, in one packet

    def write(self, data: bytes) -> None:
        if self.is_gone or not data:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data = self._head + data
            self._head = b""
        self._transport.write(data)

    def flush(self) -> None:
        """Sends a head whose body is not there yet."""
        if self._head and not self.is_gone:
            self._transport.write(self._head)
            self._head = b""

    def finish(self) -> None:
        self.flush()
        if self._is_chunked and not self.is_gone:
            self._transport.write(b"0\r\n\r\n")
        self._flow = None
        self._is_serving = False
        self.since = self._listener.now()
        if not self._keeps_alive:
            self._is_deaf = True
            if not self.is_gone:
                self._transport.close()
        elif self._waiting:
            self._next()

    def abort(self) -> None:
        self._flow = None
        self._is_serving = False
        self._is_deaf = True
        self._waiting.clear()
        if not self.is_gone:
            self._transport.abort()

    def _next(self) -> None:
        entry = self._waiting.popleft()
        if self._is_reading_paused and not self.is_gone:
            self._is_reading_paused = False
            self._transport.resume_reading()
        self._serve(entry)
