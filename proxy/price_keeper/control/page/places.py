"""Which budgets there are for somebody to see: found page by page, so that what one look reads is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from price_keeper.control.orgs import show_org
from price_keeper.control.parts import ControlServices
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Page, Prefix, Query

MOST_ROWS = 25
MOST_READS = 60  # of the store for one page: a search in vain says so, and goes on where it is told to
ORGS_AT_ONCE, APPS_AT_ONCE = 25, 100


class Place(NamedTuple):
    """An app with a budget of its own; an org whose apps share one, or that has no apps yet."""

    org: str
    org_name: str | None
    app: str | None = None
    app_name: str | None = None

    def has(self, text: str) -> bool:
        return any(text in each.casefold() for each in self if each)

    @property
    def cursor(self) -> str:
        return self.org if self.app is None else f"{self.org}/{self.app}"


class Found(NamedTuple):
    """`cursor` is the place behind which there may be more."""

    places: list[Place]
    cursor: str | None


async def one(services: ControlServices, org: str, app: str | None) -> Place:
    """Whether or not anybody ever put it."""
    keys = [schema.org_config_key(org), *([schema.app_config_key(org, app)] if app is not None else [])]
    above, *own = await services.store.get_many(keys)
    return Place(org, _text(above, "org_name"), app, _text(own[0], "app_name") if own else None)


async def found(services: ControlServices, org: str | None, search: str, after: str) -> Found:
    """Of one org or of all. Raises StoreError."""
    walk, text, places, last = _Walk(services), search.strip().casefold(), list[Place](), None
    async for place in walk.after(org, after):
        if place is not None and (not text or place.has(text)):
            if len(places) == MOST_ROWS:
                return Found(places, places[-1].cursor)
            places.append(place)
        last = place or last
        if walk.reads > MOST_READS and last is not None:
            return Found(places, last.cursor)
    return Found(places, None)


class _Walk:
    """Org by org, and in each app by app."""

    def __init__(self, services: ControlServices) -> None:
        self._services = services
        self.reads = 0

    async def after(self, only: str | None, after: str) -> AsyncIterator[Place | None]:
        org, _, app = after.partition("/")
        if only is not None:
            async for place in self._of(await self._names([only]), app if org == only else ""):
                yield place
            return
        if app:
            async for place in self._of(await self._names([org]), app):
                yield place
        while True:
            page = await self._page(schema.ORG_REGISTRY, "ORG#", org, ORGS_AT_ONCE)
            listed = [row.key.sk.removeprefix("ORG#") for row in page.rows]
            async for place in self._of(await self._names(listed), ""):
                yield place
            if page.cursor is None:
                return
            org = listed[-1]

    async def _names(self, orgs: list[str]) -> dict[str, Item]:
        self.reads += 1
        found = await self._services.store.get_many([schema.org_config_key(org) for org in orgs])
        return {org: item or {} for org, item in zip(orgs, found, strict=True)}

    async def _of(self, orgs: dict[str, Item], after: str) -> AsyncIterator[Place]:
        for org, item in orgs.items():
            name, has_any = _text(item, "org_name"), bool(after)
            if show_org(self._services, org, item).plan.quota_scope == "APP":
                async for app, app_name in self._apps(org, after):
                    has_any = True
                    yield Place(org, name, app, app_name)
            if not has_any:
                yield Place(org, name)

    async def _apps(self, org: str, after: str) -> AsyncIterator[tuple[str, str | None]]:
        while True:
            page = await self._page(schema.org_config_key(org).pk, schema.APPS_PREFIX, after, APPS_AT_ONCE)
            for row in page.rows:
                after = row.key.sk.removeprefix(schema.APPS_PREFIX)
                yield after, _text(row.item, "app_name")
            if page.cursor is None:
                return

    async def _page(self, partition: str, prefix: str, after: str, limit: int) -> Page:
        self.reads += 1
        begin = f"{prefix}{after}" if after else None
        return await self._services.store.query(Query("config", partition, Prefix(prefix), limit=limit, after=begin))


def _text(item: Item | None, name: str) -> str | None:
    value = (item or {}).get(name)
    return value if isinstance(value, str) else None
