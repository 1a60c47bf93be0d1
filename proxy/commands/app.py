"""`price-keeper app`: what single apps of an org may spend, where that differs from what their org says."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from proxy.clock import SystemClock
from proxy.commands.org import apps_of, known_labels, org_named, shown_org
from proxy.commands.places import NotAsked, add_places, config_of, opened
from proxy.commands.settings_file import SettingsFile, add_file
from proxy.commands.settings_shown import columns, say, tell
from proxy.commands.shared import Commands, actor, add_json_option, print_json
from proxy.config import Config
from proxy.model import Scope, is_app_id
from proxy.reporting.settings_shown import Shown
from proxy.selection.settings import audited, put_app
from proxy.stores import schema
from proxy.stores.contract import Item, Store


def add_to(commands: Commands) -> None:
    app = commands.add_parser("app", help="set and tell what apps of an org may spend")
    verbs = app.add_subparsers(metavar="WHAT", required=True)
    put = verbs.add_parser("put", help="make an app, or put new settings in the place of its own")
    show = verbs.add_parser("show", help="tell what holds for an app, and which of it is its own")
    listing = verbs.add_parser("list", help="list the apps of an org")
    for parser in (put, show, listing):
        parser.add_argument("org", metavar="ORG", help="the org's id or name")
    for parser in (put, show):
        parser.add_argument("app", type=app_id, metavar="APP", help="1 to 64 letters, digits or any of ._-")
    add_file(put)
    for parser, verb in ((put, _put), (show, _show), (listing, _list)):
        add_json_option(parser)
        add_places(parser)
        parser.set_defaults(run=lambda chosen, verb=verb: asyncio.run(verb(chosen, config_of(chosen))))


def add_app_option(parser: ArgumentParser) -> None:
    parser.add_argument("--app", type=app_id, metavar="APP", help="where quotas apply to each app")


def app_id(text: str) -> str:
    if not is_app_id(text):
        raise ArgumentTypeError(
            f"an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .., not {text[:80]!r}"
        )
    return text


async def shown_app(store: Store, above: Shown, app: str) -> Shown:
    item = await store.get(schema.app_config(above.org, app), consistent=True)
    if item is None:
        there = ", ".join(str(each.app) for each in await apps_of(store, above)) or "none"
        raise NotAsked(f"the org {above.title} has no app {app}; there are: {there}")
    return _shown(above, app, item)


async def _put(chosen: Namespace, config: Config) -> int:
    file, clock = SettingsFile(chosen.file), SystemClock()
    async with opened(config.store, clock) as store:
        above = await shown_org(store, await org_named(store, chosen.org), config)
        with file.located():
            beside = audited(actor(), "app.put", Scope(above.org, chosen.app), clock)
            written = await put_app(store, clock, above.org, chosen.app, file.body, known_labels(config), beside)
        shown = _shown(await shown_org(store, above.org, config), chosen.app, written.item)
    if chosen.json:
        print_json(shown.record())
    else:
        say([f"{shown.title}: {'made' if written.is_new else 'changed'}", *shown.lines()[1:]])
    return 0


async def _show(chosen: Namespace, config: Config) -> int:
    async with opened(config.store, SystemClock()) as store:
        above = await shown_org(store, await org_named(store, chosen.org), config)
        shown = await shown_app(store, above, chosen.app)
    tell(shown, as_json=chosen.json)
    return 0


async def _list(chosen: Namespace, config: Config) -> int:
    async with opened(config.store, SystemClock()) as store:
        above = await shown_org(store, await org_named(store, chosen.org), config)
        apps = await apps_of(store, above)
    if chosen.json:
        print_json([each.record() for each in apps])
    elif not apps:
        say([f"the org {above.title} has no apps yet; price-keeper app put makes one"])
    else:
        say(columns([("App", "Id", "Ordering", "Enforcement"), *map(_row, apps)]))
    return 0


def _row(shown: Shown) -> tuple[str, ...]:
    plan = shown.plan
    return shown.name, str(shown.app), " > ".join(plan.ordering) or "no budget", plan.enforcement


def _shown(above: Shown, app: str, item: Item) -> Shown:
    return Shown(above.org, above.org_item, above.defaults, above.now, app, item)
