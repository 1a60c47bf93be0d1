"""Nothing is inflated that somebody else has sent: a few kilobytes may hold gigabytes."""

from __future__ import annotations

import gzip
import zlib

import pytest
from aiohttp import web
from price_keeper.auth.control_service_client import open_control_service

BOMB = 30_000_000  # bytes of nothing, which are 30 kB on the way


@pytest.mark.parametrize(
    ("coding", "packed"), [("gzip", gzip.compress(bytes(BOMB))), ("deflate", zlib.compress(bytes(BOMB)))]
)
async def test_an_answer_of_the_control_service(coding: str, packed: bytes) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": coding})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with open_control_service(f"http://{host}:{port}") as ask:
            assert (await ask("client:secret")).body == packed
    finally:
        await runner.cleanup()
