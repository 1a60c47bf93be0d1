"""What a caller without a valid token can take from those with one: the whole data port, as it is composed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from price_keeper.server.server_limits import DEFAULT_LIMITS

from tests.support.data_port import DataPort, data_port
from tests.support.raw_clients import Http2TestClient, RawConnection, read_error_message

LARGE = DEFAULT_LIMITS.unchecked_body_bytes + 1
HEAD = "POST /model/premium/converse HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def _connected(port: DataPort) -> AsyncIterator[RawConnection]:
    wire = await RawConnection.connect(int(port.url.rpartition(":")[2]))
    try:
        yield wire
    finally:
        wire.kernel.close()


@pytest.mark.parametrize("shown", ["", "authorization: Bearer eyJhbGciOiJIUzI1NiJ9.e30.c2lnbmF0dXJl\r\n"])
@pytest.mark.parametrize("framing", [f"content-length: {LARGE}", "transfer-encoding: chunked"])
async def test_unauthenticated_body_does_not_fill_request_memory(tmp_path: Path, shown: str, framing: str) -> None:
    """It is refused at its head, and its received body is released."""
    async with data_port(tmp_path) as port, _connected(port) as wire:
        await wire.send(f"{HEAD}{shown}{framing}\r\n\r\n".encode())
        assert "token" in read_error_message(await wire.answer(), 403, "AccessDeniedException")
        assert port.listener.reserved_bytes == 0


@pytest.mark.parametrize("path", [b"/credentials", b"/inference-profiles"])
async def test_unauthenticated_http2_body_does_not_fill_request_memory(tmp_path: Path, path: bytes) -> None:
    async with data_port(tmp_path) as port:
        client = await Http2TestClient.connect(int(port.url.rpartition(":")[2]))
        number = client.open(path, ends=False, method=b"GET")
        await client.body(number, b"x", ends=False)
        assert "token" in read_error_message(await client.answer(number), 403, "AccessDeniedException")
        assert port.listener.reserved_bytes == 0
        client.connection.close()


async def test_authenticated_body_is_read_to_end(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port, _connected(port) as wire:
        text = {"messages": [{"role": "user", "content": [{"text": "x" * LARGE}]}]}
        body = json.dumps(text).encode()
        await wire.send(
            f"{HEAD}authorization: Bearer {port.token}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        assert (await wire.answer()).status == 200
