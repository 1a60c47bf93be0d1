"""Reads the usage of a response while its bytes are relayed. Pure.

START HERE: `build_reader`. It picks the `UsageReader` for an operation and a content type: a JSON body, an AWS event
stream or server-sent events. A reader never changes what it is fed. Bodies are buffered up to a limit; the usage of a
longer one comes from its headers alone, or is estimated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import orjson

from price_keeper.operations import BodyForm, Operation
from price_keeper.upstream.eventstream import FrameInterests, FrameWatcher
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.model_families import LATENCY_HEADER, TIER_HEADER
from price_keeper.usage.stream_usage import (
    BYTES_PER_TOKEN,
    CONVERSE_COUNTED_FRAMES,
    CONVERSE_FRAME_LIMITS,
    INVOCATION_FRAME_LIMITS,
    ChatStream,
    ConverseStream,
    InvocationStream,
    ResponsesStream,
    parse_json,
)
from price_keeper.usage.token_usage import Usage

MAX_BUFFERED_BYTES = 16 * 1024 * 1024  # the usage of a longer body, such as a film, comes from its headers

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"application/vnd.amazon.eventstream"
SERVER_SENT_EVENTS: Final = b"text/event-stream"

# All other calls wait while a complete body is read. Picking the usage members takes at most 35 ms, for the longest
# body. A body from which they cannot be picked is parsed as a whole up to this size.
MAX_PARSED_BYTES: Final = 1024 * 1024
TOKENS_PER_IMAGE: Final = 1500  # about what models count that sell images by the token
_BASE64_BLOCK: Final = re.compile(rb'[",][A-Za-z0-9+/_=-]{1000,}+')  # an image or a sound, not text


class BodyBuffer:
    """Buffers a body up to MAX_BUFFERED_BYTES, and only counts the bytes of a longer one."""

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        if self.size <= MAX_BUFFERED_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    @property
    def is_too_large(self) -> bool:
        return self.size > MAX_BUFFERED_BYTES

    def to_bytes(self) -> bytes:
        """Return the body; empty if it is too large."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)


# Takes the document, the response's headers, and whether the output must be stated.
UsageParser: TypeAlias = Callable[[Any, Mapping[bytes, bytes], bool], Usage | None]


class UsageReader(Protocol):
    """Reads the usage of one response."""

    def feed(self, data: bytes) -> None: ...

    def usage(self) -> Usage | None:
        """Return the usage after the end; None if the response does not state all of it. Zeros count as stated."""

    def partial_usage(self) -> Usage | None:
        """Return what is known if the response was cut, or does not state its output."""

    def estimate_output(self) -> int | None:
        """Estimate the output tokens from what was seen; None if that is not possible."""

    def has_output(self) -> bool:
        """Whether the response has output; True also if that is not known."""

    @property
    def has_failed(self) -> bool:
        """Whether the response reported an error after it began with success."""


def build_reader(operation: Operation, format: str, content_type: bytes, headers: Mapping[bytes, bytes]) -> UsageReader:
    """Pick the reader. `content_type` is the response's."""
    if content_type == JSON:  # the usual case
        return _build_body_reader(operation, headers)
    content_type = content_type.lower()
    if content_type.startswith(EVENT_STREAM):
        if operation.traits.form is BodyForm.CONVERSE:
            return _EventStreamReader(ConverseStream(format, headers), _CONVERSE_FRAMES)
        return _EventStreamReader(InvocationStream(headers), _INVOCATION_FRAMES)
    if content_type.startswith(SERVER_SENT_EVENTS):
        return ResponsesStream(headers) if operation.traits.form is BodyForm.RESPONSES else ChatStream(headers)
    return _build_body_reader(operation, headers)


def _build_body_reader(operation: Operation, headers: Mapping[bytes, bytes]) -> UsageReader:
    if operation is Operation.CONVERSE:  # the usual case
        may_parse_fast = TIER_HEADER not in headers and LATENCY_HEADER not in headers
        return _BodyReader(_parse_converse, headers, fast_parse.parse_converse if may_parse_fast else None)
    return _BodyReader(_PARSERS[operation.traits.form], headers)


