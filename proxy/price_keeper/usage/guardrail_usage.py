"""Guardrails: which calls name one, how many units they use, and what those cost. Pure.

Bedrock charges a guardrail by the unit of text and policy, also if a model call names it. The response's trace
states the units if the caller asked for a trace; otherwise they are estimated, and the estimate errs upward.

START HERE: `estimate_request_units`, and `GuardrailUsageReader`, which wraps the reader of a response and adds the
units. Traces are found here:

    Converse, and its stream's metadata    trace.guardrail.inputAssessment.{id}, outputAssessments.{id}[]
    InvokeModel, its stream, and chats     amazon-bedrock-trace.guardrail.input.{id}, outputs[].{id}

Below each {id}, at any depth, there is `invocationMetrics.usage`.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from price_keeper.config.config_sections import GuardrailsConfig
from price_keeper.operations import BodyForm, Charge, Operation, find_operations
from price_keeper.upstream import json_splice
from price_keeper.upstream.eventstream import EventFrame, FrameWatcher
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.price_table import PRICE_UNKNOWN, Cost
from price_keeper.usage.stream_usage import parse_json
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import EVENT_STREAM, SERVER_SENT_EVENTS, BodyBuffer, UsageReader

GUARDRAIL_ESTIMATED: Final = "guardrail_estimated"  # the units are estimated, while the tokens may be exact
ESTIMATED_UNITS: Final = "estimated"  # stands for a policy's name; each unit costs as much as the dearest policy's
CHARACTERS_PER_UNIT: Final = 1000
CHARACTERS_PER_TOKEN: Final = 6  # of a response: more than the mean in any language

GUARDRAIL_HEADER: Final = b"x-amzn-bedrock-guardrailidentifier"
_CONFIG: Final = "guardrailConfig"
_CONFIG_BYTES: Final = b'"guardrailConfig"'
_OPERATIONS_WITH_CONFIG: Final = find_operations(BodyForm.CONVERSE)
_OPERATIONS_WITH_HEADER: Final = find_operations(charge=Charge.TOKENS)

# Encoders write control characters, quotes, angle brackets and characters beyond ASCII as escapes, but never letters.
# So a caller that escapes letters wants to hide a name.
_ESCAPED: Final = b"\\u00"
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[467]")
_NO_GUARDRAIL: Final = (b"", b"null")
_BYTE_ORDER_MARKS: Final = (b"\xfe", b"\xff")

# An image or a document instead of text. In a member for text, words without a space between them would look the same.
_BASE64: Final = re.compile(rf'"(?:bytes|data)"\s*+:\s*+"([A-Za-z0-9+/_=-]{{{CHARACTERS_PER_UNIT},}}+)"')
_ESCAPE: Final = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|.)")


# ---------------------------------------------------------------- calls that name a guardrail


def estimate_request_units(operation: Operation, headers: Mapping[bytes, bytes], body: bytes) -> int:
    """Estimate the units that a request uses; 0 if it names no guardrail."""
    if may_name_guardrail(operation, headers, body) and (GUARDRAIL_HEADER in headers or _has_guardrail_config(body)):
        return max(1, _round_up_units(_count_characters(body)))
    return 0


def may_name_guardrail(operation: Operation, headers: Mapping[bytes, bytes], body: bytes) -> bool:
    """Whether the request may name a guardrail. This runs for every call, so it only searches the bytes."""
    if operation not in _OPERATIONS_WITH_HEADER:
        return False
    if GUARDRAIL_HEADER in headers:
        return True
    if operation not in _OPERATIONS_WITH_CONFIG:
        return False
    if _CONFIG_BYTES in body:
        return True
    if b"\0" in body[:4] or body[:1] in _BYTE_ORDER_MARKS:
        return True  # JSON in UTF-16 or UTF-32, where a byte search finds nothing
    # Each search is faster than the next one, and most bodies need only the first.
    return b"\\" in body and _ESCAPED in body and _ESCAPED_LETTER.search(body) is not None


def _has_guardrail_config(body: bytes) -> bool:
    try:
        span = json_splice.find_members(body, (_CONFIG,)).spans.get(_CONFIG)
    except json_splice.InvalidJsonObject:
        return True  # invalid JSON, or two of them: Bedrock may see a guardrail there, so the call must have its price
    return span is not None and body[span[0] : span[1]].strip(b"{} \t\r\n") not in _NO_GUARDRAIL


def _count_characters(body: bytes) -> int:
    """Count characters of text. JSON names and punctuation count too, as they are few; large bodies are not parsed."""
    text = body.decode("utf-8", "replace")
    escapes = sum(match.end() - match.start() - 1 for match in _ESCAPE.finditer(text))
    binary = sum(match.end(1) - match.start(1) - CHARACTERS_PER_UNIT for match in _BASE64.finditer(text))
    return len(text) - escapes - binary


def _round_up_units(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_UNIT)


# ---------------------------------------------------------------- units


def estimate_units(request_units: int, output_tokens: int) -> Mapping[str, int]:
    """Estimate the units of a call from those of its request, and from the length of its output."""
    return {ESTIMATED_UNITS: request_units + _round_up_units(output_tokens * CHARACTERS_PER_TOKEN)}


def add_units(assessments: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Add assessments. Units add up; the number of policies by which automated reasoning is sold does not."""
    total: dict[str, int] = {}
    for units in assessments:
        for name, count in units.items():
            so_far = total.get(name, 0)
            total[name] = max(so_far, count) if name == _REASONING_POLICIES else so_far + count
    return total


