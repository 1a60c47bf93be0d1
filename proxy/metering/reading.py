"""Reads what an answer used as it goes by, whichever operation it answers and in whichever form it comes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from proxy.exchange import Header
from proxy.forwarding.eventstream import FrameWatcher
from proxy.forwarding.model_path import Operation
from proxy.metering import bodies
from proxy.metering.streams import CONVERSE_WANTED, INVOCATION_WANTED, ChatStream, ConverseStream, InvocationStream
from proxy.metering.usage import Usage

EVENT_STREAM = b"application/vnd.amazon.eventstream"
SERVER_SENT_EVENTS = b"text/event-stream"

# Of an answer in one piece. A longer one, such as a film, is known by its headers or estimated.
MOST_BYTES = 16 * 1024 * 1024
BYTES_A_TOKEN = 4  # of text, in the mean; where nothing better is known


class Reader(Protocol):
    def feed(self, data: bytes) -> None: ...

    def usage(self) -> Usage | None:
        """All of it, at the answer's end; None where the answer does not say."""

    def partial(self) -> Usage | None:
        """What is known of an answer that was cut."""

    def estimate_output(self) -> int:
        """Tokens, as far as can be told from what was seen."""

    @property
    def has_failed(self) -> bool:
        """Whether the answer, which began well, told of an error on its way."""


def reader_of(operation: Operation, format: str, kind: bytes, headers: list[Header]) -> Reader:
    """`kind` is the answer's content type."""
    if kind.startswith(EVENT_STREAM):
        if operation is Operation.CONVERSE_STREAM:
            return _Frames(ConverseStream(format), CONVERSE_WANTED)
        return _Frames(InvocationStream(dict(headers)), INVOCATION_WANTED)
    if kind.startswith(SERVER_SENT_EVENTS):
        return _Events()
    meaning = _MEANINGS.get(operation)
    return _Whole(meaning or (lambda document: bodies.invocation(format, document, dict(headers))))


_MEANINGS: Mapping[Operation, Callable[[Any], Usage | None]] = {
    Operation.CONVERSE: bodies.converse,
    Operation.CHAT_COMPLETIONS: bodies.chat,
    Operation.APPLY_GUARDRAIL: bodies.guardrail,
    Operation.CHECK_GUARDRAILS: bodies.guardrail,
    Operation.ASYNC_INVOKES: lambda _: Usage(),  # a job: it has a price of its own, whatever it will use
}


class _Whole:
    """Kept until its end, and then read."""

    __slots__ = ("_meaning", "_parts", "_size")

    def __init__(self, meaning: Callable[[Any], Usage | None]) -> None:
        self._meaning = meaning
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MOST_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def usage(self) -> Usage | None:
        return self._meaning(self._document())

    def _document(self) -> Any:
        try:
            return orjson.loads(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        except orjson.JSONDecodeError:
            return {}  # the headers may still say it

    def partial(self) -> Usage | None:
        return self.usage()

    def estimate_output(self) -> int:
        return self._size // BYTES_A_TOKEN

    @property
    def has_failed(self) -> bool:
        return False


class _Frames:
    __slots__ = ("_stream", "_watcher", "has_failed")

    def __init__(self, stream: ConverseStream | InvocationStream, wanted: Mapping[str, int]) -> None:
        self._stream = stream
        self._watcher = FrameWatcher(wanted)
        self.has_failed = False

    def feed(self, data: bytes) -> None:
        for frame in self._watcher.feed(data):
            self._stream.frame(frame)
            if frame.kind != "event":
                self.has_failed = True

    def usage(self) -> Usage | None:
        return self._stream.usage()

    def partial(self) -> Usage | None:
        return self._stream.partial()

    def estimate_output(self) -> int:
        return self._stream.estimate_output()


class _Events(ChatStream):
    __slots__ = ()

    @property
    def has_failed(self) -> bool:
        return False
