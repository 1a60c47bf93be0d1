"""Reads the usage of streamed responses: InvokeModelWithResponseStream, ConverseStream, and OpenAI's chat completions
and responses over server-sent events. Pure.

While a stream runs, each frame costs as little work as possible; parsing waits until the end. Then `usage()` is what
the stream itself stated, or None if it was cut before. In that case a soft budget is charged the input of
`partial_usage()`, which may be None as well, and the output of `estimate_output()`; a hard one is charged the ceiling.

The chunks of all model families are read with the table of `model_families`.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import orjson

from price_keeper.upstream.eventstream import EventFrame
from price_keeper.usage import fast_parse, model_families
from price_keeper.usage.model_families import INVOCATION_METRICS, LATENCY_HEADER, NO_HEADERS, TIER_HEADER
from price_keeper.usage.token_usage import NO_COUNTS, ReportedCounts, Usage, build_usage, merge_counts, sum_tokens

_MAX_TRIES: Final = 16
_DECODER: Final = json.JSONDecoder()

# The first chunks of a stream are small and are needed whole. The last one may repeat the whole text (Cohere's does),
# but Bedrock puts its own counts at its end.
INVOCATION_FRAME_LIMITS: Final = {"chunk": 16 * 1024}

# Models were seen to stream 1 to 5 tokens per frame, so this overestimates most of them. In a larger frame, such as one
# with the whole input of a tool, the excess counts with the usual 4 bytes per token.
TOKENS_PER_FRAME: Final = 4
ORDINARY_FRAME_BYTES: Final = 512
BYTES_PER_TOKEN: Final = 4  # the mean for text, used if nothing better is known

# An event with the usage has a few hundred bytes; nothing else is read from events.
MAX_EVENT_BYTES: Final = 256 * 1024

_MAX_FIRST_CHUNKS: Final = 2
_MAX_LAST_CHUNKS: Final = 3  # Claude's message_delta and message_stop, and one that may follow them

# Chunks with these beginnings are kept wherever they are in the stream, because keep-alive chunks may come before and
# after them. A character of base64 is six bits; one that is not whole depends on what follows.
_COUNTING_PREFIXES: Final = tuple(
    b'{"bytes":"' + b64encode(beginning)[: len(beginning) * 8 // 6]
    for beginning in model_families.COUNTING_CHUNK_BEGINNINGS
)

# A guardrail's trace can be in the metadata. It comes before the usage, so the end suffices, however long the trace is.
# Of the output only the length is needed, for estimates.
CONVERSE_FRAME_LIMITS: Final = {
    "metadata": 64 * 1024,
    "contentBlockDelta": 0,
    "messageStart": 0,
    "contentBlockStart": 0,
}
CONVERSE_COUNTED_FRAMES: Final = {"contentBlockDelta": ORDINARY_FRAME_BYTES}  # below this size, their number suffices

# OpenAI's models cache prompts in blocks of this size, so less than one block of a cached prompt is plain input.
CACHE_BLOCK_TOKENS: Final = 128


def parse_json(data: bytes) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return orjson.loads(data)
    except ValueError:
        return None


def find_last_object(data: bytes, name: str, member: str) -> dict[str, Any]:
    """Return the last object of this name that has this member; empty if there is none."""
    text = data.decode("utf-8", "replace")
    for candidate in _iter_objects_from_end(text, name):
        if isinstance(candidate, dict) and member in candidate:
            return candidate
    return {}


def _iter_objects_from_end(text: str, name: str) -> Iterator[Any]:
    starts = [match.end() - 1 for match in re.finditer(rf'"{name}"\s*:\s*\{{', text)]
    for start in starts[: -_MAX_TRIES - 1 : -1]:
        try:
            yield _DECODER.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue


class InvocationStream:
    """The chunks of an InvokeModel stream, of any family.

    Bedrock adds its own counts to the last chunk. The lifetime of cache writes is in the first one, and the number of
    model runs in the last but one.
    """

    __slots__ = (
        "_estimated_tokens",
        "_first",
        "_first_counting",
        "_has_dropped_chunks",
        "_headers",
        "_last",
        "_last_counting",
    )

    def __init__(self, headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        """`headers` state tier and latency; the chunks do not for all families."""
        self._headers = headers
        self._first: list[EventFrame] = []
        self._last: deque[EventFrame] = deque(maxlen=_MAX_LAST_CHUNKS)
        self._first_counting: list[EventFrame] = []  # chunks with counts between the first and the last chunks
        self._last_counting: deque[EventFrame] = deque(maxlen=_MAX_LAST_CHUNKS)
        self._has_dropped_chunks = False  # whether other chunks were dropped
        self._estimated_tokens = 0

    def add_frame(self, frame: EventFrame) -> None:
        if frame.name != "chunk" or frame.kind != "event":
            return
        excess = frame.payload_size - ORDINARY_FRAME_BYTES  # the content is in base64: 3 bytes are 4 here
        self._estimated_tokens += (
            TOKENS_PER_FRAME if excess < 0 else TOKENS_PER_FRAME + excess * 3 // 4 // BYTES_PER_TOKEN
        )
        if len(self._first) < _MAX_FIRST_CHUNKS:
            self._first.append(frame)
        else:
            last = self._last
            if len(last) == _MAX_LAST_CHUNKS:
                if last[0].payload.startswith(_COUNTING_PREFIXES):
                    self._keep_counting(last[0])
                else:
                    self._has_dropped_chunks = True
            last.append(frame)

    def _keep_counting(self, chunk: EventFrame) -> None:
        if len(self._first_counting) < _MAX_FIRST_CHUNKS:
            self._first_counting.append(chunk)
        else:
            self._last_counting.append(chunk)

    def _iter_newest_first(self) -> Iterator[EventFrame]:
        """Yield the kept chunks from the newest to the oldest."""
        for frames in (self._last, self._last_counting, self._first_counting, self._first):
            yield from reversed(frames)

    def usage(self) -> Usage | None:
        summary = self._collect_counts()
        if summary.counts.input is None or summary.counts.output is None:
            return None
        return build_usage(summary.counts, summary.tier, model_families.read_latency(self._headers))

    def partial_usage(self) -> Usage | None:
        summary = self._collect_counts()
        if summary.counts.input is None:
            return None
        return build_usage(summary.counts, summary.tier, model_families.read_latency(self._headers))

    def estimate_output(self) -> int:
        summary = self._collect_counts()
        if summary.counts.output:
            return summary.counts.output
        # A family that counts along the way states the count in its newest chunk. Otherwise an earlier count is a lower
        # bound.
        if summary.newest_count is None:
            return max(self._estimated_tokens, summary.earlier_count)
        return summary.newest_count

    def has_output(self) -> bool:
        return self._has_dropped_chunks or any(map(_may_have_output, self._iter_newest_first()))

    def _collect_counts(self) -> _StreamCounts:
        counts, newest, earlier, tier = NO_COUNTS, None, 0, ""
        for age, chunk in enumerate(map(_parse_chunk, self._iter_newest_first())):
            reported, bedrock_counts = _read_chunk_counts(chunk), model_families.read_bedrock_metrics(chunk)
            if reported.output is not None and not _is_final(chunk):
                newest, earlier = (reported.output if age == 0 else newest), max(earlier, reported.output)
                reported = reported._replace(output=None)  # the stream continues, so this is not the final count
            counts = merge_counts(counts, merge_counts(bedrock_counts, reported))
            tier = tier or _read_chunk_tier(chunk, self._headers)
        return _StreamCounts(counts, newest, earlier, tier)


class _StreamCounts(NamedTuple):
    counts: ReportedCounts
    newest_count: int | None
    earlier_count: int
    tier: str


def _parse_chunk(frame: EventFrame) -> dict[str, Any]:
    if frame.payload_size > len(frame.payload):
        return _parse_end_of_chunk(frame.payload)
    try:
        document = orjson.loads(b64decode(orjson.loads(frame.payload)["bytes"]))
    except (KeyError, TypeError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _may_have_output(frame: EventFrame) -> bool:
    """Whether a chunk may have output; True also if it cannot be read completely."""
    document = _parse_chunk(frame)
    return frame.payload_size > len(frame.payload) or not document or model_families.has_output(document)


def _parse_end_of_chunk(payload: bytes) -> dict[str, Any]:
    """Read the end of a chunk that was cut. The base64 is by far its longest text, and can be decoded from any multiple
    of four characters before its end."""
    text = max(payload.split(b'"'), key=len).replace(b"\\", b"")
    try:
        document = b64decode(text[len(text) % 4 :])
    except ValueError:
        return {}
    return {INVOCATION_METRICS: find_last_object(document, INVOCATION_METRICS, "inputTokenCount")}


def _read_chunk_counts(chunk: dict[str, Any]) -> ReportedCounts:
    counts = model_families.read_counts(chunk)
    for name in model_families.CHUNK_WRAPPERS:
        if counts != NO_COUNTS:
            break
        counts = model_families.read_counts(chunk.get(name))
    return counts


def _read_chunk_tier(chunk: dict[str, Any], headers: Mapping[bytes, bytes]) -> str:
    return model_families.read_tier(chunk, headers) or model_families.read_tier(chunk.get("message"), NO_HEADERS)


def _is_final(chunk: dict[str, Any]) -> bool:
    """Whether no output follows this chunk, in the form of any family, so that its counts are final."""
    if chunk.get("type") == "message_delta" or isinstance(chunk.get("metadata"), dict):
        return True
    choices = chunk.get("choices")
    if isinstance(choices, list):
        return not choices or any(_has_stop_reason(choice) for choice in choices)
    return _has_stop_reason(chunk)


def _has_stop_reason(place: Any) -> bool:
    return isinstance(place, dict) and any(place.get(name) for name in model_families.END_MARKS)


# ---------------------------------------------------------------- chat completions


# Within a text the quotes would be escaped, so this is always a member, and not the null that announces one.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_TIER: Final = re.compile(rb'"service_tier"\s*:\s*"')
_ERROR: Final = re.compile(rb'"error"\s*:\s*[^\sn]')
_DONE: Final = b"[DONE]"
_EVENT_END: Final = b"\n\n"


class ChatStream:
    """The server-sent events of chat completions. The last one states the usage, if the caller asked for that.

    An event with an error ends the output: neither it nor any event after it counts.
    """

    __slots__ = (
        "_byte_count",
        "_event_count",
        "_has_failed",
        "_headers",
        "_is_complete",
        "_partial_usage",
        "_splitter",
        "_tier",
        "_usage",
    )

    def __init__(self, headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        self._headers = headers
        self._splitter = _EventSplitter()
        self._event_count = 0
        self._byte_count = 0
        self._tier = ""
        self._usage: Usage | None = None
        self._partial_usage: Usage | None = None  # from an event that does not state its output
        self._is_complete = False
        self._has_failed = False

    def feed(self, data: bytes) -> None:
        if b"\r" in data:
            data = data.replace(b"\r", b"")  # in JSON a carriage return can only stand between members
        self._byte_count += len(data)
        events = self._splitter.feed(data)
        if not events:
            return
        if not self._has_failed:
            self._count_events(events)
        if not self._tier and _TIER.search(events):  # each event states it, except perhaps the one with the usage
            self._tier = next(filter(None, map(_read_event_tier, events.split(_EVENT_END))), "")
        if _USAGE.search(events) or _DONE in events:
            for event in events.split(_EVENT_END):
                self._read_event(event)

    def usage(self) -> Usage | None:
        if not self._is_complete:
            self._read_event(self._splitter.unfinished)  # a server may leave out the empty line after its last event
        return self._usage_with_tier() if self._is_complete else None

    def partial_usage(self) -> Usage | None:
        return self.usage() or self._usage_with_tier() or self._partial_usage

    def estimate_output(self) -> int:
        usage = self.usage()
        if usage is not None and usage.output:
            return usage.output
        counted = 0 if self._usage is None else self._usage.output
        if self.has_failed and not self._event_count:
            return counted
        excess = self._byte_count - self._event_count * ORDINARY_FRAME_BYTES
        return max(counted, TOKENS_PER_FRAME * self._event_count, excess // BYTES_PER_TOKEN)

    def has_output(self) -> bool:
        return True  # the events are not kept, so it is not known whether they had text

    @property
    def has_failed(self) -> bool:
        return self._has_failed or _is_error_event(self._splitter.unfinished)

    def _count_events(self, events: bytes) -> None:
        good = _cut_before_error(events) if b'"error"' in events else events
        self._event_count += good.count(b"\ndata:") + good.startswith(b"data:")
        self._has_failed = len(good) < len(events)

    def _usage_with_tier(self) -> Usage | None:
        usage = self._usage
        return usage if usage is None or usage.tier else usage._replace(tier=self._tier)

    def _read_event(self, event: bytes) -> None:
        if len(event) > MAX_EVENT_BYTES:
            return
        if _USAGE.search(event):
            document = parse_json(_join_event_data(event))
            if not isinstance(document, dict):
                return
            usage = model_families.read_chat(document, self._headers)
            if usage is None:
                self._partial_usage = (
                    model_families.read_chat(document, self._headers, needs_output=False) or self._partial_usage
                )
            else:
                self._usage = usage if sum_tokens(usage) >= sum_tokens(self._usage) else self._usage
                self._is_complete = _is_final(document)
        elif _DONE in event and _join_event_data(event).strip() == _DONE:
            self._is_complete = True


# The type of an event of a response, from its beginning: the caller's own text may stand in any other place.
_RESPONSE_TYPE: Final = re.compile(rb'(?:event: ?|data: ?\{"type": ?")(error|response\.[a-z_.]+)')
_FINAL_TYPES: Final = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_DELTA: Final = b".delta"
_MAX_FINAL_EVENT_BYTES: Final = 4 * 1024 * 1024  # it repeats the request and the whole response; parsed in 10 ms


def _read_response_type(event: bytes | bytearray) -> bytes:
    found = _RESPONSE_TYPE.match(event)
    return b"" if found is None else found[1]


class ResponsesStream:
    """The server-sent events of OpenAI's responses. The last one repeats the whole response, with its usage; only there
    usage counts, because the events before repeat what the caller sent."""

    __slots__ = ("_delta_bytes", "_delta_count", "_headers", "_partial_usage", "_splitter", "_usage", "has_failed")

    def __init__(self, headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        self._headers = headers
        self._splitter = _EventSplitter(_is_final_event, _MAX_FINAL_EVENT_BYTES)
        self._delta_count = 0
        self._delta_bytes = 0
        self._usage: Usage | None = None
        self._partial_usage: Usage | None = None
        self.has_failed = False

    def feed(self, data: bytes) -> None:
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        for event in self._splitter.feed(data).split(_EVENT_END):
            self._read_event(event)

    def usage(self) -> Usage | None:
        if self._usage is None:
            self._read_event(self._splitter.unfinished)  # a server may leave out the empty line after its last event
        return self._usage

    def partial_usage(self) -> Usage | None:
        return self.usage() or self._partial_usage

    def estimate_output(self) -> int:
        usage = self.usage()
        if usage is not None and usage.output:
            return usage.output
        excess = self._delta_bytes - self._delta_count * ORDINARY_FRAME_BYTES
        return max(TOKENS_PER_FRAME * self._delta_count, excess // BYTES_PER_TOKEN)

    def has_output(self) -> bool:
        return True  # the events are not kept, so it is not known whether they had text

    def _read_event(self, event: bytes) -> None:
        kind = _read_response_type(event)
        if kind.endswith(_DELTA):
            self._delta_count += 1
            self._delta_bytes += len(event)
        elif kind in _FINAL_TYPES and len(event) <= _MAX_FINAL_EVENT_BYTES:
            document = parse_json(_join_event_data(event))
            response = document.get("response") if isinstance(document, dict) else None
            if isinstance(response, dict):
                self._usage = model_families.read_responses(response, self._headers)
                self._partial_usage = model_families.read_responses(response, self._headers, needs_output=False)
        self.has_failed = self.has_failed or kind in (b"error", b"response.failed")


def _is_final_event(start: bytes | bytearray) -> bool:
    return _read_response_type(start) in _FINAL_TYPES


def is_usage_only_event(event: bytes) -> bool:
    """Whether an event holds only the usage, so that a caller that did not ask for it misses nothing."""
    if not _USAGE.search(event):
        return False
    document = parse_json(_join_event_data(event))
    if not isinstance(document, dict) or document.get("choices") != [] or "error" in document:
        return False
    return isinstance(document.get("usage"), dict)


def _cut_before_error(events: bytes) -> bytes:
    """Return the events before the first error; all if there is none."""
    offset = 0
    for event in events.split(_EVENT_END):
        if _is_error_event(event):
            return events[:offset]
        offset += len(event) + len(_EVENT_END)
    return events


def _read_event_tier(event: bytes) -> str:
    """Read the tier from the event's own members, not from what a model was made to say in it."""
    if len(event) > MAX_EVENT_BYTES or not _TIER.search(event):
        return ""
    return model_families.read_tier(parse_json(_join_event_data(event)), NO_HEADERS)


