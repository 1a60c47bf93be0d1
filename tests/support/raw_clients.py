"""Real sockets by hand: clients of both protocols that see every byte, and say when they read."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import Frame, GoAwayFrame
from price_keeper.exchange import Header

TIMEOUT_SECONDS = 10.0  # for what must come at once; only a failing test waits so long
RESET = struct.pack("ii", 1, 0)


async def eventually(is_so: Callable[[], object]) -> None:
    """The kernel and the other tasks take their turns; this waits for their effects, not for a rule."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        # What is waited for knows of no event.
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def wait_quietly(seconds: float = 0.05) -> None:
    """Long enough for whatever is on its way on this machine to arrive."""
    await asyncio.sleep(seconds)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class ConnectionCut(Exception):
    """The connection ended in the middle of an answer; `how` is "reset" or "closed"."""

    def __init__(self, how: str, got: bytes) -> None:
        self.ending = how
        self.received = got
        super().__init__(f"{how} after {got[-200:]!r}")


@dataclass
class WireResponse:
    """An answer as a client has it."""

    status: int
    headers: list[Header]
    body: bytes

    def __getitem__(self, name: bytes) -> bytes:
        return dict(self.headers)[name]

    def __contains__(self, name: bytes) -> bool:
        return name in dict(self.headers)


class RawConnection:
    """A client's socket. It reads nothing until asked, and knows just enough HTTP/1.1 to find an answer's end."""

    def __init__(self, kernel: socket.socket) -> None:
        self.kernel = kernel
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> RawConnection:
        kernel = socket.socket()
        kernel.setblocking(False)
        if receive_buffer is not None:
            kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        kernel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(kernel, ("127.0.0.1", port))
        except OSError:
            kernel.close()
            raise
        return cls(kernel)

    @property
    def received(self) -> bytes:
        """What was read and not yet taken."""
        return bytes(self._received)

    def take_all(self) -> bytes:
        """Takes it."""
        taken, self._received = bytes(self._received), bytearray()
        return taken

    async def send(self, *pieces: bytes) -> None:
        """Each piece arrives by itself, as far as a kernel can be made to do that."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for piece in pieces:
                await self._loop.sock_sendall(self.kernel, piece)
                if len(pieces) > 1:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

    async def read_more(self, max_bytes: int = 65536) -> bool:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            data = await self._loop.sock_recv(self.kernel, max_bytes)
        self._received += data
        return bool(data)

    async def _until(self, is_enough: Callable[[], bool]) -> None:
        try:
            while not is_enough():
                if not await self.read_more():
                    raise ConnectionCut("closed", self.received)
        except ConnectionError:
            raise ConnectionCut("reset", self.received) from None

    async def take(self, length: int) -> bytes:
        await self._until(lambda: len(self._received) >= length)
        taken = bytes(self._received[:length])
        del self._received[:length]
        return taken

    async def _line(self) -> bytes:
        await self._until(lambda: b"\r\n" in self._received)
        return (await self.take(self._received.index(b"\r\n") + 2))[:-2]

    async def head(self) -> tuple[int, list[Header]]:
        status = int((await self._line()).split(b" ")[1])
        headers = []
        while line := await self._line():
            name, _, value = line.partition(b": ")
            headers.append((name, value))
        return status, headers

    async def answer(self, *, has_body: bool = True) -> WireResponse:
        status, headers = await self.head()
        header_values = dict(headers)
        body = b""
        if not has_body or status in (204, 304):
            pass
        elif b"content-length" in header_values:
            assert b"transfer-encoding" not in header_values
            body = await self.take(int(header_values[b"content-length"]))
        elif header_values.get(b"transfer-encoding") == b"chunked":
            chunks = []
            while size := int(await self._line(), 16):
                chunks.append((await self.take(size + 2))[:-2])
            body = b"".join(chunks)
            assert await self._line() == b""
        else:
            body = await self.read_rest()
        return WireResponse(status, headers, body)

    async def read_rest(self) -> bytes:
        """All up to an orderly end."""
        try:
            while await self.read_more():
                pass
        except ConnectionError:
            raise ConnectionCut("reset", self.received) from None
        return self.take_all()

    async def read_ending(self) -> str:
        """How the connection ends, whatever comes before: "closed" or "reset"."""
        try:
            await self.read_rest()
        except ConnectionCut as cut:
            return cut.ending
        return "closed"

    def half_close(self) -> None:
        self.kernel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.kernel.close()

    def reset(self) -> None:
        self.kernel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.kernel.close()


def ask(body: bytes = b"", more: bytes = b"", *, path: bytes = b"/a", method: bytes = b"POST") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: here\r\n%bcontent-length: %d\r\n\r\n%b" % (method, path, more, len(body), body)


def chunked(*chunks: bytes, more: bytes = b"", trailers: bytes = b"") -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"POST /a HTTP/1.1\r\nhost: here\r\n%btransfer-encoding: chunked\r\n\r\n" % more
    return head + framed + b"0\r\n" + trailers + b"\r\n"


def read_error_message(response: WireResponse, status: int, kind: str) -> str:
    """The message of an answer in the form AWS gives errors."""
    assert (response.status, response[b"x-amzn-errortype"].decode()) == (status, kind)
    assert response[b"content-type"] == b"application/json"
    document: dict[str, Any] = json.loads(response.body)
    assert set(document) in ({"message"}, {"message", "error"})  # the second in the form of OpenAI
    return str(document["message"])


async def read_refusal(wire: RawConnection, status: int = 400, kind: str = "ValidationException") -> str:
    """It says why, and then closes in good order even though the client may still have something to say."""
    response = await wire.answer()
    assert response[b"connection"] == b"close"
    assert response[b"x-price-keeper-request-id"]
    assert await wire.read_ending() == "closed"
    wire.close()
    return read_error_message(response, status, kind)


@dataclass
class StreamedResponse:
    head: list[Header] = field(default_factory=list)
    body: bytes = b""
    is_ended: bool = False
    reset: int | None = None

    def to_response(self) -> WireResponse:
        status, *headers = self.head
        return WireResponse(int(status[1]), headers, self.body)


class PatientH2Connection(H2Connection):
    """The library takes a goodbye for the end, answers still to come and all."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        goodbye = events.ConnectionTerminated()
        goodbye.error_code, goodbye.last_stream_id = frame.error_code, frame.last_stream_id
        return [], [goodbye]


