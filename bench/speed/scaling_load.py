"""Bedrock and the callers in one process: requests, streams that take their time, and callers who leave."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.speed.contenders import STREAMING, UNARY
from bench.speed.frames import END, HEAD, answer, chunk
from bench.speed.scaling_sidecar import Sidecar
from bench.speed.upstream import ANSWER

FRAMES, FRAME_SECONDS = 40, 0.05  # of one stream
LEAVES_AT = 3  # whoever is the third asks for an answer and does not stay for it

_UNARY = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode() + ANSWER
_ALL = answer()
_FRAMES = [chunk(frame) for frame in (*_ALL[: FRAMES - 3], *_ALL[-3:])]


class Bedrock(asyncio.Protocol):
    """Answers at once, or frame by frame."""

    def __init__(self) -> None:
        self._inbox = b""
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's own name
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        head, end, body = self._inbox.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._inbox = body[length:]
        if b"converse-stream" in head.partition(b"\r\n")[0]:
            self._stream = asyncio.ensure_future(self._send_frames())
        else:
            self._transport.write(_UNARY)

    async def _send_frames(self) -> None:
        self._transport.write(HEAD)
        for frame in _FRAMES:
            self._transport.write(frame)
            await asyncio.sleep(FRAME_SECONDS)
        self._transport.write(END)


@dataclass
class Load:
    """What callers did and what became of it."""

    answered: int = 0
    streamed: int = 0
    left: int = 0
    failed: int = 0
    why: Counter[str] = field(default_factory=Counter)  # they failed: the first line of the answer, as far as it came
    took: list[float] = field(default_factory=list)  # since the last sample


class Caller(asyncio.Protocol):
    """One answer: to its end, or so many bytes of it."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.changed = asyncio.Event()
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.seen += data
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's own name
        self.is_closed = True
        self.changed.set()

    async def until(self, is_there: Callable[[bytearray], bool]) -> bool:
        while not is_there(self.seen):
            if self.is_closed:
                return False
            self.changed.clear()
            await self.changed.wait()
        return self.seen.startswith(b"HTTP/1.1 200")


def _is_whole(seen: bytearray) -> bool:
    end = seen.find(b"\r\n\r\n")
    return end >= 0 and len(seen) >= end + 4 + _length(seen[:end])


def _length(head: bytearray) -> int:
    return int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)


def _is_begun(seen: bytearray) -> bool:
    return len(seen) > len(_FRAMES[0]) * 3


def _is_over(seen: bytearray) -> bool:
    return seen.endswith(b"\r\n" + END)


class Callers:
    def __init__(self, running: Sidecar) -> None:
        self.load = Load()
        self._port = running.port
        self._unary = [each.raw for each in running.questions(UNARY)]
        self._streaming = [each.raw for each in running.questions(STREAMING)]
        self._free: list[Caller] = []

    async def ask(self, number: int) -> None:
        began = time.perf_counter()
        while self._free and self._free[-1].is_closed:  # it stood by for longer than connections are kept
            self._free.pop()
        caller, is_good = self._free.pop() if self._free else None, False
        if caller is not None:
            caller.seen.clear()
            is_good = await self._asked(caller, number)
        if caller is None or not (is_good or caller.seen):  # as clients do where it was closed in that very moment
            caller = await self._new()
            is_good = await self._asked(caller, number)
        if not is_good:
            self._failed(caller)
            return
        self.load.answered += 1
        self.load.took.append(time.perf_counter() - began)
        self._free.append(caller)

    async def _asked(self, caller: Caller, number: int) -> bool:
        caller.transport.write(self._unary[number % len(self._unary)])
        return await caller.until(_is_whole)

    def _failed(self, caller: Caller) -> None:
        self.load.failed += 1
        self.load.why[caller.seen.partition(b"\r\n")[0].decode("latin-1")] += 1

    async def stream(self, number: int) -> None:
        caller = await self._new()
        caller.transport.write(self._streaming[number % len(self._streaming)])
        leaves = number % LEAVES_AT == 0
        is_good = await caller.until(_is_begun if leaves else _is_over)
        caller.transport.abort() if leaves else caller.transport.close()
        if not is_good:
            self._failed(caller)
        self.load.left += leaves and is_good
        self.load.streamed += is_good and not leaves

    async def leave(self, number: int) -> None:
        """Before anything has come."""
        caller = await self._new()
        caller.transport.write(self._unary[number % len(self._unary)])
        await asyncio.sleep(0)
        caller.transport.abort()
        self.load.left += 1

    async def _new(self) -> Caller:
        _, caller = await asyncio.get_running_loop().create_connection(Caller, "127.0.0.1", self._port)
        return caller

    def close(self) -> None:
        for caller in self._free:
            caller.transport.close()