def _is_error_event(event: bytes) -> bool:
    if len(event) > MAX_EVENT_BYTES or not _ERROR.search(event):
        return False
    document = parse_json(_join_event_data(event))
    return isinstance(document, dict) and bool(document.get("error"))


def _join_event_data(event: bytes) -> bytes:
    """Join the data lines. A space after the colon and carriage returns stay, as they mean nothing in JSON."""
    return b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))


def _is_never_kept(_: bytes | bytearray) -> bool:
    return False


class _EventSplitter:
    """Cuts a stream after complete events. Of an incomplete event it holds only as much as could ever be read."""

    __slots__ = ("_buffer", "_is_kept", "_is_skipping", "_most_bytes")

    def __init__(
        self, is_kept: Callable[[bytes | bytearray], bool] = _is_never_kept, most_bytes: int = MAX_EVENT_BYTES
    ) -> None:
        """Events of which `is_kept` says so by their beginning may have `most_bytes`, all others MAX_EVENT_BYTES."""
        self._buffer = bytearray()
        self._is_kept = is_kept
        self._most_bytes = most_bytes
        self._is_skipping = False  # within the rest of an event that is too large

    def feed(self, data: bytes) -> bytes:
        """Return all events that end in this data. The usual data is exactly that, and is returned as it is."""
        if not self._buffer and data.endswith(_EVENT_END):
            return data
        searched = max(0, len(self._buffer) - 1)
        self._buffer += data
        end = self._buffer.rfind(_EVENT_END, searched) + len(_EVENT_END)
        if end < len(_EVENT_END):
            self._trim_buffer()
            return b""
        events = bytes(self._buffer[:end])
        del self._buffer[:end]
        if self._is_skipping:
            self._is_skipping = False
            events = events[events.find(_EVENT_END) + len(_EVENT_END) :]
        self._trim_buffer()
        return events

    @property
    def unfinished(self) -> bytes:
        return bytes(self._buffer)

    def _trim_buffer(self) -> None:
        size = len(self._buffer) - 1  # it may have the first of the two bytes that end it
        if size > self._most_bytes or (size > MAX_EVENT_BYTES and not self._is_kept(self._buffer)):
            self._is_skipping = True
        if self._is_skipping:
            del self._buffer[:-1]  # the last byte may be the first of the two that end the event


