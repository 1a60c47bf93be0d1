"""The control port under people who want it, or the process around it, to stop serving others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from price_keeper.control import control_server, profile_endpoints
from price_keeper.control.api_constants import MAX_BODY_BYTES
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_rate_limits import ApiRateDecision, LocalApiRateLimiter
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.control_requests import (
    ANONYMOUS_BUDGET_BYTES,
    MAX_ANONYMOUS_BODY_BYTES,
    PER_CLIENT_BUDGET_BYTES,
    SMALL_BODY_BYTES,
    ByteBudget,
)
from yarl import URL

from tests.support.clock import ManualClock
from tests.support.control_harness import API, ORG, SETTINGS, ControlHarness, TickingClock, open_control_harness
from tests.support.engines import Engines

SHOP = f"{API}/apps/shop"
CALLER = (ORG, "shop")
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = {"Content-Type": "application/json"}
USAGE = {"request_id": "r", "label": "economy", "input_tokens": 1, "output_tokens": 1}
OVERRIDE = {"label": "economy", "reason": "r"}
PROFILE = {
    "label": "mine",
    "inference_profile_arn": "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc",
    "format": "nova",
    "prices_usd_per_1m": {"input": 1, "output": 2},
}


# Bodies.


@pytest.mark.parametrize(
    ("method", "path", "who", "most"),
    [
        ("POST", "/auth/token", None, MAX_ANONYMOUS_BODY_BYTES),
        ("POST", "/auth/refresh", None, MAX_ANONYMOUS_BODY_BYTES),
        ("POST", "/auth/revoke", None, MAX_ANONYMOUS_BODY_BYTES),
        ("POST", f"{SHOP}/credentials/rotate", "admin", SMALL_BODY_BYTES),
        ("PUT", f"{SHOP}/override", "admin", SMALL_BODY_BYTES),
        ("POST", f"{SHOP}/usage", CALLER, SMALL_BODY_BYTES),
    ],
)
async def test_body_above_route_limit_is_refused(
    api: ControlHarness, method: str, path: str, who: Any, most: int
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b" " * most
        yield b" "

    headers = {**JSON, **api.auth_headers(who)}
    for body in (b" " * (most + 1), parts()):
        async with api.session.request(method, api.url + path, headers=headers, data=body) as answer:
            assert answer.status == 413
    async with api.session.request(method, api.url + path, headers=headers, data=b" " * most) as answer:
        assert answer.status == 400


async def test_announced_oversized_body_is_not_read(api: ControlHarness) -> None:
    reader, writer = await _sent(api, _head(MAX_ANONYMOUS_BODY_BYTES + 1))
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_many_mistakes_are_truncated(api: ControlHarness) -> None:
    answer = await api.ask("POST", "/auth/token", {f"u{number}": 1 for number in range(1000)}, who=None)
    assert (answer.status, len(answer.body["details"])) == (400, 21)
    assert answer.body["details"][0] == {"path": "client_id", "message": "required, but missing"}
    assert answer.body["details"][-1] == {"path": "", "message": "and 982 more mistakes"}


async def test_requests_without_credentials_are_limited_too(api: ControlHarness) -> None:
    made = await api.ask("PUT", API, SETTINGS)
    statuses = [(await api.ask("POST", "/auth/token", {}, who=None)).status for _ in range(12)]
    assert statuses == [400] * 10 + [429] * 2
    token = {"X-Retrieval-Token": made.body["secret_retrieval_token"]}
    secret = await api.ask("GET", f"{API}/credentials/secret", who=None, headers=token)
    assert secret.status == 200
    assert (await api.ask("POST", "/auth/token", secret.body, who=None)).status == 200


async def test_bodies_in_flight_share_a_memory_budget(api: ControlHarness) -> None:
    api.control._body_budgets.anonymous = ByteBudget(2 * MAX_ANONYMOUS_BODY_BYTES + 100)
    slow = [await _sent(api, _head(MAX_ANONYMOUS_BODY_BYTES)) for _ in range(2)]
    for each in slow:
        each[1].write(b"{")
    await asyncio.sleep(0.1)
    refused = await api.ask("POST", "/auth/token", {"client_id": "x" * 100, "client_secret": "y"}, who=None)
    assert (refused.status, refused.headers["Retry-After"], refused.headers["Connection"]) == (503, "1", "close")
    slow[0][1].close()
    slow[1][1].write(b" " * MAX_ANONYMOUS_BODY_BYTES)
    await asyncio.sleep(0.1)
    assert (
        await api.ask("POST", "/auth/token", {"client_id": "x" * 100, "client_secret": "y"}, who=None)
    ).status == 401
    slow[1][1].close()


async def test_bodies_of_one_app_do_not_block_others(api: ControlHarness) -> None:
    """With as many bodies in flight as fit, one after the other, none of which sends a byte."""
    made = await api.ask("PUT", API, SETTINGS)
    await api.put_app("web")
    await api.put_app("shop")
    token = {"X-Retrieval-Token": made.body["secret_retrieval_token"]}
    pair = (await api.ask("GET", f"{API}/credentials/secret", who=None, headers=token)).body
    head = _head(MAX_BODY_BYTES, f"{API}/apps/web/usage/batch", api.auth_headers((ORG, "web"))["Authorization"])
    slow = [await _sent(api, head) for _ in range(2 * ANONYMOUS_BUDGET_BYTES // MAX_BODY_BYTES)]
    expected = len(slow) - PER_CLIENT_BUDGET_BYTES // MAX_BODY_BYTES
    answers = [asyncio.ensure_future(each[0].readline()) for each in slow]  # whichever came first has the room
    async with asyncio.timeout(60):
        for answered in asyncio.as_completed(answers):
            assert b" 503 " in await answered
            expected -= 1
            if not expected:
                break
    assert (await api.ask("POST", f"{API}/apps/web/usage", USAGE, who=(ORG, "web"))).status == 503
    assert (await api.ask("POST", "/auth/token", pair, who=None)).status == 200
    assert (await api.ask("PUT", API, SETTINGS)).status == 200
    assert (await api.ask("POST", f"{API}/apps/shop/usage", USAGE, who=CALLER)).status == 201
    assert sum(answer.done() for answer in answers) == len(slow) - PER_CLIENT_BUDGET_BYTES // MAX_BODY_BYTES
    for each in slow:
        each[1].close()
    await asyncio.gather(*answers)


def test_anonymous_bodies_cannot_take_whole_budget() -> None:
    assert DEFAULT_PORT_LIMITS.max_connections * MAX_ANONYMOUS_BODY_BYTES < ANONYMOUS_BUDGET_BYTES
    budget = ByteBudget(10, max_per_caller=10)
    with budget.reserve(10), pytest.raises(ApiError), budget.reserve(1):
        pass
    with budget.reserve(10):
        pass


def _head(length: int, path: str = "/auth/token", shown: str | None = None) -> bytes:
    more = "" if shown is None else f"Authorization: {shown}\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def _sent(api: ControlHarness, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


# Connections.


async def test_connections_are_bounded(tmp_path: Path) -> None:
    few = ControlPortLimits(max_connections=10, max_per_network=3, reserved_for_loopback=0)
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path, limits=few) as api:
        held = [await _sent(api, _head(20)) for _ in range(8)]
        for reader, _ in held[:5]:
            async with asyncio.timeout(60):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in held[5:])
        assert (await api.ask("GET", "/health", who=None)).status == 200
        for _, each in held:
            each.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", WHOLE])
async def test_idle_connections_block_nobody(tmp_path: Path, sent: bytes) -> None:
    few = ControlPortLimits(max_connections=10, max_per_network=3, reserved_for_loopback=0)
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path, limits=few) as api:
        for _ in range(3):
            held = [await _sent(api, sent) for _ in range(5)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                reader, writer = await _sent(api, WHOLE)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            for _, each in (*held, (reader, writer)):
                each.close()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: "])
async def test_connection_without_complete_head_is_closed(api: ControlHarness, sent: bytes) -> None:
    clock = _clock(api)
    reader, writer = await _sent(api, sent)
    await asyncio.sleep(0.1)
    await clock.advance(19)
    writer.write(sent[:1])  # one byte now and then is no head either
    await asyncio.sleep(0.1)
    assert not reader.at_eof()
    await clock.advance(2)
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_kept_connection_may_be_idle_but_next_head_must_arrive_quickly(api: ControlHarness) -> None:
    clock = _clock(api)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await _sent(api, whole)
    await reader.readuntil(b"}")
    await clock.advance(60)
    await asyncio.sleep(0.1)
    writer.write(whole)
    await reader.readuntil(b"}")
    writer.write(whole[:10])
    await asyncio.sleep(0.1)
    await clock.advance(21)
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_input_after_non_http_is_discarded(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may hand on megabytes before the first mistake is answered."""
    made: list[Any] = []
    connected = control_server._ControlConnection.connection_made

    def noted(self: Any, transport: Any) -> None:
        made.append(self)
        connected(self, transport)

    monkeypatch.setattr(control_server._ControlConnection, "connection_made", noted)
    reader, writer = await _sent(api, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    (connection,) = made
    for _ in range(30):
        connection.data_received(b"no http\r\n" * 10_000)
    assert len(connection._messages) == 1
    async with asyncio.timeout(60):
        assert (await reader.read()).count(b"HTTP/1.0 400 ") == 1
    writer.close()


async def test_client_that_never_reads_is_disconnected(api: ControlHarness) -> None:
    clock, loop = _clock(api), asyncio.get_running_loop()
    host, port = api.url.removeprefix("http://").split(":")
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                while True:  # until no more is accepted
                    await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        await clock.advance(61)
        await asyncio.sleep(0.1)
        assert await _is_cut(client)


async def _is_cut(client: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(3):
            while await loop.sock_recv(client, 65536):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def _clock(api: ControlHarness) -> TickingClock:
    assert isinstance(api.clock, TickingClock)
    return api.clock


# Requests.


@pytest.mark.parametrize("format", ["1.5", "1", "true", "[]", "{}", "[1.5]", '"novel"'])
async def test_profile_format_is_one_of_known_words(api: ControlHarness, format: str) -> None:
    await api.put_org()
    await api.put_app()
    body = json.dumps(PROFILE).replace('"nova"', format)
    headers = {**JSON, **api.auth_headers("admin")}
    async with api.session.post(f"{api.url}{SHOP}/inference-profiles", data=body, headers=headers) as answer:
        assert (answer.status, (await answer.json())["details"][0]["path"]) == (400, "format")


@pytest.mark.parametrize("name", ["refresh_interval_normal_secs", "refresh_interval_tight_secs"])
async def test_seconds_have_few_decimals(api: ControlHarness, name: str) -> None:
    await api.put_org()
    headers = {**JSON, **api.auth_headers("admin")}
    for path, settings in ((API, SETTINGS), (SHOP, {"app_name": "Shop"})):
        for seconds, status in (
            ("12." + "3" * 60, 400),
            ("30." + "0" * 47 + "1", 400),
            ("1.0005", 400),
            ("1.125", None),
        ):
            body = json.dumps(settings)[:-1] + f', "{name}": {seconds}}}'
            async with api.session.put(api.url + path, data=body, headers=headers) as answer:
                assert answer.status in ((200, 201) if status is None else (status,)), await answer.text()


async def test_head_request_for_secret_does_not_consume_it(api: ControlHarness) -> None:
    made = await api.ask("PUT", API, SETTINGS)
    token = {"X-Retrieval-Token": made.body["secret_retrieval_token"]}
    head = await api.ask("HEAD", f"{API}/credentials/secret", who=None, headers=token)
    assert (head.status, head.headers["Allow"]) == (405, "GET")
    assert (await api.ask("GET", f"{API}/credentials/secret", who=None, headers=token)).status == 200
    assert (await api.ask("HEAD", API)).status == 200


async def test_jwks_requests_of_one_address_do_not_block_others(tmp_path: Path) -> None:
    rates = LocalApiRateLimiter(ManualClock().monotonic, 3, 1)
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path, rates=rates) as api:
        statuses = [(await api.ask("GET", "/openapi.json", who=None)).status for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2
        for path in ("/.well-known/jwks.json", "/health", "/ready"):
            assert [(await api.ask("GET", path, who=None)).status for _ in range(5)] == [200] * 5


class _Recorder:
    def __init__(self) -> None:
        self.who: list[str] = []

    async def take(self, caller: str) -> ApiRateDecision:
        self.who.append(caller)
        return ApiRateDecision(1000, 999, 0.0)


async def test_ipv6_network_counts_as_one_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, recorder = iter(["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"]), _Recorder()
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, rates=recorder) as api,
    ):
        monkeypatch.setattr(web.BaseRequest, "remote", property(lambda _: next(addresses)))
        for _ in range(3):
            await api.ask("GET", "/openapi.json", who=None)
    assert recorder.who[0] == recorder.who[1] != recorder.who[2]


