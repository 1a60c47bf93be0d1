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

from price_keeper.metering.guardrails import add_units, estimate_units
from price_keeper.upstream.eventstream import Frame, FrameWatcher
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import EVENT_STREAM, SERVER_SENT_EVENTS, BodyBuffer, UsageReader

MAX_PIECE_BYTES: Final = 1024 * 1024  # of a stream. A trace that is longer is not read, and its units are estimated

_CONVERSE_TRACE, _INVOKE_TRACE = "trace", "amazon-bedrock-trace"
_INVOKE_TRACE_BYTES: Final = _INVOKE_TRACE.encode()
_ACTION, _INTERVENED = "amazon-bedrock-guardrailAction", "INTERVENED"
_INTERVENED_BYTES: Final = b'"INTERVENED"'
_METRICS: Final = "invocationMetrics"
_METRICS_BYTES: Final = _METRICS.encode()


class GuardrailUsageReader:
    """A reader that adds units to what another one reads. `asked` are those that the request is taken for."""

    __slots__ = ("_reader", "_request_units", "_trace")

    def __init__(self, reader: UsageReader, content_type: bytes, request_units: int) -> None:
        """`kind` is the answer's content type."""
        self._reader = reader
        self._request_units = request_units
        self._trace = _build_trace_reader(content_type)

    def feed(self, data: bytes) -> None:
        self._reader.feed(data)
        self._trace.feed(data)

    def usage(self) -> Usage | None:
        return self._add_units(self._reader.usage())

    def partial_usage(self) -> Usage | None:
        return self._add_units(self._reader.partial_usage())

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
        return self._trace.units() or estimate_units(self._request_units, output_tokens)

    def reported_and_estimated_units(self, output_tokens: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Of an answer that was cut: so may its trace have been."""
        return self._trace.units(), estimate_units(self._request_units, output_tokens)

    def _add_units(self, usage: Usage | None) -> Usage | None:
        return None if usage is None else usage._replace(units=self.units(usage.output))


class _TraceReader(Protocol):
    def feed(self, data: bytes) -> None: ...

    def units(self) -> Mapping[str, int]:
        """Empty where no trace tells them."""

    def is_blocked(self) -> bool: ...


def _build_trace_reader(content_type: bytes) -> _TraceReader:
    content_type = content_type.lower()
    if content_type.startswith(EVENT_STREAM):
        return _EventStreamTraceReader()
    return _ServerSentEventTraceReader() if content_type.startswith(SERVER_SENT_EVENTS) else _BodyTraceReader()


class _BodyTraceReader(BodyBuffer):
    __slots__ = ()

    def units(self) -> Mapping[str, int]:
        body = self.to_bytes()
        return add_units(_read_trace_units(fast_parse.pick_trace_members(body))) if _METRICS_BYTES in body else {}

    def is_blocked(self) -> bool:
        return _is_blocked(fast_parse.pick_trace_members(self.to_bytes()))


class _EventStreamTraceReader:
    __slots__ = ("_is_blocked", "_units", "_watcher")

    def __init__(self) -> None:
        self._watcher = FrameWatcher(
            {"metadata": MAX_PIECE_BYTES, "chunk": MAX_PIECE_BYTES, "messageStop": MAX_PIECE_BYTES}
        )
        self._units: Mapping[str, int] = {}
        self._is_blocked = False

    def feed(self, data: bytes) -> None:
        for frame in self._watcher.feed(data):
            if frame.kind == "event" and frame.payload_size == len(frame.payload):
                document = _parse_frame(frame)
                self._units = add_units([self._units, *_read_trace_units(document)])
                self._is_blocked = self._is_blocked or _is_blocked(document)

    def units(self) -> Mapping[str, int]:
        return self._units

    def is_blocked(self) -> bool:
        return self._is_blocked


class _ServerSentEventTraceReader:
    """Of server-sent events: a trace stands in one line."""

    __slots__ = ("_buffer", "_is_blocked", "_is_skipping", "_units")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_blocked = False
        self._units: Mapping[str, int] = {}
        self._is_skipping = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._buffer += first
        for beginning in others:
            if not self._is_skipping and len(self._buffer) <= MAX_PIECE_BYTES:
                if _INVOKE_TRACE_BYTES in self._buffer:
                    self._units = self.units()
                if _INTERVENED_BYTES in self._buffer:
                    self._is_blocked = self.is_blocked()
            self._buffer, self._is_skipping = bytearray(beginning), False
        if len(self._buffer) > MAX_PIECE_BYTES:
            self._buffer, self._is_skipping = bytearray(), True

    def units(self) -> Mapping[str, int]:
        return add_units([self._units, *_read_trace_units(self._parse_line())])

    def is_blocked(self) -> bool:
        return self._is_blocked or _is_blocked(self._parse_line())

    def _parse_line(self) -> Any:
        return _parse_json(bytes(self._buffer.removeprefix(b"data:")))


def _parse_frame(frame: Frame) -> Any:
    """An event of Converse's, or what a chunk of InvokeModel's has in base64."""
    event = _parse_json(frame.payload)
    if frame.name != "chunk":
        return event
    try:
        inner = b64decode(event["bytes"])
    except (LookupError, TypeError, ValueError):
        return None
    return _parse_json(inner) if _INVOKE_TRACE_BYTES in inner or _INTERVENED_BYTES in inner else None


def _is_blocked(document: Any) -> bool:
    """By the answer's own members, not by what a model said."""
    if not isinstance(document, dict):
        return False
    return document.get("stopReason") == "guardrail_intervened" or document.get(_ACTION) == _INTERVENED


def _read_trace_units(document: Any) -> list[Mapping[str, int]]:
    """The units of each assessment; none at all where one of them tells what cannot be counted."""
    if not isinstance(document, dict):
        return []
    usages = [
        model_families.read_guardrail(metrics)
        for name in (_CONVERSE_TRACE, _INVOKE_TRACE)
        for metrics in _iter_metrics(document.get(name))
    ]
    return [] if None in usages else [usage.units for usage in usages if usage is not None]


def _iter_metrics(trace: Any) -> Iterator[dict[str, Any]]:
    pending = [trace.get("guardrail")] if isinstance(trace, dict) else []
    while pending:
        place = pending.pop()
        if isinstance(place, dict):
            found = place.get(_METRICS)
            if isinstance(found, dict):
                yield found
            pending += [value for name, value in place.items() if name != _METRICS]
        elif isinstance(place, list):
            pending += place


def _parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return None
