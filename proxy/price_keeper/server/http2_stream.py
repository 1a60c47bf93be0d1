"""One stream of an HTTP/2 connection: receives the request and, as its responder, queues the response.

`Http2Connection` calls `take_head`, `take_data` and `end_request`; the handler calls the responder's methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from price_keeper.errors import InvalidRequest, Refusal, RequestTooLarge
from price_keeper.exchange import FlowControl, Header, Request
from price_keeper.server.http2_frames import ErrorCode, ProtocolViolation
from price_keeper.server.http2_headers import build_request
from price_keeper.server.request_building import Body, append_to_body, finish_body, measure_head

if TYPE_CHECKING:
    from price_keeper.server.http2 import Http2Connection

STREAM_BYTES = 2048  # memory of an open stream beside its request; measured: 1.7 kB
MAX_UNSENT_BYTES = 1024 * 1024  # a client with less left to send reads an early response: Node buffers up to 10 MB


class Http2Stream:
    """One request and its response. The response queue is `outgoing`; the connection sends it as windows allow."""

    def __init__(
        self, stream_id: int, connection: Http2Connection, send_window: int, *, is_input_finished: bool
    ) -> None:
        self.id = stream_id
        self.send_window = send_window  # bytes that the client takes; less than none after it has shrunk its windows
        self.unacknowledged_bytes = 0  # received since the client's window for this stream was enlarged
        self.is_input_finished = is_input_finished  # the client has ended its half of the stream
        self._connection = connection
        self._limits = connection.limits
        self._wait_started_at = connection.now()
        self._request: Request | None = None
        self._is_request_over = False  # the request is complete, refused or abandoned
        self._is_head_request = False
        self._body: Body = b""
        self._body_bytes = 0
        self._announced_bytes: int | None = None  # content-length, if there is one
        self._weight = 0  # memory reserved for the request
        self._unsent_body_bytes = 0  # still to come of a body that is read only to be discarded
        self._pending_refusal: Refusal | None = None  # sent when enough of that body has been discarded
        self.outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._unwritten_bytes: int | None = None  # of the response's body, if its length is known
        self._flow: FlowControl | None = None
        self._is_flow_paused = False
        self.has_started = False
        self.is_finished = False
        self.is_disconnected = False

    # The request.

    def take_head(self, headers: Sequence[Header]) -> None:
        """Raises ProtocolViolation if the list is malformed."""
        try:
            self._request = request = build_request(headers, self._limits.head_bytes)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        self._is_head_request = request.method == b"HEAD"
        is_room = self._reserve_memory(measure_head(request.target, request.headers))
        announced = request.headers.get(b"content-length")  # without it, the body may never end
        self._announced_bytes = None if announced is None else int(announced)
        length = self._announced_bytes or 0
        is_open = announced is None and not _is_get(request)
        if not self.is_input_finished and (is_open or length > self._limits.unchecked_body_bytes):
            refusal_of_head = self._connection.listener.check_head(request)
            if refusal_of_head is not None:
                self._refuse_after_discarding(length, refusal_of_head)
                return
        if not is_room:
            self.refuse(self._connection.listener.memory_full)
        elif length > self._limits.body_bytes:
            self._refuse_after_discarding(length, self._build_too_large_refusal())

    def take_data(self, data: bytes) -> None:
        """Raises ProtocolViolation for a body that is longer than its content-length."""
        if self._is_request_over:
            return
        if self._pending_refusal is not None:
            self._discard(len(data), self._pending_refusal)
            return
        if not self._body_bytes and self._announced_bytes is None and data:
            refusal = self._check_unexpected_body()
            if refusal is not None:
                self.refuse(refusal)
                return
        self._body_bytes += len(data)
        if self._announced_bytes is not None and self._body_bytes > self._announced_bytes:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "the body is longer than its content-length says")
        self._body = append_to_body(self._body, data)
        is_room = self._reserve_memory(len(data))
        if self._body_bytes > self._limits.body_bytes:
            self.refuse(self._build_too_large_refusal())
        elif not is_room:
            self.refuse(self._connection.listener.memory_full)

    def end_request(self) -> None:
        self.is_input_finished = True
        if self._is_request_over or self._request is None:
            return
        if self._pending_refusal is not None:
            self.refuse(self._pending_refusal)
            return
        if self._announced_bytes not in (None, self._body_bytes):
            self.refuse(InvalidRequest("the body is not as long as its content-length says"))
            return
        self._is_request_over = True
        self._request.body = finish_body(self._body)
        self._request.peer = self._connection.peer
        self._body = b""
        self._connection.listener.start_request(self._request, self, self._weight)

    def check_timeouts(self, now: float, connection_stalled: float | None) -> None:
        waited = now - self._wait_started_at
        if not self._is_request_over:
            if waited > self._limits.body_seconds:
                self.refuse(InvalidRequest(f"the body took more than {self._limits.body_seconds:g} seconds"))
            return
        if connection_stalled is not None:
            waited = min(waited, connection_stalled)
        if self.outgoing and waited > self._limits.stalled_seconds:
            self._reset()
        elif self._is_flow_paused and self._flow is not None:
            self._flow.on_stalled(waited)

    def on_disconnected(self) -> None:
        self.is_disconnected = True
        self.outgoing.clear()
        self._abandon_request()
        flow, self._flow = self._flow, None  # breaks a reference cycle
        if flow is not None:
            flow.on_disconnected()

    def refuse(self, refusal: Refusal) -> None:
        """Responds before the request is complete; the rest of the request is discarded."""
        self._abandon_request()
        self._connection.listener.refuse(self, refusal, self._request)

    def _refuse_after_discarding(self, length: int, refusal: Refusal) -> None:
        """Reads and discards the body until the client has so little left to send that it will read the response."""
        self._unsent_body_bytes, self._pending_refusal = length, refusal
        self._discard(0, refusal)

    def _check_unexpected_body(self) -> Refusal | None:
        """Checks the head of a GET when the first byte of an unexpected body arrives."""
        request = self._request
        if request is None or not _is_get(request):
            return None
        return self._connection.listener.check_head(request)

    def _discard(self, size: int, refusal: Refusal) -> None:
        self._unsent_body_bytes -= size
        if self._unsent_body_bytes <= MAX_UNSENT_BYTES:
            self.refuse(refusal)

    def _abandon_request(self) -> None:
        if not self._is_request_over:
            self._is_request_over = True
            self._connection.listener.release_memory(self._weight)
            self._body = b""

    def _reserve_memory(self, size: int) -> bool:
        self._weight += size
        return self._connection.listener.reserve_memory(size)

    def _build_too_large_refusal(self) -> Refusal:
        return RequestTooLarge(f"a request's body has at most {self._limits.body_bytes} bytes")

    # The responder.

    def attach(self, flow: FlowControl) -> None:
        self._flow = flow
        self._is_flow_paused = False
        if self._connection.is_write_paused:
            self.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.has_started = True
        if self.is_disconnected:
            return
        self._unwritten_bytes = length
        self._connection.send_head(self, status, headers, length)

    def write(self, data: bytes) -> None:
        if self.is_disconnected or self.is_finished or not data or self._is_head_request:
            return
        if not self.outgoing:
            self._wait_started_at = self._connection.now()
        self.outgoing.append(data)
        self._outgoing_bytes += len(data)
        if self._unwritten_bytes is not None:
            self._unwritten_bytes -= len(data)
            if not self._unwritten_bytes:
                return  # the end of the stream, which follows, leaves in the same frame
        self.pump()

    def flush(self) -> None:
        if not self.is_disconnected:
            self._connection.flush()

    def finish(self) -> None:
        if not self.is_finished:
            self.is_finished = self.has_started = True
            self._flow = None
            self.pump()

    def abort(self) -> None:
        if not self.is_finished:  # a finished response may still be queued for a slow reader
            self._reset()

    def _reset(self) -> None:
        flow, self._flow = self._flow, None
        if not self.is_disconnected:
            self.is_disconnected = True
            self.outgoing.clear()
            self._connection.reset(self, ErrorCode.INTERNAL_ERROR)
            if flow is not None:
                flow.on_disconnected()

    def pump(self) -> None:
        if self.is_disconnected:
            return
        self._connection.send_outgoing(self)
        self._connection.flush()
        if self._outgoing_bytes > self._limits.write_buffer_bytes:
            self.pause()
        elif self._is_flow_paused and not self._connection.is_write_paused:
            self._is_flow_paused = False
            if self._flow is not None:
                self._flow.resume()

    def pause(self) -> None:
        if not self._is_flow_paused:
            self._is_flow_paused = True
            if not self.outgoing:
                self._wait_started_at = self._connection.now()
            if self._flow is not None:
                self._flow.pause()

    def take_outgoing(self, max_bytes: int) -> bytes:
        data = self.outgoing.popleft()
        if len(data) > max_bytes:
            self.outgoing.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        if self.outgoing:
            self._wait_started_at = self._connection.now()
        self._outgoing_bytes -= len(data)
        return data


def _is_get(request: Request) -> bool:
    """A GET has no body, although HTTP/2 may end it in a frame of its own after the head."""
    return request.method == b"GET"