async def test_concurrent_profile_creations_keep_limit(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_endpoints, "MAX_PROFILES", 5)
    await api.put_org()
    await api.put_app()
    before = (await api.ask("GET", SHOP)).headers["ETag"]
    asked = (api.ask("POST", f"{SHOP}/inference-profiles", PROFILE | {"label": f"l{n}"}) for n in range(20))
    assert sorted(answer.status for answer in await asyncio.gather(*asked)) == [201] * 5 + [409] * 15
    listed = await api.ask("GET", f"{SHOP}/inference-profiles")
    assert len(listed.body["inference_profiles"]) == 5
    assert (await api.ask("GET", SHOP)).headers["ETag"] == before


async def test_dns_rebinding_host_is_refused(api: ControlHarness) -> None:
    for host in (
        "evil.example",
        "evil.example:8081",
        "localhost.evil.example",
        "10.0.0.1",
        "127.0.0.1.evil.example",
        "",
    ):
        for path in ("/health", "/openapi.json", API):
            answer = await api.ask("GET", path, headers={"Host": host})
            assert (answer.status, answer.body["error"]) == (403, "forbidden"), host
    for host in ("localhost", "LocalHost:1", "127.0.0.1:8081", "127.0.0.9", "[::1]:8081", "[::1]"):
        assert (await api.ask("GET", "/health", who=None, headers={"Host": host})).status == 200, host


