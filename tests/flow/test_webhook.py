"""Webhooks over real TLS: what a receiver gets, and where they never go."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from price_keeper.alerts.alert_delivery import AlertDeliveries
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.alerts.webhook import IsAllowed, WebhookResponse, WebhookSender, is_public_address
from price_keeper.clock import SystemClock
from price_keeper.server.tls import create_server_context, ensure_local_certificates
from price_keeper.tasks import Tasks
from pytest_aiohttp import AiohttpServer

from tests.support.alerts import DAY, USD, ScriptedAlertStore, scope
from tests.support.ports import free_port
from tests.support.raw_clients import descriptors, eventually, wait_quietly

SECRET = b"correct horse battery staple"
BODY = b'{"id":"id-1"}'
NOW = 1_795_003_200.9

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """A receiver on 127.0.0.1, whose certificate a local authority has signed."""

    port: int
    tls: ssl.SSLContext
    got: list[Got] = field(default_factory=list)
    handle: Handle | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append(Got(request.raw_path, headers, await request.read()))
        return await self.handle(request) if self.handle is not None else web.Response(status=204)

    def url(self, host: str = "localhost", rest: str = "/hook") -> str:
        return f"https://{host}:{self.port}{rest}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return ensure_local_certificates(tmp_path_factory.mktemp("tls"), time.time())


@pytest.fixture
def open_server(aiohttp_server: AiohttpServer, authority: tuple[Path, Path, Path]) -> Callable[[], Awaitable[Server]]:
    async def opened() -> Server:
        ca, certificate, key = authority
        app = web.Application()
        receiver = Server(0, ssl.create_default_context(cafile=ca))
        app.router.add_route("*", "/{path:.*}", receiver.answer)
        listener = await aiohttp_server(
            app, ssl=create_server_context(certificate, key), access_log=None, shutdown_timeout=0.1
        )
        receiver.port = listener.port
        return receiver

    return opened


@pytest.fixture
async def server(open_server: Callable[[], Awaitable[Server]]) -> Server:
    return await open_server()


class Dns(AbstractResolver):
    """Answers with these addresses, another list each time if there are several."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def on_this_machine(address: str) -> bool:
    """The rule of these tests; for the rest it is the real one."""
    return address == "127.0.0.1" or is_public_address(address)


@asynccontextmanager
async def calling(
    server: Server, url: str | None = None, *, allows: IsAllowed = on_this_machine, **how: Any
) -> AsyncIterator[WebhookSender]:
    how = {"resolver": Dns(["127.0.0.1"]), "tls": server.tls} | how
    webhook = WebhookSender(url or server.url(), SECRET, lambda: NOW, is_allowed=allows, **how)
    try:
        yield webhook
    finally:
        await webhook.close()


def responds(status: int, **headers: str) -> Handle:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    return handle


async def test_receiver_can_verify_signature(server: Server) -> None:
    async with calling(server, server.url(rest="/a%2Fb?x=%3D&y=%41")) as webhook:
        assert (await webhook.send("id-1", BODY)).is_accepted
    (got,) = server.got
    assert (got.path, got.body) == ("/a%2Fb?x=%3D&y=%41", BODY)
    timestamp = got.headers["x-price-keeper-timestamp"]
    assert timestamp == "1795003200"
    expected = hmac.new(SECRET, timestamp.encode() + b"." + got.body, hashlib.sha256).hexdigest()
    assert got.headers["x-price-keeper-signature"] == f"v1={expected}"
    assert got.headers["x-price-keeper-delivery"] == "id-1"
    assert got.headers["content-type"] == "application/json"
    assert SECRET.decode() not in str(got.headers)


