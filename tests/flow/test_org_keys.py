"""The administrator key of an org: what it may do, that it may do nothing else, and that it is kept as others are."""

from __future__ import annotations

import asyncio
import logging
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from price_keeper.auth.client_secrets import HASH_CACHE_SECONDS
from price_keeper.auth.throttles import FAILURE_BURST
from price_keeper.control import api as api_module
from price_keeper.control.api_types import AccessLevel, ApiRoute
from price_keeper.control.control_connections import ConnectionPeer, ConnectionRegistry, SlotClass
from price_keeper.control.readiness_checks import Readiness
from price_keeper.stores import schema
from price_keeper.telemetry.metrics import MetricsRegistry

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
from tests.support.control_thread import ControlThread, control_in_thread
from tests.support.engines import Engines

KEY_PATH = f"{API}/admin-key"
ORG_KEY_NAME = f"org-{ORG}-key"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with (
        Engines({}).open("sqlite", tmp_path) as store,
        open_control_harness(store, tmp_path, ManualClock()) as running,
    ):
        await running.put_org()
        await running.put_org(OTHER)
        await running.put_app()
        await running.put_app(org=OTHER)
        yield running


async def make_key(api: ControlHarness, org: str = ORG, grace: int = 24) -> str:
    answer = await api.ask("POST", f"/api/v1/orgs/{org}/admin-key", {"grace_hours": grace})
    assert answer.status == 200, answer.body
    return str(answer.body["admin_key"])


async def ask_with(api: ControlHarness, key: str, method: str, path: str, body: Any = None) -> ControlResponse:
    return await api.ask(method, path, body, who=None, headers={"X-API-Key": key})


async def test_org_key_creates_changes_and_reads_its_org_and_its_apps(api: ControlHarness) -> None:
    key = await make_key(api)
    shop, settings = f"{API}/apps/shop", SETTINGS | {"quotas": {"premium": 1, "economy": 2}}
    calls: list[tuple[str, str, Any, int]] = [
        ("PUT", API, settings, 200),
        ("GET", API, None, 200),
        ("PUT", f"{API}/apps/robot", {"app_name": "Robot"}, 201),
        ("PUT", shop, {"app_name": "Shop"}, 200),
        ("GET", shop, None, 200),
        ("GET", f"{API}/apps", None, 200),
        ("GET", f"{API}/aggregates/today", None, 200),
        ("GET", f"{shop}/model-selection", None, 200),
        ("POST", f"{shop}/credentials/rotate", {"grace_hours": 1}, 200),
        ("GET", f"{shop}/sessions", None, 200),
        ("DELETE", f"{shop}/sessions", None, 200),
        ("PUT", f"{shop}/override", {"label": "economy", "reason": "by the org"}, 200),
        ("DELETE", f"{shop}/override", None, 200),
        ("GET", f"{API}/audit", None, 200),
    ]
    for method, path, body, status in calls:
        answer = await ask_with(api, key, method, path, body)
        assert answer.status == status, (method, path, answer.body)
    assert (await api.ask("GET", API)).body["settings"]["quotas"] == {"premium": 1, "economy": 2}


def is_allowed(route: ApiRoute) -> bool:
    """What an org's key may do with its own org."""
    is_of_org = "{org}" in route.path
    return is_of_org and (
        route.access_level is AccessLevel.ORG_ADMIN or (route.is_read and route.access_level is not AccessLevel.ADMIN)
    )


async def test_org_key_is_refused_on_every_route_of_another_org_and_on_every_global_one(api: ControlHarness) -> None:
    key = await make_key(api)
    routes = api_module.build_routes(Readiness(api.clock), MetricsRegistry())
    guarded = [each for each in routes if each.access_level is not AccessLevel.PUBLIC]
    assert any(each.path == "/status/board" for each in guarded)
    assert len(guarded) > 30
    for route in guarded:
        for org in (OTHER, ORG):
            path = route.path.replace("{org}", org).replace("{app}", "shop").replace("{sid}", org)
            path = path.replace("{day}", "2026-11-18")
            answer = await ask_with(api, key, route.method, path, {} if route.body_schema else None)
            if org == OTHER or not is_allowed(route):
                assert answer.status == 403, (route.method, path, answer.status)
            else:
                assert answer.status not in (401, 403), (route.method, path, answer.status)


