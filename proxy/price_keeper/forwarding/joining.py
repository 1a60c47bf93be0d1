"""Retries that must not pay twice: a call sent again joins the one under way, or gets the answer it just had.

SDKs give up reading after a while and send the same call again, under the same invocation id. What has come of the
answer by then is kept, within bounds, and shown to whoever asks for it again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from price_keeper.exchange import FlowControl, Header, Responder

KEPT_BYTES = 1024 * 1024  # of one answer; a longer one is no longer joinable
KEPT_BYTES_IN_ALL = 32 * 1024 * 1024  # at most; under way and whole, the oldest of the whole ones going first
CALL_BYTES = 4096  # what a call weighs before anything of its answer is kept
PIECE_BYTES = 64  # what each piece of an answer weighs beyond its bytes
HEADER_BYTES = 160  # the same for each of its headers
KEPT_SECONDS = 60.0  # after an answer was whole: longer than an SDK waits between two tries
HOLD_SECONDS = 15.0  # that a reader may read nothing while another waits for it; SDKs give up after 60
ALONE_SECONDS = 120.0  # an answer under way is kept up for nobody, in case somebody comes back for it


# How an answer of status 200 tells that it failed after all: by a frame of such a type, or without the last event.
_FAILED_FRAME = re.compile(rb"\x0d:message-type\x07\x00(?:\x09exception|\x05error)")
_LAST_EVENT = b"data: [DONE]"
_EVENT_STREAM, _SERVER_SENT = b"application/vnd.amazon.eventstream", b"text/event-stream"


class Shared:
    """One answer with any number of readers, each of whom gets it from its beginning. It is their responder.

    Upstream waits for the slowest of them; but one that stands still while others wait for it is dropped.
    """

    __slots__ = ("_flow", "_head", "_is_paused", "_joining", "_kept", "_left_at", "_readers", "finished_at",
                 "is_finished", "is_joinable", "kept_bytes", "key")  # fmt: skip

    def __init__(self, key: Hashable, first: Responder, joining: Joining) -> None:
        self.key = key
        self._joining = joining
        self._readers: list[_Reader] = []
        self._flow: FlowControl | None = None
        self._is_paused = False
        self._head: tuple[int, Sequence[Header], int | None] | None = None
        self._kept: list[bytes] = []
        self._left_at = joining.now()
        self.kept_bytes = 0
        self.is_joinable = True
        self.is_finished = False
        self.finished_at = 0.0
        self.join(first)

    def join(self, responder: Responder) -> None:
        if responder.is_disconnected:
            return
        reader = _Reader(self, responder)
        if not self.is_finished:
            self._readers.append(reader)
        responder.attach(reader)
        if self._head is not None:
            responder.start(*self._head)
            for data in self._kept:
                responder.write(data)
            responder.flush()
        if self.is_finished:
            responder.finish()
        else:
            self.steer()

    def stop_keeping(self) -> None:
        if self.is_joinable:
            self.is_joinable = False
            self._joining.forget(self)
            self._kept = []
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
        self.steer()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self._head = (status, tuple(headers), length)
        # An error is never shown again: the next try may fare better.
        if status >= 300 or not self._is_kept(sum(len(name) + len(value) + HEADER_BYTES for name, value in headers)):
            self.stop_keeping()
        for reader in tuple(self._readers):
            reader.responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if self.is_joinable:
            self._keep(data)
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
        self._joining.settle(self)
        for reader in readers:
            reader.responder.finish()

    def abort(self) -> None:
        """Also for the end of whoever made the call: an answer that has no end then gets none, and nobody joins it."""
        if self.is_finished:
            return
        flow, self._flow = self._flow, None
        readers, self._readers = self._readers, []
        self.stop_keeping()
        for reader in readers:
            reader.responder.abort()
        if flow is not None:
            flow.on_disconnected()

    def _keep(self, data: bytes) -> None:
        if self._is_left_alone() or not self._is_kept(len(data) + PIECE_BYTES):
            self.stop_keeping()
        else:
            self._kept.append(data)

    def _is_kept(self, weight: int) -> bool:
        """Whether so much more of the answer may be; if so, it is counted."""
        if not self.is_joinable or self.kept_bytes + weight > KEPT_BYTES or not self._joining.has_room(weight):
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
            return _FAILED_FRAME.search(b"".join(self._kept)) is None
        return not kind.startswith(_SERVER_SENT) or _LAST_EVENT in b"".join(self._kept)

    def _is_left_alone(self) -> bool:
        return not self._readers and self._joining.now() - self._left_at > ALONE_SECONDS

    # What readers tell.

    def reader_left(self, reader: _Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        self._left_at = self._joining.now()
        self.steer()
        if not self._readers and not self.is_joinable and self._flow is not None:
            self._flow.on_disconnected()

    @property
    def has_others(self) -> bool:
        return len(self._readers) > 1

    def steer(self) -> None:
        is_paused = any(reader.is_paused for reader in self._readers)
        if self._flow is None or is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if is_paused:
            self._flow.pause()
        else:
            self._flow.resume()


class _Reader:
    """One of the readers, as the flow of its own responder."""

    __slots__ = ("_shared", "is_paused", "responder")

    def __init__(self, shared: Shared, responder: Responder) -> None:
        self._shared = shared
        self.responder = responder
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True
        self._shared.steer()

    def resume(self) -> None:
        self.is_paused = False
        self._shared.steer()

    def on_stalled(self, seconds: float) -> None:
        if seconds > HOLD_SECONDS and self._shared.has_others:
            self.responder.abort()

    def on_disconnected(self) -> None:
        self._shared.reader_left(self)


class Joining:
    """Keys are small, and differ for calls whose answers may."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._calls: dict[Hashable, Shared] = {}  # those that can be joined
        self._finished: deque[Shared] = deque()  # in the order in which they were whole
        self.most_bytes = KEPT_BYTES_IN_ALL
        self.kept_bytes = 0
        self.joined = 0

    def join(self, key: Hashable, responder: Responder) -> bool:
        """Whether there was a call to join; its answer then goes to this responder too."""
        shared = self._calls.get(key)
        if shared is None or (shared.is_finished and self.now() - shared.finished_at > KEPT_SECONDS):
            return False
        self.joined += 1
        shared.join(responder)
        return True

    def share(self, key: Hashable, responder: Responder) -> Shared:
        before = self._calls.get(key)
        if before is not None:
            before.stop_keeping()
        shared = Shared(key, responder, self)
        if self.has_room(CALL_BYTES):
            self._calls[key] = shared
        else:
            shared.is_joinable = False
        return shared

    async def check_time(self) -> None:
        """Called every second or so: lets go of answers that have been kept for long enough."""
        self._forget_old_ones()

    # What the shared calls tell.

    def has_room(self, weight: int) -> bool:
        """If so, it is taken; calls that are whole make room, the oldest first."""
        while self.kept_bytes + weight > self.most_bytes and self._finished:
            self._finished.popleft().stop_keeping()
        if self.kept_bytes + weight > self.most_bytes:
            return False
        self.kept_bytes += weight
        return True

    def settle(self, shared: Shared) -> None:
        """It is whole, and kept for a while."""
        if not shared.is_joinable:
            return
        if not shared.has_succeeded:
            shared.stop_keeping()
            return
        shared.finished_at = self.now()
        self._finished.append(shared)
        self._forget_old_ones()

    def forget(self, shared: Shared) -> None:
        self.kept_bytes -= CALL_BYTES + shared.kept_bytes
        del self._calls[shared.key]

    def _forget_old_ones(self) -> None:
        now = self.now()
        while self._finished and now - self._finished[0].finished_at > KEPT_SECONDS:
            self._finished.popleft().stop_keeping()
