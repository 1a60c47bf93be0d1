"""A responder around another one, for responses that are changed on their way to the caller."""

from __future__ import annotations

from collections.abc import Sequence

from price_keeper.exchange import FlowControl, Header, Responder


class ResponderWrapper:
    """A responder that passes everything on to another; subclasses change what they need to."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    @property
    def has_started(self) -> bool:
        return self._responder.has_started

    @property
    def is_disconnected(self) -> bool:
        return self._responder.is_disconnected

    def attach(self, flow: FlowControl) -> None:
        self._responder.attach(flow)

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self._responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        self._responder.write(data)

    def flush(self) -> None:
        self._responder.flush()

    def finish(self) -> None:
        self._responder.finish()

    def abort(self) -> None:
        self._responder.abort()
