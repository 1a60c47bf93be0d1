"""Orgs and apps over the control API: made, changed, read, listed, and who may."""

from __future__ import annotations

import asyncio
from typing import Any

from price_keeper.stores import schema
from price_keeper.stores.audit_log import read_records

from tests.support.control_harness import API, ORG, OTHER, SETTINGS, ControlHarness


async def test_org_is_created_then_changed_and_secret_issued_once(api: ControlHarness) -> None:
    made = await api.ask("PUT", API, SETTINGS)
    assert made.status == 201, made.body
    assert made.headers["Location"] == API
    assert made.body["settings"] == SETTINGS | {"period": "day", "agg_shard_count": 8}
    assert made.body["client_id"] == f"org-{ORG}"
    changed = await api.ask("PUT", API, SETTINGS | {"org_name": "Acme Ltd"})
    assert (changed.status, changed.body["settings"]["org_name"]) == (200, "Acme Ltd")
    assert not {"client_id", "secret_retrieval_token"} & changed.body.keys()
    token = {"X-Retrieval-Token": made.body["secret_retrieval_token"]}
    fetched = await api.ask("GET", f"{API}/credentials/secret", who=None, headers=token)
    assert (fetched.status, fetched.body["client_id"]) == (200, f"org-{ORG}")
    assert (await api.ask("GET", f"{API}/credentials/secret", who=None, headers=token)).status == 401
    login = {name: fetched.body[name] for name in ("client_id", "client_secret")}
    tokens = await api.ask("POST", "/auth/token", login, who=None)
    assert tokens.status == 200, tokens.body
    bearer = {"Authorization": f"Bearer {tokens.body['access_token']}"}
    assert (await api.ask("GET", API, who=None, headers=bearer)).status == 200
    given_back = await api.ask("POST", "/auth/revoke", {"token": tokens.body["refresh_token"]}, who=None)
    assert (given_back.status, given_back.body) == (200, {"is_revoked": True})
    assert (await api.ask("GET", API, who=None, headers=bearer)).status == 401


async def test_app_is_created_below_its_org_and_listed(api: ControlHarness) -> None:
    assert (await api.ask("PUT", f"{API}/apps/shop", {"app_name": "Shop"})).status == 404
    await api.put_org()
    made = await api.ask("PUT", f"{API}/apps/shop", {"app_name": "Shop", "quotas": {"premium": 5, "economy": 1}})
    assert (made.status, made.body["app"], made.body["client_id"]) == (201, "shop", f"org-{ORG}-app-shop")
    assert made.body["in_force"]["quotas"] == {"premium": 5, "economy": 1}
    for app in ("a", "b", "z"):
        await api.put_app(app)
    names, cursor = [], ""
    while cursor is not None:
        page = await api.ask("GET", f"{API}/apps", params={"limit": "2"} | ({"cursor": cursor} if cursor else {}))
        names += [each["app"] for each in page.body["apps"]]
        cursor = page.body["cursor"]
    assert names == ["a", "b", "shop", "z"]
    await api.put_org(OTHER)
    listed = await api.ask("GET", "/api/v1/orgs")
    assert [each["org"] for each in listed.body["orgs"]] == [ORG, OTHER]


async def test_mistakes_are_reported_with_their_paths(api: ControlHarness) -> None:
    body = SETTINGS | {"quotas": {"premium": -1, "econmy": 2}, "timezone": "Europe/Berln", "x": 1, "org_name": ""}
    refused = await api.ask("PUT", API, body)
    assert (refused.status, refused.body["error"]) == (400, "invalid_request")
    paths = [each["path"] for each in refused.body["details"]]
    assert paths == ["x", "org_name", "timezone", "quotas.premium", "quotas.econmy"]
    assert "Europe/Berlin" in refused.body["details"][2]["message"]
    assert (await api.ask("GET", API)).status == 404


async def test_unchanged_resource_returns_not_modified(api: ControlHarness) -> None:
    await api.put_org()
    first = await api.ask("GET", API)
    tag = first.headers["ETag"]
    assert tag.startswith('"')
    assert first.headers["Cache-Control"] == "private, no-cache"
    for wanted in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        again = await api.ask("GET", API, headers={"If-None-Match": wanted})
        assert (again.status, again.raw, again.headers["ETag"]) == (304, b"", tag)
    await api.put_org(org_name="Acme Ltd")
    changed = await api.ask("GET", API, headers={"If-None-Match": tag})
    assert (changed.status, changed.headers["ETag"] != tag) == (200, True)


