"""Reads a guardrail's units from the trace in an answer of a model, beside whatever else reads the answer. Pure.

    Converse, and its stream's metadata    trace.guardrail.inputAssessment.{id}, outputAssessments.{id}[]
    InvokeModel, its stream, and chats     amazon-bedrock-trace.guardrail.input.{id}, outputs[].{id}

Below each {id} there is `invocationMetrics.usage`, and it is looked for in any depth: the two differ in names only.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import orjson

from price_keeper.forwarding.eventstream import Frame, FrameWatcher
from price_keeper.metering import bodies, usual
from price_keeper.metering.guardrails import added, estimated
from price_keeper.metering.kept import BodyBuffer
from price_keeper.metering.reading import EVENT_STREAM, SERVER_SENT_EVENTS, UsageReader
from price_keeper.metering.usage import Usage

LARGEST_PIECE: Final = 1024 * 1024  # of a stream. A trace that is longer is not read, and its units are estimated

_OF_CONVERSE, _OF_MODELS = "trace", "amazon-bedrock-trace"
_OF_MODELS_PLAIN: Final = _OF_MODELS.encode()
_ACTION, _INTERVENED = "amazon-bedrock-guardrailAction", "INTERVENED"
_INTERVENED_PLAIN: Final = b'"INTERVENED"'
_METRICS: Final = "invocationMetrics"
_METRICS_PLAIN: Final = _METRICS.encode()


class Guarded:
    """A reader that adds units to what another one reads. `asked` are those that the request is taken for."""

    __slots__ = ("_asked", "_reader", "_trace")

    def __init__(self, reader: UsageReader, kind: bytes, asked: int) -> None:
        """`kind` is the answer's content type."""
        self._reader = reader
        self._asked = asked
        self._trace = _trace_in(kind)

    def feed(self, data: bytes) -> None:
        self._reader.feed(data)
        self._trace.feed(data)

    def usage(self) -> Usage | None:
        return self._with_units(self._reader.usage())

    def partial_usage(self) -> Usage | None:
        return self._with_units(self._reader.partial_usage())

    def estimate_output(self) -> int | None:
        return self._reader.estimate_output()

    @property
    def has_failed(self) -> bool:
        return self._reader.has_failed

    def has_output(self) -> bool:
        return self._reader.has_output()

    def is_blocked(self) -> bool:
        """Whether the guardrail stopped the call. Where it did so before the model ran, Bedrock bills no tokens."""
        return self._trace.is_blocked()

    def units(self, output_tokens: int) -> Mapping[str, int]:
        return self._trace.units() or estimated(self._asked, output_tokens)

    def told_and_estimated(self, output_tokens: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Of an answer that was cut: so may its trace have been."""
        return self._trace.units(), estimated(self._asked, output_tokens)

    def _with_units(self, told: Usage | None) -> Usage | None:
        return None if told is None else told._replace(units=self.units(told.output))


class _Trace(Protocol):
    def feed(self, data: bytes) -> None: ...

    def units(self) -> Mapping[str, int]:
        """Empty where no trace tells them."""

    def is_blocked(self) -> bool: ...


def _trace_in(kind: bytes) -> _Trace:
    kind = kind.lower()
    if kind.startswith(EVENT_STREAM):
        return _Frames()
    return _Lines() if kind.startswith(SERVER_SENT_EVENTS) else _Whole()


class _Whole(BodyBuffer):
    __slots__ = ()

    def units(self) -> Mapping[str, int]:
        answer = self.to_bytes()
        return added(_told(usual.pick_trace_members(answer))) if _METRICS_PLAIN in answer else {}

    def is_blocked(self) -> bool:
        return _is_blocked(usual.pick_trace_members(self.to_bytes()))


class _Frames:
    __slots__ = ("_found", "_is_blocked", "_watcher")

    def __init__(self) -> None:
        self._watcher = FrameWatcher({"metadata": LARGEST_PIECE, "chunk": LARGEST_PIECE, "messageStop": LARGEST_PIECE})
        self._found: Mapping[str, int] = {}
        self._is_blocked = False

    def feed(self, data: bytes) -> None:
        for frame in self._watcher.feed(data):
            if frame.kind == "event" and frame.payload_size == len(frame.payload):
                document = _document(frame)
                self._found = added([self._found, *_told(document)])
                self._is_blocked = self._is_blocked or _is_blocked(document)

    def units(self) -> Mapping[str, int]:
        return self._found

    def is_blocked(self) -> bool:
        return self._is_blocked


class _Lines:
    """Of server-sent events: a trace stands in one line."""

    __slots__ = ("_found", "_held", "_is_blocked", "_is_skipping")

    def __init__(self) -> None:
        self._held = bytearray()
        self._is_blocked = False
        self._found: Mapping[str, int] = {}
        self._is_skipping = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._held += first
        for beginning in others:
            if not self._is_skipping and len(self._held) <= LARGEST_PIECE:
                if _OF_MODELS_PLAIN in self._held:
                    self._found = self.units()
                if _INTERVENED_PLAIN in self._held:
                    self._is_blocked = self.is_blocked()
            self._held, self._is_skipping = bytearray(beginning), False
        if len(self._held) > LARGEST_PIECE:
            self._held, self._is_skipping = bytearray(), True

    def units(self) -> Mapping[str, int]:
        return added([self._found, *_told(self._line())])

    def is_blocked(self) -> bool:
        return self._is_blocked or _is_blocked(self._line())

    def _line(self) -> Any:
        return _parsed(bytes(self._held.removeprefix(b"data:")))


def _document(frame: Frame) -> Any:
    """An event of Converse's, or what a chunk of InvokeModel's has in base64."""
    event = _parsed(frame.payload)
    if frame.name != "chunk":
        return event
    try:
        inner = b64decode(event["bytes"])
    except (LookupError, TypeError, ValueError):
        return None
    return _parsed(inner) if _OF_MODELS_PLAIN in inner or _INTERVENED_PLAIN in inner else None


def _is_blocked(document: Any) -> bool:
    """By the answer's own members, not by what a model said."""
    if not isinstance(document, dict):
        return False
    return document.get("stopReason") == "guardrail_intervened" or document.get(_ACTION) == _INTERVENED


def _told(document: Any) -> list[Mapping[str, int]]:
    """The units of each assessment; none at all where one of them tells what cannot be counted."""
    if not isinstance(document, dict):
        return []
    usages = [bodies.read_guardrail(each) for name in (_OF_CONVERSE, _OF_MODELS) for each in _metrics(document.get(name))]
    return [] if None in usages else [usage.units for usage in usages if usage is not None]


def _metrics(trace: Any) -> Iterator[dict[str, Any]]:
    places = [trace.get("guardrail")] if isinstance(trace, dict) else []
    while places:
        place = places.pop()
        if isinstance(place, dict):
            found = place.get(_METRICS)
            if isinstance(found, dict):
                yield found
            places += [value for name, value in place.items() if name != _METRICS]
        elif isinstance(place, list):
            places += place


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return None
