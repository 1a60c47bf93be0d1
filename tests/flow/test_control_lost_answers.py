"""Answers of the store that get lost: whoever made a change is never told that somebody else did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import StoreUnavailable
from tests.support.control import API, SETTINGS, Rig, rig
from tests.support.engines import Engines

SHOP = f"{API}/apps/shop"
Lose = Callable[[int], None]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Engines({}).open("sqlite", tmp_path) as store, rig(store, tmp_path) as running:
        yield running


@pytest.fixture
def lose(api: Rig, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """So many answers from now on, of transactions that were carried out."""
    kind, left = type(api.store), [0]
    transact = kind.transact

    async def spoilt(self: Any, *arguments: Any, **options: Any) -> None:
        await transact(self, *arguments, **options)
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("by the test", maybe_applied=True)

    monkeypatch.setattr(kind, "transact", spoilt)

    def losing(number: int) -> None:
        left[0] = number

    return losing


async def actions(api: Rig) -> list[str]:
    return [each["action"] for each in (await api.ask("GET", f"{API}/audit")).body["records"]]


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_conditional_put_is_done_once_and_told(api: Rig, lose: Lose, lost: int) -> None:
    lose(lost)
    made = await api.ask("PUT", API, SETTINGS, headers={"If-None-Match": "*"})
    assert made.status == 201, made.body
    lose(lost)
    changed = await api.ask("PUT", API, SETTINGS | {"org_name": "B"}, headers={"If-Match": made.headers["ETag"]})
    assert (changed.status, changed.body["settings"]["org_name"]) == (200, "B")
    lose(lost)
    assert (await api.ask("PUT", SHOP, {"app_name": "s"}, headers={"If-None-Match": "*"})).status == 201
    assert sorted(each for each in await actions(api) if each.endswith("put")) == ["app.put", "org.put", "org.put"]


async def test_an_override_is_set_once_and_cleared_once(api: Rig, lose: Lose) -> None:
    await api.org()
    await api.app()
    lose(1)
    told = (await api.ask("PUT", f"{SHOP}/override", {"label": "economy", "reason": "x"})).body
    assert told["override"]["version"] == 1
    lose(1)
    assert (await api.ask("DELETE", f"{SHOP}/override")).body["is_cleared"] is True
    found = [each for each in await actions(api) if each.startswith("override")]
    assert sorted(found) == ["override.clear", "override.set"]
