"""Callers' connections to a sidecar, with one call after the other: as little of each protocol as is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from tests.support.raw_clients import ConnectionCut, Http2TestClient


class CallerConnection(Protocol):
    async def ask(self, path: str, token: str, body: dict[str, Any]) -> None: ...

    async def answer(self) -> int:
        """Its status, when all of it is there. Raises OSError and EOFError."""

    async def close(self) -> None: ...


OpenConnection = Callable[[int], Awaitable[CallerConnection]]


class Http1Connection:
    """HTTP/1.1, as little of it as is needed: it costs the machine less than a whole client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Http1Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, path: str, token: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {token}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)

    async def answer(self) -> int:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if "content-length" in headers:
            await self._reader.readexactly(int(headers["content-length"]))
        else:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                await self._reader.readexactly(size + 2)
            await self._reader.readexactly(2)
        return int(first.split(" ")[1])

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


class Http2Connection:
    def __init__(self, client: Http2TestClient) -> None:
        self._client = client
        self._number = 0

    @classmethod
    async def connect(cls, port: int) -> Http2Connection:
        return cls(await Http2TestClient.connect(port))

    async def ask(self, path: str, token: str, body: dict[str, Any]) -> None:
        more = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]
        self._number = self._client.open(path.encode(), more, ends=False)
        await self._client.body(self._number, json.dumps(body).encode())

    async def answer(self) -> int:
        try:
            return (await self._client.answer(self._number)).status
        except ConnectionCut as cut:
            raise EOFError from cut

    async def close(self) -> None:
        self._client.connection.close()
        await asyncio.sleep(0)
