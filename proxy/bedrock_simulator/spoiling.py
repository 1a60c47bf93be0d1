"""How a fault damages an answer's body: pieces in, pieces and breaks out. The sender knows what a break is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from bedrock_simulator import chat, frames
from bedrock_simulator.call import EVENT_STREAM, SERVER_SENT
from bedrock_simulator.refusals import Refusal
from bedrock_simulator.wishes import CONNECTION_FAULTS, FaultSpec


class Break(Enum):
    STALL = "stall"
    CUT = "cut"
    RESET = "reset"


class Spoiler:
    """Lets pieces pass until its fault strikes, once; `is_damaged` tells whether what passed is not the answer."""

    def __init__(self, spec: FaultSpec, content_type: str = EVENT_STREAM) -> None:
        self._spec = spec
        self._content_type = content_type
        self._frames = spec.after_frames
        self._bytes = spec.after_bytes
        if self._frames is None and self._bytes is None:
            self._frames = 1
        self.is_damaged = False

    def pieces(self, source: Iterable[bytes]) -> Iterator[bytes | Break]:
        passing, passed, seen = iter(source), 0, 0
        for piece in passing:
            at = self._place(passed, seen, len(piece))
            if at is not None:
                yield from self._strike(piece[:at], piece[at:], passing)
                return
            yield piece
            passed, seen = passed + len(piece), seen + 1
        # Behind the last frame, but before the end of the stream. A body of stated length has ended by then.
        if self._content_type in (EVENT_STREAM, SERVER_SENT) and self._place(passed, seen, 0) == 0:
            yield from self._strike(b"", b"", passing)

    def _place(self, passed: int, seen: int, size: int) -> int | None:
        """Where in a piece the fault strikes, None if later."""
        if self._bytes is not None:
            at = self._bytes - passed
            return at if at < size or at == size == 0 else None
        return 0 if seen == self._frames else None

    def _strike(self, before: bytes, rest: bytes, passing: Iterator[bytes]) -> Iterator[bytes | Break]:
        if before:
            yield before
        match self._spec.fault:
            case "exception-frame":
                self.is_damaged = True
                yield self._exception()
                return
            case "bad-crc" if rest:
                self.is_damaged = True
                rest = frames.damaged(rest)
            case fault if fault in CONNECTION_FAULTS:
                yield Break(fault)  # if the sender comes back from this, the answer goes on
        if rest:
            yield rest
        yield from passing

    def _exception(self) -> bytes:
        kind = self._spec.exception
        refusal = stream_refusal(kind)
        if self._content_type == EVENT_STREAM:
            return frames.exception(kind, refusal.message)
        return chat.sent(chat.error(refusal))


def stream_refusal(kind: str) -> Refusal:
    """The error that a stream's exception is called elsewhere."""
    return Refusal(kind[0].upper() + kind[1:])