@pytest.mark.parametrize("status", [200, 201, 204, 400, 410, 429, 500, 503])
async def test_response_is_reported_by_status(server: Server, status: int) -> None:
    server.handle = responds(status)
    async with calling(server) as webhook:
        assert await webhook.send("id-1", BODY) == WebhookResponse(status)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_not_followed(
    server: Server, status: int, open_server: Callable[[], Awaitable[Server]]
) -> None:
    elsewhere = await open_server()
    async with calling(server) as webhook:
        server.handle = responds(status, Location=elsewhere.url("127.0.0.1"))
        answer = await webhook.send("id-1", BODY)
        assert (answer, answer.is_accepted, answer.is_rejected) == (WebhookResponse(status), False, False)
        await wait_quietly()
        assert elsewhere.got == []
    assert len(server.got) == 1


PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::7f00:1"]


@pytest.mark.parametrize("address", PRIVATE)
async def test_name_resolving_to_private_address_is_not_contacted(server: Server, address: str) -> None:
    for answer in ([address], ["8.8.8.8", address], [address, "8.8.8.8"]):
        async with calling(server, allows=is_public_address, resolver=Dns(answer)) as webhook:
            assert (await webhook.send("id-1", BODY)).error == f"its address is not a public one: {address}"
    assert server.got == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"])
async def test_literal_private_address_is_not_contacted(server: Server, host: str) -> None:
    dns = Dns(["8.8.8.8"])
    async with calling(server, server.url(host), allows=is_public_address, resolver=dns) as webhook:
        assert "its address is not a public one" in (await webhook.send("id-1", BODY)).error
    assert (dns.asked, server.got) == (0, [])


@pytest.mark.parametrize("host", ["localhost", "0x7f000001", "0x7f.1", "localhost."])
async def test_result_of_system_resolver_is_checked(server: Server, host: str) -> None:
    async with calling(server, server.url(host), allows=is_public_address, resolver=None) as webhook:
        answer = await webhook.send("id-1", BODY)
        assert answer.error.startswith(("its address is not a public one: ", "not reached: ", "no whole answer: "))
    assert server.got == []


async def test_dns_rebinding_gains_nothing(server: Server) -> None:
    """The first answer is good. The second, were anybody to ask again for the same connection, would not be."""
    dns = Dns(["127.0.0.1"], ["127.0.0.2"])
    async with calling(server, resolver=dns) as webhook:
        assert (await webhook.send("id-1", BODY)).is_accepted
        assert dns.asked == 1
        assert (await webhook.send("id-1", BODY)).error == "its address is not a public one: 127.0.0.2"
        assert dns.asked == 2
    assert len(server.got) == 1


async def test_proxy_from_environment_is_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with calling(server) as webhook:
        assert (await webhook.send("id-1", BODY)).is_accepted


async def test_untrusted_certificate_is_refused(server: Server) -> None:
    async with calling(server, tls=None) as webhook:
        assert (await webhook.send("id-1", BODY)).error == "its certificate is not trusted"
    async with calling(server, server.url("alerts.example.com")) as webhook:  # trusted, but issued for another name
        assert (await webhook.send("id-1", BODY)).error == "its certificate is not trusted"
    assert server.got == []


def test_only_https_is_accepted() -> None:
    with pytest.raises(ValueError, match="https"):
        WebhookSender("http://example.com/", SECRET, lambda: NOW)


async def test_hanging_receiver_times_out(server: Server) -> None:
    gate = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await gate.wait()
        return web.Response()

    server.handle = hang
    async with calling(server, seconds=0.2) as webhook:
        assert (await webhook.send("id-1", BODY)).error == "no answer within 0.2 s"
    gate.set()


async def test_hanging_name_server_times_out(server: Server) -> None:
    class Silent(Dns):
        async def resolve(self, *_: Any, **__: Any) -> list[ResolveResult]:
            return await asyncio.Event().wait()  # type: ignore[return-value]

    async with calling(server, seconds=0.1, resolver=Silent([])) as webhook:
        assert (await webhook.send("id-1", BODY)).error == "no answer within 0.1 s"