async def test_org_key_cannot_make_or_remove_keys_submit_usage_or_set_prices(api: ControlHarness) -> None:
    key = await make_key(api)
    profile = {"label": "x", "inference_profile_arn": "arn:x", "format": "nova", "prices_usd_per_1m": {}}
    for method, path, body in (
        ("POST", KEY_PATH, {}),
        ("DELETE", KEY_PATH, None),
        ("GET", "/api/v1/orgs", None),
        ("POST", f"{API}/apps/shop/usage", {"request_id": "1", "label": "premium"}),
        ("POST", f"{API}/apps/shop/inference-profiles", profile),
    ):
        assert (await ask_with(api, key, method, path, body)).status == 403, path


async def log_in(api: ControlHarness, org: str) -> tuple[str, str]:
    """The id of a session of the org's client, and an access token of it."""
    path = f"/api/v1/orgs/{org}/credentials"
    issued = (await api.ask("POST", f"{path}/rotate", {})).body
    token = {"X-Retrieval-Token": issued["secret_retrieval_token"]}
    pair = (await api.ask("GET", f"{path}/secret", who=None, headers=token)).body
    tokens = (await api.ask("POST", "/auth/token", pair, who=None)).body
    return tokens["session_id"], tokens["access_token"]


async def test_org_key_ends_its_own_sessions_and_by_no_id_the_tokens_of_another_org(api: ControlHarness) -> None:
    key = await make_key(api)
    for org, status in ((ORG, 401), (OTHER, 200)):
        sid, token = await log_in(api, org)
        bearer = {"Authorization": f"Bearer {token}"}
        answers = [await ask_with(api, key, "DELETE", f"{API}/sessions/{sid}") for _ in range(2)]
        if org == ORG:
            assert [(each.status, each.body) for each in answers] == [(200, {"ended": 1}), (200, {"ended": 0})]
        else:
            assert [each.status for each in answers] == [404, 404]
            assert (await ask_with(api, key, "DELETE", f"{API}/apps/shop/sessions/{sid}")).status == 404
            assert await api.store.get(schema.revoked_session_key(sid), consistent=True) is None
        assert (await api.ask("GET", f"/api/v1/orgs/{org}", who=None, headers=bearer)).status == status


async def test_org_key_begins_no_session_of_the_status_page(api: ControlHarness) -> None:
    """Such a session would be the administrator's of all orgs."""
    key = await make_key(api)
    page = {"X-Price-Keeper-Page": "1", "Origin": api.url}
    for kind in ("admin", "client"):
        answer = await api.ask("POST", "/status/session", {"kind": kind, "secret": key}, who=None, headers=page)
        assert answer.status in (401, 403)
        assert "Set-Cookie" not in answer.headers


async def test_org_key_is_no_key_of_another_org_however_it_is_spelled(api: ControlHarness) -> None:
    key = await make_key(api)
    secret = key.rpartition(".")[2]
    await make_key(api, OTHER)
    shapes = [
        f"pkorg.{OTHER}.{secret}",
        f"pkorg.{ORG.upper()}.{secret}",
        f"{key}x",
        key[:-1],
        secret,
        f"pkorg.{secret}",
    ]
    for wrong in shapes:
        assert (await ask_with(api, wrong, "GET", API)).status == 401, wrong
    assert (await ask_with(api, key, "GET", API)).status == 200


async def test_rotated_org_key_has_its_grace_and_a_removed_one_none(api: ControlHarness) -> None:
    first = await make_key(api)
    second = await make_key(api, grace=1)
    for key in (first, second):
        assert (await ask_with(api, key, "GET", API)).status == 200
    await api.clock.advance(3600)  # type: ignore[attr-defined]
    assert [(await ask_with(api, key, "GET", API)).status for key in (first, second)] == [401, 200]
    third = await make_key(api, grace=0)
    assert [(await ask_with(api, key, "GET", API)).status for key in (second, third)] == [401, 200]
    assert (await api.ask("DELETE", KEY_PATH)).body == {"org": ORG, "is_removed": True}
    assert (await ask_with(api, third, "GET", API)).status == 401
    assert (await api.ask("DELETE", KEY_PATH)).status == 404
    assert (await api.ask("POST", f"/api/v1/orgs/{ORG[:-1]}f/admin-key", {})).status == 404


