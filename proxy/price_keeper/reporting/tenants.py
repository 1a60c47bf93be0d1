"""The orgs and their apps as the store knows them: by which name, in which zone, and how an org counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.config.keys import DefaultsConfig
from price_keeper.model import Scope, is_org_id
from price_keeper.selection.plan import resolve_settings
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Query, Store, iterate_rows

MOST_NAMED = 20  # in a message that says which orgs there are


@dataclass(frozen=True, slots=True)
class Tenant:
    org: str
    name: str | None
    zone: ZoneInfo
    quota_scope: str

    @property
    def title(self) -> str:
        return self.name or self.org


async def registered(store: Store) -> dict[str, str | None]:
    """The name of each org in the registry, None where it has none there."""
    found: dict[str, str | None] = {}
    async for row in iterate_rows(store, Query("config", schema.ORG_REGISTRY)):
        found[Scope.from_key(row.key.sk).org] = _name(row.item, "org_name")
    return found


async def tenants(
    store: Store, orgs: Iterable[str], names: Mapping[str, str | None], zone: ZoneInfo, now: float
) -> dict[str, Tenant]:
    """Also of orgs that nobody registered; `zone` is for those that say nothing of theirs."""
    wanted = list(dict.fromkeys(orgs))
    items = await store.get_many([schema.org_config_key(org) for org in wanted])
    return {org: _tenant(org, item, names.get(org), zone, now) for org, item in zip(wanted, items, strict=True)}


async def app_names(store: Store, apps: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    wanted = list(dict.fromkeys(apps))
    items = await store.get_many([schema.app_config_key(org, app) for org, app in wanted])
    named = ((key, _name(item or {}, "app_name")) for key, item in zip(wanted, items, strict=True))
    return {key: name for key, name in named if name is not None}


def org_called(text: str, names: Mapping[str, str | None]) -> str:
    """The id of the org with this id or name. Raises ValueError that says which there are."""
    if is_org_id(text.lower()):
        return text.lower()  # it need not be registered to have spent
    fitting = [org for org, name in names.items() if name is not None and name.casefold() == text.casefold()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"several orgs are called {text!r}; name one by its id: {', '.join(sorted(fitting))}")
    raise ValueError(f"no org has the id or the name {text!r}; {_told(names)}")


def _told(names: Mapping[str, str | None]) -> str:
    if not names:
        return "none is registered"
    told = sorted(f"{name} ({org})" if name else org for org, name in names.items())
    more = f", and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
    return f"there are {', '.join(told[:MOST_NAMED])}{more}"


def _tenant(org: str, item: Item | None, registry_name: str | None, default: ZoneInfo, now: float) -> Tenant:
    """As those who count read it."""
    plan = resolve_settings(item, None, DefaultsConfig(timezone=default.key), (), now)
    return Tenant(org, _name(item or {}, "org_name") or registry_name, plan.zone, plan.quota_scope)


def _name(item: Mapping[str, Any], attribute: str) -> str | None:
    name = item.get(attribute)
    return name if isinstance(name, str) and name.strip() else None
