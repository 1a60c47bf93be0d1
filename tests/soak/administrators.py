"""What goes on at the control ports, and beside the calls: settings are read and written, usage submitted, tokens are
fetched, status pages listen, and strangers try their luck."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import aiohttp

from tests.soak.fleet import ADMIN_KEY, Member
from tests.soak.tenants import APPS, STEADY, SUBMITTED, App, app_body, orgs
from tests.support.raw_clients import ConnectionCut, RawConnection

PEOPLE = 3
PAUSE_SECONDS = 0.5  # between two questions
TELLING_TRIES = 400  # until the store is back
SILENT_SECONDS = 45.0  # within which who says nothing is shown out

_ADMIN = {"X-API-Key": ADMIN_KEY}
_BROKEN = (aiohttp.ClientError, OSError, EOFError, TimeoutError, ConnectionCut)

_HOSTILE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS where none is spoken
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\x00\x00\x04\x08\x00\x00\x00\x00\x01\xff\xff\xff\xff",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /model/premium/converse HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
    b"POST /model/..%2f..%2fetc%2fpasswd/converse HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /model/premium/converse HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
    b"POST /model/premium/converse HTTP/1.1\r\nhost: x\r\nx: a\nb\r\n\r\n",
    b"\r\n\r\n\x00\x00GET / HTTP/9.9\r\n\r\n",
)


class Administrators:
    def __init__(self, members: list[Member], seed: str) -> None:
        self.asked: Counter[str] = Counter()
        self.heard: Counter[int] = Counter()
        self.broken = 0
        self.troubles: list[str] = []
        self.silent_shown_out = self.silent_left_alone = 0
        self.events = 0  # received by status pages
        self.submitted_usd_micros = Decimal()  # of submitted usage: the cost stated by the answers
        self.zones: dict[str, str] = {}  # of orgs
        self.credentials = ""  # of an app's client
        self._members = members
        self._chance = random.Random(f"{seed} administrators")
        self._seed = seed
        self._usages = 0

    async def __aenter__(self) -> Administrators:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    # The start: who there is.

    async def settle_tenants(self) -> None:
        api = self._members[0].api
        for org, body in orgs().items():
            self.zones[org] = body["timezone"]
            await self._done("PUT", f"{api}/api/v1/orgs/{org}", body)
        for app in APPS:
            made = await self._done("PUT", f"{api}{app.path}", app_body(app))
            if app is STEADY:
                shown = {"X-Retrieval-Token": made["secret_retrieval_token"]}
                client = await self._done("GET", f"{api}{app.path}/credentials/secret", None, shown)
                self.credentials = f"{client['client_id']}:{client['client_secret']}"

    async def put(self, app: App, **more: Any) -> None:
        await self._done("PUT", f"{self._members[0].api}{app.path}", app_body(app, **more))

    async def _done(self, method: str, url: str, body: Any = None, shown: dict[str, str] | None = None) -> Any:
        async with self._http.request(method, url, json=body, headers=shown or _ADMIN) as answer:
            assert answer.status in (200, 201), (url, answer.status, await answer.text())
            return await answer.json()

    # All the while.

    async def go_on(self, until: float) -> None:
        kinds: list[Callable[[Member], Awaitable[None]]] = [
            self._read_settings, self._write_settings, self._read_spend, self._tell_usage, self._tell_usage,
            self._fetch_credentials, self._fetch_credentials, self._log_in, self._be_hostile, self._scrape,
        ]  # fmt: skip
        listening = [asyncio.create_task(self._listen(member, until)) for member in self._members]
        silent = asyncio.create_task(self._say_nothing(until))
        await asyncio.gather(*(self._ask_on(kinds, until) for _ in range(PEOPLE)), *listening, silent)

    async def _ask_on(self, kinds: list[Callable[[Member], Awaitable[None]]], until: float) -> None:
        while time.monotonic() < until:
            kind, member = self._chance.choice(kinds), self._chance.choice(self._members)
            self.asked[kind.__name__.strip("_").replace("_", " ")] += 1
            try:
                await kind(member)
            except _BROKEN:
                self.broken += 1
            except AssertionError as failure:
                self.troubles.append(str(failure))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(
        self, method: str, url: str, body: Any = None, shown: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with self._http.request(method, url, json=body, headers=_ADMIN if shown is None else shown) as answer:
            self.heard[answer.status] += 1
            return answer.status, await answer.json(content_type=None)

    async def _read_settings(self, member: Member) -> None:
        await self._ask("GET", f"{member.api}{self._chance.choice(APPS).path}")

    async def _write_settings(self, member: Member) -> None:
        await self._ask("PUT", f"{member.api}{STEADY.path}", app_body(STEADY, alert_thresholds_pct=[50, 80]))

    async def _read_spend(self, member: Member) -> None:
        app = self._chance.choice(APPS)
        await self._ask("GET", f"{member.api}{app.path}/aggregates/today", None, member.bearer(app))

    async def _scrape(self, member: Member) -> None:
        async with self._http.get(f"{member.api}/metrics") as answer:
            self.heard[answer.status] += 1
            await answer.read()

    async def _tell_usage(self, _: Member) -> None:
        """Again and again under one name until an answer confirms that it counts, wherever that is."""
        self._usages += 1
        usage = {
            "request_id": f"{self._seed}-{self._usages}",
            "label": self._chance.choice(["premium", "economy"]),
            "input_tokens": self._chance.randrange(1000),
            "output_tokens": self._chance.randrange(1000),
        }
        for _ in range(TELLING_TRIES):
            member = self._chance.choice(self._members)
            try:
                status, answer = await self._ask(
                    "POST", f"{member.api}{SUBMITTED.path}/usage", usage, member.bearer(SUBMITTED)
                )
            except _BROKEN:
                self.broken += 1
            else:
                if status in (200, 201):
                    self.submitted_usd_micros += Decimal(answer["cost_usd_micros"])
                    return
                assert status in (429, 500, 503), (status, answer)
            await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError("usage could not be submitted")

    async def _fetch_credentials(self, member: Member) -> None:
        shown = {"Authorization": self.credentials}
        await self._ask("GET", f"http://127.0.0.1:{member.data}/credentials", None, shown)

    async def _log_in(self, member: Member) -> None:
        client, secret = self.credentials.split(":")
        login = {"client_id": client, "client_secret": secret}
        status, tokens = await self._ask("POST", f"{member.api}/auth/token", login, {})
        if status == 200:
            await self._ask("POST", f"{member.api}/auth/refresh", {"refresh_token": tokens["refresh_token"]}, {})

    async def _listen(self, member: Member, until: float) -> None:
        """As an open status page does: again whenever it is cut off."""
        while (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    async with self._http.get(
                        f"{member.api}/status/events", headers=_ADMIN, timeout=aiohttp.ClientTimeout(total=None)
                    ) as answer:
                        async for line in answer.content:
                            self.events += line.startswith(b"data: ")
            except _BROKEN:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _be_hostile(self, member: Member) -> None:
        wire = await RawConnection.connect(member.data)
        try:
            data = self._chance.choice((*_HOSTILE, self._chance.randbytes(300)))
            await wire.send(data[: self._chance.randrange(1, len(data) + 1)])
            async with asyncio.timeout(1):
                await wire.read_rest()
        except TimeoutError:
            pass  # it may wait for more
        finally:
            wire.close()

    async def _say_nothing(self, until: float) -> None:
        """To the first member, which is restarted but once."""
        while time.monotonic() + SILENT_SECONDS < until:
            try:
                wire = await RawConnection.connect(self._members[0].data)
            except OSError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            is_shown_out = await _ends_within(wire, SILENT_SECONDS)
            self.silent_shown_out += is_shown_out
            self.silent_left_alone += not is_shown_out


async def _ends_within(wire: RawConnection, seconds: float) -> bool:
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            with suppress(TimeoutError):
                if not await wire.read_more():
                    return True
    except OSError:
        return True
    finally:
        wire.close()
    return False
