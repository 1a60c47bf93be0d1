"""Doors before the sidecar, one for each client: bytes go through unchanged, and requests among them are counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools

PIECE = 64 * 1024
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = 9
HEADERS_FRAME = 1

T = TypeVar("T")


class Door:
    """`requests` counts what a client sent to be answered; what it fetched on the way, as credentials, is left out."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._serving: set[asyncio.Task[None]] = set()
        self.requests = 0
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def count(self, method: bytes) -> None:
        self.requests += method == b"POST"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
            watch = _Counting(self.count)
            there = asyncio.create_task(_pass(reader, far_writer, watch))
            # The answer's end is the end: a refusal may come while the client still sends.
            await _pass(far_reader, writer, None)
            there.cancel()
            for each in (writer, far_writer):
                each.close()
        finally:
            self._serving.discard(task)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: _Counting | None) -> None:
    with suppress(OSError):  # whoever left has no more to say
        while piece := await reader.read(PIECE):
            if watch is not None:
                watch.feed(piece)
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


class _Counting:
    """Reads along with one connection, whichever protocol it speaks."""

    def __init__(self, count: Callable[[bytes], None]) -> None:
        self._count = count
        self._http1 = httptools.HttpRequestParser(self)
        self._start = b""
        self._feed: Callable[[bytes], None] | None = None
        self._frames = b""
        self._skip = 0

    def feed(self, data: bytes) -> None:
        if self._feed is None:
            self._start = data = self._start + data
            if HTTP2_PREFACE.startswith(data) and data != HTTP2_PREFACE:
                return
            is_http2 = data.startswith(HTTP2_PREFACE)
            self._feed = self._feed_frames if is_http2 else self._http1.feed_data
            data = data[len(HTTP2_PREFACE) :] if is_http2 else data
        self._feed(data)

    def on_headers_complete(self) -> None:
        self._count(self._http1.get_method())

    def _feed_frames(self, data: bytes) -> None:
        """Each request of HTTP/2 begins with one frame of this kind; none that is counted here has trailers."""
        while data:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
            missing = FRAME_HEAD - len(self._frames)
            self._frames += data[:missing]
            data = data[missing:]
            if len(self._frames) == FRAME_HEAD:
                self._skip = int.from_bytes(self._frames[:3])
                if self._frames[3] == HEADERS_FRAME:
                    self._count(b"POST")
                self._frames = b""


class Doors:
    """Their loop runs in a thread of its own, as tests wait for client processes without a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="doors", daemon=True)
        self._opened: list[Door] = []

    def to(self, url: str) -> Door:
        door = Door(url)
        self._do(door.open())
        self._opened.append(door)
        return door

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    @contextmanager
    def running(self) -> Iterator[Doors]:
        self._thread.start()
        try:
            yield self
        finally:
            for door in self._opened:
                self._do(door.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
