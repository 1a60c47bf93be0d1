"""A proxy on the way to an HTTP/1.1 server that spoils what goes by, byte by byte, by a script or by chance.

`async with wire_proxy(url) as wire: wire.next(Break(Where.HEAD), Twice())` spoils the next two exchanges. After
`wire.random(seed, STORE_RATES)` each is spoilt as the seed and its number say: the same seed, the same schedule.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.raw_clients import RESET
from tests.support.wire_faults import (
    REQUEST_ID,
    Answer,
    AtAccept,
    Break,
    Fault,
    FaultKind,
    FaultPoint,
    Pass,
    Rates,
    Refuse,
    Slow,
    Surplus,
    Twice,
    draw_fault,
    name_of,
)

LIMIT = 1024 * 1024  # of a head, and of what is read ahead
PIECE = 64 * 1024
FRESH_SECONDS = 1.0  # after its last answer; a server may close an older connection at any moment
_TCP_REPAIR = 19  # of Linux: a socket that is closed in this state says nothing to its peer


@dataclass
class WireProxy:
    """`injected` counts faults by name, and `requests` those that were read whole, since the last `plan`."""

    host: str
    server_port: int
    port: int = 0
    at_accept: deque[AtAccept] = field(default_factory=deque)  # of the next connections
    always: dict[bytes, Fault] = field(default_factory=dict)  # for every request with these bytes in its head
    injected: Counter[str] = field(default_factory=Counter)
    connections: int = 0  # ever made
    requests: int = 0
    _script: deque[Fault] = field(default_factory=deque)
    _chance: Callable[[int], Fault] | None = None
    _drawn_faults: int = 0
    _listener: socket.socket | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _unserved: set[socket.socket] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _delayed: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections there are."""
        return len(self._serving)

    # What is to happen.

    def next(self, *faults: Fault) -> None:
        """One for each of the next requests, behind those that are planned already."""
        self._script.extend(faults)

    def plan(self, faults: Iterable[Fault]) -> None:
        """These, instead of what was planned; `requests` starts again at zero."""
        self._script = deque(faults)
        self.requests = 0

    def random(self, seed: object, rates: Rates) -> None:
        """Until `calm`; what is planned goes first."""
        self._chance, self._drawn_faults = lambda number: draw_fault(seed, number, rates), 0

    def stop_faults(self) -> None:
        """Nothing is spoilt any more but what has begun."""
        self._chance = None
        self._script.clear()
        self.at_accept.clear()
        self.always.clear()

    def refuse(self) -> None:
        """New connections; those there are go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def accept(self) -> None:
        """Again, under the same address. Not asyncio's own server, which leaks connections that arrive as it closes."""
        if self._listener is None:
            self._listener = listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self.port = listener.getsockname()[1]
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener, self._take, listener)

    def reset_all(self) -> None:
        for writer in self._writers:
            _reset(writer)

    async def close(self) -> None:
        tasks = (*self._delayed, *self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for near in self._unserved:  # their tasks were cancelled before they began
            near.close()
        self.refuse()
        await asyncio.sleep(0)  # in which transports close

    # What happens.

    def _take(self, listener: socket.socket) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return  # it is closed again
        self.connections += 1
        self._unserved.add(near)
        task = asyncio.create_task(self._serve(near))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, near: socket.socket) -> None:
        reader = asyncio.StreamReader(LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, near)
        self._unserved.discard(near)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._writers.add(writer)
        far = _ServerConnection(self.host, self.server_port)
        try:
            if await self._is_taken(writer):
                with suppress(ConnectionError, EOFError):
                    while await self._exchange(reader, writer, far):
                        pass
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            self._writers.discard(writer)
            far.close()
            writer.close()

    async def _is_taken(self, writer: asyncio.StreamWriter) -> bool:
        how = self.at_accept.popleft() if self.at_accept else AtAccept.TAKE
        if how is AtAccept.TAKE:
            return True
        self.injected[f"{how.name.lower()} at accept"] += 1
        if how is AtAccept.RESET:
            return _reset(writer)
        writer.transport.pause_reading()
        await asyncio.get_running_loop().create_future()  # until the proxy ends
        return False

    def _fault(self, head: bytes) -> Fault:
        self.requests += 1
        fault = next((each for words, each in self.always.items() if words in head), None)
        if fault is None and self._script:
            fault = self._script.popleft()
        elif fault is None and self._chance is not None:
            self._drawn_faults += 1
            fault = self._chance(self._drawn_faults)
        if fault is None or isinstance(fault, Pass):
            return Pass()
        self.injected[name_of(fault)] += 1
        return fault

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, far: _ServerConnection
    ) -> bool:
        """Whether the connection is good for another one."""
        request = await _request(reader)
        fault = self._fault(request)
        match fault:
            case Refuse(seconds):
                self.refuse()
                self._run_later(seconds, self.accept)
                return _reset(writer)
            case Answer():
                writer.write(_render(fault, self.injected.total()))
                await writer.drain()
                return True
            case Break(FaultPoint.REQUEST):
                return await _break_connection(fault, reader, writer)
            case Twice(_, True):
                await self._resend(request)
            case Twice(later, False):
                self._run_later(later, lambda: self._resend(request))
        parts = _answer(await far.ask(request))
        match fault:
            case Break():
                await _until_it_breaks(fault, parts, writer)
                await parts.aclose()
                return await _break_connection(fault, reader, writer)
            case Slow():
                await _write_slowly(fault, parts, writer)
            case _:
                await self._relay(fault, parts, writer)
        far.is_done()
        return True

    async def _relay(
        self, fault: Fault, parts: AsyncIterator[tuple[FaultPoint, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        kept: list[bytes] = []
        async for where, data in parts:
            if isinstance(fault, Surplus):
                kept.append(data)
                if where is FaultPoint.END and not fault.later:
                    data += b"".join(kept) if fault.data is None else fault.data
            writer.write(data)
            await writer.drain()
        if isinstance(fault, Surplus) and fault.later:
            surplus = b"".join(kept) if fault.data is None else fault.data

            self._run_later(fault.later, lambda: writer.write(surplus))

    async def _resend(self, request: bytes) -> None:
        far = _ServerConnection(self.host, self.server_port)
        try:
            async for _ in _answer(await far.ask(request)):
                pass
        finally:
            far.close()

    def _run_later(self, when: float | asyncio.Event, what: Callable[[], Awaitable[None] | None]) -> None:
        async def after() -> None:
            await (when.wait() if isinstance(when, asyncio.Event) else asyncio.sleep(when))
            with suppress(ConnectionError, EOFError):
                done = what()
                if done is not None:
                    await done

        task = asyncio.create_task(after())
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)


class _ServerConnection:
    """The connection to the server that goes with one client's."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._done_at = 0.0

    async def ask(self, request: bytes) -> asyncio.StreamReader:
        is_fresh = asyncio.get_running_loop().time() - self._done_at < FRESH_SECONDS
        if self._streams is None or not is_fresh or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address, limit=LIMIT)
        reader, writer = self._streams
        writer.write(request)
        await writer.drain()
        return reader

    def is_done(self) -> None:
        self._done_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


# ---------------------------------------------------------------- messages


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(_length(head) or 0)


async def _answer(reader: asyncio.StreamReader) -> AsyncIterator[tuple[FaultPoint, bytes]]:
    """Its head, its body in pieces, and its end. This proxy's servers send no interim answers."""
    head = await reader.readuntil(b"\r\n\r\n")
    yield FaultPoint.HEAD, head
    left = _length(head)
    if left is None and b"transfer-encoding: chunked" in head.lower():
        while (size := await reader.readuntil(b"\r\n")) != b"0\r\n":
            yield FaultPoint.MIDDLE, size + await reader.readexactly(int(size, 16) + 2)
        yield FaultPoint.END, size + await reader.readuntil(b"\r\n")
        return
    while left is not None and left > 1:
        data = await reader.read(min(PIECE, left - 1))
        if not data:
            raise EOFError
        left -= len(data)
        yield FaultPoint.MIDDLE, data
    yield FaultPoint.END, await reader.readexactly(left or 0)


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None


def _render(answer: Answer, number: int) -> bytes:
    headers = {"content-type": "application/json", **answer.headers, "content-length": str(len(answer.body))}
    if REQUEST_ID in headers:
        headers[REQUEST_ID] += str(number)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} Planned\r\n{lines}\r\n".encode() + answer.body


# ---------------------------------------------------------------- faults


async def _until_it_breaks(
    fault: Break, parts: AsyncIterator[tuple[FaultPoint, bytes]], writer: asyncio.StreamWriter
) -> None:
    """Where the body is too short for its middle, it breaks at its end."""
    passed = 0
    async for where, data in parts:
        if fault.where is FaultPoint.ANSWER:
            return None  # it was carried out, as this shows
        if where is FaultPoint.HEAD and fault.where is FaultPoint.HEAD:
            return writer.write(data[: len(data) // 2])
        if where is FaultPoint.MIDDLE and fault.where is FaultPoint.MIDDLE:
            if passed == fault.after:
                return writer.write(data[: len(data) // 2])
            passed += 1
        if where is FaultPoint.END:
            return None
        writer.write(data)
        await writer.drain()
        if fault.where is FaultPoint.BODY:
            return None
    return None


async def _break_connection(fault: Break, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """False, as the connection is of no use any more."""
    await writer.drain()
    match fault.how:
        case FaultKind.CLOSE:
            writer.close()
        case FaultKind.RESET:
            await asyncio.sleep(0.01)  # else what was sent may be lost with it
            _reset(writer)
        case FaultKind.HALF | FaultKind.STALL:
            if fault.how is FaultKind.HALF:
                writer.write_eof()
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(fault.seconds):
                    await reader.read()
            _reset(writer)
        case FaultKind.VANISH:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            writer.transport.abort()
    return False


def may_vanish() -> bool:
    """Whether this process may end a connection without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as end:
        try:
            end.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        except OSError:
            return False
        return True


async def _write_slowly(
    fault: Slow, parts: AsyncIterator[tuple[FaultPoint, bytes]], writer: asyncio.StreamWriter
) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(fault.wait)
    until = loop.time() + fault.most
    async for _, data in parts:
        for start in range(0, len(data), fault.piece):
            writer.write(data[start : start + fault.piece])
            await writer.drain()
            await asyncio.sleep(fault.pause if loop.time() < until else 0)


def _reset(writer: asyncio.StreamWriter) -> bool:
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
    return False


@asynccontextmanager
async def wire_proxy(url: str) -> AsyncIterator[WireProxy]:
    parts = urlsplit(url)
    proxy = WireProxy(parts.hostname or "", parts.port or 80)
    proxy.accept()
    try:
        yield proxy
    finally:
        await proxy.close()
