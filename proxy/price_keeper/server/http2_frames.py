"""HTTP/2's frames (RFC 9113, sections 4 to 7): from bytes, to bytes, and what each means in a stream's state. Pure.

`FrameReader` splits what a client sends into frames whose length and stream id are possible for their type.
`FRAME_EFFECTS` is the state machine of a stream, as a table.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the fixed first bytes of a client
FRAME_HEADER_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384  # of a payload; the protocol's default, and a client is offered no other
LARGEST_MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1
MAX_WINDOW_BYTES: Final = 2**31 - 1
DEFAULT_WINDOW_BYTES: Final = 65_535  # of a connection and of each stream, until a frame says otherwise

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6
ENABLE_CONNECT_PROTOCOL: Final = 0x8

_HEADER: Final = struct.Struct(">HBBBL")
_SETTING: Final = struct.Struct(">HL")
_NUMBER: Final = struct.Struct(">L")
_PRIORITY_BYTES: Final = 5  # of the deprecated priority fields in a HEADERS frame


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class ProtocolViolation(Exception):
    """The client broke the protocol or a limit, and its connection ends with this code."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        self.code = code
        super().__init__(reason)


class Frame(NamedTuple):
    """A complete frame as it was received; the payload still has its padding."""

    type: int
    flags: int
    stream_id: int
    payload: bytes


class _FrameRule(NamedTuple):
    """`is_of_stream` is None if the frame may be of a stream or of the connection."""

    is_of_stream: bool | None
    min_bytes: int
    max_bytes: int = MAX_FRAME_BYTES


_RULES: Final = {
    DATA: _FrameRule(True, 0),
    HEADERS: _FrameRule(True, 0),
    PRIORITY: _FrameRule(True, 5, 5),
    RST_STREAM: _FrameRule(True, 4, 4),
    SETTINGS: _FrameRule(False, 0),
    PUSH_PROMISE: _FrameRule(True, 4),
    PING: _FrameRule(False, 8, 8),
    GOAWAY: _FrameRule(False, 8),
    WINDOW_UPDATE: _FrameRule(None, 4, 4),
    CONTINUATION: _FrameRule(True, 0),
}


class FrameReader:
    """Splits received bytes into frames. A frame that is too long is rejected when its header has arrived, so that
    nothing of its payload, up to 16 MB, is buffered."""

    def __init__(self) -> None:
        self._data = b""
        self._position = 0

    @property
    def buffered_bytes(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._position :] + data if self._data else data
        self._position = 0

    def read_frame(self) -> Frame | None:
        """The next complete frame, or None until there is one. Raises ProtocolViolation."""
        data, start = self._data, self._position
        available = len(data) - start - FRAME_HEADER_BYTES
        if available >= 0:
            high, low, frame_type, flags, stream_id = _HEADER.unpack_from(data, start)
            length = high << 8 | low
            if length > MAX_FRAME_BYTES:
                raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame has at most {MAX_FRAME_BYTES} bytes")
            if available >= length:
                payload_start = start + FRAME_HEADER_BYTES
                self._position = payload_start + length
                frame = Frame(
                    frame_type, flags, stream_id & MAX_STREAM_ID, data[payload_start : payload_start + length]
                )
                rule = _RULES.get(frame_type)
                if rule is not None:
                    _check_frame(frame, rule)
                return frame
        self._data, self._position = data[start:], 0
        return None


def _check_frame(frame: Frame, rule: _FrameRule) -> None:
    if rule.is_of_stream is not None and rule.is_of_stream != (frame.stream_id != 0):
        whose = "a stream" if rule.is_of_stream else "the connection"
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"a frame of type {frame.type} belongs to {whose}")
    if not rule.min_bytes <= len(frame.payload) <= rule.max_bytes:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {frame.type} has another length")


def build_frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return build_frame_header(frame_type, flags, stream_id, len(payload)) + payload


def build_frame_header(frame_type: int, flags: int, stream_id: int, length: int) -> bytes:
    return _HEADER.pack(length >> 8, length & 0xFF, frame_type, flags, stream_id)


def build_settings(settings: dict[int, int]) -> bytes:
    return build_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings.items()))


def build_window_update(stream_id: int, size: int) -> bytes:
    return build_frame(WINDOW_UPDATE, 0, stream_id, _NUMBER.pack(size))


def build_reset(stream_id: int, code: ErrorCode) -> bytes:
    return build_frame(RST_STREAM, 0, stream_id, _NUMBER.pack(code))


