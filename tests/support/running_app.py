"""The whole product in this process, as `app.run` wires it: real ports, and SQLite in a folder."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from price_keeper import app
from price_keeper.config import Config

from tests.support.control_harness import ADMIN_KEY

ENVIRON = {"PRICE_KEEPER_JWT_SECRET": "what these tests sign their tokens with", "PRICE_KEEPER_API_KEY": ADMIN_KEY}
START_SECONDS = 30


@asynccontextmanager
async def run_app(config: Config, role: app.Role = "both") -> AsyncIterator[app.StartedServer]:
    begun: asyncio.Future[app.StartedServer] = asyncio.get_running_loop().create_future()

    async def tell(started: app.StartedServer) -> None:
        begun.set_result(started)

    process = asyncio.ensure_future(app.run(config, ENVIRON, tell, role=role))
    try:
        await asyncio.wait([process, begun], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        yield begun.result()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await process
        gc.unfreeze()


async def ask(url: str, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
    """The body of the answer, which has this status. As the administrator, unless headers are given."""
    shown = {"X-API-Key": ADMIN_KEY} if not headers else {name.replace("_", "-"): it for name, it in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url + path, json=body, headers=shown) as it:
        assert it.status == status, (method, path, await it.text())
        return await it.json()
