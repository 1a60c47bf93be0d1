"""The control API under attack: who is admitted where, and the form of every error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from price_keeper.config.config_sections import AuthConfig
from price_keeper.control.api_constants import MAX_BODY_BYTES
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_rate_limits import LocalApiRateLimiter
from price_keeper.control.control_access import load_admin_key
from price_keeper.control.control_requests import parse_json
from price_keeper.errors import ConfigError
from yarl import URL

from tests.support.clock import ManualClock
from tests.support.control_harness import ADMIN_KEY, API, ORG, OTHER, SETTINGS, ControlHarness, open_control_harness
from tests.support.engines import Engines

SHOP = f"{API}/apps/shop"
TODAY = "/aggregates/today"


# Who may do what: the method, the path, the caller, and the status.
ADMIN, ORGS_OWN, SHOPS_OWN, BOTS, OTHERS = "admin", (ORG, None), (ORG, "shop"), (ORG, "bot"), (OTHER, "shop")
USAGE = {"request_id": "r", "label": "premium", "input_tokens": 1, "output_tokens": 1}
MAY = [
    ("GET", "/api/v1/orgs", None, {ADMIN: 200, ORGS_OWN: 403, SHOPS_OWN: 403, None: 401}),
    ("GET", API, None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 403, OTHERS: 403, None: 401}),
    ("PUT", API, SETTINGS, {ADMIN: 200, ORGS_OWN: 403, SHOPS_OWN: 403, None: 401}),
    ("GET", f"{API}/apps", None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 403}),
    ("GET", SHOP, None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 200, BOTS: 403, OTHERS: 403, None: 401}),
    ("PUT", SHOP, {"app_name": "x"}, {ADMIN: 200, ORGS_OWN: 403, SHOPS_OWN: 403}),
    ("GET", API + TODAY, None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 403, OTHERS: 403}),
    ("GET", SHOP + TODAY, None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 200, BOTS: 403, OTHERS: 403}),
    ("GET", f"{SHOP}/model-selection", None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 200, BOTS: 403}),
    ("POST", f"{SHOP}/usage", USAGE, {ADMIN: 201, SHOPS_OWN: 200, ORGS_OWN: 403, BOTS: 403, OTHERS: 403, None: 401}),
    ("DELETE", f"{SHOP}/override", None, {ADMIN: 200, ORGS_OWN: 403, SHOPS_OWN: 403}),
    ("GET", f"{SHOP}/inference-profiles", None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 200, BOTS: 403}),
    ("POST", f"{SHOP}/inference-profiles", {}, {ADMIN: 400, SHOPS_OWN: 403}),
    ("POST", f"{SHOP}/credentials/rotate", {}, {ADMIN: 200, SHOPS_OWN: 403}),
    ("GET", f"{API}/audit", None, {ADMIN: 200, ORGS_OWN: 200, SHOPS_OWN: 403, OTHERS: 403}),
    ("GET", "/openapi.json", None, {None: 200, ADMIN: 200}),
    ("GET", "/.well-known/jwks.json", None, {None: 200}),
    ("GET", "/health", None, {None: 200}),
]


async def test_every_route_admits_exactly_its_callers(api: ControlHarness) -> None:
    await api.put_org()
    await api.put_app()
    for method, path, body, expected in MAY:
        for who, status in expected.items():
            answer = await api.ask(method, path, body, who=who)
            assert answer.status == status, (method, path, who, answer.body)
            if status >= 400:
                assert_problem(answer)


def assert_problem(answer: Any) -> None:
    assert answer.body.keys() == {"error", "message", "details", "timestamp", "request_id"}
    assert answer.body["request_id"] == answer.headers["X-Request-Id"]
    assert "Traceback" not in answer.raw.decode()
    assert answer.headers["Cache-Control"] == "no-store"


async def test_every_other_route_requires_authentication(api: ControlHarness) -> None:
    """So that no route is added without anybody thinking of it."""
    document = (await api.ask("GET", "/openapi.json", who=None)).body
    open_to_all = {
        path for path, methods in document["paths"].items() for each in methods.values() if not each["security"]
    }
    assert open_to_all == {
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/.well-known/jwks.json",
        "/.well-known/oauth-authorization-server",
        "/status",
        "/status/{file}",
        "/status/session",
        "/auth/token",
        "/auth/refresh",
        "/auth/revoke",
        "/credentials",
        "/api/v1/orgs/{org}/credentials/secret",
        "/api/v1/orgs/{org}/apps/{app}/credentials/secret",
    }
    for path, methods in document["paths"].items():
        for method in methods:
            if path not in open_to_all:
                place = path.replace("{org}", ORG).replace("{app}", "shop").replace("{day}", "2026-11-18")
                assert (await api.ask(method.upper(), place, who=None)).status == 401, (method, path)


# Attacks: the method, the path, headers and a body, and the status.
GOOD = {"X-API-Key": ADMIN_KEY}
JSON = GOOD | {"Content-Type": "application/json"}
ATTACKS: list[tuple[str, str, Any, Any, int]] = [
    ("GET", API, {"X-API-Key": ADMIN_KEY + "x"}, None, 401),
    ("GET", API, {"X-API-Key": ADMIN_KEY[:-1]}, None, 401),
    ("GET", API, {"X-API-Key": ""}, None, 401),
    ("GET", API, {"x-api-key": ADMIN_KEY.upper()}, None, 401),
    ("GET", API, {"Authorization": f"Bearer {ADMIN_KEY}"}, None, 401),
    ("GET", API, {"Authorization": f"Basic {ADMIN_KEY}"}, None, 401),
    ("GET", API, {"Authorization": "Bearer a.b.c"}, None, 401),
    ("GET", API, {"Authorization": "Bearer"}, None, 401),
    ("GET", API, [("X-API-Key", ADMIN_KEY), ("X-API-Key", ADMIN_KEY)], None, 400),
    ("GET", API, [("X-API-Key", ADMIN_KEY), ("X-API-Key", "other")], None, 400),
    ("GET", API, GOOD | {"Authorization": "Bearer a.b.c"}, None, 400),
    ("GET", f"/api/v1/orgs/{ORG.upper()}", GOOD, None, 400),
    ("GET", f"/api/v1/orgs/{ORG.replace('-', '')}", GOOD, None, 400),
    ("GET", "/api/v1/orgs/%2e%2e%2f%2e%2e%2fetc", GOOD, None, 400),
    ("GET", f"{API}/apps/%2e%2e%2fshop", GOOD, None, 400),
    ("GET", f"{API}/apps/shop%23x", GOOD, None, 400),
    ("GET", f"{API}/apps/shop%00", GOOD, None, 400),
    ("GET", f"{API}/apps/{'a' * 65}", GOOD, None, 400),
    ("GET", f"{API}/apps/%ff", GOOD, None, 404),
    ("GET", f"{API}/apps/", GOOD, None, 400),
    ("GET", f"/{API}", GOOD, None, 404),
    ("GET", f"{API}/../{OTHER}", GOOD, None, 404),
    ("GET", "/x" * 500, GOOD, None, 404),
    ("GET", f"{API}?x=1", GOOD, None, 400),
    ("GET", f"{API}/apps?limit=1&limit=2", GOOD, None, 400),
    ("GET", f"{API}/apps?limit=0", GOOD, None, 400),
    ("GET", f"{API}/apps?limit=%D9%A3", GOOD, None, 400),
    ("GET", f"{SHOP}/model-selection?force_check=1", GOOD, None, 400),
    ("GET", f"{API}/aggregates/2026-02-30", GOOD, None, 400),
    ("GET", f"{API}/aggregates/yesterday", GOOD, None, 400),
    ("GET", f"{API}/aggregates/2026-11-20", GOOD, None, 400),
    ("GET", f"{API}/aggregates/2020-01-01", GOOD, None, 400),
    ("GET", f"{API}/aggregates?from=2026-11-01", GOOD, None, 400),
    ("GET", f"{API}/aggregates?from=2026-11-18&to=2026-11-01", GOOD, None, 400),
    ("GET", f"{API}/aggregates?from=2026-01-01&to=2026-11-01", GOOD, None, 400),
    ("POST", API, GOOD, None, 405),
    ("DELETE", API, GOOD, None, 405),
    ("OPTIONS", API, GOOD, None, 405),
    ("PUT", API, GOOD, b"{}", 415),
    ("PUT", API, GOOD | {"Content-Type": "text/plain"}, b"{}", 415),
    ("PUT", API, GOOD | {"Content-Type": "application/json; charset=utf-16"}, b"{}", 415),
    ("PUT", API, [*JSON.items(), ("Content-Type", "text/plain")], b"{}", 400),
    ("PUT", API, JSON | {"Content-Encoding": "br"}, b"{}", 415),
    ("PUT", API, JSON | {"Expect": "a miracle"}, b"{}", 417),
    ("PUT", API, JSON, b"", 400),
    ("PUT", API, JSON, b"{", 400),
    ("PUT", API, JSON, b"[" * 200_000, 400),
    ("PUT", API, JSON, b"[" * 20 + b"]" * 20, 400),
    ("PUT", API, JSON, b'{"a":' * 20_000, 400),
    ("PUT", API, JSON, b'{"org_name":"a","org_name":"b"}', 400),
    ("PUT", API, JSON, b'{"org_name":NaN}', 400),
    ("PUT", API, JSON, b'{"refresh_interval_normal_secs":1e999999999}', 400),
    ("PUT", API, JSON, b'{"refresh_interval_normal_secs":1e9999999999999999999}', 400),
    ("PUT", API, JSON, b'{"org_name":' + b"9" * 5000 + b"}", 400),
    ("PUT", API, JSON, b'{"org_name":"\\ud800"}', 400),
    ("PUT", API, JSON, b'{"org_name":"\xff"}', 400),
    ("PUT", API, JSON, b"null", 400),
    ("PUT", API, JSON, b" " * (MAX_BODY_BYTES + 1), 413),
    ("PUT", f"{API}/apps/shop", JSON, b'{"app_name":"a\\u0000"}', 400),
    ("POST", "/auth/token", {"Content-Type": "application/json"}, b'{"client_id":"x","client_secret":"y"}', 401),
    ("POST", "/auth/refresh", {"Content-Type": "application/json"}, b'{"refresh_token":"a.b.c"}', 401),
    ("POST", "/auth/revoke", {"Content-Type": "application/json"}, b'{"token":"a.b.c"}', 401),
    ("GET", f"{API}/credentials/secret", {}, None, 401),
    ("GET", f"{API}/credentials/secret", {"X-Retrieval-Token": "x" * 43}, None, 401),
]


async def test_attacks_are_refused_in_uniform_error_form(api: ControlHarness) -> None:
    await api.put_org()
    await api.put_app()
    for number, (method, path, headers, body, status) in enumerate(ATTACKS):
        api.parts.login_throttle._by_address._empty_at.clear()
        api.parts.login_throttle._by_client._empty_at.clear()
        url = URL(api.url + path, encoded=True)
        skipped = ["Content-Type"] if body is not None else []
        async with api.session.request(
            method, url, headers=headers, data=body, skip_auto_headers=skipped, allow_redirects=False
        ) as answer:
            raw = await answer.read()
            assert answer.status == status, (number, method, path, headers, raw)
            document = json.loads(raw)
            assert document.keys() == {"error", "message", "details", "timestamp", "request_id"}
            assert ADMIN_KEY not in raw.decode()


# What is no HTTP, or may be read in two ways.
HEAD = f"Host: x\r\nX-API-Key: {ADMIN_KEY}\r\nContent-Type: application/json\r\n"
SMUGGLED = [
    b"hello\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-API-Key: se\x00same\r\n\r\n",
    f"PUT {API} HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
    f"PUT {API} HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}} ".encode(),
    f"PUT {API} HTTP/1.1\r\n{HEAD}Content-Length: -1\r\n\r\n{{}}".encode(),
    f"PUT {API} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
    f"PUT {API} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n".encode(),
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("sent", SMUGGLED, ids=range(len(SMUGGLED)))
async def test_non_http_input_is_refused_and_closed(
    api: ControlHarness, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1.[01] 400 ", head), answer
    assert json.loads(body)["error"] == "invalid_request"
    assert "sesame" not in caplog.text
    assert ADMIN_KEY not in caplog.text + answer.decode()


async def test_endless_body_is_cut_off(api: ControlHarness) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65_536

    url, headers = api.url + API, JSON
    try:
        async with api.session.put(url, headers=headers, data=endless()) as answer:
            assert answer.status == 413
    except (ConnectionError, OSError):  # the connection may be refused before the client has read the answer
        pass


async def test_guessing_is_limited_and_valid_key_still_works(api: ControlHarness) -> None:
    await api.put_org()
    statuses = [(await api.ask("GET", API, who=None, headers={"X-API-Key": f"guess {n}"})).status for n in range(14)]
    assert statuses == [401] * 10 + [429] * 4
    late = await api.ask("GET", API, who=None, headers={"Authorization": "Bearer a.b.c"})
    assert (late.status, int(late.headers["Retry-After"]) <= 6) == (429, True)
    assert (await api.ask("GET", API)).status == 200


async def test_rate_limited_caller_gets_retry_after(tmp_path: Path) -> None:
    clock = ManualClock()
    rates = LocalApiRateLimiter(clock.monotonic, 5, 1)
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, clock, rates) as api,
    ):
        answers = [await api.ask("GET", "/api/v1/orgs") for _ in range(6)]
        assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
        assert [answer.status for answer in answers] == [200] * 5 + [429]
        assert answers[-1].headers["Retry-After"] == "1"
        assert answers[-1].headers["X-RateLimit-Limit"] == "5"
        assert (await api.ask("GET", "/openapi.json", who=None)).status == 200
        await clock.advance(2)
        assert (await api.ask("GET", "/api/v1/orgs")).headers["X-RateLimit-Remaining"] == "1"
        for _ in range(6):
            assert (await api.ask("GET", "/health", who=None)).status == 200


def test_weak_admin_key_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{ADMIN_KEY}\n")
    from_file = AuthConfig(admin_api_key_file=str(tmp_path / "key"))
    assert load_admin_key(from_file, {"PRICE_KEEPER_API_KEY": "x"}) == ADMIN_KEY
    assert load_admin_key(AuthConfig(), {}) is None
    for config, environ in (
        (AuthConfig(), {"PRICE_KEEPER_API_KEY": "sesame"}),
        (AuthConfig(), {"PRICE_KEEPER_API_KEY": "sesame" * 9 + "\x07"}),
        (AuthConfig(admin_api_key_file=str(tmp_path / "none")), {}),
    ):
        with pytest.raises(ConfigError) as caught:
            load_admin_key(config, environ)
        assert "sesame" not in str(caught.value)


def test_deeply_nested_json_is_parsed_or_refused() -> None:
    assert parse_json(b"[" * 12 + b"]" * 12)
    for depth in (13, 100, 1000, 50_000):
        with pytest.raises(ApiError):
            parse_json(b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("raw", [b'{"a":1,"a":1}', b'[{"a":{"b":1,"b":2}}]', b"[NaN]", b"[-Infinity]", b'["\\udfff"]'])
def test_ambiguous_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError):
        parse_json(raw)


async def test_changes_are_refused_while_starting_or_stopping(api: ControlHarness) -> None:
    control = api.control
    control.stop()
    assert (await api.ask("PUT", API, SETTINGS)).status == 503
    assert (await api.ask("GET", "/health", who=None)).status == 200
    control.start(api.parts)
    assert (await api.ask("PUT", API, SETTINGS)).status == 201
