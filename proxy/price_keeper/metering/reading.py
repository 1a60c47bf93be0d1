"""Reads what an answer used as it goes by, whichever operation it answers and in whichever form it comes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import orjson

from price_keeper.forwarding.eventstream import FrameWatcher
from price_keeper.forwarding.model_path import Operation
from price_keeper.metering import bodies, usual
from price_keeper.metering.bodies import LATENCY_HEADER, TIER_HEADER
from price_keeper.metering.converse_stream import CONVERSE_WANTED, ConverseStream
from price_keeper.metering.json_tail import parsed
from price_keeper.metering.kept import Kept
from price_keeper.metering.streams import INVOCATION_WANTED, ChatStream, InvocationStream
from price_keeper.metering.usage import Usage

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"application/vnd.amazon.eventstream"
SERVER_SENT_EVENTS: Final = b"text/event-stream"

# Every other call waits while an answer in one piece is read: to pick the members that tell of usage takes 35 ms of the
# longest at worst. One that they cannot be picked from is parsed whole, up to this.
MOST_BYTES_PARSED: Final = 1024 * 1024
BYTES_A_TOKEN: Final = 4  # of text, in the mean; where nothing better is known
TOKENS_AN_IMAGE: Final = 1500  # about what models count that sell images by the token
_IMAGE: Final = re.compile(rb'[",][A-Za-z0-9+/_=-]{1000,}+')  # or a sound: base64, and no text


# From a document, the answer's headers, and whether the output has to be stated.
Meaning: TypeAlias = Callable[[Any, Mapping[bytes, bytes], bool], Usage | None]


class Reader(Protocol):
    def feed(self, data: bytes) -> None: ...

    def usage(self) -> Usage | None:
        """All of it, at the answer's end; None where the answer does not state it. Zeros are returned as stated."""

    def partial(self) -> Usage | None:
        """What is known of an answer that was cut, or does not state its output."""

    def estimate_output(self) -> int | None:
        """Tokens, as far as can be told from what was seen; None where that is nothing."""

    def says_something(self) -> bool:
        """Whether there is output in the answer; also True where that cannot be told."""

    @property
    def has_failed(self) -> bool:
        """Whether the answer, which began well, told of an error on its way."""


def reader_of(operation: Operation, format: str, kind: bytes, headers: Mapping[bytes, bytes]) -> Reader:
    """`kind` is the answer's content type."""
    if kind == JSON:  # as most are
        return _whole(operation, headers)
    kind = kind.lower()
    if kind.startswith(EVENT_STREAM):
        if operation is Operation.CONVERSE_STREAM:
            return _Frames(ConverseStream(format, headers), CONVERSE_WANTED)
        return _Frames(InvocationStream(headers), INVOCATION_WANTED)
    if kind.startswith(SERVER_SENT_EVENTS):
        return ChatStream(headers)
    return _whole(operation, headers)


def _whole(operation: Operation, headers: Mapping[bytes, bytes]) -> Reader:
    if operation is Operation.CONVERSE:
        is_usual = TIER_HEADER not in headers and LATENCY_HEADER not in headers
        return _Whole(_converse, headers, usual.parse_converse if is_usual else None)
    return _Whole(_MEANINGS.get(operation, _invocation), headers)


def _converse(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return bodies.read_converse(document, headers, needs_output=needs_output)


def _invocation(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return bodies.read_invocation(document, headers, needs_output=needs_output)


def _chat(document: Any, headers: Mapping[bytes, bytes], needs_output: bool) -> Usage | None:
    return bodies.read_chat(document, headers, needs_output=needs_output)


_MEANINGS: Mapping[Operation, Meaning] = {
    Operation.CHAT_COMPLETIONS: _chat,
    Operation.APPLY_GUARDRAIL: lambda document, *_: bodies.read_guardrail(document),
    Operation.CHECK_GUARDRAILS: lambda document, *_: bodies.read_guardrail(document),
    Operation.ASYNC_INVOKES: lambda *_: Usage(),  # a job: it has a price of its own, whatever it will use
}


class _Whole(Kept):
    __slots__ = ("_document", "_headers", "_meaning", "_usual")

    def __init__(
        self, meaning: Meaning, headers: Mapping[bytes, bytes], usual: Callable[[bytes], Usage | None] | None = None
    ) -> None:
        """`usual` is asked first: it is quick, and may know nothing."""
        super().__init__()
        self._meaning = meaning
        self._headers = headers
        self._usual = usual
        self._document: Any = None

    def usage(self) -> Usage | None:
        if self._usual is not None and (told := self._usual(self.whole())) is not None:
            return told
        return self._meaning(self._telling(), self._headers, True)

    def partial(self) -> Usage | None:
        return self._meaning(self._telling(), self._headers, False)

    def _telling(self) -> Any:
        """At the end: all members that tell of usage."""
        if self._document is None:
            answer = self.whole()
            picked = usual.pick_usage_members(answer)
            self._document = _parsed(answer) if picked is None else picked
        return self._document

    def estimate_output(self) -> int | None:
        if self.is_too_large:
            return None  # of so much most is no text
        images = _IMAGE.findall(self.whole())
        return (self.size - sum(map(len, images))) // BYTES_A_TOKEN + TOKENS_AN_IMAGE * len(images)

    def says_something(self) -> bool:
        if bodies.is_embedding(self._telling()):
            return False
        if self.size > MOST_BYTES_PARSED:
            return True
        document = parsed(self.whole())
        return self.size > 0 if document is None else bodies.has_output(document)

    @property
    def has_failed(self) -> bool:
        return False


def _parsed(answer: bytes) -> Any:
    """Of what is no JSON the headers may still say it."""
    try:
        return orjson.loads(answer) if len(answer) <= MOST_BYTES_PARSED else {}
    except orjson.JSONDecodeError:
        return {}


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

    def says_something(self) -> bool:
        return self._stream.says_something()
