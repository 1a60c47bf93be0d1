"""Applies a fault to a response's body: pieces in, pieces and connection faults out. Pure.

`response_writer` carries out the connection faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from bedrock_simulator import chat_completions, event_frames
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import CONNECTION_FAULTS, FaultSpec
from bedrock_simulator.simulated_call import EVENT_STREAM, SERVER_SENT_EVENTS


class ConnectionFault(Enum):
    STALL = "stall"
    CUT = "cut"
    RESET = "reset"


class FaultInjector:
    """Passes pieces on and injects its fault once. `is_damaged` is True if the output differs from the response."""

    def __init__(self, spec: FaultSpec, content_type: str = EVENT_STREAM) -> None:
        self._spec = spec
        self._content_type = content_type
        self._after_frames = spec.after_frames
        self._after_bytes = spec.after_bytes
        if self._after_frames is None and self._after_bytes is None:
            self._after_frames = 1
        self.is_damaged = False

    def apply(self, source: Iterable[bytes]) -> Iterator[bytes | ConnectionFault]:
        remaining, passed_bytes, passed_pieces = iter(source), 0, 0
        for piece in remaining:
            offset = self._find_offset(passed_bytes, passed_pieces, len(piece))
            if offset is not None:
                yield from self._inject(piece[:offset], piece[offset:], remaining)
                return
            yield piece
            passed_bytes, passed_pieces = passed_bytes + len(piece), passed_pieces + 1
        # After the last frame, but before the end of the stream. A body with a Content-Length has ended by then.
        if (
            self._content_type in (EVENT_STREAM, SERVER_SENT_EVENTS)
            and self._find_offset(passed_bytes, passed_pieces, 0) == 0
        ):
            yield from self._inject(b"", b"", remaining)

    def _find_offset(self, passed_bytes: int, passed_pieces: int, size: int) -> int | None:
        """The offset of the fault in the current piece, None if it is in a later one."""
        if self._after_bytes is not None:
            offset = self._after_bytes - passed_bytes
            return offset if offset < size or offset == size == 0 else None
        return 0 if passed_pieces == self._after_frames else None

    def _inject(self, before: bytes, rest: bytes, remaining: Iterator[bytes]) -> Iterator[bytes | ConnectionFault]:
        if before:
            yield before
        match self._spec.fault:
            case "exception-frame":
                self.is_damaged = True
                yield self._build_exception()
                return
            case "bad-crc" if rest:
                self.is_damaged = True
                rest = event_frames.corrupt_checksum(rest)
            case fault if fault in CONNECTION_FAULTS:
                yield ConnectionFault(fault)  # after a stall that ends, the response continues
        if rest:
            yield rest
        yield from remaining

    def _build_exception(self) -> bytes:
        kind = self._spec.exception
        error = build_stream_error(kind)
        if self._content_type == EVENT_STREAM:
            return event_frames.encode_exception(kind, error.message)
        return chat_completions.encode_server_sent_event(chat_completions.build_error_document(error))


def build_stream_error(kind: str) -> AwsError:
    """The error that corresponds to a stream's exception frame outside of streams."""
    return AwsError(kind[0].upper() + kind[1:])
