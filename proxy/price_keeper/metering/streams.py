"""What a stream says it used, piece by piece. Pure.

While a stream runs, as little as possible is done for each piece; almost everything waits until it is over. Then
`usage()` is what the stream itself told, None if it was cut before. What to assume instead: the input is that of
`partial()`, which may be None too, and the output is `estimate_output()`.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import orjson

from price_keeper.forwarding.eventstream import Frame
from price_keeper.metering import bodies
from price_keeper.metering.bodies import INVOCATION_METRICS, NO_HEADERS
from price_keeper.metering.counts import NO_COUNTS, ReportedCounts, merge_counts, build_usage
from price_keeper.metering.json_tail import last_object, parsed
from price_keeper.metering.usage import Usage, sum_tokens

# The first chunks of a stream are small and wanted whole. Its last one may repeat all that was said (Cohere's does),
# but Bedrock puts its own counts at the end.
INVOCATION_WANTED: Final = {"chunk": 16 * 1024}

# Models were seen to stream 1 to 5 tokens a frame, so this errs to the dear side on most of them. A frame larger than
# the ordinary, such as one with the whole input of a tool, has what is above that counted by the usual 4 bytes a token.
TOKENS_A_FRAME: Final = 4
ORDINARY_FRAME: Final = 512
BYTES_A_TOKEN: Final = 4

# An event that tells the usage has a few hundred bytes, and nothing else in an event is wanted.
LARGEST_EVENT: Final = 256 * 1024

_FIRST_CHUNKS: Final = 2
_LAST_CHUNKS: Final = 3  # Claude's message_delta and message_stop, and one that may follow them

# How the chunks begin in which Claude and Nova count: `{"type":"message_` and `{"metadata":`. They are kept wherever
# they stand, since keep-alive chunks may come before and after them.
_COUNTING: Final = (b'{"bytes":"eyJ0eXBlIjoibWVzc2FnZV', b'{"bytes":"eyJtZXRhZGF0YSI6')


class InvocationStream:
    """The chunks of any family. Bedrock adds its own counts to the last one; how long a cache keeps what was written
    stands in the first, and how often the model ran in the last but one."""

    __slots__ = ("_assumed", "_first", "_has_passed_some", "_headers", "_last", "_passed_first", "_passed_last")

    def __init__(self, headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        """The answer's headers tell tier and latency; no body of a stream does so for all families."""
        self._headers = headers
        self._first: list[Frame] = []
        self._last: deque[Frame] = deque(maxlen=_LAST_CHUNKS)
        self._passed_first: list[Frame] = []  # between the first and the last chunks: those that count
        self._passed_last: deque[Frame] = deque(maxlen=_LAST_CHUNKS)
        self._has_passed_some = False  # that are not kept
        self._assumed = 0

    def frame(self, frame: Frame) -> None:
        if frame.name != "chunk" or frame.kind != "event":
            return
        excess = frame.payload_size - ORDINARY_FRAME  # what is said is in base64: 3 bytes are 4 here
        self._assumed += TOKENS_A_FRAME if excess < 0 else TOKENS_A_FRAME + excess * 3 // 4 // BYTES_A_TOKEN
        if len(self._first) < _FIRST_CHUNKS:
            self._first.append(frame)
        else:
            last = self._last
            if len(last) == _LAST_CHUNKS:
                if last[0].payload.startswith(_COUNTING):
                    self._keep(last[0])
                else:
                    self._has_passed_some = True
            last.append(frame)

    def _keep(self, passed: Frame) -> None:
        if len(self._passed_first) < _FIRST_CHUNKS:
            self._passed_first.append(passed)
        else:
            self._passed_last.append(passed)

    def _kept(self) -> Iterator[Frame]:
        """From the newest to the oldest."""
        for kept in (self._last, self._passed_last, self._passed_first, self._first):
            yield from reversed(kept)

    def usage(self) -> Usage | None:
        found = self._found()
        if found.counts.input is None or found.counts.output is None:
            return None
        return build_usage(found.counts, found.tier, bodies.read_latency(self._headers))

    def partial_usage(self) -> Usage | None:
        found = self._found()
        if found.counts.input is None:
            return None
        return build_usage(found.counts, found.tier, bodies.read_latency(self._headers))

    def estimate_output(self) -> int:
        found = self._found()
        if found.counts.output:
            return found.counts.output
        # A family that counts as it goes has just said it; else what was counted earlier is the least there can be.
        return max(self._assumed, found.earlier_count) if found.newest_count is None else found.newest_count

    def has_output(self) -> bool:
        return self._has_passed_some or any(map(_says_something, self._kept()))

    def _found(self) -> _Found:
        counts, newest, earlier, tier = NO_COUNTS, None, 0, ""
        for age, chunk in enumerate(map(_chunk, self._kept())):
            said, by_bedrock = _told(chunk), bodies.read_bedrock_metrics(chunk)
            if said.output is not None and not _ends(chunk):
                newest, earlier = (said.output if age == 0 else newest), max(earlier, said.output)
                said = said._replace(output=None)  # of a stream that goes on
            counts = merge_counts(counts, merge_counts(by_bedrock, said))
            tier = tier or _tier(chunk, self._headers)
        return _Found(counts, newest, earlier, tier)