# From the names under which Bedrock counts units to the keys of the configuration.
_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "topicPolicyUnits": "topic",
        "contentPolicyUnits": "content",
        "contentPolicyImageUnits": "content_image",
        "wordPolicyUnits": "word",
        "sensitiveInformationPolicyUnits": "sensitive_information",
        "contextualGroundingPolicyUnits": "contextual_grounding",
        "automatedReasoningPolicyUnits": "automated_reasoning",
        "contentFilter": "check_content_filter",
        "promptAttack": "check_prompt_attack",
        "sensitiveInformation": "check_sensitive_information",
    }
)
_FREE_UNITS: Final = "sensitiveInformationPolicyFreeUnits"
_REASONING_UNITS, _REASONING_POLICIES = "automatedReasoningPolicyUnits", "automatedReasoningPolicies"


def build_guardrail_prices(config: GuardrailsConfig) -> Mapping[str, int]:
    """Return pico-dollars per unit, under the names by which Bedrock counts units."""
    return MappingProxyType({name: config.pico_per_unit(policy) for name, policy in _POLICIES.items()})


def price_guardrail(prices: Mapping[str, int], units: Mapping[str, int]) -> Cost:
    """Price units. Those of an unknown policy cost as much as the dearest policy's; free units cost nothing."""
    dearest = max(prices.values())
    pico, flags = 0, set()
    for name, count in units.items():
        if not count or name in (_FREE_UNITS, _REASONING_POLICIES):
            continue
        if name not in prices:
            flags.add(GUARDRAIL_ESTIMATED if name == ESTIMATED_UNITS else PRICE_UNKNOWN)
        # Automated reasoning is sold by the policy.
        factor = max(1, units.get(_REASONING_POLICIES, 1)) if name == _REASONING_UNITS else 1
        pico += count * factor * prices.get(name, dearest)
    return Cost(pico, frozenset(flags))


MAX_PIECE_BYTES: Final = 1024 * 1024  # of a stream; a longer trace is not read, and its units are estimated

_CONVERSE_TRACE, _INVOKE_TRACE = "trace", "amazon-bedrock-trace"
_INVOKE_TRACE_BYTES: Final = _INVOKE_TRACE.encode()
_ACTION, _INTERVENED = "amazon-bedrock-guardrailAction", "INTERVENED"
_INTERVENED_BYTES: Final = b'"INTERVENED"'
_METRICS: Final = "invocationMetrics"
_METRICS_BYTES: Final = _METRICS.encode()


class GuardrailUsageReader:
    """Adds a guardrail's units to the usage that another reader reads. `request_units` are the request's estimate."""

    __slots__ = ("_reader", "_request_units", "_trace")

    def __init__(self, reader: UsageReader, content_type: bytes, request_units: int) -> None:
        """`content_type` is the response's."""
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
        """Whether the guardrail blocked the call. If it did so before the model ran, Bedrock bills no tokens."""
        return self._trace.is_blocked()

    def units(self, output_tokens: int) -> Mapping[str, int]:
        return self._trace.units() or estimate_units(self._request_units, output_tokens)

    def reported_and_estimated_units(self, output_tokens: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return both for a response that was cut, because its trace may have been cut as well."""
        return self._trace.units(), estimate_units(self._request_units, output_tokens)

    def _add_units(self, usage: Usage | None) -> Usage | None:
        return None if usage is None else usage._replace(units=self.units(usage.output))


class _TraceReader(Protocol):
    """Reads the units from the trace in a response."""

    def feed(self, data: bytes) -> None: ...

    def units(self) -> Mapping[str, int]:
        """Return the units by policy; empty if no trace states them."""

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
    """Reads server-sent events, in which a trace is on one line."""

    __slots__ = ("_buffer", "_is_blocked", "_is_skipping", "_units")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_blocked = False
        self._units: Mapping[str, int] = {}
        self._is_skipping = False  # within the rest of a line that is too long

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
        return parse_json(bytes(self._buffer.removeprefix(b"data:")))


def _parse_frame(frame: EventFrame) -> Any:
    """Parse an event of Converse, or the base64 content of a chunk of InvokeModel."""
    event = parse_json(frame.payload)
    if frame.name != "chunk":
        return event
    try:
        inner = b64decode(event["bytes"])
    except (LookupError, TypeError, ValueError):
        return None
    return parse_json(inner) if _INVOKE_TRACE_BYTES in inner or _INTERVENED_BYTES in inner else None


def _is_blocked(document: Any) -> bool:
    """Read this from the response's own members, not from what a model said."""
    if not isinstance(document, dict):
        return False
    return document.get("stopReason") == "guardrail_intervened" or document.get(_ACTION) == _INTERVENED


def _read_trace_units(document: Any) -> list[Mapping[str, int]]:
    """Return the units of each assessment; none at all if one of them has a value that is not a count."""
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
        node = pending.pop()
        if isinstance(node, dict):
            metrics = node.get(_METRICS)
            if isinstance(metrics, dict):
                yield metrics
            pending += [value for name, value in node.items() if name != _METRICS]
        elif isinstance(node, list):
            pending += node