@pytest.mark.parametrize("of", [API, f"{API}/apps/shop", f"{API}/apps/mine"], ids=["org", "app", "own app"])
async def test_credentials_made_by_a_leaked_org_key_end_with_a_rotation_without_grace(
    api: ControlHarness, of: str
) -> None:
    key, app = await make_key(api), of.partition("/apps/")[2]
    if app == "mine":
        await ask_with(api, key, "PUT", of, {"app_name": "Mine"})
    made = (await ask_with(api, key, "POST", f"{of}/credentials/rotate", {"grace_hours": 168})).body
    shown = {"X-Retrieval-Token": made["secret_retrieval_token"]}
    given = (await api.ask("GET", f"{of}/credentials/secret", who=None, headers=shown)).body
    login = {"client_id": made["client_id"], "client_secret": given["client_secret"]}
    pair = (await api.ask("POST", "/auth/token", login, who=None)).body

    async def try_all() -> list[int]:
        bearer = {"Authorization": f"Bearer {pair['access_token']}"}
        return [
            (await ask_with(api, key, "GET", API)).status,
            (await api.ask("GET", f"{of}/model-selection", who=None, headers=bearer)).status,
            (await api.ask("POST", "/auth/token", login, who=None)).status,
        ]

    assert await try_all() == [200, 200, 200]
    await make_key(api, grace=0)
    assert await try_all() == [401, 200, 200]  # as docs/orgs.md says: they outlive the key
    assert (await api.ask("POST", f"{of}/credentials/rotate", {"grace_hours": 0})).status == 200
    assert await try_all() == [401, 401, 401]
    refresh = {"refresh_token": pair["refresh_token"]}
    assert (await api.ask("POST", "/auth/refresh", refresh, who=None)).status == 401


async def test_org_key_removed_elsewhere_ends_within_a_minute(api: ControlHarness, tmp_path: Path) -> None:
    key = await make_key(api)
    async with open_control_harness(api.store, tmp_path / "there", api.clock) as there:
        assert (await ask_with(there, key, "GET", API)).status == 200
        await api.ask("DELETE", KEY_PATH)
        await api.clock.advance(HASH_CACHE_SECONDS)  # type: ignore[attr-defined]
        assert (await ask_with(there, key, "GET", API)).status == 401


async def test_org_key_is_stored_as_a_hash_and_survives_a_change_of_settings(api: ControlHarness) -> None:
    key = await make_key(api)
    await ask_with(api, key, "PUT", API, SETTINGS)
    item = await api.store.get(schema.org_config_key(ORG), consistent=True)
    assert item is not None
    assert str(item["provisioning_api_key_hash"]).startswith("$2b$")
    assert item["provisioning_api_key_created_at_epoch"] == int(api.clock.now())
    assert key.rpartition(".")[2] not in repr(item)
    assert (await ask_with(api, key, "GET", API)).status == 200
    shown = await api.ask("GET", API)
    assert "provisioning" not in shown.raw.decode()


async def test_change_by_org_key_is_audited_under_its_name_without_the_key(api: ControlHarness) -> None:
    await api.clock.advance(1)  # type: ignore[attr-defined]
    key = await make_key(api)
    await api.clock.advance(1)  # type: ignore[attr-defined]
    await ask_with(api, key, "PUT", f"{API}/apps/shop", {"app_name": "Other"})
    answer = await api.ask("GET", f"{API}/audit")
    newest, before = answer.body["records"][:2]
    assert (newest["action"], newest["who"]) == ("app.put", ORG_KEY_NAME)
    assert (before["action"], before["who"], before["after"]) == ("org_key.rotate", "admin", {"grace_hours": 24})
    assert key.rpartition(".")[2] not in answer.raw.decode()
    await api.clock.advance(1)  # type: ignore[attr-defined]
    await api.ask("DELETE", KEY_PATH)
    assert (await api.ask("GET", f"{API}/audit")).body["records"][0]["action"] == "org_key.remove"


