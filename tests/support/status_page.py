"""A browser's side of the status page without a browser: its cookie, its headers, and a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from price_keeper.control.page.page_state import SingleFlightCache
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store

from tests.support.clock import ShiftedClock
from tests.support.control_harness import (
    ADMIN_KEY,
    ORG,
    SETTINGS,
    ControlHarness,
    ControlResponse,
    open_control_harness,
)
from tests.support.engines import Engines

TICK = 0.02
PAGE = {"X-Price-Keeper-Page": "1"}
SECONDS = 10


@asynccontextmanager
async def status_page(folder: Path, store: Store | None = None) -> AsyncIterator[ControlHarness]:
    """At the real time, which a test may put forward, and with a quick pulse."""
    if store is None:
        async with Engines({}).open("sqlite", folder) as opened, status_page(folder, opened) as api:
            yield api
        return
    async with open_control_harness(store, folder, ShiftedClock()) as api:
        page = api.parts.page
        page.tick_seconds = TICK
        page.board_cache, page.list_cache, page.event_cache = (
            SingleFlightCache(TICK, api.clock.monotonic),
            SingleFlightCache(TICK, api.clock.monotonic),
            SingleFlightCache(TICK, api.clock.monotonic),
        )
        yield api


async def put(api: ControlHarness, *apps: str, org: str = ORG, **changes: Any) -> None:
    """An org and its apps as the control API would write them, without the credentials, which take a second each."""
    item = {**SETTINGS, **changes}
    writes = [Put(schema.org_config_key(org), item), Put(schema.org_entry_key(org), {"org_name": item["org_name"]})]
    writes += [Put(schema.app_config_key(org, app), {"app_name": app}) for app in apps]
    await api.store.transact(writes)


@dataclass
class Browser:
    """`cookie` is what it would send; `origin` is where its page came from."""

    api: ControlHarness
    cookie: str | None = None
    origin: str = ""
    headers: dict[str, str] = field(default_factory=lambda: dict(PAGE))

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> ControlResponse:
        request_headers = self.headers | ({} if self.cookie is None else {"Cookie": self.cookie})
        if method not in ("GET", "HEAD"):
            request_headers["Origin"] = self.origin or self.api.url
        return await self.api.ask(method, path, body, who=None, headers={**request_headers, **headers})

    async def sign_in(self, kind: str = "admin", secret: str = ADMIN_KEY) -> ControlResponse:
        answer = await self.ask("POST", "/status/session", {"kind": kind, "secret": secret})
        if answer.status == 200:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer

    async def sign_in_as(self, org: str, app: str | None) -> ControlResponse:
        return await self.sign_in("client", self.api.tokens.mint_access(org, app).token)


class Events:
    """The events of a stream, one by one."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.comments = 0

    async def next(self) -> tuple[str, Any]:
        """Raises StopAsyncIteration at the end."""
        name, data = "message", list[str]()
        async with asyncio.timeout(SECONDS):
            async for raw in self._answer.content:
                line = raw.decode().rstrip("\n")
                self.comments += line.startswith(":")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                if line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                if not line and data:
                    return name, json.loads("\n".join(data))
        raise StopAsyncIteration

    async def until(self, *names: str) -> Any:
        """The first event that tells all of these."""
        while True:
            _, document = await self.next()
            if set(names) <= document.keys():
                return document


@asynccontextmanager
async def open_events(
    api: ControlHarness, query: str = "", **headers: str
) -> AsyncIterator[tuple[aiohttp.ClientResponse, Events]]:
    request_headers = headers or api.auth_headers("admin")
    async with api.session.get(f"{api.url}/status/events{query}", headers=request_headers) as answer:
        yield answer, Events(answer)
