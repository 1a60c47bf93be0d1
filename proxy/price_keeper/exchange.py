"""The interface between server and handler: a request, and the responder for its response.

It is the same for HTTP/1.1 and HTTP/2. A responder never blocks; if the caller reads slowly, it pauses the
`FlowControl` attached to it. A response that cannot be completed is aborted so that no client takes it for complete.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, Protocol, TypeAlias

from price_keeper.domain import Caller

Header: TypeAlias = "tuple[bytes, bytes]"


class RequestTrace(Protocol):
    """Receives what tracing needs to know about a request and cannot read from its response."""

    def on_authenticated(self, caller: Caller) -> None: ...

    def on_completed(self, receipt: Any) -> None:
        """Called with the usage and cost of the call; `receipt` is None if it cost nothing."""

    def on_never_sent(self) -> None:
        """Called instead of `on_completed` if the call was never sent."""


class RequestMemory(Protocol):
    """The memory limit that all requests share."""

    def grow_request(self, request: Request, size: int) -> None:
        """Reserves `size` more bytes for this request, until it ends. Raises Busy if they exceed the limit."""


class Request:
    """A complete request. Header names are in lower case; of a repeated header only the first value is kept, and its
    name is in `repeated`."""

    __slots__ = (
        "_body_sha256",
        "body",
        "headers",
        "memory",
        "memory_bytes",
        "method",
        "peer",
        "received_at",
        "repeated",
        "target",
        "trace",
    )

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes], repeated: frozenset[bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.repeated = repeated
        self.body = b""
        self._body_sha256 = ""
        self.peer = ""  # IP address of the client; empty if unknown
        self.received_at = 0.0  # when it was complete, by the monotonic clock
        self.trace: RequestTrace | None = None
        self.memory: RequestMemory | None = None
        self.memory_bytes = 0  # reserved in `memory` for this request

    def hash_body(self, body: bytes) -> str:
        """The SHA-256 of a body that is sent, in hexadecimal digits. That of the request's own is computed once."""
        if body is not self.body:
            return sha256(body).hexdigest()
        if not self._body_sha256:
            self._body_sha256 = sha256(body).hexdigest()
        return self._body_sha256

    def reserve_copies(self, copies: int) -> None:
        """Reserves memory for copies of the body that the caller is about to make. Raises Busy."""
        if self.memory is not None:
            self.memory.grow_request(self, copies * len(self.body))


class FlowControl(Protocol):
    """The source of a response's data, which a responder pauses while the caller reads slowly (back-pressure)."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def on_stalled(self, seconds: float) -> None:
        """Called about once a second while paused, with the seconds for which the caller has read nothing."""

    def on_disconnected(self) -> None: ...


class Responder(Protocol):
    """Writes one response. Methods are called in the order start, write..., finish; abort may come at any time.

    No method blocks: while the caller reads slowly, the responder pauses its flow.
    """

    @property
    def has_started(self) -> bool: ...

    @property
    def is_disconnected(self) -> bool:
        """Whether the caller has disconnected, or the response was aborted; further writes are discarded."""

    def attach(self, flow: FlowControl) -> None: ...

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        """`length` is that of the body, if known. The responder adds content-length or other framing; `headers` must
        not."""

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Sends the head now; otherwise it waits for the first bytes of the body."""

    def finish(self) -> None: ...

    def abort(self) -> None:
        """Ends the connection or stream in a way that no client takes for the end of a complete response."""


Handler: TypeAlias = Callable[[Request, Responder], Awaitable[None]]


def create_request_id_source() -> Callable[[], bytes]:
    """A function that returns a new request id: unique in this process and, by a random prefix, among processes."""
    run, numbers = os.urandom(6).hex(), count(1)
    return lambda: f"{run}-{next(numbers)}".encode()
