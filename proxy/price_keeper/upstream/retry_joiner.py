"""Retries that must not be paid for twice: a call that is sent again joins the one in flight, or gets its response again.

SDKs stop reading after a timeout and send the same call again with the same invocation id. What has arrived of the
response is kept, within bounds, and replayed to the retry. `RetryJoiner.join` and `open_shared` are the entry points.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from price_keeper.exchange import FlowControl, Header, Responder

MAX_RESPONSE_BYTES = 1024 * 1024  # of one answer; a longer one is no longer joinable
MAX_TOTAL_BYTES = 32 * 1024 * 1024  # at most; under way and whole, the oldest of the whole ones going first
CALL_OVERHEAD_BYTES = 4096  # what a call weighs before anything of its answer is kept
PIECE_OVERHEAD_BYTES = 64  # what each piece of an answer weighs beyond its bytes
HEADER_OVERHEAD_BYTES = 160  # the same for each of its headers
RESPONSE_TTL_SECONDS = 60.0  # after an answer was whole: longer than an SDK waits between two tries
MAX_STALL_SECONDS = 15.0  # that a reader may read nothing while another waits for it; SDKs give up after 60
ABANDONED_TTL_SECONDS = 120.0  # an answer under way is kept up for nobody, in case somebody comes back for it


# How an answer of status 200 tells that it failed after all: by a frame of such a type, or without the last event.
_ERROR_FRAME = re.compile(rb"\x0d:message-type\x07\x00(?:\x09exception|\x05error)")
_LAST_EVENT = b"data: [DONE]"
_EVENT_STREAM, _SERVER_SENT_EVENTS = b"application/vnd.amazon.eventstream", b"text/event-stream"


class SharedResponse:
    """One answer with any number of readers, each of whom gets it from its beginning. It is their responder.

    Upstream waits for the slowest of them; but one that stands still while others wait for it is dropped.
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
        self._readers: list[_ResponseReader] = []
        self._flow: FlowControl | None = None
        self._is_paused = False
        self._head: tuple[int, Sequence[Header], int | None] | None = None
        self._retained: list[bytes] = []
        self._last_reader_left_at = joiner.now()
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
            self._readers.append(reader)
        responder.attach(reader)
        if self._head is not None:
            responder.start(*self._head)
            for data in self._retained:
                responder.write(data)
            responder.flush()
        if self.is_finished:
            responder.finish()
        else:
            self.update_flow()

    def discard(self) -> None:
        if self.is_joinable:
            self.is_joinable = False
            self._joiner.forget(self)
            self._retained = []
            if not self._readers and self._flow is not None:
                self._flow.on_disconnected()

    # The responder of the one call.

    @property
    def has_started(self) -> bool:
        return self._head is not None

    @property
    def is_disconnected(self) -> bool:
        """Once the call is sent, whoever left may come back for the answer as long as it is kept."""
        return not self._readers and (self._flow is None or not self.is_joinable)

    def attach(self, flow: FlowControl) -> None:
        self._flow = flow
        self._is_paused = False
        self.update_flow()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self._head = (status, tuple(headers), length)
        # An error is never shown again: the next try may fare better.
        if status >= 300 or not self._reserve(
            sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in headers)
        ):
            self.discard()
        for reader in tuple(self._readers):
            reader.responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if self.is_joinable:
            self._retain(data)
        for reader in tuple(self._readers):
            reader.responder.write(data)

    def flush(self) -> None:
        for reader in tuple(self._readers):
            reader.responder.flush()

    def finish(self) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self._flow = None
        readers, self._readers = self._readers, []
        self._joiner.on_finished(self)
        for reader in readers:
            reader.responder.finish()

    def abort(self) -> None:
        """Also for the end of whoever made the call: an answer that has no end then gets none, and nobody joins it."""
        if self.is_finished:
            return
        flow, self._flow = self._flow, None
        readers, self._readers = self._readers, []
        self.discard()
        for reader in readers:
            reader.responder.abort()
        if flow is not None:
            flow.on_disconnected()

    def _retain(self, data: bytes) -> None:
        if self._is_abandoned() or not self._reserve(len(data) + PIECE_OVERHEAD_BYTES):
            self.discard()
        else:
            self._retained.append(data)

    def _reserve(self, weight: int) -> bool:
        """Whether so much more of the answer may be; if so, it is counted."""
        if (
            not self.is_joinable
            or self.kept_bytes + weight > MAX_RESPONSE_BYTES
            or not self._joiner.reserve_bytes(weight)
        ):
            return False
        self.kept_bytes += weight
        return True

    @property
    def has_succeeded(self) -> bool:
        """Asked of an answer that is whole, and kept."""
        if self._head is None:
            return False
        kind = next((value for name, value in self._head[1] if name == b"content-type"), b"").lower()
        if kind.startswith(_EVENT_STREAM):
            return _ERROR_FRAME.search(b"".join(self._retained)) is None
        return not kind.startswith(_SERVER_SENT_EVENTS) or _LAST_EVENT in b"".join(self._retained)

    def _is_abandoned(self) -> bool:
        return not self._readers and self._joiner.now() - self._last_reader_left_at > ABANDONED_TTL_SECONDS

    # What readers tell.

    def on_reader_left(self, reader: _ResponseReader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        self._last_reader_left_at = self._joiner.now()
        self.update_flow()
        if not self._readers and not self.is_joinable and self._flow is not None:
            self._flow.on_disconnected()

    @property
    def has_other_readers(self) -> bool:
        return len(self._readers) > 1

    def update_flow(self) -> None:
        is_paused = any(reader.is_paused for reader in self._readers)
        if self._flow is None or is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if is_paused:
            self._flow.pause()
        else:
            self._flow.resume()


class _ResponseReader:
    """One of the readers, as the flow of its own responder."""

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
    """Keys are small, and differ for calls whose answers may."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._calls: dict[Hashable, SharedResponse] = {}  # those that can be joined
        self._finished: deque[SharedResponse] = deque()  # in the order in which they were whole
        self.max_bytes = MAX_TOTAL_BYTES
        self.kept_bytes = 0
        self.joined = 0

    def join(self, key: Hashable, responder: Responder) -> bool:
        """Whether there was a call to join; its answer then goes to this responder too."""
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
        if self.reserve_bytes(CALL_OVERHEAD_BYTES):
            self._calls[key] = shared
        else:
            shared.is_joinable = False
        return shared

    async def drop_expired(self) -> None:
        """Called every second or so: lets go of answers that have been kept for long enough."""
        self._discard_expired()

    # What the shared calls tell.

    def reserve_bytes(self, weight: int) -> bool:
        """If so, it is taken; calls that are whole make room, the oldest first."""
        while self.kept_bytes + weight > self.max_bytes and self._finished:
            self._finished.popleft().discard()
        if self.kept_bytes + weight > self.max_bytes:
            return False
        self.kept_bytes += weight
        return True

    def on_finished(self, shared: SharedResponse) -> None:
        """It is whole, and kept for a while."""
        if not shared.is_joinable:
            return
        if not shared.has_succeeded:
            shared.discard()
            return
        shared.finished_at = self.now()
        self._finished.append(shared)
        self._discard_expired()

    def forget(self, shared: SharedResponse) -> None:
        self.kept_bytes -= CALL_OVERHEAD_BYTES + shared.kept_bytes
        del self._calls[shared.key]

    def _discard_expired(self) -> None:
        now = self.now()
        while self._finished and now - self._finished[0].finished_at > RESPONSE_TTL_SECONDS:
            self._finished.popleft().discard()