async def test_endless_response_is_not_read(server: Server) -> None:
    sent = 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    server.handle = pour
    async with calling(server) as webhook:
        assert (await webhook.send("id-1", BODY)).is_accepted
    await wait_quietly(0.2)
    assert sent < 8 * 1024 * 1024  # what the kernel's buffers take


async def test_unreachable_receiver_is_reported(server: Server) -> None:
    async with calling(server, f"https://localhost:{free_port()}/?sig=hunter2") as webhook:
        answer = await webhook.send("id-1", BODY)
    assert answer.status is None
    assert answer.error.startswith("not reached: ")
    assert "hunter2" not in answer.error


async def test_malformed_response_is_reported_without_address(
    server: Server, authority: tuple[Path, Path, Path]
) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/9.9 what? hunter2\r\n\r\n")
        writer.close()

    babbling = await asyncio.start_server(babble, "127.0.0.1", 0, ssl=create_server_context(*authority[1:]))
    async with babbling:
        port = babbling.sockets[0].getsockname()[1]
        async with calling(server, f"https://localhost:{port}/?sig=hunter2") as webhook:
            answer = await webhook.send("id-1", BODY)
    assert answer.status is None
    assert answer.error.startswith("no whole answer: ")
    assert "hunter2" not in answer.error


@asynccontextmanager
async def delivering(server: Server, folder: Path, url: str | None = None) -> AsyncIterator[AlertRaiser]:
    clock = SystemClock()
    async with Tasks(clock) as tasks, calling(server, url) as webhook:
        deliveries = AlertDeliveries(AlertOutbox(folder), webhook, clock, tasks, chance=lambda: 0.0)
        yield AlertRaiser(ScriptedAlertStore(), clock, deliveries)  # type: ignore[arg-type]
        await tasks.stop()


async def test_alert_travels_from_threshold_to_receiver(server: Server, tmp_path: Path) -> None:
    whom, before = scope(), descriptors()
    server.handle = responds(500)
    async with delivering(server, tmp_path / "alerts") as alerts:
        assert await alerts.raise_alert(whom, "premium", DAY, 80, 8_000_000_499_999, 10 * USD)
        await eventually(lambda: server.got)
        server.handle = None
        await eventually(lambda: alerts.deliveries is not None and alerts.deliveries.delivered)
        assert list((tmp_path / "alerts").iterdir()) == []
    first, second = server.got
    assert first.body == second.body
    assert first.headers["x-price-keeper-delivery"] == second.headers["x-price-keeper-delivery"]
    payload = json.loads(first.body)
    assert payload.pop("id") == first.headers["x-price-keeper-delivery"]
    assert payload.pop("raised_at").endswith("Z")
    assert payload == {
        "type": "threshold",
        "org": whom.org,
        "app": "my-app",
        "label": "premium",
        "period": "DAY#20261118",
        "threshold_pct": 80,
        "spent_usd_micros": 8_000_000,
        "spent_usd_micros_exact": "8000000.499999",
        "quota_usd_micros": 10_000_000,
        "quota_usd_micros_exact": "10000000",
        "resets_at": "2026-11-19T00:00:00Z",
    }
    await eventually(lambda: descriptors() <= before + 1)  # the server's side of a connection may linger


@pytest.mark.parametrize("status", [302, 410, 500])
async def test_no_log_shows_secret_or_address(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    server.handle = responds(status, Location="/elsewhere?token=hunter2")
    async with delivering(server, tmp_path / "alerts", server.url(rest="/T00/pathname?sig=hunter2")) as alerts:
        assert await alerts.raise_alert(scope(), "premium", DAY, 80, USD, USD)
        await eventually(lambda: "alerts" in caplog.text and f"response status {status}" in caplog.text)
    for hidden in ("hunter2", "pathname", SECRET.decode()):
        assert hidden not in caplog.text
        assert not any(hidden.encode() in path.read_bytes() for path in (tmp_path / "alerts").iterdir())