class Http2TestClient:
    """An HTTP/2 client on a wire; `reads_on` says whether what it receives opens the windows again."""

    def __init__(self, wire: RawConnection) -> None:
        self.connection = wire
        self.h2 = PatientH2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.streams: dict[int, StreamedResponse] = {}
        self.goodbye: events.ConnectionTerminated | None = None
        self.is_closed = False
        self.reopens_windows = True

    @classmethod
    async def connect(cls, port: int, settings: dict[Any, int] | None = None, **how: int) -> Http2TestClient:
        client = cls(await RawConnection.connect(port, **how))
        if settings:
            client.h2.local_settings.update(settings)
        client.h2.initiate_connection()
        if settings:
            client.h2.update_settings(settings)
        await client.flush()
        return client

    async def flush(self) -> None:
        await self.connection.send(self.h2.data_to_send())

    def open(
        self, path: bytes = b"/", more: Sequence[Header] = (), *, ends: bool = True, method: bytes = b"POST"
    ) -> int:
        number = self.h2.get_next_available_stream_id()
        head = [(b":method", method), (b":scheme", b"http"), (b":authority", b"here"), (b":path", path), *more]
        self.h2.send_headers(number, head, end_stream=ends)
        self.streams[number] = StreamedResponse()
        return number

    async def body(self, number: int, data: bytes, *, ends: bool = True) -> None:
        while data:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if room <= 0:
                await self.flush()
                await self.listen()
                continue
            self.h2.send_data(number, data[:room], end_stream=ends and len(data) <= room)
            data = data[room:]
        await self.flush()

    async def listen(self, max_bytes: int = 65536) -> bool:
        """Once; False at the end of the connection."""
        try:
            is_more = await self.connection.read_more(max_bytes)
        except ConnectionError:
            is_more = False
        for event in self.h2.receive_data(self.connection.take_all()):
            self._take(event)
        self.is_closed = not is_more
        if is_more:
            await self.flush()
        return is_more

    def _take(self, event: events.Event) -> None:
        match event:
            case events.ResponseReceived():
                self.streams[event.stream_id].head = list(event.headers)
            case events.DataReceived():
                self.streams[event.stream_id].body += event.data
                if self.reopens_windows:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case events.StreamEnded():
                self.streams[event.stream_id].is_ended = True
            case events.StreamReset():
                self.streams[event.stream_id].reset = event.error_code
            case events.ConnectionTerminated():
                self.goodbye = event

    async def wait_until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            if not await self.listen():
                raise ConnectionCut("closed", b"")

    async def answer(self, number: int) -> WireResponse:
        stream = self.streams[number]
        await self.wait_until(lambda: stream.is_ended or stream.reset is not None)
        if not stream.is_ended:
            raise ConnectionCut(f"stream reset with {stream.reset}", stream.body)
        return stream.to_response()

    async def call(self, path: bytes = b"/", body: bytes = b"", more: Sequence[Header] = ()) -> WireResponse:
        number = self.open(path, more, ends=not body)
        await self.body(number, body)
        return await self.answer(number)
