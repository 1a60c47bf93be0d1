"""`price-keeper org`: what orgs may spend, on which labels, and when their day begins."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from proxy.clock import SystemClock
from proxy.commands.places import NotAsked, add_places, config_of, opened
from proxy.commands.settings_file import SettingsFile, add_file
from proxy.commands.settings_shown import columns, say, tell
from proxy.commands.shared import Commands, actor, add_json_option, print_json
from proxy.config import Config
from proxy.config.prices import PSEUDO_LABELS
from proxy.model import Scope
from proxy.reporting.settings_shown import Shown
from proxy.reporting.tenants import org_called, registered
from proxy.selection.settings import audited, put_org
from proxy.stores import schema
from proxy.stores.contract import Prefix, Query, Row, Store, every_row


def add_to(commands: Commands) -> None:
    org = commands.add_parser("org", help="set and tell what orgs may spend")
    verbs = org.add_subparsers(metavar="WHAT", required=True)
    put = verbs.add_parser("put", help="make an org, or put new settings in the place of its own")
    _add_org(put)
    add_file(put)
    show = verbs.add_parser("show", help="tell an org's settings, and what holds now")
    _add_org(show)
    listing = verbs.add_parser("list", help="list the orgs")
    for parser, verb in ((put, _put), (show, _show), (listing, _list)):
        add_json_option(parser)
        add_places(parser)
        parser.set_defaults(run=lambda chosen, verb=verb: asyncio.run(verb(chosen, config_of(chosen))))


def _add_org(parser: ArgumentParser) -> None:
    parser.add_argument("org", metavar="ORG", help="its id, a UUID, or the name of one that is there")


async def org_named(store: Store, text: str) -> str:
    try:
        return org_called(text, await registered(store))
    except ValueError as failure:
        raise NotAsked(str(failure)) from None


async def shown_org(store: Store, org: str, config: Config) -> Shown:
    item = await store.get(schema.org_config(org), consistent=True)
    if item is None:
        raise NotAsked(f"there is no org {org}; price-keeper org put makes it")
    return Shown(org, item, config.defaults, SystemClock().now())


async def apps_of(store: Store, above: Shown) -> list[Shown]:
    query = Query("config", schema.org_config(above.org).pk, Prefix(schema.APPS_PREFIX), consistent=True)
    return [_app(above, row) async for row in every_row(store, query)]


def _app(above: Shown, row: Row) -> Shown:
    app = row.key.sk.removeprefix(schema.APPS_PREFIX)
    return Shown(above.org, above.org_item, above.defaults, above.now, app, row.item)


def known_labels(config: Config) -> tuple[str, ...]:
    return (*config.labels, *PSEUDO_LABELS)


async def _put(chosen: Namespace, config: Config) -> int:
    file, clock = SettingsFile(chosen.file), SystemClock()
    async with opened(config.store, clock) as store:
        org = await _org_to_put(store, chosen.org)
        with file.located():
            beside = audited(actor(), "org.put", Scope(org), clock)
            written = await put_org(store, clock, org, file.body, known_labels(config), config.defaults, beside)
        shown = Shown(org, written.item, config.defaults, clock.now())
        apps = await apps_of(store, shown)
    if chosen.json:
        print_json(shown.record())
        return 0
    say([f"{shown.title}: {'made' if written.is_new else 'changed'}", *shown.lines()[1:]])
    say(
        f"Warning: app {app.app}: {line}"
        for app in apps
        for line in app.plan.passed_over
        if line not in shown.plan.passed_over
    )
    return 0


async def _org_to_put(store: Store, text: str) -> str:
    try:
        return await org_named(store, text)
    except NotAsked as failure:
        raise NotAsked(f"{failure}. A new org needs an id of its own, a UUID such as {uuid4()}") from None


async def _show(chosen: Namespace, config: Config) -> int:
    async with opened(config.store, SystemClock()) as store:
        shown = await shown_org(store, await org_named(store, chosen.org), config)
    tell(shown, as_json=chosen.json)
    return 0


async def _list(chosen: Namespace, config: Config) -> int:
    async with opened(config.store, SystemClock()) as store:
        names = await registered(store)
        items = await store.get_many([schema.org_config(org) for org in names])
    now = SystemClock().now()
    shown = [Shown(org, item or {}, config.defaults, now) for org, item in zip(names, items, strict=True)]
    if chosen.json:
        print_json([_record(each, names) for each in shown])
    elif not shown:
        say(["no orgs yet; price-keeper org put makes one"])
    else:
        say(columns([("Org", "Id", "Time zone", "Quotas", "Ordering"), *map(_row, shown)]))
    return 0


def _record(shown: Shown, names: Mapping[str, str | None]) -> dict[str, Any]:
    return {"org_name": names[shown.org], **shown.record()}


def _row(shown: Shown) -> tuple[str, ...]:
    plan = shown.plan
    quotas = f"{'for the org' if plan.quota_scope == 'ORG' else 'for each app'}, by {plan.period.value}"
    return shown.name, shown.org, plan.zone.key, quotas, " > ".join(plan.ordering) or "no budget"
