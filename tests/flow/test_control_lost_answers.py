"""Lost answers of the store: the author of a change never gets a conflict with his own write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from price_keeper.auth import registration
from price_keeper.control import client_endpoints
from price_keeper.errors import StoreUnavailable

from tests.support.client_secrets import raise_unavailable
from tests.support.control_harness import API, SETTINGS, ControlHarness

SHOP = f"{API}/apps/shop"
Lose = Callable[[int], None]


@pytest.fixture
def lose(api: ControlHarness, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """So many answers from now on, of transactions that were carried out."""
    kind, left = type(api.store), [0]
    transact = kind.transact

    async def fail_after(self: Any, *arguments: Any, **options: Any) -> None:
        await transact(self, *arguments, **options)
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("by the test", maybe_applied=True)

    monkeypatch.setattr(kind, "transact", fail_after)

    def losing(number: int) -> None:
        left[0] = number

    return losing


async def actions(api: ControlHarness) -> list[str]:
    return [each["action"] for each in (await api.ask("GET", f"{API}/audit")).body["records"]]


@pytest.mark.parametrize("lost", [1, 2])
async def test_conditional_put_with_lost_answer_is_applied_once(api: ControlHarness, lose: Lose, lost: int) -> None:
    lose(lost)
    made = await api.ask("PUT", API, SETTINGS, headers={"If-None-Match": "*"})
    assert made.status == 201, made.body
    lose(lost)
    changed = await api.ask("PUT", API, SETTINGS | {"org_name": "B"}, headers={"If-Match": made.headers["ETag"]})
    assert (changed.status, changed.body["settings"]["org_name"]) == (200, "B")
    lose(lost)
    assert (await api.ask("PUT", SHOP, {"app_name": "s"}, headers={"If-None-Match": "*"})).status == 201
    assert sorted(each for each in await actions(api) if each.endswith("put")) == ["app.put", "org.put", "org.put"]


async def test_override_with_lost_answer_is_set_and_cleared_once(api: ControlHarness, lose: Lose) -> None:
    await api.put_org()
    await api.put_app()
    lose(1)
    document = (await api.ask("PUT", f"{SHOP}/override", {"label": "economy", "reason": "x"})).body
    assert document["override"]["version"] == 1
    lose(1)
    assert (await api.ask("DELETE", f"{SHOP}/override")).body["is_cleared"] is True
    found = [each for each in await actions(api) if each.startswith("override")]
    assert sorted(found) == ["override.clear", "override.set"]


@pytest.mark.parametrize("path", [API, SHOP])
async def test_conditional_put_interrupted_before_credentials_can_be_repeated(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    if path == SHOP:
        await api.put_org()
    body = SETTINGS if path == API else {"app_name": "s"}
    name = "org_name" if path == API else "app_name"
    only_new = {"If-None-Match": "*"}
    with monkeypatch.context() as cut:
        cut.setattr("price_keeper.control.org_endpoints.create_credentials", lambda *_: raise_unavailable())
        assert (await api.ask("PUT", path, body, headers=only_new)).status == 503
    assert (await api.ask("PUT", path, body | {name: "another"}, headers=only_new)).status == 412
    assert (await api.ask("PUT", path, body, headers={"If-Match": '"another"'})).status == 412
    again = await api.ask("PUT", path, body, headers=only_new)
    assert again.status == 200
    assert again.body["secret_retrieval_token"]
    assert (await api.ask("PUT", path, body, headers=only_new)).status == 412


async def test_refresh_with_all_answers_lost_ends_no_session(api: ControlHarness, lose: Lose) -> None:
    await api.put_org()
    issued = (await api.ask("PUT", SHOP, {"app_name": "s"})).body
    shown = {"X-Retrieval-Token": issued["secret_retrieval_token"]}
    secret = (await api.ask("GET", f"{SHOP}/credentials/secret", who=None, headers=shown)).body
    lose(3)
    pair = (await api.ask("POST", "/auth/token", secret, who=None)).body
    for _ in range(2):
        lose(3)
        answer = await api.ask("POST", "/auth/refresh", {"refresh_token": pair["refresh_token"]}, who=None)
        assert answer.status == 200, answer.body
        pair = answer.body
    bearer = {"Authorization": f"Bearer {pair['access_token']}"}
    assert (await api.ask("GET", SHOP, who=None, headers=bearer)).status == 200


async def test_rotation_of_unknown_outcome_rechecks_every_token(
    api: ControlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.put_org()
    issued = (await api.ask("PUT", SHOP, {"app_name": "s"})).body
    shown = {"X-Retrieval-Token": issued["secret_retrieval_token"]}
    secret = (await api.ask("GET", f"{SHOP}/credentials/secret", who=None, headers=shown)).body
    pair = (await api.ask("POST", "/auth/token", secret, who=None)).body
    bearer = {"Authorization": f"Bearer {pair['access_token']}"}
    assert (await api.ask("GET", SHOP, who=None, headers=bearer)).status == 200
    rotated = registration.rotate

    async def unsure(*arguments: Any) -> None:
        await rotated(*arguments)
        raise StoreUnavailable("by the test", maybe_applied=True)

    monkeypatch.setattr(client_endpoints, "rotate", unsure)
    assert (await api.ask("POST", f"{SHOP}/credentials/rotate", {"grace_hours": 0})).status == 503
    assert (await api.ask("GET", SHOP, who=None, headers=bearer)).status == 401