@pytest.mark.parametrize(
    "head",
    [
        "GET /health RTSP/1.0\r\nHost: localhost\r\n",
        "GET /health RTSP/1.1\r\nHost: localhost\r\n",
        "GET /health HTTP/0.9\r\nHost: localhost\r\n",
        "GET /health HTTP/1.1\r\nHost: you@localhost\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost/health\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost, localhost\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost:x\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n",
        "GET /health HTTP/1.1\r\n",
        "GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n",
        "GET http://you@localhost/health HTTP/1.1\r\nHost: localhost\r\n",
        "GET ftp://localhost/health HTTP/1.1\r\nHost: localhost\r\n",
    ],
)
async def test_malformed_host_or_protocol_is_refused(api: ControlHarness, head: str) -> None:
    reader, writer = await _sent(api, f"{head}\r\n".encode())
    status = await reader.readline()
    assert status.split()[1:2] in ([b"400"], [b"403"]), status
    writer.close()


@pytest.mark.parametrize("split", range(1, 22))
async def test_other_protocol_is_refused_wherever_its_first_line_is_split(api: ControlHarness, split: int) -> None:
    head = b"GET /health RTSP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await _sent(api, head[:split])
    await asyncio.sleep(0.005)  # so that it comes in two pieces
    writer.write(head[split:])
    assert (await reader.readline()).split()[1:2] == [b"400"]
    writer.close()


async def test_responses_allow_no_cross_origin_reads(api: ControlHarness) -> None:
    """Nor may one ask for leave to send what forms cannot."""
    elsewhere = {"Origin": "https://evil.example"}
    leave = {**elsewhere, "Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "x-api-key"}
    for method, path, headers in (
        ("GET", "/health", elsewhere),
        ("GET", "/metrics", elsewhere),
        ("GET", API, elsewhere),
        ("POST", "/auth/token", elsewhere),
        ("OPTIONS", API, leave),
        ("OPTIONS", "/status/session", leave),
    ):
        answer = await api.ask(method, path, who=None, headers=headers)
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")], path
        assert method != "OPTIONS" or answer.status == 405


@pytest.mark.parametrize("app", ["%2e", "%2E%2e"])
async def test_app_name_lost_in_paths_is_refused(api: ControlHarness, app: str) -> None:
    await api.put_org()
    url = URL(f"{api.url}{API}/apps/{app}", encoded=True)
    async with api.session.put(url, json={"app_name": "x"}, headers=api.auth_headers("admin")) as answer:
        assert answer.status in (400, 404)