def build_goaway(last_stream_id: int, code: ErrorCode) -> bytes:
    return build_frame(GOAWAY, 0, 0, _NUMBER.pack(last_stream_id) + _NUMBER.pack(code))


def build_headers(stream_id: int, block: bytes, max_frame_bytes: int) -> bytes:
    """A HEADERS frame, and as many CONTINUATION frames as a long header block needs."""
    if len(block) <= max_frame_bytes:
        return build_frame(HEADERS, END_HEADERS, stream_id, block)
    frames = [build_frame(HEADERS, 0, stream_id, block[:max_frame_bytes])]
    for start in range(max_frame_bytes, len(block), max_frame_bytes):
        piece = block[start : start + max_frame_bytes]
        is_last = start + max_frame_bytes >= len(block)
        frames.append(build_frame(CONTINUATION, END_HEADERS if is_last else 0, stream_id, piece))
    return b"".join(frames)


def extract_content(frame: Frame) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and priority fields. Raises ProtocolViolation."""
    payload, flags = frame.payload, frame.flags
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "a padded frame says how much padding it has")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY and frame.type == HEADERS:
        start += _PRIORITY_BYTES
        if len(payload) < start:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "a frame with a priority has its fields")
    if end < start:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a frame has less padding than payload")
    return payload[start:end] if end - start < len(payload) else payload


def parse_settings(frame: Frame) -> dict[int, int]:
    """The settings of a client; of a repeated one the last. Raises ProtocolViolation."""
    if len(frame.payload) % _SETTING.size or (frame.flags & ACK and frame.payload):
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "settings are pairs of six bytes, an acknowledgement empty")
    settings: dict[int, int] = dict(_SETTING.iter_unpack(frame.payload))
    if settings.get(ENABLE_PUSH, 0) > 1 or settings.get(ENABLE_CONNECT_PROTOCOL, 0) > 1:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a setting is 0 or 1")
    if not MAX_FRAME_BYTES <= settings.get(MAX_FRAME_SIZE, MAX_FRAME_BYTES) <= LARGEST_MAX_FRAME_BYTES:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "frames have 16 kB to 16 MB")
    if settings.get(INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW_BYTES:
        raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "a window has less than 2 GB")
    return settings


def parse_window_increment(frame: Frame) -> int:
    """Raises ProtocolViolation for 0, which an attacker could repeat for ever."""
    increment: int = _NUMBER.unpack(frame.payload)[0] & MAX_WINDOW_BYTES
    if not increment:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a window grows by at least one byte")
    return increment


class StreamState(Enum):
    """The states of RFC 9113, section 5.1, as a server sees them. "Closed" is four, by how the stream closed."""

    IDLE = "no frame of it has been received"
    OPEN = "the client is sending its request"
    HALF_CLOSED = "the client has sent all of its request; the response is not finished"
    RESET = "closed by RST_STREAM of either side"
    ENDED = "closed by the end of request and response"
    FORGOTTEN = "closed too long ago to be remembered, or skipped by the client"


class Effect(Enum):
    """What a frame does to its stream."""

    APPLY = "the frame is interpreted"
    IGNORE = "it may have been sent before the stream closed"
    STREAM_CLOSED = "the stream is reset with STREAM_CLOSED"
    CONNECTION_STREAM_CLOSED = "the connection ends with STREAM_CLOSED"
    CONNECTION_PROTOCOL_ERROR = "the connection ends with PROTOCOL_ERROR"


_APPLY, _IGNORE, _RESET = Effect.APPLY, Effect.IGNORE, Effect.STREAM_CLOSED
_CLOSED, _FAULT = Effect.CONNECTION_STREAM_CLOSED, Effect.CONNECTION_PROTOCOL_ERROR

FRAME_EFFECTS: Final[dict[StreamState, dict[int, Effect]]] = {
    state: dict(zip((HEADERS, DATA, RST_STREAM, WINDOW_UPDATE), effects, strict=True))
    for state, effects in {
        # the frame:              HEADERS  DATA    RST_STREAM WINDOW_UPDATE
        StreamState.IDLE: (_APPLY, _FAULT, _FAULT, _FAULT),
        StreamState.OPEN: (_APPLY, _APPLY, _APPLY, _APPLY),
        StreamState.HALF_CLOSED: (_RESET, _RESET, _APPLY, _APPLY),
        StreamState.RESET: (_RESET, _RESET, _IGNORE, _IGNORE),
        StreamState.ENDED: (_CLOSED, _RESET, _IGNORE, _IGNORE),
        StreamState.FORGOTTEN: (_FAULT, _RESET, _IGNORE, _IGNORE),
    }.items()
}
