"""Large bodies on their way to Bedrock: in memory once, however slowly Bedrock reads, and whole when it has read."""

from __future__ import annotations

import asyncio
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from price_keeper.server.tls import create_server_context, ensure_local_certificates
from price_keeper.upstream.connection_pool import UpstreamEndpoint

from tests.support.port_harness import ForwardingHandler, build_response, on_both_loops, open_forwarding_port
from tests.support.raw_clients import ask, eventually, read_error_message

SIZE = 16_000_000
BODY = bytes(range(256)) * (SIZE // 256)


class SlowBedrock:
    """Reads no body until released; then all of it, or only a part."""

    def __init__(self, reads: int | None = None) -> None:
        self.gate = asyncio.Event()
        self.heads = 0
        self.received = b""
        self._reads = reads

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.heads += 1
            await self.gate.wait()
            self.received = await reader.readexactly(SIZE if self._reads is None else self._reads)
            if self._reads is None:
                writer.write(build_response(b"read"))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def calls_to(bedrock: SlowBedrock, folder: Path, *, is_tls: bool) -> AsyncIterator[ForwardingHandler]:
    authority, certificate, key = ensure_local_certificates(folder, 1_800_000_000.0)
    trust = ssl.create_default_context(cafile=str(authority))
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    context = create_server_context(certificate, key) if is_tls else None
    server = await asyncio.start_server(bedrock, "127.0.0.1", 0, limit=4096, ssl=context)
    endpoint = UpstreamEndpoint("127.0.0.1", server.sockets[0].getsockname()[1], is_tls)
    try:
        yield ForwardingHandler(endpoint, tls=trust)
    finally:
        server.close()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@on_both_loops
async def test_body_waiting_for_bedrock_is_not_copied(tmp_path: Path, is_tls: bool) -> None:
    bedrock = SlowBedrock()
    async with calls_to(bedrock, tmp_path, is_tls=is_tls) as through, open_forwarding_port(through) as rig:
        wire, call = await rig.connect(), ask(BODY)
        tracemalloc.start()
        try:
            await wire.send(call)
            await eventually(lambda: bedrock.heads)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        (connection,) = through.busy_connections
        assert connection.transport.get_write_buffer_size() < SIZE // 10
        assert kept < 1.3 * SIZE
        bedrock.gate.set()
        assert (await wire.answer()).body == b"read"
        assert bedrock.received == BODY


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@on_both_loops
async def test_bedrock_closing_mid_body_ends_call(tmp_path: Path, is_tls: bool) -> None:
    bedrock = SlowBedrock(reads=SIZE // 4)
    async with calls_to(bedrock, tmp_path, is_tls=is_tls) as through, open_forwarding_port(through) as rig:
        wire = await rig.connect()
        bedrock.gate.set()
        await wire.send(ask(BODY))
        read_error_message(await wire.answer(), 503, "ServiceUnavailableException")
        assert bedrock.received == BODY[: SIZE // 4]
        assert through.idle_connections == []