def _parse_converse(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return model_families.read_converse(document, headers, needs_output=needs_output)


def _parse_invocation(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return model_families.read_invocation(document, headers, needs_output=needs_output)


def _parse_chat(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return model_families.read_chat(document, headers, needs_output=needs_output)


def _parse_responses(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return model_families.read_responses(document, headers, needs_output=needs_output)


# The reader of each form's answers.
_PARSERS: Mapping[BodyForm, UsageParser] = {
    BodyForm.CONVERSE: _parse_converse,
    BodyForm.INVOKE: _parse_invocation,
    BodyForm.CHAT: _parse_chat,
    BodyForm.RESPONSES: _parse_responses,
    BodyForm.GUARDRAIL: lambda document, *_: model_families.read_guardrail(document),
    BodyForm.JOB: lambda *_: Usage(),  # a job has one price, whatever it uses
}


class _BodyReader(BodyBuffer):
    __slots__ = ("_document", "_fast_parse_body", "_headers", "_parse")

    def __init__(
        self,
        parse: UsageParser,
        headers: Mapping[bytes, bytes],
        fast_parse_body: Callable[[bytes], Usage | None] | None = None,
    ) -> None:
        """`fast_parse_body` is tried first; it returns None for a body that it does not know."""
        super().__init__()
        self._parse = parse
        self._headers = headers
        self._fast_parse_body = fast_parse_body
        self._document: Any = None

    def usage(self) -> Usage | None:
        if self._fast_parse_body is not None and (usage := self._fast_parse_body(self.to_bytes())) is not None:
            return usage
        return self._parse(self._usage_members(), self._headers, True)

    def partial_usage(self) -> Usage | None:
        return self._parse(self._usage_members(), self._headers, False)

    def _usage_members(self) -> Any:
        """Return all members that state usage. To be called after the end."""
        if self._document is None:
            body = self.to_bytes()
            picked = fast_parse.pick_usage_members(body)
            self._document = _parse_small_body(body) if picked is None else picked
        return self._document

    def estimate_output(self) -> int | None:
        if self.is_too_large:
            return None  # most of so large a body is not text
        images = _BASE64_BLOCK.findall(self.to_bytes())
        return (self.size - sum(map(len, images))) // BYTES_PER_TOKEN + TOKENS_PER_IMAGE * len(images)

    def has_output(self) -> bool:
        if model_families.is_embedding(self._usage_members()):
            return False
        if self.size > MAX_PARSED_BYTES:
            return True
        document = parse_json(self.to_bytes())
        return self.size > 0 if document is None else model_families.has_output(document)

    @property
    def has_failed(self) -> bool:
        return False


def _parse_small_body(answer: bytes) -> Any:
    """Parse a body; empty if it is too large or not JSON, as the headers may still state the usage."""
    try:
        return orjson.loads(answer) if len(answer) <= MAX_PARSED_BYTES else {}
    except orjson.JSONDecodeError:
        return {}


_CONVERSE_FRAMES: Final = FrameInterests(CONVERSE_FRAME_LIMITS, CONVERSE_COUNTED_FRAMES)
_INVOCATION_FRAMES: Final = FrameInterests(INVOCATION_FRAME_LIMITS)


class _EventStreamReader:
    __slots__ = ("_stream", "_watcher", "has_failed")

    def __init__(self, stream: ConverseStream | InvocationStream, interests: FrameInterests) -> None:
        self._stream = stream
        self._watcher = FrameWatcher(interests)
        self.has_failed = False

    def feed(self, data: bytes) -> None:
        for frame in self._watcher.feed(data):
            self._stream.add_frame(frame)
            if frame.kind != "event":
                self.has_failed = True
        if isinstance(self._stream, ConverseStream):
            self._stream.ordinary_frames = self._watcher.counted

    def usage(self) -> Usage | None:
        return self._stream.usage()

    def partial_usage(self) -> Usage | None:
        return self._stream.partial_usage()

    def estimate_output(self) -> int:
        return self._stream.estimate_output()

    def has_output(self) -> bool:
        return self._stream.has_output()
