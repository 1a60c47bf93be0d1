"""Join SDK retries to the call in flight, or replay its response, so that a retry is not paid for twice.

SDKs stop reading after a timeout and send the same call again with the same invocation id. What has arrived of the
response is kept, within bounds, and replayed to the retry. START HERE: `RetryJoiner.join` and `open_shared`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import chain

from price_keeper.exchange import FlowControl, Header, Responder

MAX_RESPONSE_BYTES = 1024 * 1024  # of one response; a longer one cannot be joined any more
MAX_TOTAL_BYTES = 20 * 1024 * 1024  # of all responses; the oldest finished ones are evicted first
CALL_OVERHEAD_BYTES = 4096  # counted for a call before any of its response is kept
PIECE_OVERHEAD_BYTES = 64  # counted for each piece of a response beyond its bytes; its headers are one piece
RESPONSE_TTL_SECONDS = 60.0  # of a finished response: longer than an SDK waits between two attempts
MAX_STALL_SECONDS = 15.0  # that a reader may stall while another waits for it; SDKs give up after 60
ABANDONED_TTL_SECONDS = 120.0  # how long a response without readers is still kept, in case a retry comes


# A response of status 200 that failed after all has a frame of such a type, or lacks the last event.
_ERROR_FRAME = re.compile(rb"\x0d:message-type\x07\x00(?:\x09exception|\x05error)")
_LAST_EVENT = re.compile(
    rb'(?:\A|\n)(?:data: ?\[DONE\]|(?:event: ?|data: ?\{"type": ?")response\.(?:completed|incomplete)\b)'
)
_EVENT_STREAM, _SERVER_SENT_EVENTS = b"application/vnd.amazon.eventstream", b"text/event-stream"


class SharedResponse:
    """One response with any number of readers; each gets it from the beginning. It is the responder of the one call.

    Upstream waits for the slowest reader, but a reader that stalls while others wait for it is dropped.
    """

    __slots__ = (
        "_flow",
        "_head",
        "_is_paused",
        "_joiner",
        "_last_reader_left_at",
        "_readers",
        "_retained",
        "finished_at",
        "is_finished",
        "is_joinable",
        "kept_bytes",
        "key",
    )  # fmt: skip

    def __init__(self, key: Hashable, first: Responder, joiner: RetryJoiner) -> None:
        self.key = key
        self._joiner = joiner
        self._readers: tuple[_ResponseReader, ...] = ()
        self._flow: FlowControl | None = None
        self._is_paused = False
        self._head: tuple[int, bytes, int | None] | None = None  # the headers are packed
        self._retained: list[bytes] = []
        self._last_reader_left_at = 0.0
        self.kept_bytes = 0
        self.is_joinable = True
        self.is_finished = False
        self.finished_at = 0.0
        self.join(first)

    def join(self, responder: Responder) -> None:
        if responder.is_disconnected:
            return
        reader = _ResponseReader(self, responder)
        if not self.is_finished:
            self._readers = (*self._readers, reader)
        responder.attach(reader)
        if self._head is not None:
            status, packed, length = self._head
            responder.start(status, _unpack_headers(packed), length)
            for data in self._retained:
                responder.write(data)
            responder.flush()
        if self.is_finished:
            responder.finish()

    def discard(self) -> None:
        if self.is_joinable:
            self.is_joinable = False
            self._joiner.forget(self)
            self._retained = []
            if not self._readers and self._flow is not None:
                self._flow.on_disconnected()

    # The responder interface, for the one call.

    @property
    def has_started(self) -> bool:
        return self._head is not None

    @property
    def is_disconnected(self) -> bool:
        """Once the call is sent, a client that left may come back for the response as long as it is kept."""
        return not self._readers and (self._flow is None or not self.is_joinable)

    def attach(self, flow: FlowControl) -> None:
        self._flow = flow
        if self._is_paused:
            flow.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        packed = _pack_headers(headers)
        self._head = (status, packed, length)
        # An error is never replayed: the next attempt may succeed.
        if status >= 300 or not self._joiner.reserve_bytes(self, len(packed) + PIECE_OVERHEAD_BYTES):
            self.discard()
        for reader in self._readers:
            reader.responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if self.is_joinable:
            is_awaited = bool(self._readers) or not self._is_abandoned()
            if is_awaited and self._joiner.reserve_bytes(self, len(data) + PIECE_OVERHEAD_BYTES):
                self._retained.append(data)
            else:
                self.discard()
        for reader in self._readers:
            reader.responder.write(data)

    def flush(self) -> None:
        for reader in self._readers:
            reader.responder.flush()

    def finish(self) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self._flow = None
        readers, self._readers = self._readers, ()
        self._joiner.on_finished(self)
        for reader in readers:
            reader.responder.finish()

    def abort(self) -> None:
        """End without a response, also if the call's own task ends early; it cannot be joined any more."""
        if self.is_finished:
            return
        flow, self._flow = self._flow, None
        readers, self._readers = self._readers, ()
        self.discard()
        for reader in readers:
            reader.responder.abort()
        if flow is not None:
            flow.on_disconnected()

    @property
    def has_succeeded(self) -> bool:
        """Whether a finished response that is kept was a success."""
        if self._head is None:
            return False
        kind = (b"\n" + self._head[1]).partition(b"\ncontent-type\n")[2].partition(b"\n")[0].lower()
        if kind.startswith(_EVENT_STREAM):
            return _ERROR_FRAME.search(b"".join(self._retained)) is None
        return not kind.startswith(_SERVER_SENT_EVENTS) or _LAST_EVENT.search(b"".join(self._retained)) is not None

    def _is_abandoned(self) -> bool:
        return self._joiner.now() - self._last_reader_left_at > ABANDONED_TTL_SECONDS

    # Callbacks of the readers.

    def on_reader_left(self, reader: _ResponseReader) -> None:
        self._readers = tuple([other for other in self._readers if other is not reader])
        self._last_reader_left_at = self._joiner.now()
        self.update_flow()
        if not self._readers and not self.is_joinable and self._flow is not None:
            self._flow.on_disconnected()

    @property
    def has_other_readers(self) -> bool:
        return len(self._readers) > 1

    def update_flow(self) -> None:
        is_paused = False
        for reader in self._readers:
            is_paused = is_paused or reader.is_paused
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if self._flow is None:
            return
        if is_paused:
            self._flow.pause()
        else:
            self._flow.resume()


