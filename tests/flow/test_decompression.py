"""Compressed responses from others are not decompressed: a few kilobytes may hold gigabytes."""

from __future__ import annotations

import gzip
import zlib

import pytest
from aiohttp import web
from price_keeper.auth.control_service_client import open_control_service
from pytest_aiohttp import AiohttpRawServer

BOMB = 30_000_000  # bytes of nothing, which are 30 kB on the way


@pytest.mark.parametrize(
    ("coding", "packed"), [("gzip", gzip.compress(bytes(BOMB))), ("deflate", zlib.compress(bytes(BOMB)))]
)
async def test_control_service_response_is_not_decompressed(
    aiohttp_raw_server: AiohttpRawServer, coding: str, packed: bytes
) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": coding})

    server = await aiohttp_raw_server(answer)
    async with open_control_service(str(server.make_url(""))) as ask:
        assert (await ask("client:secret")).body == packed
