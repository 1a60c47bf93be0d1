"""The status page over real sockets: what anybody may see of it, who gets in, what a foreign page cannot do, and that
visitors see only their own data."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import UUID

import jwt
import pytest
from price_keeper.auth.page_sessions import PAGE_SESSION_SECONDS as SESSION_SECONDS
from price_keeper.control import control_access
from price_keeper.control.api_rate_limits import LocalApiRateLimiter
from price_keeper.control.page import budget_list
from price_keeper.control.page.budget_list import MAX_ROWS
from price_keeper.errors import AccessDenied

from tests.support.clock import ManualClock
from tests.support.control_harness import (
    ADMIN_KEY,
    API,
    ORG,
    OTHER,
    SETTINGS,
    ControlHarness,
    ControlResponse,
    open_control_harness,
)
from tests.support.engines import Engines
from tests.support.status_page import PAGE, Browser, put, status_page

SHOP = f"{API}/apps/shop"
OVERRIDE = {"label": "economy", "reason": "a quiet day"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with status_page(tmp_path) as running:
        yield running


@pytest.fixture
async def shop(api: ControlHarness) -> ControlHarness:
    await put(api, "shop")
    return api


async def spend(api: ControlHarness, name: str, label: str, millions: int, path: str = SHOP) -> None:
    """Of tokens that go in."""
    body = {"request_id": name, "label": label, "input_tokens": millions * 1_000_000, "output_tokens": 0}
    answer = await api.ask("POST", f"{path}/usage", body)
    assert answer.status == 201, answer.body
    assert (await api.ask("GET", f"{path}/model-selection?force_check=true")).status == 200


# What anybody may see.


async def test_page_files_are_public_and_hold_no_data(shop: ControlHarness) -> None:
    page = await shop.ask("GET", "/status", who=None)
    text = page.raw.decode()
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers["X-Frame-Options"] == "DENY"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    policy = dict(each.split(" ", 1) for each in page.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|https?://", text)
    for name in re.findall(r'(?:src|href)="(/status/[^"]+)"', text):
        assert (await shop.ask("GET", name, who=None)).status == 200, name
    for other in (ORG, "Acme", "shop", ADMIN_KEY):
        assert other not in text


async def test_every_page_file_has_its_content_type_and_nothing_else_is_served(api: ControlHarness) -> None:
    kinds = {
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "svg": "image/svg+xml; charset=utf-8",
    }
    for each in files("price_keeper.control.page").joinpath("files").iterdir():
        answer = await api.ask("GET", f"/status/{each.name}", who=None)
        kind = kinds.get(each.name.rpartition(".")[2])
        assert answer.status == (404 if kind is None else 200), each.name
        if kind is not None:
            assert (answer.headers["Content-Type"], answer.raw) == (kind, each.read_bytes())
            assert "http://" not in answer.raw.decode().replace("http://www.w3.org/", ""), each.name
            assert "https://" not in answer.raw.decode()
            again = await api.ask(
                "GET", f"/status/{each.name}", who=None, headers={"If-None-Match": answer.headers["ETag"]}
            )
            assert (again.status, again.raw) == (304, b"")
    for name in (
        "..%2fboard.py",
        "board.py",
        "%2e%2e%2fboard.py",
        "page.JS",
        "",
        "nothing.js",
        "a" * 100 + ".js",
        "page.js%00",
    ):
        assert (await api.ask("GET", f"/status/{name}", who=None)).status == 404, name


async def test_signed_out_visitor_sees_nothing(shop: ControlHarness) -> None:
    reported = await Browser(shop).ask("GET", "/status/session")
    assert (reported.status, reported.body["is_signed_in"], reported.body["org"]) == (200, False, None)
    for path in ("/status/board", "/status/events", f"{SHOP}/what-if?label=premium&quota_usd_micros=1"):
        answer = await Browser(shop).ask("GET", path)
        assert (answer.status, "Acme" in answer.raw.decode()) == (401, False)


# Signing in and out.


async def test_administrator_signs_in_and_out(shop: ControlHarness) -> None:
    browser = Browser(shop)
    answer = await browser.sign_in()
    assert (answer.status, answer.body["is_admin"], answer.body["org"]) == (200, True, None)
    port = shop.url.rpartition(":")[2]
    value, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert value.startswith(f"price-keeper-{port}=")
    assert [each.partition("=")[0] for each in attributes] == ["Path", "Max-Age", "HttpOnly", "SameSite"]
    assert (attributes[0], attributes[3]) == ("Path=/", "SameSite=Strict")
    assert SESSION_SECONDS - 5 <= int(attributes[1].removeprefix("Max-Age=")) <= SESSION_SECONDS
    assert ADMIN_KEY not in str(answer.headers) + answer.raw.decode()
    assert (await browser.ask("GET", "/status/session")).body["is_signed_in"] is True
    assert (await browser.ask("GET", "/status/board")).body["list"]["rows"][0]["app"] == "shop"
    assert (await browser.ask("PUT", f"{SHOP}/override", OVERRIDE)).status == 200
    kept = Browser(shop, browser.cookie)
    out = await browser.ask("DELETE", "/status/session")
    assert (out.status, out.body["is_signed_in"]) == (200, False)
    assert f"price-keeper-{port}=; Path=/; Max-Age=0" in out.headers["Set-Cookie"]
    assert (await kept.ask("GET", "/status/board")).status == 401  # with the kept cookie
    assert (await browser.ask("DELETE", "/status/session")).status == 200


async def test_https_cookie_is_secure(api: ControlHarness) -> None:
    host = "keeper.localhost"
    headers = PAGE | {"Origin": "https://127.0.0.1", "Host": "127.0.0.1"}
    body = {"kind": "admin", "secret": ADMIN_KEY}
    answer = await api.ask("POST", "/status/session", body, who=None, headers=headers)
    assert answer.headers["Set-Cookie"].endswith("; HttpOnly; SameSite=Strict; Secure")
    named = headers | {"Host": host, "Origin": f"https://{host}"}
    assert (await api.ask("POST", "/status/session", body, who=None, headers=named)).status == 403  # not this machine


@pytest.mark.parametrize("secret", ["wrong", ADMIN_KEY + "x", ADMIN_KEY.upper(), "a.b.c"])
async def test_failed_sign_ins_are_limited(api: ControlHarness, secret: str) -> None:
    kind = "client" if secret == "a.b.c" else "admin"
    statuses = [(await Browser(api).sign_in(kind, secret)).status for _ in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    assert (await Browser(api).sign_in()).status == 200  # the right one is let in whatever was tried before it
    assert (await api.ask("GET", API, headers={"X-API-Key": secret}, who=None)).status == 429


@pytest.mark.parametrize(
    "body", [{}, {"kind": "root", "secret": "x"}, {"kind": "admin"}, {"kind": "admin", "secret": "ä"}]
)
async def test_malformed_sign_in_is_explained(api: ControlHarness, body: Any) -> None:
    answer = await Browser(api).ask("POST", "/status/session", body)
    assert (answer.status, bool(answer.body["details"])) == (400, True)
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("name", ["secret", "client_secret", "refresh_token", "token"])
async def test_malformed_secret_is_not_echoed(api: ControlHarness, name: str) -> None:
    """The page would show it to bystanders."""
    path = {"secret": "/status/session", "client_secret": "/auth/token", "refresh_token": "/auth/refresh"}
    for mistyped in (ADMIN_KEY + "–", [ADMIN_KEY]):
        body = {"kind": "admin", name: mistyped} if name == "secret" else {name: mistyped}
        answer = await Browser(api).ask("POST", path.get(name, "/auth/revoke"), body)
        assert (answer.status, name in answer.raw.decode()) == (400, True)
        assert ADMIN_KEY[:8] not in answer.raw.decode()


async def test_shared_address_does_not_block_sign_in(tmp_path: Path) -> None:
    rates = LocalApiRateLimiter(ManualClock().monotonic, 3, 1)
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path, rates=rates) as api:
        assert [(await api.ask("GET", "/openapi.json", who=None)).status for _ in range(4)] == [200] * 3 + [429]
        for path in ("/status", "/status/page.js", "/status/session"):
            for method in ("GET", "HEAD"):
                assert (await Browser(api).ask(method, path)).status == 200, (method, path)
        browser = Browser(api)
        assert (await browser.sign_in()).status == 200
        assert (await browser.ask("GET", "/status/session")).body["is_signed_in"] is True
        assert (await browser.ask("DELETE", "/status/session")).status == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_invalid_cookie_is_removed_despite_limit(api: ControlHarness, method: str) -> None:
    """Otherwise its browser would get nothing else, even once it has a valid key."""
    port = api.url.rpartition(":")[2]
    for _ in range(12):
        answer = await Browser(api, f"price-keeper-{port}=a.b.c").ask(method, "/status/session")
        assert f"price-keeper-{port}=; Path=/; Max-Age=0" in answer.headers.get("Set-Cookie", "")
    assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (429, True)


async def test_session_ends_with_its_expiry_token_or_key(shop: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    admin, client, revoked = Browser(shop), Browser(shop), Browser(shop)
    assert (await admin.sign_in()).status == 200
    assert (await client.sign_in_as(ORG, "shop")).status == 200
    token = shop.tokens.mint_access(ORG, "shop").token
    await revoked.sign_in("client", token)
    assert (await shop.ask("POST", "/auth/revoke", {"token": token}, who=None)).status == 200
    assert [(await each.ask("GET", "/status/board")).status for each in (admin, client, revoked)] == [200, 200, 401]
    shop.clock.ahead += shop.tokens.access_seconds + 1  # type: ignore[attr-defined]
    assert [(await each.ask("GET", "/status/board")).status for each in (admin, client)] == [200, 401]
    with monkeypatch.context() as patch:  # as after a start with another key
        patch.setattr(
            shop.parts.page_sessions,
            "_admin_key_digest",
            control_access.fingerprint_admin_key("another admin key, as long as it has to be"),
        )
        assert (await admin.ask("GET", "/status/board")).status == 401
    shop.clock.ahead += SESSION_SECONDS  # type: ignore[attr-defined]
    assert (await admin.ask("GET", "/status/board")).status == 401
    answer = await admin.ask("GET", "/status/session")
    assert (answer.status, answer.body["is_signed_in"]) == (200, False)
    assert "Max-Age=0" in answer.headers["Set-Cookie"]


async def test_page_session_and_access_token_are_not_interchangeable(shop: ControlHarness) -> None:
    browser = Browser(shop)
    await browser.sign_in_as(ORG, "shop")
    assert browser.cookie is not None
    name, _, session = browser.cookie.partition("=")
    claims = jwt.decode(session, options={"verify_signature": False})
    assert (claims["aud"], claims["scope"]) == ("price-keeper-page", "page")
    for check in (shop.tokens.verify_access, shop.tokens.verify_refresh, shop.tokens.verify_any):
        with pytest.raises(AccessDenied):
            check(session)
    assert (await shop.ask("GET", SHOP, headers={"Authorization": f"Bearer {session}"}, who=None)).status == 401
    for cookie in (
        shop.tokens.mint_access(ORG, "shop").token,
        ADMIN_KEY,
        f"{session}x",
        session[:-4],
        "a.b.c",
        "x" * 5000,
    ):
        answer = await Browser(shop, f"{name}={cookie}").ask("GET", "/status/board")
        assert answer.status in (401, 429), cookie
    assert (await browser.ask("GET", "/status/board")).status == 200


# What a page from elsewhere cannot do, though the browser adds the cookie.


async def test_foreign_page_changes_and_reads_nothing(shop: ControlHarness) -> None:
    browser = Browser(shop)
    await browser.sign_in()
    assert browser.cookie is not None
    cookie = {"Cookie": browser.cookie}
    foreign = {"Origin": "http://127.0.0.1:3000"}
    for headers, status in (
        (cookie, 401),
        (cookie | {"Origin": shop.url}, 401),
        (cookie | PAGE, 403),
        (cookie | PAGE | foreign, 403),
        (cookie | PAGE | {"Origin": "null"}, 403),
        (cookie | PAGE | {"Origin": shop.url, "Sec-Fetch-Site": "same-site"}, 403),
    ):
        for method, path, body in (
            ("PUT", f"{SHOP}/override", OVERRIDE),
            ("DELETE", f"{SHOP}/override", None),
            ("PUT", API, SETTINGS | {"quotas": {"premium": 1, "economy": 1}}),
            ("POST", f"{SHOP}/credentials/rotate", {}),
        ):
            answer = await shop.ask(method, path, body, who=None, headers=headers)
            assert answer.status == status, (headers, method, path, answer.body)
    for headers in (cookie, cookie | PAGE | foreign, cookie | PAGE | {"Sec-Fetch-Site": "cross-site"}):
        for path in ("/status/board", "/status/events", API):
            assert (await shop.ask("GET", path, who=None, headers=headers)).status in (401, 403)
    for method, headers in (("POST", foreign), ("DELETE", foreign), ("POST", {}), ("DELETE", {})):
        sent = cookie | PAGE | headers
        answer = await shop.ask(
            method, "/status/session", {"kind": "admin", "secret": ADMIN_KEY}, who=None, headers=sent
        )
        assert (answer.status, "Set-Cookie" in answer.headers) == (403, False)
    # No preflight allows the header from elsewhere, and nothing was done.
    leave = await shop.ask(
        "OPTIONS", "/status/session", who=None, headers=foreign | {"Access-Control-Request-Method": "POST"}
    )
    assert leave.status == 405
    assert not [name for name in leave.headers if name.lower().startswith("access-control")]
    assert (await browser.ask("GET", f"{SHOP}/model-selection")).body["override"] is None
    assert (await browser.ask("GET", "/status/board", Host="evil.example")).status == 403


# Whose data.


async def test_visitors_see_only_their_own_data(shop: ControlHarness) -> None:
    await put(shop, "till", org=OTHER, org_name="Rival")
    await put(shop, "bot")
    for who, rows in ((("admin"), {"shop", "bot", "till"}), ((ORG, None), {"shop", "bot"}), ((ORG, "shop"), {"shop"})):
        reported = await _board(shop, who)
        assert {row["app"] for row in reported.body["list"]["rows"]} == rows, who
        assert ("Rival" in reported.raw.decode()) is (who == "admin")
    for who, query, status in (
        ((ORG, "shop"), f"?org={ORG}&app=shop", 200),
        ((ORG, "shop"), f"?org={ORG}&app=bot", 403),
        ((ORG, "shop"), f"?org={ORG}", 403),
        ((ORG, "shop"), f"?org={OTHER}&app=till", 403),
        ((ORG, None), f"?org={ORG}&app=bot", 200),
        ((ORG, None), f"?org={OTHER}&app=till", 403),
        ((ORG, "shop"), "?search=till", 200),
        ((ORG, None), f"?after={ORG}", 200),
        ("admin", f"?org={OTHER}&app=till", 200),
    ):
        for path in ("/status/board", "/status/events"):
            if (path, status) == ("/status/events", 200):
                continue
            browser = Browser(shop)
            await (browser.sign_in() if who == "admin" else browser.sign_in_as(*who))
            answer = await browser.ask("GET", path + query)
            assert answer.status == status, (who, query, answer.body)
            assert "till" not in answer.raw.decode() or who == "admin", (who, query)
    assert (await shop.ask("GET", f"/api/v1/orgs/{OTHER}/apps/till/what-if", who=(ORG, "shop"))).status == 403


async def _board(api: ControlHarness, who: Any, query: str = "") -> ControlResponse:
    answer = await api.ask("GET", f"/status/board{query}", who=who)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize(
    "query",
    ["org=x", f"org={ORG}&app=..", "app=shop", "after=x", f"after={ORG}/a/b", "nothing=1", f"search={'x' * 101}"],
)
async def test_invalid_query_is_explained(api: ControlHarness, query: str) -> None:
    answer = await api.ask("GET", f"/status/board?{query}")
    assert (answer.status, bool(answer.body["details"])) == (400, True)


async def test_every_budget_is_found_by_page_and_name(api: ControlHarness) -> None:
    orgs = [str(UUID(int=number)) for number in range(1, 31)]
    for number, org in enumerate(orgs):
        apps = [f"app-{app}" for app in range(number % 3 * 3)]
        await put(api, *apps, org=org, org_name=f"Org {number}", quota_scope="ORG" if number % 3 == 2 else "APP")
    expected = [
        place
        for number, org in enumerate(orgs)
        for place in ([(org, f"app-{app}") for app in range(3)] if number % 3 == 1 else [(org, None)])
    ]
    found, after = list[tuple[str, str | None]](), ""
    while True:
        page = (await _board(api, "admin", f"?after={after}")).body["list"]
        assert len(page["rows"]) <= MAX_ROWS
        found += [(row["org"], row["app"]) for row in page["rows"]]
        if page["cursor"] is None:
            break
        after = page["cursor"]
    assert found == expected
    for search, expected in (
        ("org 13", [(orgs[13], f"app-{app}") for app in range(3)]),
        ("ORG 29", [(orgs[29], None)]),
        ("P-2", [(orgs[number], "app-2") for number in range(1, 30, 3)]),
        ("zz", []),
    ):
        rows = (await _board(api, "admin", f"?search={search}")).body["list"]["rows"]
        assert [(row["org"], row["app"]) for row in rows] == expected


async def test_long_search_is_bounded_and_resumable(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_list, "MAX_READS", 3)
    orgs = [str(UUID(int=number)) for number in range(1, 40)]
    for org in orgs:
        await put(api, "web", "wanted" if org == orgs[-1] else "other", org=org)
    pages, after = 0, ""
    while not (page := (await _board(api, "admin", f"?search=wanted&after={after}")).body["list"])["rows"]:
        pages, after = pages + 1, page["cursor"]
        assert after is not None
    assert [(row["org"], row["app"]) for row in page["rows"]] == [(orgs[-1], "wanted")]
    assert pages > 5


# What it tells.


async def test_board_shows_spend_labels_and_events(shop: ControlHarness) -> None:
    await spend(shop, "one", "premium", 1)
    board = (await _board(shop, (ORG, "shop"), f"?org={ORG}&app=shop")).body
    assert (board["health"]["status"], board["trouble"]) == ("ready", None)
    scope = board["scope"]
    assert (scope["org_name"], scope["app"], scope["serves"], scope["active_label"]) == (
        "Acme",
        "shop",
        "premium",
        "premium",
    )
    premium = scope["labels"][0]
    assert (premium["spent_usd_micros"], premium["quota_pct"]) == ("3000000", 30)
    assert board["course"]["premium"][-1][1] == 3_000_000
    assert (scope["pace"]["premium"], scope["reached"]["premium"]["state"]) == (None, "unknown")
    shop.clock.ahead += 1800  # type: ignore[attr-defined]
    await spend(shop, "two", "premium", 1)
    scope = (await _board(shop, (ORG, "shop"), f"?org={ORG}&app=shop")).body["scope"]
    pace = scope["pace"]["premium"]
    assert pace["over_seconds"] == pytest.approx(1800, abs=5)
    assert pace["usd_micros_per_hour"] == pytest.approx(6_000_000, rel=0.01)
    shop.clock.ahead += 60  # type: ignore[attr-defined]
    await spend(shop, "three", "premium", 2)
    await shop.ask("PUT", f"{SHOP}/override", OVERRIDE | {"reason": "<b>bold</b>"})
    await shop.ask("GET", f"{SHOP}/model-selection?force_check=true")
    shop.clock.ahead += 1  # type: ignore[attr-defined]
    board = (await _board(shop, (ORG, "shop"), f"?org={ORG}&app=shop")).body
    assert (board["scope"]["serves"], board["scope"]["override"]["reason"]) == ("economy", "<b>bold</b>")
    assert board["scope"]["reached"]["premium"]["state"] == "reached"
    moved = [each for each in board["happened"] if each["kind"] == "moved"]
    assert [(each["before"], each["label"]) for each in moved] == [("premium", "economy")]
    row = board["list"]["rows"][0]
    assert (row["serves"], row["is_overridden"], row["labels"][0]["mode"]) == ("economy", True, "EXCEEDED")


async def test_board_reads_totals_unknown_to_process(shop: ControlHarness) -> None:
    """As of a fleet's spend, on a control service that serves no calls itself."""
    query = f"?org={ORG}&app=shop"
    assert (await _board(shop, "admin", query)).body["scope"]["labels"][0]["spent_usd_micros"] == "0"
    counter = shop.recording.counter()._replace(scope=f"ORG#{ORG}#APP#shop", period_or_lease=_period(shop))
    shop.recording.flusher.sender._flush_listeners.clear()  # from here on it is another process, so to say
    shop.recording.spend(4 * 10**12, counter)
    assert await shop.recording.flusher.flush()
    shop.clock.ahead += 30  # type: ignore[attr-defined]
    assert (await _board(shop, "admin", query)).body["scope"]["labels"][0]["spent_usd_micros"] == "0"
    shop.parts.page.spend_history.record(counter, 4 * 10**12, shop.clock.now())
    for _ in range(200):
        shop.clock.ahead += 1  # type: ignore[attr-defined]
        board = (await _board(shop, "admin", query)).body
        if board["scope"]["labels"][0]["spent_usd_micros"] == "4000000":
            return
    raise AssertionError(json.dumps(board["scope"]["labels"]))


def _period(api: ControlHarness) -> str:
    return datetime.fromtimestamp(api.clock.now(), UTC).strftime("DAY#%Y%m%d")


async def test_what_if_changes_nothing(shop: ControlHarness) -> None:
    await spend(shop, "one", "premium", 2)
    before = (await shop.ask("GET", API)).raw
    answer = await shop.ask("GET", f"{SHOP}/what-if?label=premium&quota_usd_micros=5000000", who=(ORG, "shop"))
    assert (answer.body["as_it_is"]["serves"], answer.body["as_it_would_be"]["serves"]) == ("premium", "economy")
    assert answer.body["as_it_would_be"]["labels"][0]["quota_pct"] == 120
    assert (await shop.ask("GET", f"{SHOP}/model-selection")).body["active_label"] == "premium"
    assert (await shop.ask("GET", API)).raw == before
    whole = "label=premium&quota_usd_micros="
    for query in ("label=premium", "quota_usd_micros=1", "label=gold&quota_usd_micros=1", f"{whole}-1", f"{whole}1.5",
                  f"{whole}{10**15 + 1}", f"{whole}\u0663"):  # fmt: skip
        assert (await shop.ask("GET", f"{SHOP}/what-if?{query}")).status == 400, query