class ConverseStream:
    """A Converse stream. Its last event, the metadata, states everything; before it only the length of the output is
    known."""

    __slots__ = (
        "_format",
        "_has_begun",
        "_has_block",
        "_headers",
        "_metadata",
        "_tokens_of_added",
        "ordinary_frames",
    )

    def __init__(self, format: str = "", headers: Mapping[bytes, bytes] = NO_HEADERS) -> None:
        self._format = format
        self._headers = headers
        self._metadata: EventFrame | None = None
        self._tokens_of_added = 0
        self.ordinary_frames = 0  # with output, counted and not added
        self._has_begun = self._has_block = False

    def add_frame(self, frame: EventFrame) -> None:
        if frame.name == "contentBlockDelta":
            excess = frame.payload_size - ORDINARY_FRAME_BYTES
            self._tokens_of_added += TOKENS_PER_FRAME if excess < 0 else TOKENS_PER_FRAME + excess // BYTES_PER_TOKEN
        elif frame.name == "metadata" and frame.kind == "event":
            if self._metadata is None or sum_tokens(self._parse_metadata(frame)) >= sum_tokens(self.usage()):
                self._metadata = frame
        elif frame.kind == "event":
            self._has_begun = True
            if frame.name == "contentBlockStart":
                self._has_block = True  # for example with a tool's name

    def usage(self) -> Usage | None:
        return None if self._metadata is None else self._parse_metadata(self._metadata)

    def partial_usage(self) -> Usage | None:
        return None if self._metadata is None else self._parse_metadata(self._metadata, needs_output=False)

    def estimate_output(self) -> int:
        """Estimate the output. A model that began its message has read the whole prompt, and said at least a little."""
        usage = self.usage()
        return (usage.output if usage is not None else 0) or self._output_tokens or TOKENS_PER_FRAME * self._has_begun

    def has_output(self) -> bool:
        return self._has_block or self._output_tokens > 0

    @property
    def _output_tokens(self) -> int:
        return self._tokens_of_added + TOKENS_PER_FRAME * self.ordinary_frames

    def _parse_metadata(self, metadata: EventFrame, *, needs_output: bool = True) -> Usage | None:
        payload, size = metadata.payload, metadata.payload_size
        usage = None
        if size == len(payload) and TIER_HEADER not in self._headers and LATENCY_HEADER not in self._headers:
            usage = fast_parse.parse_converse(payload)  # the usual case
        if usage is None:
            document = parse_json(payload) if size == len(payload) else _parse_end_of_metadata(payload)
            usage = model_families.read_converse(document, self._headers, needs_output=needs_output)
        return _exclude_cached_input(usage) if usage is not None and self._format == "openai" else usage


def _parse_end_of_metadata(payload: bytes) -> dict[str, Any]:
    members = (("usage", "inputTokens"), ("serviceTier", "type"), ("performanceConfig", "latency"))
    return {name: find_last_object(payload, name, member) for name, member in members}


def _exclude_cached_input(usage: Usage) -> Usage:
    """Correct the input of some streams of OpenAI's models, which count cached tokens as input too, and twice in the
    total (seen with GPT-5.6).

    A total that is documented as such looks the same, so only the seen case is corrected: all input but less than one
    block of the cache is cached. Anything else is taken as documented, which is never too little.
    """
    cached = usage.cache_read + usage.cache_write_5m + usage.cache_write_1h
    return usage._replace(input=usage.input - cached) if 0 <= usage.input - cached < CACHE_BLOCK_TOKENS else usage
