"""HTTP/1.1: the asyncio protocol of a connection, and the responder of each of its requests.

Requests are answered in order; pipelined ones are queued up to a limit, after which reading pauses. A responder belongs
to one request, so code that keeps it too long cannot touch the next response. The parser is in `http1_parser`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

from price_keeper.errors import InvalidRequest, Refusal
from price_keeper.exchange import FlowControl, Header, Request
from price_keeper.server.http1_parser import Http1RequestParser
from price_keeper.server.server_limits import MAX_SLICES_PER_TURN, SLICE_BYTES
from price_keeper.server.sockets import WriteStallDetector, get_peer_address, reset_connection

if TYPE_CHECKING:
    from price_keeper.server.listener import Listener

_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS_STATUSES: Final = (204, 304)


class _PipelinedRequest(NamedTuple):
    """A complete request, queued until the responses to earlier ones are written."""

    request: Request
    keeps_alive: bool
    takes_chunks: bool
    weight: int


_PipelineEntry: TypeAlias = "_PipelinedRequest | Refusal"  # a Refusal stands for input that is no valid request


class Http1Connection(asyncio.Protocol):
    """One client connection. Serves one request at a time and queues pipelined ones."""

    def __init__(self, listener: Listener, is_surplus: bool = False) -> None:
        self.protocol = "http/1.1"
        self.open_streams = 0
        self._listener = listener
        self._limits = listener.limits
        self.write_batcher = listener.write_batcher
        self._is_surplus = is_surplus
        self._slice_bytes = min(SLICE_BYTES, self._limits.head_bytes)
        self._request_parser = Http1RequestParser(self, listener)
        self._responder: Http1Responder | None = None  # of the active request
        self._pipelined: deque[_PipelineEntry] = deque()
        self._is_serving_pipelined = False
        self._unread = b""  # received but not parsed: the queue is full, or the slices of this loop iteration are used
        self._unread_weight = 0  # memory reserved for `_unread`
        self._is_reading_paused = False  # the queue of pipelined requests is full
        self._is_yielding = False  # parsing continues in the next iteration of the event loop
        self._is_input_ignored = False  # input is discarded from now on
        self._is_input_cut_short = False  # the client may still be sending when the connection closes
        self._is_closed = False
        self.is_write_paused = False
        self._write_stall: WriteStallDetector | None = None  # while writing is paused or the connection closes
        self._wait_started_at = listener.now()  # of the present wait for a head, a body or the next request

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass, but works as one
        self._transport.set_write_buffer_limits(self._limits.write_buffer_bytes)
        self._peer = get_peer_address(transport)
        self._listener.add_connection(self, self._peer)

    def connection_lost(self, _: Exception | None) -> None:
        self._is_closed = True
        self._listener.remove_connection(self)
        self._discard_input()
        self._request_parser.detach()
        responder, self._responder = self._responder, None
        if responder is not None:
            responder.on_disconnected()

    def data_received(self, data: bytes) -> None:
        if self._is_input_ignored:
            return
        if len(data) <= self._slice_bytes and not self._request_parser.head_bytes and not self._unread:
            self._request_parser.feed(data)
        else:
            self._unread += data
            self._feed_unread()

    def eof_received(self) -> bool:
        self.write_batcher.flush()  # a batched response must go out before the event loop closes the connection
        # A client may close its half after its last request and still wait for the response, though not over TLS.
        self._request_parser.discard_request()
        self._is_input_ignored = True
        self._is_input_cut_short = False
        return (self._responder is not None or bool(self._pipelined)) and self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._write_stall = WriteStallDetector(self._transport, self._listener.now())
        if self._responder is not None and self._responder.flow is not None:
            self._responder.flow.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if not self._is_closed:
            self._write_stall = None
        if self._responder is None:
            if not self._is_closed:
                self.restart_wait_timer()
                self._serve_next()
        elif self._responder.flow is not None:
            self._responder.flow.resume()

    def check_timeouts(self, now: float) -> None:
        """Ends the connection or its request if the client stalls reading, or takes too long to send."""
        if self._write_stall is not None:
            self._check_write_stall(self._write_stall.measure_stall(now))
        elif self._responder is None and not self._is_closed:
            self._check_request_timeout(now - self._wait_started_at)

    def _check_write_stall(self, stalled: float) -> None:
        is_lingering = self._is_closed and not self._transport.is_closing()
        if stalled > (self._limits.lingering_seconds if is_lingering else self._limits.stalled_seconds):
            reset_connection(self._transport)
        elif self._responder is not None and self._responder.flow is not None:
            self._responder.flow.on_stalled(stalled)

    def _check_request_timeout(self, waited: float) -> None:
        if self._request_parser.has_begun:
            timeout = self._request_parser.find_timeout(waited)
            if timeout is not None:
                self.stop_reading(InvalidRequest(timeout))
        elif waited > (self._limits.head_seconds if self._request_parser.head_bytes else self._limits.idle_seconds):
            self._close()

    def drain(self) -> None:
        """Finishes the active request, or one that is partly received, takes no other, and closes."""
        if self._responder is not None:
            self._discard_input()
            self._responder.keeps_alive = False
        elif not (self._request_parser.is_in_body or self._request_parser.head_bytes):
            self._close()

    def abort(self) -> None:
        self.write_batcher.flush()
        reset_connection(self._transport)

    # Called by the parser.

    def restart_wait_timer(self) -> None:
        self._wait_started_at = self._listener.now()

    def on_request(self, request: Request, keeps_alive: bool, takes_chunks: bool, weight: int) -> None:
        if self._can_serve():
            self._serve(request, keeps_alive, takes_chunks, weight)
        else:
            self._enqueue(_PipelinedRequest(request, keeps_alive, takes_chunks, weight))

    def stop_reading(self, refusal: Refusal) -> None:
        """Stops parsing: serves the requests parsed so far, then responds with `refusal`, then closes."""
        self._is_input_ignored = self._is_input_cut_short = True
        begun_head = self._request_parser.read_begun_head()
        self._request_parser.discard_request()
        self._set_unread(b"")
        if self._can_serve():
            self._refuse(refusal, begun_head)
        else:
            self._enqueue(refusal)

    def send_continue_if_due(self) -> None:
        """Sends `100 Continue` if the request being received asks for it and all earlier ones are answered."""
        if self._request_parser.is_continue_due and self._can_serve():
            self._request_parser.is_continue_due = False
            self.write_batcher.flush()
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Parsing and serving.

    def _feed_unread(self) -> None:
        slices = 0
        while self._unread and not (self._is_input_ignored or self._is_reading_paused or self._is_yielding):
            if slices == MAX_SLICES_PER_TURN:
                self._yield_to_loop()
                break
            slices += 1
            feed_bytes = self._request_parser.max_feed_bytes(self._slice_bytes)
            if not feed_bytes:
                message = f"a request's head has at most {self._limits.head_bytes} bytes"
                self.stop_reading(InvalidRequest(message))
                return
            piece, self._unread = self._unread[:feed_bytes], self._unread[feed_bytes:]
            self._request_parser.feed(piece)
        self._set_unread(b"" if self._is_input_ignored else self._unread)

    def _yield_to_loop(self) -> None:
        """Continues in the next loop iteration: parsing many tiny requests or chunks takes long, and one connection
        must not monopolise the event loop."""
        self._is_yielding = True
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume_after_yield)

    def _resume_after_yield(self) -> None:
        self._is_yielding = False
        if self._is_closed:
            return
        self._feed_unread()
        if not (self._is_closed or self._is_yielding or self._is_reading_paused):
            self._transport.resume_reading()

    def _set_unread(self, data: bytes) -> None:
        more = len(data) - self._unread_weight
        self._unread, self._unread_weight = data, len(data)
        if not self._listener.reserve_memory(more) and more > 0:
            self.stop_reading(self._listener.memory_full)

    def _can_serve(self) -> bool:
        return self._responder is None and not self._pipelined and not self.is_write_paused and not self._is_closed

    def _enqueue(self, entry: _PipelineEntry) -> None:
        if self._is_closed:
            self._discard_entry(entry)
            return
        self._pipelined.append(entry)
        if len(self._pipelined) >= self._limits.pipelined and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _serve(self, request: Request, keeps_alive: bool, takes_chunks: bool, weight: int) -> None:
        if self._is_surplus:
            self._listener.release_memory(weight)
            self._refuse(self._listener.too_many_connections, request)
            return
        request.peer = self._peer
        responder_type = HeadResponder if request.method == b"HEAD" else Http1Responder
        self._responder = responder_type(
            self, self._transport, keeps_alive and not self._listener.is_draining, takes_chunks
        )
        self._listener.start_request(request, self._responder, weight)

    def _refuse(self, refusal: Refusal, request: Request | None = None) -> None:
        self._responder = Http1Responder(self, self._transport, False, False)
        self._listener.refuse(self._responder, refusal, request)

    def _discard_entry(self, entry: _PipelineEntry) -> None:
        if not isinstance(entry, Refusal):
            self._listener.release_memory(entry.weight)

    def on_response_finished(self, keeps_alive: bool) -> None:
        self._responder = None
        self.restart_wait_timer()
        if not keeps_alive:
            self._close()
        elif not self.is_write_paused:
            self._serve_next()

    def _serve_next(self) -> None:
        """Serves queued requests, resumes reading if the queue has room, and closes if no more input can come."""
        if self._pipelined:
            self._serve_pipelined()
        elif self._is_input_ignored:
            self._close()
        if self._is_reading_paused and len(self._pipelined) < self._limits.pipelined and not self._is_closed:
            self._is_reading_paused = False
            if not self._is_yielding:
                self._transport.resume_reading()
                self._feed_unread()
        if self._request_parser.is_continue_due:
            self.send_continue_if_due()

    def _serve_pipelined(self) -> None:
        """Serves queued requests until one is not answered at once. A request that is answered at once calls this again
        from within; the flag turns that recursion, hundreds of calls deep otherwise, into this loop."""
        if self._is_serving_pipelined:
            return
        self._is_serving_pipelined = True
        try:
            while self._pipelined and self._responder is None and not (self.is_write_paused or self._is_closed):
                if self._transport.is_closing():
                    break  # the client has disconnected, and asyncio would warn of each write
                entry = self._pipelined.popleft()
                if isinstance(entry, Refusal):
                    self._refuse(entry)
                else:
                    self._serve(*entry)
        finally:
            self._is_serving_pipelined = False

    def on_response_aborted(self) -> None:
        self._responder = None
        self._is_closed = True
        self._discard_input()
        reset_connection(self._transport)

    def _close(self) -> None:
        self._is_closed = True
        self._discard_input()
        self._write_stall = WriteStallDetector(self._transport, self._wait_started_at)
        if self._is_input_cut_short and self._transport.can_write_eof():
            # The client may still be sending, and closing now would reset the connection and destroy the response.
            with suppress(OSError):  # the client may have disconnected already
                self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def _discard_input(self) -> None:
        self.write_batcher.flush()
        self._is_input_ignored = True
        self._request_parser.discard_request()
        self._set_unread(b"")
        while self._pipelined:
            self._discard_entry(self._pipelined.popleft())


class Http1Responder:
    """Writes the response to one request. After `finish` or `abort` it does nothing, so code that still holds it cannot
    touch the next response."""

    __slots__ = (
        "_connection",
        "_discards_writes",
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
        self._discards_writes = False  # the client has disconnected, or the response is over
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
                self.keeps_alive = False  # without chunks, only the end of the connection delimits the body
        end = b"\r\n" if self.keeps_alive else b"connection: close\r\n\r\n"
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        lines = b"\r\n".join(map(b": ".join, headers))
        # The head is sent with the first bytes of the body, in one packet.
        self._head = b"%b%b\r\n%b%b" % (line, lines, framing, end) if headers else line + framing + end

    def write(self, data: bytes) -> None:
        if self._discards_writes or not data:
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
        if self._head and not self._discards_writes:
            self._send(self._head)
            self._head = b""

    def _send(self, data: bytes) -> None:
        self._write_batcher.flush()  # it may hold an earlier response of this connection
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
        self.is_disconnected = True
        if not was_disconnected:
            self._connection.on_response_aborted()
        if flow is not None:
            flow.on_disconnected()

    def on_disconnected(self) -> None:
        """The client has disconnected."""
        self.is_disconnected = self._discards_writes = True
        flow, self.flow = self.flow, None  # breaks a reference cycle
        if flow is not None:
            flow.on_disconnected()

    def _write_end(self) -> None:
        self.flush()
        if self._is_chunked:
            self._send(b"0\r\n\r\n")

    def _mark_over(self) -> None:
        self._is_over = self._discards_writes = self.has_started = True
        self.flow = None


class HeadResponder(Http1Responder):
    """Responds to HEAD: sends the head that GET would get, and no body."""

    __slots__ = ()

    def write(self, data: bytes) -> None:
        pass

    def _write_end(self) -> None:
        self.flush()
