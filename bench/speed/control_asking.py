"""Asks over connections that stay open: at a pace, to see how long answers take, or as fast as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.speed.machine import CannotMeasure

ANSWER_SECONDS = 30.0
_END, _LENGTH = b"\r\n\r\n", b"\r\ncontent-length: "


@dataclass(frozen=True)
class Asked:
    """One request as bytes for a socket, and the statuses it may come to."""

    raw: bytes
    wanted: frozenset[int]


@dataclass
class Seen:
    """What came of requests: how long each took, in seconds, and how long all took together."""

    took: list[float] = field(default_factory=list)
    elapsed: float = 0.0

    def percentile(self, percent: float) -> float:
        ordered = sorted(self.took)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def request(method: str, path: str, port: int, headers: dict[str, str], body: bytes = b"") -> bytes:
    lines = {"Host": f"127.0.0.1:{port}", **headers}
    if body:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One question at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def ask(self, raw: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(_END)
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(_LENGTH)
        length = int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else 0
        if len(self._buffer) >= end + len(_END) + length:
            body, self._buffer = self._buffer[end + len(_END) :], b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CannotMeasure(f"the service closed a connection: {exc}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connected(port: int, count: int, addresses: int = 1) -> list[Connection]:
    """From several addresses of loopback, since what one address may do at once is bounded."""
    loop = asyncio.get_running_loop()
    made = []
    for number in range(count):
        own = (f"127.0.0.{2 + number % addresses}", 0)
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port, local_addr=own)
        made.append(connection)
    return made


async def paced(connections: Sequence[Connection], questions: Sequence[Asked], per_second: float) -> Seen:
    """Each at its time, whether or not those before it are answered, so that nothing slow hides what comes after it."""
    seen, begun = Seen(), time.perf_counter()
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)

    async def one(question: Asked, due: float) -> None:
        connection = await free.get()
        await _answered(connection, question)
        seen.took.append(time.perf_counter() - due)
        free.put_nowait(connection)

    async with asyncio.TaskGroup() as asking:
        for number, question in enumerate(questions):
            due = begun + number / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.create_task(one(question, time.perf_counter()))
    seen.elapsed = time.perf_counter() - begun
    return seen


async def flat_out(connections: Sequence[Connection], questions: Iterator[Asked], seconds: float) -> Seen:
    """Each connection asks again as soon as it is answered."""
    seen, begun = Seen(), time.perf_counter()

    async def keep_asking(connection: Connection) -> None:
        while (now := time.perf_counter()) < begun + seconds:
            question = next(questions, None)
            if question is None:
                return
            await _answered(connection, question)
            seen.took.append(time.perf_counter() - now)

    async with asyncio.TaskGroup() as asking:
        for connection in connections:
            asking.create_task(keep_asking(connection))
    seen.elapsed = time.perf_counter() - begun
    return seen


async def _answered(connection: Connection, question: Asked) -> bytes:
    async with asyncio.timeout(ANSWER_SECONDS):
        status, body = await connection.ask(question.raw)
    if status not in question.wanted:
        raise CannotMeasure(f"{question.raw[:80]!r} came to {status}: {body[:300]!r}")
    return body
