"""Orgs and apps from the store: names, time zone, and whether quotas apply to the org or to each app."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import Scope, is_org_id
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Query, Store, iterate_rows

MAX_ORGS_LISTED = 20  # in an error message


@dataclass(frozen=True, slots=True)
class OrgInfo:
    org: str
    name: str | None
    zone: ZoneInfo
    quota_scope: str

    @property
    def title(self) -> str:
        return self.name or self.org


async def load_org_names(store: Store) -> dict[str, str | None]:
    """The name of each org in the registry, None for an org without a name."""
    names: dict[str, str | None] = {}
    async for row in iterate_rows(store, Query("config", schema.ORG_REGISTRY)):
        names[Scope.from_key(row.key.sk).org] = _read_name(row.item, "org_name")
    return names


async def load_orgs(
    store: Store, orgs: Iterable[str], names: Mapping[str, str | None], zone: ZoneInfo, now: float
) -> dict[str, OrgInfo]:
    """The details of these orgs, registered or not. `zone` is the default for orgs without a time zone."""
    org_ids = list(dict.fromkeys(orgs))
    items = await store.get_many([schema.org_config_key(org) for org in org_ids])
    return {
        org: _build_org_info(org, item, names.get(org), zone, now) for org, item in zip(org_ids, items, strict=True)
    }


async def load_app_names(store: Store, apps: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    app_keys = list(dict.fromkeys(apps))
    items = await store.get_many([schema.app_config_key(org, app) for org, app in app_keys])
    named = ((key, _read_name(item or {}, "app_name")) for key, item in zip(app_keys, items, strict=True))
    return {key: name for key, name in named if name is not None}


def resolve_org(text: str, names: Mapping[str, str | None]) -> str:
    """The id of the org with this id or name. Raises ValueError that lists the orgs."""
    if is_org_id(text.lower()):
        return text.lower()  # an org can have spend without being registered
    matching = [org for org, name in names.items() if name is not None and name.casefold() == text.casefold()]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"several orgs are called {text!r}; name one by its id: {', '.join(sorted(matching))}")
    raise ValueError(f"no org has the id or the name {text!r}; {_describe_orgs(names)}")


def _describe_orgs(names: Mapping[str, str | None]) -> str:
    if not names:
        return "none is registered"
    titles = sorted(f"{name} ({org})" if name else org for org, name in names.items())
    suffix = f", and {len(titles) - MAX_ORGS_LISTED} more" if len(titles) > MAX_ORGS_LISTED else ""
    return f"there are {', '.join(titles[:MAX_ORGS_LISTED])}{suffix}"


def _build_org_info(org: str, item: Item | None, registry_name: str | None, default: ZoneInfo, now: float) -> OrgInfo:
    """Reads the item as the budget code does, so that both agree on zone and quota scope."""
    settings = resolve_settings(item, None, DefaultsConfig(timezone=default.key), (), now)
    return OrgInfo(org, _read_name(item or {}, "org_name") or registry_name, settings.zone, settings.quota_scope)


def _read_name(item: Mapping[str, Any], attribute: str) -> str | None:
    name = item.get(attribute)
    return name if isinstance(name, str) and name.strip() else None
