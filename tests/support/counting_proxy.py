"""Doors before the sidecar, one for each client: bytes go through unchanged, and requests among them are counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools
from price_keeper.server.sockets import reset_connection

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = 9
HEADERS_FRAME = 1

T = TypeVar("T")


class CountingProxy:
    """`requests` counts what a client sent to be answered; what it fetched on the way, as credentials, is left out."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.sides: set[_ProxySide] = set()
        self.requests = 0
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _CallerSide(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for side in tuple(self.sides):
            side.transport.abort()

    def count(self, method: bytes) -> None:
        self.requests += method == b"POST"


class _ProxySide(asyncio.Protocol):
    """One side of a door: bytes, their end and a reset go on to the other side as they come."""

    transport: asyncio.Transport
    has_ended = False

    def __init__(self, proxy: CountingProxy, other: _ProxySide | None = None) -> None:
        self._proxy = proxy
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._proxy.sides.add(self)

    def data_received(self, data: bytes) -> None:
        self._other_transport.write(data)

    def eof_received(self) -> bool:
        self.has_ended = True
        with suppress(OSError):  # it may just have gone
            self._other_transport.write_eof()
        if self.other is not None and self.other.has_ended:
            self.transport.close()
        return True

    def connection_lost(self, failure: Exception | None) -> None:
        self._proxy.sides.discard(self)
        if self.other is not None:
            reset_connection(self._other_transport) if failure else self._other_transport.close()

    def pause_writing(self) -> None:
        self._other_transport.pause_reading()

    def resume_writing(self) -> None:
        self._other_transport.resume_reading()

    @property
    def _other_transport(self) -> asyncio.Transport:
        assert self.other is not None
        return self.other.transport


class _CallerSide(_ProxySide):
    def __init__(self, proxy: CountingProxy) -> None:
        super().__init__(proxy)
        self._counter = _RequestCounter(proxy.count)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        target, loop = self._proxy.target, asyncio.get_running_loop()
        _, self.other = await loop.create_connection(
            lambda: _ProxySide(self._proxy, self), target.hostname, target.port
        )
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._counter.feed(data)
        super().data_received(data)


class _RequestCounter:
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


class CountingProxies:
    """Their loop runs in a thread of its own, as tests wait for client processes without a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="doors", daemon=True)
        self._opened: list[CountingProxy] = []

    def open_proxy(self, url: str) -> CountingProxy:
        proxy = CountingProxy(url)
        self._run(proxy.open())
        self._opened.append(proxy)
        return proxy

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    @contextmanager
    def running(self) -> Iterator[CountingProxies]:
        self._thread.start()
        try:
            yield self
        finally:
            for proxy in self._opened:
                self._run(proxy.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