async def test_org_key_is_in_no_log_and_no_answer_but_its_own(
    api: ControlHarness, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    with caplog.at_level(logging.DEBUG):
        key = await make_key(api)
        for method, path, body in (
            ("GET", API, None),
            ("GET", f"/api/v1/orgs/{OTHER}", None),
            ("PUT", API, {"org_name": key}),
            ("GET", "/api/v1/orgs", None),
            ("GET", f"{API}?x={key}", None),
        ):
            told.append((await ask_with(api, key, method, path, body)).raw.decode())
        told.append((await ask_with(api, f"{key}x", "GET", API)).raw.decode())
        told.append(caplog.text)
    # A body or query that quotes it is the sender's own doing; everything else must not.
    assert all(key.rpartition(".")[2] not in each for number, each in enumerate(told) if number != 2)


async def test_flood_of_wrong_org_keys_is_slowed_down_and_the_right_one_always_served(api: ControlHarness) -> None:
    key = await make_key(api)
    wrong = [f"pkorg.{ORG}.{b64encode(secrets.token_bytes(32)).decode()}" for _ in range(FAILURE_BURST + 5)]
    statuses = [(await ask_with(api, each, "GET", API)).status for each in wrong]
    assert statuses == [401] * FAILURE_BURST + [429] * 5
    assert (await ask_with(api, key, "GET", API)).status == 200
    assert (await api.ask("GET", API)).status == 200  # the administrator's own limit is another


async def test_invented_org_key_waits_for_the_store_in_a_slot_of_the_unverified(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere that a key can be shown: otherwise invented keys could take the slots of clients."""
    invented = f"pkorg.{ORG}.{b64encode(secrets.token_bytes(32)).decode()}"
    taken: list[SlotClass] = []
    acquire = ConnectionRegistry.acquire_slot

    def note(registry: ConnectionRegistry, connection: ConnectionPeer, slot_class: SlotClass) -> bool:
        taken.append(slot_class)
        return acquire(registry, connection, slot_class)

    monkeypatch.setattr(ConnectionRegistry, "acquire_slot", note)
    page = {"X-Price-Keeper-Page": "1", "Origin": api.url}
    body = {"kind": "admin", "secret": f" {invented}"}
    assert (await api.ask("POST", "/status/session", body, who=None, headers=page)).status == 401
    assert (await ask_with(api, invented.replace(ORG, OTHER), "GET", API)).status == 401
    assert taken == [SlotClass.UNVERIFIED] * 2


async def test_invented_org_keys_cost_reads_at_a_pace_and_no_comparison(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they tell whether an org has a key: each is answered alike, before any hash is compared."""
    await make_key(api)
    compared: list[bytes] = []
    monkeypatch.setattr(
        "price_keeper.auth.client_secrets._is_bcrypt_match", lambda secret, _: bool(compared.append(secret))
    )
    answers = [
        await ask_with(api, f"pkorg.{org}.{b64encode(secrets.token_bytes(32)).decode()}", "GET", API)
        for org in (ORG, OTHER, "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a99")
    ]
    assert {(each.status, each.body["message"]) for each in answers} == {(401, "the admin key is wrong")}
    assert compared == []


async def test_concurrent_rotations_leave_the_last_two_keys_good(api: ControlHarness) -> None:
    running = asyncio.create_task(_advance(api))
    keys = await asyncio.gather(*(make_key(api) for _ in range(5)))
    running.cancel()
    statuses = [(await ask_with(api, key, "GET", API)).status for key in keys]
    assert sorted(statuses) == [200, 200, 401, 401, 401]


async def _advance(api: ControlHarness) -> None:
    while True:
        await api.clock.advance(0.01)  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)


@pytest.fixture
def running(tmp_path: Path) -> Any:
    with control_in_thread(tmp_path) as started:
        started.do(started.harness.put_org())
        started.do(started.harness.put_app())
        yield started


def test_org_key_command_prints_the_key_with_which_the_org_is_administered(running: ControlThread) -> None:
    key = running.run_command("org", "key", "Acme").stdout.strip()
    assert key.startswith(f"pkorg.{ORG}.")
    with_key = {"PRICE_KEEPER_API_KEY": key}
    assert "Acme" in running.run_command("org", "show", ORG, **with_key).stdout
    (running.folder / "app.yaml").write_text("app_name: Robot")
    assert "made" in running.run_command("app", "put", ORG, "robot", "app.yaml", **with_key).stdout
    assert "answered 403" in running.run_command("org", "list", code=1, **with_key).stderr
    assert "answered 403" in running.run_command("org", "key", ORG, code=1, **with_key).stderr
    assert "no administrator key any more" in running.run_command("org", "key", "Acme", "--remove").stdout
    assert "answered 401" in running.run_command("org", "show", ORG, code=1, **with_key).stderr
    assert ADMIN_KEY not in key
