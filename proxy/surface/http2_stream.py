"""One stream of an HTTP/2 connection: a request coming in and, as its responder, the way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from proxy.answers import refuse
from proxy.errors import InvalidRequest, Refusal, TooLarge
from proxy.exchange import Flow, Header, Request

if TYPE_CHECKING:
    from proxy.surface.http2 import Http2Connection
    from proxy.surface.listener import Listener

_BAD_IN_VALUES = frozenset(b"\r\n\x00")


class Stream:
    """One request and, as its responder, the way back."""

    def __init__(self, stream_id: int, connection: Http2Connection, now: float) -> None:
        self.id = stream_id
        self._connection = connection
        self._limits = connection.limits
        self._since = now
        self._request: Request | None = None
        self._refusal: Refusal | None = None
        self._is_whole = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._flow: Flow | None = None
        self._is_flow_paused = False
        self.has_started = False
        self.is_finished = False
        self.is_gone = False

    # The request.

    def take_head(self, headers: Sequence[Header]) -> None:
        try:
            self._request = _request(headers)
        except Refusal as refusal:
            self._refuse_early(refusal)
            return
        length = self._request.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            self._refuse_early(self._too_large())

    def take_data(self, data: bytes) -> None:
        if self._is_whole:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_early(self._too_large())

    def request_ended(self, listener: Listener) -> None:
        if self._is_whole or self._request is None:
            return
        self._is_whole = True
        self._request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        listener.begin(self._request, self)

    def check_time(self, now: float) -> None:
        waited = now - self._since
        if not self._is_whole and waited > self._limits.body_seconds:
            self._refuse_early(InvalidRequest(f"the body took more than {self._limits.body_seconds:g} seconds"))
        elif self._is_flow_paused and waited > self._limits.stalled_seconds:
            self.abort()

    def left(self) -> None:
        self.is_gone = True
        self.outgoing.clear()
        if self._flow is not None:
            self._flow.caller_left()

    def _refuse_early(self, refusal: Refusal) -> None:
        """Answers before the request is whole; what still comes of it is thrown away."""
        self._is_whole = True
        self._body = []
        refuse(self, refusal)

    def _too_large(self) -> Refusal:
        return TooLarge(f"a request's body has at most {self._limits.body_bytes} bytes")

    # The responder.

    def attach(self, flow: Flow) -> None:
        self._flow = flow
        if self._connection.is_write_paused:
            self.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.has_started = True
        if self.is_gone:
            return
        head = [(b":status", b"%d" % status), *headers]
        if length is not None:
            head.append((b"content-length", b"%d" % length))
        self._connection.send_head(self, head)

    def write(self, data: bytes) -> None:
        if self.is_gone or not data:
            return
        self.outgoing.append(data)
        self._outgoing_bytes += len(data)
        self.pump()

    def flush(self) -> None:
        if not self.is_gone:
            self._connection.flush()

    def finish(self) -> None:
        self.is_finished = True
        self._flow = None
        if not self.is_gone:
            self.pump()

    def abort(self) -> None:
        flow, self._flow = self._flow, None
        if not self.is_gone:
            self.is_gone = True
            self.outgoing.clear()
            self._connection.reset(self, ErrorCodes.INTERNAL_ERROR)
            if flow is not None:
                flow.caller_left()

    def pump(self) -> None:
        if self.is_gone:
            return
        self._connection.send_some(self)
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
            self._since = self._connection.now()
            if self._flow is not None:
                self._flow.pause()

    def take_outgoing(self, room: int) -> bytes:
        data = self.outgoing.popleft()
        if len(data) > room:
            self.outgoing.appendleft(data[room:])
            data = data[:room]
        self._outgoing_bytes -= len(data)
        return data


def _request(headers: Sequence[Header]) -> Request:
    """The library has checked the protocol's rules; what it leaves to us is what a value may hold."""
    pseudo: dict[bytes, bytes] = {}
    plain: dict[bytes, bytes] = {}
    repeated: set[bytes] = set()
    for name, value in headers:
        if _BAD_IN_VALUES.intersection(value):
            raise InvalidRequest("a header's value has no control characters")
        if name.startswith(b":"):
            pseudo[name] = value
        elif name in plain:
            repeated.add(name)
        else:
            plain[name] = value
    authority = pseudo.get(b":authority")
    if authority is not None and plain.setdefault(b"host", authority) != authority:
        raise InvalidRequest("the headers Host and :authority differ")
    if b"host" not in plain:
        raise InvalidRequest("a request needs a Host header")
    return Request(pseudo[b":method"], pseudo.get(b":path", b""), plain, frozenset(repeated))
