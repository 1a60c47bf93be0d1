"""The control port answers probes, administrators and valid secrets, whatever else arrives; over real sockets."""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import sys
import termios
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp
import pytest
from price_keeper.auth.client_secrets import ClientVerifier, make_secret
from price_keeper.auth.throttles import LookupThrottle
from price_keeper.config import Address
from price_keeper.control import control_server
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS
from price_keeper.control.control_server import ControlDispatcher, open_control_port
from price_keeper.control.page.page_state import MAX_ADMIN_PAGES
from price_keeper.control.probe_endpoints import build_probe_routes
from price_keeper.control.readiness_checks import Readiness
from price_keeper.stores.contract import Key
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.clock import ManualClock
from tests.support.control_harness import API, ORG, SETTINGS, ControlHarness, open_control_harness
from tests.support.engines import Engines
from tests.support.raw_clients import eventually

VALID = 14
FLOOD = 100
HERE, THERE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def endless_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "LINGER_SECONDS", 3600.0)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, ManualClock()) as running,
    ):
        await running.put_org()
        yield running


class Wire(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> int:
        """0 where the connection ends without an answer."""
        try:
            async with asyncio.timeout(60):
                line = await self.reader.readline()
        except (ConnectionError, TimeoutError):
            return 0
        return int(line.split()[1]) if line else 0

    def undelivered_bytes(self) -> int:
        sent = self.writer.get_extra_info("socket")
        if self.writer.is_closing() or sent.fileno() < 0:
            return 0
        return int.from_bytes(fcntl.ioctl(sent, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class Client:
    """One address that opens connections, and closes them at the end of the test."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._where = host, int(port)
        self.wires: list[Wire] = []

    async def send(self, data: bytes, address: str = HERE) -> Wire:
        wire = Wire(*await asyncio.open_connection(*self._where, local_addr=(address, 0)))
        wire.writer.write(data)
        self.wires.append(wire)
        return wire

    async def ask(self, data: bytes, address: str = HERE) -> int:
        return await (await self.send(data, address)).status()

    async def arrived(self) -> None:
        """What was sent has been read at the other side, which is in this process. On a busy machine the kernel takes
        its time, so it is asked what it has not delivered yet."""
        await eventually(lambda: not any(wire.undelivered_bytes() for wire in self.wires))
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for wire in self.wires:
            wire.writer.close()
            with suppress(ConnectionError):
                await wire.writer.wait_closed()


@pytest.fixture
async def client(api: ControlHarness) -> AsyncIterator[Client]:
    opened = Client(api.url)
    yield opened
    await opened.close()


@pytest.fixture
async def health() -> AsyncIterator[Client]:
    clock = ManualClock()
    readiness = Readiness(clock)
    readiness.start({})
    control = ControlDispatcher(build_probe_routes(readiness, MetricsRegistry()), clock.now)
    async with open_control_port(control, Address("127.0.0.1", 0), clock) as address:
        opened = Client(f"http://{address}")
        yield opened
        await opened.close()


def head(method: str, path: str, headers: dict[str, str] | None = None, length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join((*lines, "", "")).encode()


HALF_LOGIN = head("POST", "/auth/token", length=1000) + b'{"client_id": '
PROBES = ("/health", "/ready", "/metrics")


def addresses(count: int) -> list[str]:
    """One has half of the connections at most."""
    return [(HERE, THERE)[number // DEFAULT_PORT_LIMITS.max_per_network] for number in range(count)]


# Half-sent bodies.


@pytest.mark.parametrize("count", [DEFAULT_PORT_LIMITS.max_per_network, DEFAULT_PORT_LIMITS.max_connections])
async def test_half_sent_bodies_block_neither_probes_nor_administrator(
    api: ControlHarness, client: Client, count: int
) -> None:
    for address in addresses(count):
        await client.send(HALF_LOGIN, address)
        await client.arrived()
    found = [await client.ask(head("GET", path), address) for path in PROBES for address in (HERE, "127.0.0.9")]
    assert found == [200] * len(found)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(HERE, 0))) as session:
        put = session.put(api.url + API, json=SETTINGS, headers=api.auth_headers("admin"))
        async with put as answer:
            assert answer.status == 200


@pytest.mark.parametrize("count", [DEFAULT_PORT_LIMITS.max_per_network, DEFAULT_PORT_LIMITS.max_connections])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_half_sent_bodies_block_no_probe_of_health_port(health: Client, count: int, method: str) -> None:
    for address in addresses(count):
        await health.send(head(method, "/health", length=1000) + b"{", address)
        await health.arrived()
    found = [await health.ask(head("GET", path), address) for path in PROBES for address in (HERE, "127.0.0.9")]
    assert found == [200] * len(found)


async def test_half_sent_body_of_administrator_outlives_others(api: ControlHarness, client: Client) -> None:
    body = b'{"grace_hours": 1}'
    await api.put_app()
    shown = api.auth_headers("admin")
    slow = await client.send(head("POST", f"{API}/apps/shop/credentials/rotate", shown, len(body)) + body[:5])
    await client.arrived()
    strangers = [await client.send(HALF_LOGIN) for _ in range(2 * DEFAULT_PORT_LIMITS.max_per_network)]
    await client.arrived()
    assert strangers[0].reader.at_eof() or await strangers[0].status() == 0
    slow.writer.write(body[5:])
    assert await slow.status() == 200


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ready", 200), ("/nowhere", 404), (API, 401)])
async def test_body_no_route_reads_is_not_awaited(
    endless_lingering: None, client: Client, path: str, status: int
) -> None:
    wire = await client.send(head("GET", path, length=1000) + b"{")
    async with asyncio.timeout(60):
        received = await wire.reader.read()
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in received.lower()


# Requests at work.


async def test_requests_waiting_for_store_block_neither_probes_nor_administrator(
    api: ControlHarness, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, gate = type(api.store), asyncio.Event()
    get = kind.get

    async def slow(self: Any, key: Key, **options: Any) -> Any:
        await gate.wait()
        return await get(self, key, **options)

    monkeypatch.setattr(kind, "get", slow)
    asked = [
        await client.send(head("GET", API, api.auth_headers((ORG, None))))
        for _ in range(DEFAULT_PORT_LIMITS.max_per_network)
    ]
    await client.arrived()
    assert [await client.ask(head("GET", path)) for path in PROBES] == [200] * 3
    administrator = await client.send(head("GET", API, api.auth_headers("admin")))
    await client.arrived()
    gate.set()
    assert await administrator.status() == 200
    found = Counter([await each.status() for each in asked])
    slots = DEFAULT_PORT_LIMITS.max_per_network * 13 // 16
    assert found[200] >= slots  # no request that holds a slot is cut
    assert found.keys() <= {200, 503, 0}
    assert found[0] <= len(PROBES) + 1  # one without a slot may be closed for each that came later


async def test_status_pages_survive_half_sent_bodies_and_block_no_probe(api: ControlHarness, client: Client) -> None:
    pages = [
        await client.send(head("GET", "/status/events", api.auth_headers("admin"))) for _ in range(MAX_ADMIN_PAGES)
    ]
    assert [await each.status() for each in pages] == [200] * MAX_ADMIN_PAGES
    for _ in range(2 * DEFAULT_PORT_LIMITS.max_per_network):
        await client.send(HALF_LOGIN)
    await client.arrived()
    assert [await client.ask(head("GET", path)) for path in PROBES] == [200] * 3
    assert not [each for each in pages if each.writer.transport.is_closing() or each.reader.at_eof()]


# Invented tokens and clients.


async def credentials(api: ControlHarness) -> list[dict[str, str]]:
    """The credentials of apps that the administrator has just created."""
    return [(await api.ask("PUT", f"{API}/apps/a{number}", {"app_name": "a"})).body for number in range(VALID)]


async def test_invented_retrieval_tokens_do_not_block_valid_one_of_same_address(
    api: ControlHarness, client: Client
) -> None:
    made = await credentials(api)

    def asked(app: str, token: str) -> bytes:
        return head("GET", f"{API}/apps/{app}/credentials/secret", {"X-Retrieval-Token": token})

    flood = [await client.send(asked(f"a{n % VALID}", secrets.token_urlsafe(32))) for n in range(FLOOD)]
    await client.arrived()
    found = [await client.ask(asked(f"a{n}", each["secret_retrieval_token"])) for n, each in enumerate(made)]
    assert found == [200] * VALID
    again = [await client.ask(asked(f"a{n}", each["secret_retrieval_token"])) for n, each in enumerate(made)]
    assert 200 not in again
    assert len(flood) == FLOOD


@pytest.mark.parametrize("way", ["/auth/token", "/credentials"])
async def test_invented_clients_do_not_block_valid_one_of_same_address(
    api: ControlHarness, client: Client, way: str
) -> None:
    known = [await _secret(api, number, each) for number, each in enumerate(await credentials(api))]
    api.parts.clients.__init__(  # type: ignore[misc]
        api.store, api.clock.now, LookupThrottle(api.clock), api.clock.monotonic, api.tokens.secret_tagger
    )

    def asked(client_id: str, secret: str) -> bytes:
        if way == "/credentials":
            return head("GET", way, {"Authorization": f"{client_id}:{secret}"})
        body = f'{{"client_id": "{client_id}", "client_secret": "{secret}"}}'.encode()
        return head("POST", way, length=len(body)) + body

    for n in range(4 * FLOOD):  # both unknown names, and the valid ones with invented secrets
        await client.send(asked(f"org-{uuid4()}" if n % 2 else known[n % VALID][0], make_secret()))
    await client.arrived()
    assert [await client.ask(asked(*each)) for each in known] == [200] * VALID
    assert isinstance(api.parts.clients, ClientVerifier)


async def _secret(api: ControlHarness, number: int, made: dict[str, str]) -> tuple[str, str]:
    token = {"X-Retrieval-Token": made["secret_retrieval_token"]}
    document = (await api.ask("GET", f"{API}/apps/a{number}/credentials/secret", who=None, headers=token)).body
    await api.clock.advance(1)  # type: ignore[attr-defined]
    return document["client_id"], document["client_secret"]
