"""`price-keeper app`: what single apps of an org may spend, where that differs from what their org says."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from proxy.commands.admin import NO_ORG, Admin, add_verb, app_found, app_id, org_found, scope_path
from proxy.commands.asking import readable
from proxy.commands.putting import tell_put, written
from proxy.commands.settings_file import SettingsFile, add_file
from proxy.commands.settings_shown import Shown, columns, say
from proxy.commands.shared import Commands, print_json


def add_to(commands: Commands) -> None:
    app = commands.add_parser("app", help="set and tell what apps of an org may spend")
    verbs = app.add_subparsers(metavar="WHAT", required=True)
    text = "make an app, or put new settings in the place of its own"
    put = add_verb(verbs, "put", text, "app put Acme shop shop.yaml", _put)
    text = "tell what holds for an app, and which of it is its own"
    show = add_verb(verbs, "show", text, "app show Acme shop", _show)
    listing = add_verb(verbs, "list", "list the apps of an org", "app list Acme --json", _list)
    for parser in (put, show, listing):
        add_org(parser)
    for parser in (put, show):
        parser.add_argument("app", type=app_id, metavar="APP", help="1 to 64 letters, digits or any of ._-")
    add_file(put)


def add_org(parser: ArgumentParser) -> None:
    parser.add_argument("org", metavar="ORG", help="the org's id or name")


def _put(admin: Admin, chosen: Namespace) -> int:
    file = SettingsFile(chosen.file)
    above = org_found(admin, chosen.org)
    path = scope_path(above["org"], chosen.app)
    is_new, told = written(admin, path, file)
    tell_put(admin, path, told, above, is_new=is_new, as_json=chosen.json)
    return 0


def _show(admin: Admin, chosen: Namespace) -> int:
    above = org_found(admin, chosen.org)
    told = app_found(admin, above["org"], chosen.app)
    if chosen.json:
        print_json(told)
        return 0
    with readable(admin.api.url):
        lines = Shown(told, above).lines()
    say(lines)
    return 0


def _list(admin: Admin, chosen: Namespace) -> int:
    above = org_found(admin, chosen.org)
    apps = admin.every(f"{scope_path(above['org'])}/apps", "apps", NO_ORG)
    if chosen.json:
        print_json(apps)
        return 0
    with readable(admin.api.url):
        rows = [_row(Shown(each, above)) for each in apps]
        title = Shown(above).title
    heads = ("App", "Id", "Ordering", "Enforcement")
    say(columns([heads, *rows]) if rows else [f"the org {title} has no apps yet; price-keeper app put makes one"])
    return 0


def _row(shown: Shown) -> tuple[str, ...]:
    return (
        shown.name,
        str(shown.record["app"]),
        shown.ordering or "no budget",
        str(shown.record["in_force"]["enforcement"]),
    )
