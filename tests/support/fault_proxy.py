"""A proxy on the way to an HTTP server that spoils exchanges by a script: one fault a request, then all pass."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Pass:
    """The exchange is left alone."""


@dataclass(frozen=True)
class DropAnswer:
    """The request is carried out; the connection is closed without an answer."""


@dataclass(frozen=True)
class Reset:
    """The request is carried out; the connection is reset, as by a machine that went away."""


@dataclass(frozen=True)
class CutAnswer:
    """The request is carried out; the connection is closed half-way through the answer."""


@dataclass(frozen=True)
class BlackHole:
    """The request is taken and never answered, nor carried out."""


@dataclass(frozen=True)
class Answer:
    """The request is not carried out; this is the answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Fault = Pass | DropAnswer | Reset | CutAnswer | BlackHole | Answer


# What tells an answer of DynamoDB's from anybody else's.
DYNAMODB = {"x-amzn-requestid": "PLANNED"}


def dynamodb_error(kind: str, status: int = 400, **more: Any) -> Answer:
    body = {"__type": f"com.amazonaws.dynamodb.v20120810#{kind}", "message": "by the script", **more}
    return Answer(status, json.dumps(body).encode(), DYNAMODB)


@dataclass
class FaultProxy:
    url: str
    script: list[Fault] = field(default_factory=list)
    requests: int = 0
    always: dict[bytes, Fault] = field(default_factory=dict)  # for every request that has these bytes in its head

    def plan(self, faults: Iterable[Fault]) -> None:
        self.script[:] = faults
        self.requests = 0

    def _next(self, request: bytes) -> Fault:
        self.requests += 1
        for words, fault in self.always.items():
            if words in request.partition(b"\r\n\r\n")[0]:
                return fault
        return self.script.pop(0) if self.script else Pass()


@asynccontextmanager
async def fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    parts = urlsplit(upstream)
    proxy = FaultProxy("")

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await _exchange(reader, writer):
                    pass
        finally:
            serving.discard(task)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _message(reader)
        fault = proxy._next(request)
        match fault:
            case BlackHole():
                await reader.read()  # until the client gives up
                return False
            case Answer(status, body, headers):
                head = f"HTTP/1.1 {status} Planned\r\nContent-Type: application/x-amz-json-1.0\r\n"
                head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
                return True
        answer = await _carried_out(parts.hostname or "", parts.port or 80, request)
        match fault:
            case DropAnswer():
                return False
            case Reset():
                kernel_socket = writer.get_extra_info("socket")
                kernel_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            case CutAnswer():
                writer.write(answer[: len(answer) - 5])
                await writer.drain()
                return False
        writer.write(answer)
        await writer.drain()
        return True

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in (still_serving := tuple(serving)):
            task.cancel()
        await asyncio.gather(*still_serving, return_exceptions=True)


async def _carried_out(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await _message(reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One message with a Content-Length, as both sides of DynamoDB's protocol send."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)