class _Found(NamedTuple):
    counts: ReportedCounts
    newest_count: int | None
    earlier_count: int
    tier: str


def _chunk(frame: Frame) -> dict[str, Any]:
    if frame.payload_size > len(frame.payload):
        return _end_of_chunk(frame.payload)
    try:
        document = orjson.loads(b64decode(orjson.loads(frame.payload)["bytes"]))
    except (KeyError, TypeError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _says_something(frame: Frame) -> bool:
    """Also of a chunk that is not read whole, or not at all."""
    document = _chunk(frame)
    return frame.payload_size > len(frame.payload) or not document or bodies.has_output(document)


def _end_of_chunk(payload: bytes) -> dict[str, Any]:
    """Of a chunk that was cut. The base64 is by far its longest text, and can be read from any multiple of four
    characters before its end."""
    text = max(payload.split(b'"'), key=len).replace(b"\\", b"")
    try:
        document = b64decode(text[len(text) % 4 :])
    except ValueError:
        return {}
    return {INVOCATION_METRICS: last_object(document, INVOCATION_METRICS, "inputTokenCount")}


# Where a family wraps what it tells: Claude at the start, Nova and Cohere at the end.
_WRAPPERS: Final = ("message", "metadata", "response")


def _told(chunk: dict[str, Any]) -> ReportedCounts:
    counts = bodies.read_counts(chunk)
    for name in _WRAPPERS:
        if counts != NO_COUNTS:
            break
        counts = bodies.read_counts(chunk.get(name))
    return counts


def _tier(chunk: dict[str, Any], headers: Mapping[bytes, bytes]) -> str:
    return bodies.read_tier(chunk, headers) or bodies.read_tier(chunk.get("message"), NO_HEADERS)


def _ends(chunk: dict[str, Any]) -> bool:
    """Whether nothing is said after it, in the words of any family; what it counts is then the whole."""
    if chunk.get("type") == "message_delta" or isinstance(chunk.get("metadata"), dict):
        return True
    choices = chunk.get("choices")
    if isinstance(choices, list):
        return not choices or any(_has_reason(choice) for choice in choices)
    return _has_reason(chunk)


def _has_reason(place: Any) -> bool:
    names = ("finish_reason", "stop_reason", "completionReason", "is_finished")
    return isinstance(place, dict) and any(place.get(name) for name in names)


# ---------------------------------------------------------------- chat completions


# Inside a text its quotes would be escaped, so this is always a member, and not the null that announces one.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_TIER: Final = re.compile(rb'"service_tier"\s*:\s*"')
_ERROR: Final = re.compile(rb'"error"\s*:\s*[^\sn]')
_DONE: Final = b"[DONE]"
_END: Final = b"\n\n"


class ChatStream:
    """The server-sent events of chat completions. The last of them tells the usage, if the caller asked for that. One
    that tells of an error ends what is said: neither it nor any event behind it counts."""

    __slots__ = ("_bytes", "_events", "_has_failed", "_headers", "_is_over", "_lines", "_partial", "_tier", "_usage")

    def __init__(self, headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        self._headers = headers
        self._events = _Events()
        self._lines = 0
        self._bytes = 0
        self._tier = ""
        self._usage: Usage | None = None
        self._partial: Usage | None = None  # of an event that does not state its output
        self._is_over = False
        self._has_failed = False

    def feed(self, data: bytes) -> None:
        if b"\r" in data:
            data = data.replace(b"\r", b"")  # in JSON it can only stand between lines
        self._bytes += len(data)
        whole = self._events.take(data)
        if not whole:
            return
        if not self._has_failed:
            self._count(whole)
        if not self._tier and _TIER.search(whole):  # each event has it, but maybe not the one with the usage
            self._tier = next(filter(None, map(_tier_told, whole.split(_END))), "")
        if _USAGE.search(whole) or _DONE in whole:
            for event in whole.split(_END):
                self._read(event)

    def usage(self) -> Usage | None:
        if not self._is_over:
            self._read(self._events.unfinished)  # a server may leave out the empty line after its last event
        return self._told() if self._is_over else None

    def partial_usage(self) -> Usage | None:
        return self.usage() or self._told() or self._partial

    def estimate_output(self) -> int:
        told = self.usage()
        if told is not None and told.output:
            return told.output
        counted = 0 if self._usage is None else self._usage.output
        if self.has_failed and not self._lines:
            return counted
        excess = self._bytes - self._lines * ORDINARY_FRAME
        return max(counted, TOKENS_A_FRAME * self._lines, excess // BYTES_A_TOKEN)

    def has_output(self) -> bool:
        return True  # its events are not kept, so nobody can tell that there was no text in them

    @property
    def has_failed(self) -> bool:
        return self._has_failed or _tells_error(self._events.unfinished)

    def _count(self, whole: bytes) -> None:
        said = _before_error(whole) if b'"error"' in whole else whole
        self._lines += said.count(b"\ndata:") + said.startswith(b"data:")
        self._has_failed = len(said) < len(whole)

    def _told(self) -> Usage | None:
        told = self._usage
        return told if told is None or told.tier else told._replace(tier=self._tier)

    def _read(self, event: bytes) -> None:
        if len(event) > LARGEST_EVENT:
            return
        if _USAGE.search(event):
            document = parsed(_data(event))
            if not isinstance(document, dict):
                return
            told = bodies.read_chat(document, self._headers)
            if told is None:
                self._partial = bodies.read_chat(document, self._headers, needs_output=False) or self._partial
            else:
                self._usage = told if sum_tokens(told) >= sum_tokens(self._usage) else self._usage
                self._is_over = _ends(document)
        elif _DONE in event and _data(event).strip() == _DONE:
            self._is_over = True


def usage_event_only(event: bytes) -> bool:
    """Whether all that an event holds is the usage, so that a caller who did not ask for it misses nothing."""
    if not _USAGE.search(event):
        return False
    document = parsed(_data(event))
    if not isinstance(document, dict) or document.get("choices") != [] or "error" in document:
        return False
    return isinstance(document.get("usage"), dict)


def _before_error(events: bytes) -> bytes:
    """Those before the first that tells of an error; all, if none does."""
    at = 0
    for event in events.split(_END):
        if _tells_error(event):
            return events[:at]
        at += len(event) + len(_END)
    return events


def _tier_told(event: bytes) -> str:
    """By the event itself, and not by what a model was made to say in it."""
    if len(event) > LARGEST_EVENT or not _TIER.search(event):
        return ""
    return bodies.read_tier(parsed(_data(event)), NO_HEADERS)


def _tells_error(event: bytes) -> bool:
    if len(event) > LARGEST_EVENT or not _ERROR.search(event):
        return False
    document = parsed(_data(event))
    return isinstance(document, dict) and bool(document.get("error"))


def _data(event: bytes) -> bytes:
    """With the space that may stand after the colon, and with carriage returns: to JSON both are nothing."""
    return b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))


class _Events:
    """Cuts a stream after whole events. Of an event that has no end as yet, no more is held than is ever read."""

    __slots__ = ("_held", "_is_skipping")

    def __init__(self) -> None:
        self._held = bytearray()
        self._is_skipping = False  # the rest of an event that is too large

    def take(self, data: bytes) -> bytes:
        """All events that end in this piece; the usual piece is just that, and is handed back as it is."""
        if not self._held and data.endswith(_END):
            return data
        searched = max(0, len(self._held) - 1)
        self._held += data
        end = self._held.rfind(_END, searched) + len(_END)
        if end < len(_END):
            self._bound()
            return b""
        whole = bytes(self._held[:end])
        del self._held[:end]
        if self._is_skipping:
            self._is_skipping = False
            whole = whole[whole.find(_END) + len(_END) :]
        self._bound()
        return whole

    @property
    def unfinished(self) -> bytes:
        return bytes(self._held)

    def _bound(self) -> None:
        if len(self._held) > LARGEST_EVENT + 1:  # with the first of the two bytes that end it
            self._is_skipping = True
        if self._is_skipping:
            del self._held[:-1]  # that first byte may be the last one here