def _pack_headers(headers: Sequence[Header]) -> bytes:
    """One object instead of three for each header: thousands of responses are kept. No header has a line feed in it."""
    return b"\n".join(chain.from_iterable(headers))


def _unpack_headers(packed: bytes) -> list[Header]:
    parts = packed.split(b"\n")
    return [*zip(parts[::2], parts[1::2], strict=False)]  # no headers are one empty part


class _ResponseReader:
    """One reader: the flow control of its own responder."""

    __slots__ = ("_shared", "is_paused", "responder")

    def __init__(self, shared: SharedResponse, responder: Responder) -> None:
        self._shared = shared
        self.responder = responder
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True
        self._shared.update_flow()

    def resume(self) -> None:
        self.is_paused = False
        self._shared.update_flow()

    def on_stalled(self, seconds: float) -> None:
        if seconds > MAX_STALL_SECONDS and self._shared.has_other_readers:
            self.responder.abort()

    def on_disconnected(self) -> None:
        self._shared.on_reader_left(self)


class RetryJoiner:
    """Knows the calls that can be joined. Keys must be small, and differ for calls whose responses may differ."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._calls: dict[Hashable, SharedResponse] = {}  # calls that can be joined
        self._finished: deque[SharedResponse] = deque()  # in the order in which they finished
        self.max_bytes = MAX_TOTAL_BYTES
        self.kept_bytes = 0
        self.joined = 0

    def join(self, key: Hashable, responder: Responder) -> bool:
        """Give this responder the response of a call with the same key; False if there is none to join."""
        shared = self._calls.get(key)
        if shared is None or (shared.is_finished and self.now() - shared.finished_at > RESPONSE_TTL_SECONDS):
            return False
        self.joined += 1
        shared.join(responder)
        return True

    def open_shared(self, key: Hashable, responder: Responder) -> SharedResponse:
        before = self._calls.get(key)
        if before is not None:
            before.discard()
        shared = SharedResponse(key, responder, self)
        if self.reserve_bytes(shared, CALL_OVERHEAD_BYTES):
            self._calls[key] = shared
        else:
            shared.is_joinable = False
        return shared

    async def drop_expired(self) -> None:
        """Drop responses past their TTL. To be called every second or so."""
        now = self.now()
        while self._finished and now - self._finished[0].finished_at > RESPONSE_TTL_SECONDS:
            self._finished.popleft().discard()

    # Callbacks of the shared responses.

    def reserve_bytes(self, shared: SharedResponse, size: int) -> bool:
        """Count `size` more bytes for this response; False if that exceeds a limit. Finished responses are evicted, the
        oldest first."""
        kept_bytes = shared.kept_bytes + size
        if not shared.is_joinable or kept_bytes > CALL_OVERHEAD_BYTES + MAX_RESPONSE_BYTES:
            return False
        while self.kept_bytes + size > self.max_bytes:
            if not self._finished:
                return False
            self._finished.popleft().discard()
        self.kept_bytes += size
        shared.kept_bytes = kept_bytes
        return True

    def on_finished(self, shared: SharedResponse) -> None:
        """Keep a finished response for RESPONSE_TTL_SECONDS if it was a success."""
        if not shared.is_joinable:
            return
        if not shared.has_succeeded:
            shared.discard()
            return
        shared.finished_at = self.now()
        self._finished.append(shared)

    def forget(self, shared: SharedResponse) -> None:
        self.kept_bytes -= shared.kept_bytes
        del self._calls[shared.key]
