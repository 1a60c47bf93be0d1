"""Watches an answer on its way: whether it came whole and, if it is an event stream, sound. It never alters it."""

from __future__ import annotations

import logging

from proxy.exchange import Header
from proxy.forwarding.eventstream import FrameWatcher

EVENT_STREAM = b"application/vnd.amazon.eventstream"

# The frames that tell what a stream has used: of Converse its metadata, of InvokeModel the end of its last chunk.
WANTED = {"metadata": 64 * 1024, "chunk": 2 * 1024}

_log = logging.getLogger("proxy.forwarding")


class Watching:
    def __init__(self) -> None:
        self._frames: FrameWatcher | None = None

    def head(self, status: int, headers: list[Header]) -> None:
        for name, value in headers:
            if name == b"content-type" and status == 200 and value.startswith(EVENT_STREAM):
                self._frames = FrameWatcher(WANTED)

    def data(self, data: bytes) -> None:
        if self._frames is not None:
            self._frames.feed(data)

    def end(self, is_whole: bool) -> None:
        if self._frames is None:
            return
        failure = self._frames.close()
        if failure is not None or not is_whole:
            _log.warning("a stream of Bedrock's was cut or broken after %d frames: %s", self._frames.frames, failure)
