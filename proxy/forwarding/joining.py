"""Retries that must not pay twice: a call sent again joins the one under way, or gets the answer it just had.

SDKs give up reading after a while and send the same call again, under the same invocation id. What has come of the
answer by then is kept, within bounds, and shown to whoever asks for it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from proxy.exchange import Flow, Header, Responder

KEPT_BYTES = 1024 * 1024  # of one answer; a longer one is no longer joinable
KEPT_BYTES_IN_ALL = 8 * 1024 * 1024  # of answers that are whole, the oldest going first
KEPT_SECONDS = 60.0  # after an answer was whole: longer than an SDK waits between two tries


class Shared:
    """One answer with any number of readers, each of whom gets it from its beginning. It is their responder."""

    def __init__(self, first: Responder, forget: Callable[[Shared], None], settle: Callable[[Shared], None]) -> None:
        self._readers: list[_Reader] = []
        self._forget = forget
        self._settle = settle
        self._flow: Flow | None = None
        self._head: tuple[int, Sequence[Header], int | None] | None = None
        self._kept: list[bytes] = []
        self.kept_bytes = 0
        self.is_joinable = True
        self.is_finished = False
        self.finished_at = 0.0
        self._paused: set[_Reader] = set()
        self.join(first)

    def join(self, responder: Responder) -> None:
        reader = _Reader(self, responder)
        self._readers.append(reader)
        responder.attach(reader)
        if self._head is not None:
            responder.start(*self._head)
            for data in self._kept:
                responder.write(data)
            responder.flush()
        if self.is_finished:
            responder.finish()
            self._readers.remove(reader)

    # The responder of the one call.

    @property
    def has_started(self) -> bool:
        return self._head is not None

    @property
    def is_gone(self) -> bool:
        """Whoever left may come back for the answer as long as it is kept."""
        return not self.is_joinable and not self._readers

    def attach(self, flow: Flow) -> None:
        self._flow = flow
        if self._paused:
            flow.pause()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self._head = (status, tuple(headers), length)
        if status >= 300:  # an error is never shown again: the next try may fare better
            self._stop_keeping()
        for reader in tuple(self._readers):
            reader.responder.start(status, headers, length)

    def write(self, data: bytes) -> None:
        if self.is_joinable:
            self._kept.append(data)
            self.kept_bytes += len(data)
            if self.kept_bytes > KEPT_BYTES:
                self._stop_keeping()
        for reader in tuple(self._readers):
            reader.responder.write(data)

    def flush(self) -> None:
        for reader in tuple(self._readers):
            reader.responder.flush()

    def finish(self) -> None:
        self.is_finished = True
        self._flow = None
        readers, self._readers = self._readers, []
        self._settle(self)
        for reader in readers:
            reader.responder.finish()

    def abort(self) -> None:
        self._flow = None
        readers, self._readers = self._readers, []
        self._stop_keeping()
        for reader in readers:
            reader.responder.abort()

    def _stop_keeping(self) -> None:
        self.is_joinable = False
        self._kept = []
        self.kept_bytes = 0
        self._forget(self)
        if not self._readers and self._flow is not None:
            self._flow.caller_left()

    # What readers tell.

    def reader_paused(self, reader: _Reader) -> None:
        if not self._paused and self._flow is not None:
            self._flow.pause()
        self._paused.add(reader)

    def reader_resumed(self, reader: _Reader) -> None:
        self._paused.discard(reader)
        if not self._paused and self._flow is not None:
            self._flow.resume()

    def reader_left(self, reader: _Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        if reader in self._paused:
            self.reader_resumed(reader)
        if not self._readers and not self.is_joinable and self._flow is not None:
            self._flow.caller_left()


class _Reader:
    """One of the readers, as the flow of its own responder."""

    def __init__(self, shared: Shared, responder: Responder) -> None:
        self._shared = shared
        self.responder = responder

    def pause(self) -> None:
        self._shared.reader_paused(self)

    def resume(self) -> None:
        self._shared.reader_resumed(self)

    def caller_left(self) -> None:
        self._shared.reader_left(self)


class Joining:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._calls: dict[Hashable, Shared] = {}
        self._keys: dict[Shared, Hashable] = {}
        self._finished: deque[Shared] = deque()  # in the order in which they were whole
        self._finished_bytes = 0
        self.joined = 0

    def join(self, key: Hashable, responder: Responder) -> bool:
        """Whether there was a call to join; its answer then goes to this responder too."""
        shared = self._calls.get(key)
        if shared is None or (shared.is_finished and self._now() - shared.finished_at > KEPT_SECONDS):
            return False
        self.joined += 1
        shared.join(responder)
        return True

    def share(self, key: Hashable, responder: Responder) -> Shared:
        shared = Shared(responder, self._forget, self._settle)
        self._calls[key] = shared
        self._keys[shared] = key
        return shared

    def _settle(self, shared: Shared) -> None:
        if not shared.is_joinable:
            return
        shared.finished_at = self._now()
        self._finished.append(shared)
        self._finished_bytes += shared.kept_bytes
        while self._finished:
            oldest = self._finished[0]
            if self._finished_bytes <= KEPT_BYTES_IN_ALL and shared.finished_at - oldest.finished_at <= KEPT_SECONDS:
                return
            self._finished.popleft()
            self._finished_bytes -= oldest.kept_bytes
            self._forget(oldest)

    def _forget(self, shared: Shared) -> None:
        key = self._keys.pop(shared, None)
        if key is not None and self._calls.get(key) is shared:
            del self._calls[key]