async def test_conditional_put_replaces_only_version_seen(api: ControlHarness) -> None:
    assert (await api.ask("PUT", API, SETTINGS, headers={"If-Match": "*"})).status == 412
    made = await api.ask("PUT", API, SETTINGS, headers={"If-None-Match": "*"})
    assert (made.status, made.headers["ETag"]) == (201, (await api.ask("GET", API)).headers["ETag"])
    assert (await api.ask("PUT", API, SETTINGS, headers={"If-None-Match": "*"})).status == 412
    assert (await api.ask("PUT", API, SETTINGS, headers={"If-Match": '"old"'})).status == 412
    tag = {"If-Match": made.headers["ETag"]}
    bodies = [SETTINGS | {"org_name": f"Acme {number}"} for number in range(6)]
    answers = await asyncio.gather(*(api.ask("PUT", API, body, headers=tag) for body in bodies))
    assert sorted(answer.status for answer in answers) == [200] + [412] * 5
    winner = next(answer for answer in answers if answer.status == 200)
    assert (await api.ask("GET", API)).body == winner.body


async def test_concurrent_puts_all_succeed_and_issue_one_secret(api: ControlHarness) -> None:
    bodies = [SETTINGS | {"org_name": f"Acme {number}"} for number in range(8)]
    answers = await asyncio.gather(*(api.ask("PUT", API, body) for body in bodies))
    assert sorted(answer.status for answer in answers) == [200] * 7 + [201]
    assert sum("secret_retrieval_token" in answer.body for answer in answers) == 1
    assert (await api.ask("GET", API)).body["in_force"]["version"] == 8
    records = (await api.ask("GET", f"{API}/audit")).body["records"]
    puts = [each for each in reversed(records) if each["action"] == "org.put"]
    assert len(puts) == 8
    assert [each["before"] for each in puts[1:]] == [each["after"] for each in puts[:-1]]


async def test_audit_records_who_changed_what_without_secrets(api: ControlHarness) -> None:
    made = await api.ask("PUT", API, SETTINGS)
    await api.put_app()
    changed = await api.ask("PUT", API, SETTINGS | {"org_name": "Acme Ltd"})
    rotated = await api.ask("POST", f"{API}/credentials/rotate", {"grace_hours": 1})
    assert rotated.status == 200, rotated.body
    refused = await api.ask("PUT", API, {})
    assert refused.status == 400
    answer = await api.ask("GET", f"{API}/audit")
    actions = ["credentials.rotate", "org.put", "credentials.make", "app.put", "credentials.make", "org.put"]
    assert [each["action"] for each in answer.body["records"]] == actions
    second = answer.body["records"][1]
    assert (second["who"], second["request_id"]) == ("admin", changed.headers["X-Request-Id"])
    assert second["before"] | {"org_name": "Acme Ltd"} == second["after"]
    assert second["address"] == "127.0.0.1"
    item = await api.store.get(schema.org_config_key(ORG), consistent=True)
    assert item is not None
    secrets = [str(item["client_secret_hash"]), made.body["secret_retrieval_token"]]
    secrets.append(rotated.body["secret_retrieval_token"])
    page = await read_records(api.store, ORG, 100)
    assert len(page.rows) == len(actions)
    assert not any(secret in answer.raw.decode() + repr(page) for secret in secrets)


async def test_audit_is_paginated_and_admin_only(api: ControlHarness) -> None:
    for number in range(7):
        await api.put_org(org_name=f"Acme {number}")
    found: list[Any] = []
    cursor = None
    while True:
        params = {"limit": "3"} | ({"cursor": cursor} if cursor else {})
        page = (await api.ask("GET", f"{API}/audit", params=params, who=(ORG, None))).body
        found += page["records"]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert len({each["id"] for each in found}) == len(found) == 8
    assert [each["id"] for each in found] == sorted((each["id"] for each in found), reverse=True)
    assert (await api.ask("GET", f"{API}/audit", who=(ORG, "shop"))).status == 403
    assert (await api.ask("GET", f"{API}/audit", who=(OTHER, None))).status == 403
