"""List the budgets that a caller may see, page by page, with a limited number of store reads for each page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from price_keeper.control.control_services import ControlServices
from price_keeper.control.org_endpoints import show_org
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Page, Prefix, Query

MAX_ROWS = 25
MAX_READS = 60  # store reads for one page; a search that has found nothing by then returns a cursor to continue
ORGS_PER_QUERY, APPS_PER_QUERY = 25, 100


class BudgetEntry(NamedTuple):
    """An app with a budget of its own; an org whose apps share one, or that has no apps yet."""

    org: str
    org_name: str | None
    app: str | None = None
    app_name: str | None = None

    def matches(self, text: str) -> bool:
        return any(text in value.casefold() for value in self if value)

    @property
    def cursor(self) -> str:
        return self.org if self.app is None else f"{self.org}/{self.app}"


class BudgetPage(NamedTuple):
    """`cursor` is that of the last entry, after which there may be more; None on the last page."""

    entries: list[BudgetEntry]
    cursor: str | None


async def load_entry(services: ControlServices, org: str, app: str | None) -> BudgetEntry:
    """The entry of an org or app. It need not exist."""
    keys = [schema.org_config_key(org), *([schema.app_config_key(org, app)] if app is not None else [])]
    org_item, *app_items = await services.store.get_many(keys)
    return BudgetEntry(
        org, _read_text(org_item, "org_name"), app, _read_text(app_items[0], "app_name") if app_items else None
    )


async def list_budgets(services: ControlServices, org: str | None, search: str, after: str) -> BudgetPage:
    """One page of the budgets of an org, or of all orgs. Raises StoreError."""
    walker, needle, entries, last = _BudgetWalker(services), search.strip().casefold(), list[BudgetEntry](), None
    async for entry in walker.walk_after(org, after):
        if entry is not None and (not needle or entry.matches(needle)):
            if len(entries) == MAX_ROWS:
                return BudgetPage(entries, entries[-1].cursor)
            entries.append(entry)
        last = entry or last
        if walker.reads > MAX_READS and last is not None:
            return BudgetPage(entries, last.cursor)
    return BudgetPage(entries, None)


class _BudgetWalker:
    """Walks over orgs, and over the apps of each org, and counts its store reads."""

    def __init__(self, services: ControlServices) -> None:
        self._services = services
        self.reads = 0

    async def walk_after(self, only_org: str | None, after: str) -> AsyncIterator[BudgetEntry | None]:
        org, _, app = after.partition("/")
        if only_org is not None:
            async for entry in self._walk_orgs(await self._load_orgs([only_org]), app if org == only_org else ""):
                yield entry
            return
        if app:
            async for entry in self._walk_orgs(await self._load_orgs([org]), app):
                yield entry
        while True:
            page = await self._query_page(schema.ORG_REGISTRY, "ORG#", org, ORGS_PER_QUERY)
            listed = [row.key.sk.removeprefix("ORG#") for row in page.rows]
            async for entry in self._walk_orgs(await self._load_orgs(listed), ""):
                yield entry
            if page.cursor is None:
                return
            org = listed[-1]

    async def _load_orgs(self, orgs: list[str]) -> dict[str, Item]:
        self.reads += 1
        items = await self._services.store.get_many([schema.org_config_key(org) for org in orgs])
        return {org: item or {} for org, item in zip(orgs, items, strict=True)}

    async def _walk_orgs(self, orgs: dict[str, Item], after: str) -> AsyncIterator[BudgetEntry]:
        for org, item in orgs.items():
            name, has_any = _read_text(item, "org_name"), bool(after)
            if show_org(self._services, org, item).effective.quota_scope == "APP":
                async for app, app_name in self._walk_apps(org, after):
                    has_any = True
                    yield BudgetEntry(org, name, app, app_name)
            if not has_any:
                yield BudgetEntry(org, name)

    async def _walk_apps(self, org: str, after: str) -> AsyncIterator[tuple[str, str | None]]:
        while True:
            page = await self._query_page(schema.org_config_key(org).pk, schema.APPS_PREFIX, after, APPS_PER_QUERY)
            for row in page.rows:
                after = row.key.sk.removeprefix(schema.APPS_PREFIX)
                yield after, _read_text(row.item, "app_name")
            if page.cursor is None:
                return

    async def _query_page(self, partition: str, prefix: str, after: str, limit: int) -> Page:
        self.reads += 1
        begin = f"{prefix}{after}" if after else None
        return await self._services.store.query(Query("config", partition, Prefix(prefix), limit=limit, after=begin))


def _read_text(item: Item | None, name: str) -> str | None:
    value = (item or {}).get(name)
    return value if isinstance(value, str) else None
