"""What is known of an org: asked for once, and not over and over while the store is away."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from proxy.calendar_days import known_zone
from proxy.errors import StoreUnavailable
from proxy.selection.orgs import ASK_AGAIN_SECONDS, Org, Orgs
from proxy.stores.contract import Item, Key, Store
from tests.support.clock import ManualClock, settle

ACME = "e0000000-0000-4000-8000-000000000001"
OTHER = "e0000000-0000-4000-8000-000000000002"
DEFAULT = Org(known_zone("UTC"), "APP", 8)


class OneStore:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_away = True
        self.answers = asyncio.Event()
        self.answers.set()

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.asked.append(key.pk)
        await self.answers.wait()
        if self.is_away:
            raise StoreUnavailable("away")
        return cast(Item, {"quota_scope": "ORG"})


def orgs(store: Any, clock: ManualClock) -> Orgs:
    return Orgs(cast(Store, store), DEFAULT, clock)


async def test_a_store_that_is_away_is_asked_for_an_org_only_now_and_then() -> None:
    store, clock = OneStore(), ManualClock()
    known = orgs(store, clock)
    for _ in range(10):
        assert await known.learned(ACME) == DEFAULT
    assert len(store.asked) == 1
    await known.learned(OTHER)
    assert len(store.asked) == 2
    await clock.advance(ASK_AGAIN_SECONDS)
    store.is_away = False
    assert (await known.learned(ACME)).quota_scope == "ORG"
    assert known.known(ACME) == await known.learned(ACME)
    assert (len(store.asked), list(known._asked)) == (3, [OTHER])


async def test_calls_that_come_at_once_ask_once_though_the_first_is_broken_off() -> None:
    for is_away in (True, False):
        store, clock = OneStore(), ManualClock()
        store.is_away = is_away
        store.answers.clear()
        known = orgs(store, clock)
        first, *others = [asyncio.create_task(known.learned(ACME)) for _ in range(5)]
        await settle()
        assert len(store.asked) == 1
        first.cancel()
        await settle()
        assert len(store.asked) == 2  # the next one took over
        store.answers.set()
        found = await asyncio.gather(*others)
        assert {org.quota_scope for org in found} == {"APP" if is_away else "ORG"}
        assert len(store.asked) == 2
