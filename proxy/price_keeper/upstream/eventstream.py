"""AWS event-stream frames: observed on their way to the client, and encoded for the events that the sidecar adds.

    total length u32 | length of headers u32 | CRC of these 8 bytes | headers | payload | CRC of all before it

`FrameWatcher` never holds back or alters what passes. The lengths of every frame are verified, and all of a frame whose
payload is wanted: nothing is reported of what was damaged, but damage to text that passes is for the client to find.
A frame that lies whole in one piece of data is read in place; of a frame that comes in several pieces only its head, a
running CRC and the wanted part of its payload are kept. Frames repeat their lengths and headers, so what follows from
these is cached, for all streams.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple
from zlib import crc32

# What current AWS SDKs accept (older ones stop at 16 MiB), so a larger frame fails in the client in any case.
MAX_HEADERS: Final = 128 * 1024
MAX_PAYLOAD: Final = 24 * 1024 * 1024

# An exception carries a short message. It is reported without being asked for, so its memory is bounded here.
MAX_EXCEPTION_PAYLOAD: Final = 64 * 1024

# Some decoders read a header's length as a signed number.
_MAX_HEADER_VALUE: Final = 2**15 - 1

# Each type of event has one short block of headers, the same every time. A block of unusual length is parsed each time.
_MAX_CACHED_BLOCKS: Final = 64
_MAX_CACHED_BLOCK_BYTES: Final = 512

# Bedrock pads its events to many different lengths, and there are a few types of event.
_MAX_CACHED_PRELUDES: Final = 1024

# Up to this size the CRC of a copied slice is cheaper than that of a memory view.
_MAX_COPY_BYTES: Final = 64 * 1024

_make_tuple = tuple.__new__  # makes a named tuple in half the time of calling its class

_PRELUDE: Final = struct.Struct("!III")
_CRC: Final = struct.Struct("!I")
_crc_at = _CRC.unpack_from
_OVERHEAD: Final = _PRELUDE.size + _CRC.size

_STRING: Final = 7
_VARIABLE_LENGTH_TYPES: Final = (6, _STRING)  # 6 is a byte array
_FIXED_LENGTHS: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}  # true, false, four integers, a time, a UUID

_NAME_HEADERS: Final = {"event": ":event-type", "exception": ":exception-type", "error": ":error-code"}


class BrokenStream(ValueError):
    """The data is not a complete event stream; `offset` is where the faulty frame begins."""

    def __init__(self, fault: str, offset: int) -> None:
        self.offset = offset
        super().__init__(f"{fault}, in the frame that begins at byte {offset}")


class EventFrame(NamedTuple):
    """A frame that `FrameWatcher` reports."""

    kind: str  # event, exception or error
    name: str  # its event type, exception type or error code
    payload: bytes  # the end of the payload, as much of it as was wanted
    payload_size: int  # of the whole payload


class _Interest(NamedTuple):
    kind: str
    name: str
    keep: int
    counted_below: int  # an event with a smaller payload is counted, and not reported


class FrameInterests(dict[bytes, _Interest | None]):
    """What to do with a frame, by its whole block of headers; None lets it pass unreported.

    `wanted` names the event types to report, and how many bytes of each payload's end to keep. An event of a type in
    `counted`, with a smaller payload than is said there, is only counted. Exceptions and errors are always reported.
    """

    def __init__(self, wanted: Mapping[str, int], counted: Mapping[str, int] = MappingProxyType({})) -> None:
        self._wanted = wanted
        self._counted = counted

    def __missing__(self, block: bytes) -> _Interest | None:
        is_usual = len(block) <= _MAX_CACHED_BLOCK_BYTES
        kind, name = (_cached_kind_and_name if is_usual else _parse_kind_and_name)(block)
        interest = None
        if kind in ("exception", "error"):
            interest = _Interest(kind, name, MAX_EXCEPTION_PAYLOAD, 0)
        elif name in self._wanted:
            interest = _Interest(kind, name, self._wanted[name], self._counted.get(name, 0) if kind == "event" else 0)
        if is_usual:
            if len(self) >= _MAX_CACHED_BLOCKS:
                self.clear()
            self[block] = interest
        return interest


class FrameWatcher:
    """Observes a stream: reports and counts frames as `interests` says. A plain mapping is its `wanted`.

    After an error in the stream, `failure` describes it and the rest is ignored.
    """

    __slots__ = ("_interests", "_partial", "boundary", "counted", "failure", "frames")

    def __init__(self, interests: FrameInterests | Mapping[str, int]) -> None:
        self._interests = interests if isinstance(interests, FrameInterests) else FrameInterests(interests)
        self._partial: _PartialFrame | None = None
        self.failure: BrokenStream | None = None
        self.frames = 0  # completed frames, reported or not
        self.counted = 0  # of these, the events that were only counted
        self.boundary = 0  # where in the stream the last frame ended

    def feed(self, data: bytes) -> list[EventFrame]:
        """Return the frames to report that end in this data. Never raises, so observing cannot harm the stream."""
        reported: list[EventFrame] = []
        if self.failure is not None:
            return reported
        try:
            at = self._scan_whole_frames(data, 0, reported) if self._partial is None else 0
            while at < len(data):
                at += self._feed_partial(memoryview(data)[at:], reported)
                if self._partial is None:
                    at = self._scan_whole_frames(data, at, reported)
        except _FrameError as fault:
            self._fail(str(fault))
        return reported

    def close(self) -> BrokenStream | None:
        """End the stream. Returns what was wrong with it, or None if it ended at a frame boundary."""
        if self.unfinished:
            self._fail("the stream ends too early")
        return self.failure

    @property
    def unfinished(self) -> int:
        """Number of bytes of an incomplete frame. If it is 0 and there is no failure, a frame may be inserted here."""
        return self._partial.consumed if self._partial is not None else 0

    @property
    def retained(self) -> int:
        """Number of bytes of the stream that are in memory now."""
        return self._partial.retained if self._partial is not None else 0

    def _fail(self, fault: str) -> None:
        self.failure = BrokenStream(fault, self.boundary)
        self._partial = None

    def _scan_whole_frames(self, data: bytes, at: int, reported: list[EventFrame]) -> int:
        """Return where it stopped: at an incomplete or damaged frame, which `_PartialFrame` then handles.

        The inner loop of every stream: a frame that is not reported costs two slices and two look-ups.
        """
        size, start, frames, counted = len(data), at, 0, 0
        preludes, interests = _preludes, self._interests
        try:
            while size - at >= _OVERHEAD:
                total, head_size, payload_size = preludes[data[at : at + 12]]
                end = at + total
                if end > size:
                    break
                interest = interests[data[at + 12 : at + head_size]]
                if interest is not None:
                    kind, name, keep, counted_below = interest
                    if payload_size < counted_below:
                        counted += 1
                    else:
                        kept = b""
                        if keep:
                            crc_at = end - 4
                            source = data if total <= _MAX_COPY_BYTES else memoryview(data)
                            if crc32(source[at:crc_at]) != _crc_at(data, crc_at)[0]:
                                break
                            kept = data[crc_at - (payload_size if payload_size < keep else keep) : crc_at]
                        reported.append(_make_tuple(EventFrame, (kind, name, kept, payload_size)))
                frames += 1
                at = end
        finally:  # also if the lengths or the headers of a frame cannot be read
            self.frames += frames
            self.counted += counted
            self.boundary += at - start
        return at

    def _feed_partial(self, view: memoryview, reported: list[EventFrame]) -> int:
        """Continue the frame in progress, or begin one; return how many bytes of the view belong to it."""
        partial = self._partial = self._partial or _PartialFrame(self._interests)
        used = partial.take(view)
        if partial.is_complete:
            self._partial = None
            self.frames += 1
            self.boundary += partial.consumed
            if partial.is_counted:
                self.counted += 1
            else:
                reported.extend(partial.report())
        return used


class _FrameError(Exception):
    """What is wrong with a frame, raised where its position in the stream is not known."""


class _Preludes(dict[bytes, tuple[int, int, int]]):
    """The lengths of a frame, its head and its payload, by its first 12 bytes. Raises _FrameError for impossible ones
    and for a wrong CRC."""

    def __missing__(self, prelude: bytes) -> tuple[int, int, int]:
        total, headers_size, crc = _PRELUDE.unpack(prelude)
        if crc32(prelude[:8]) != crc:
            raise _FrameError("the CRC of the lengths is wrong")
        payload_size = total - headers_size - _OVERHEAD
        if headers_size > MAX_HEADERS or not 0 <= payload_size <= MAX_PAYLOAD:
            raise _FrameError(f"the lengths are not possible: {total} with {headers_size} of headers")
        if len(self) >= _MAX_CACHED_PRELUDES:
            self.clear()
        lengths = self[prelude] = total, _PRELUDE.size + headers_size, payload_size
        return lengths


_preludes: Final = _Preludes()


class _PartialFrame:
    """A frame that is still arriving: its head is gathered, and of its payload what is wanted."""

    def __init__(self, interests: FrameInterests) -> None:
        self._interests = interests
        self._interest: _Interest | None = None
        self._keep = 0  # bytes of the payload's end; the frame is verified if there are any
        self._gathered = bytearray()  # of the head, and after that of the CRC at the end
        self._head_size = _PRELUDE.size  # includes the headers once the prelude with their size is read
        self._is_head_read = False
        self._payload_size = self._payload_left = 0
        self._kept = bytearray()
        self._crc = 0
        self.consumed = 0
        self.is_complete = False

    @property
    def retained(self) -> int:
        return len(self._gathered) + len(self._kept)

    def take(self, view: memoryview) -> int:
        """Consume what belongs to this frame; return how many bytes that was."""
        used = 0 if self._is_head_read else self._take_head(view)
        if self._is_head_read:
            used += self._take_payload(view[used:])
            used += self._take_crc(view[used:])
        self.consumed += used
        return used

    @property
    def is_counted(self) -> bool:
        return self._interest is not None and self._payload_size < self._interest.counted_below

    def report(self) -> list[EventFrame]:
        if self._interest is None:
            return []
        kind, name, keep, _ = self._interest
        return [EventFrame(kind, name, bytes(self._kept[max(0, len(self._kept) - keep) :]), self._payload_size)]

    def _take_head(self, view: memoryview) -> int:
        used = self._gather(view, self._head_size)
        if len(self._gathered) == self._head_size == _PRELUDE.size:
            self._read_prelude()
        if len(self._gathered) == self._head_size:
            self._read_headers()
        return used

    def _gather(self, view: memoryview, size: int) -> int:
        more = view[: size - len(self._gathered)]
        self._gathered += more
        return len(more)

    def _read_prelude(self) -> None:
        _, self._head_size, self._payload_size = _preludes[bytes(self._gathered)]
        self._payload_left = self._payload_size

    def _read_headers(self) -> None:
        self._interest = self._interests[bytes(self._gathered[_PRELUDE.size :])]
        if self._interest is not None:
            self._keep = self._interest.keep
        self._crc = crc32(self._gathered)
        self._gathered.clear()
        self._is_head_read = True

    def _take_payload(self, view: memoryview) -> int:
        part = view[: self._payload_left]
        self._payload_left -= len(part)
        if self._keep:
            self._crc = crc32(part, self._crc)
            self._keep_tail(part, self._keep)
        return len(part)

    def _keep_tail(self, part: memoryview, keep: int) -> None:
        self._kept += part
        if len(self._kept) > 2 * keep:  # not each time: small parts of a large payload would be moved again and again
            del self._kept[: len(self._kept) - keep]

    def _take_crc(self, view: memoryview) -> int:
        used = self._gather(view, _CRC.size)
        if len(self._gathered) == _CRC.size:
            if self._keep and _crc_at(self._gathered)[0] != self._crc:
                raise _FrameError("the CRC of the frame is wrong")
            self.is_complete = True
        return used


def _parse_kind_and_name(block: bytes) -> tuple[str, str]:
    try:
        texts = _parse_headers(block)
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        raise _FrameError("the headers cannot be read") from None
    kind = texts.get(":message-type", "event")
    return kind, texts.get(_NAME_HEADERS.get(kind, ""), "")


_cached_kind_and_name = lru_cache(_MAX_CACHED_BLOCKS)(_parse_kind_and_name)


def _parse_headers(block: bytes) -> dict[str, str]:
    """Return every header by name, with its value if that is text."""
    texts: dict[str, str] = {}
    at = 0
    while at < len(block):
        name_end = at + 1 + block[at]
        name = block[at + 1 : name_end].decode()
        if name in texts:
            raise _FrameError(f"the header {name!r} comes twice")
        kind = block[name_end]
        at = name_end + 1
        if kind in _VARIABLE_LENGTH_TYPES:
            size = int.from_bytes(block[at : at + 2], "big")
            at += 2
        else:
            size = _FIXED_LENGTHS[kind]
        if at + size > len(block):
            raise IndexError
        texts[name] = block[at : at + size].decode() if kind == _STRING else ""
        at += size
    return texts


def encode_frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Encode a frame with these headers, in their order. Text is the only header type in Bedrock's streams."""
    block = b"".join(_encode_header(name.encode(), value.encode()) for name, value in headers.items())
    if len(block) > MAX_HEADERS or len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a frame has at most {MAX_HEADERS} bytes of headers and {MAX_PAYLOAD} of payload")
    lengths = struct.pack("!II", _OVERHEAD + len(block) + len(payload), len(block))
    frame = b"".join((lengths, _CRC.pack(crc32(lengths)), block, payload))
    return frame + _CRC.pack(crc32(frame))


def _encode_header(name: bytes, value: bytes) -> bytes:
    if not 1 <= len(name) <= 255 or len(value) > _MAX_HEADER_VALUE:
        raise ValueError(f"a header has a name of 1 to 255 bytes and a value of at most {_MAX_HEADER_VALUE}")
    return b"".join((bytes([len(name)]), name, bytes([_STRING]), struct.pack("!H", len(value)), value))
