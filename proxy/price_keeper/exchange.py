"""The contract between server and handler: a request, and the responder for its response.

The same for HTTP/1.1 and HTTP/2. A responder never blocks; if the caller reads slowly it pauses the `FlowControl`
attached to it. A response that cannot be completed is aborted in a way that no client takes for its end.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Protocol, TypeAlias

from price_keeper.domain import Caller

Header: TypeAlias = "tuple[bytes, bytes]"


class RequestObserver(Protocol):
    """Hears of a request what its answer does not tell."""

    def on_authenticated(self, caller: Caller) -> None: ...

    def on_completed(self, receipt: Any) -> None:
        """What it came to, where it has come to anything that costs."""

    def on_cancelled(self) -> None: ...


class RequestMemory(Protocol):
    """The memory that all requests share."""

    def grow_request(self, request: Request, size: int) -> None:
        """Counts so much more for this request, until it is over. Raises Busy where there is no room for it."""


class Request:
    """A whole request. Header names are in lower case; of a repeated header the first value is kept."""

    __slots__ = (
        "body",
        "headers",
        "memory",
        "memory_bytes",
        "method",
        "observer",
        "peer",
        "received_at",
        "repeated",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes], repeated: frozenset[bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.repeated = repeated
        self.body = b""
        self.peer = ""  # the address it comes from, as far as that is known
        self.received_at = 0.0  # when all of it was here, by the monotonic clock
        self.observer: RequestObserver | None = None
        self.memory: RequestMemory | None = None
        self.memory_bytes = 0  # what it is counted with in that room

    def reserve_copies(self, copies: int) -> None:
        """Of its body, which are about to be made. Raises Busy."""
        if self.memory is not None:
            self.memory.grow_request(self, copies * len(self.body))


class FlowControl(Protocol):
    """What feeds a responder, and can be asked to wait while the caller reads slowly."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def on_stalled(self, seconds: float) -> None:
        """Told every second or so while it is paused: for how long the caller has read nothing."""

    def on_disconnected(self) -> None: ...


class Responder(Protocol):
    """The way back. Calls come in the order start, write..., finish; abort may come at any time.

    Nothing here waits: a caller that reads slowly makes the responder pause its flow.
    """

    @property
    def has_started(self) -> bool: ...

    @property
    def is_disconnected(self) -> bool:
        """The caller has left; what is written goes nowhere."""

    def attach(self, flow: FlowControl) -> None: ...

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        """`length` of the body, where it is known; the headers name neither it nor the framing."""

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Lets a head go out whose body is not there yet."""

    def finish(self) -> None: ...

    def abort(self) -> None:
        """Breaks the connection or stream so that no client takes what it has for the whole."""


Handler: TypeAlias = Callable[[Request, Responder], Awaitable[None]]


def create_request_id_source() -> Callable[[], bytes]:
    """Each new in this process, and in all likelihood among all."""
    run, numbers = os.urandom(6).hex(), count(1)
    return lambda: f"{run}-{next(numbers)}".encode()
