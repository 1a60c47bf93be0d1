"""`price-keeper org`: what orgs may spend, on which labels, and when their day begins."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from uuid import uuid4

from proxy.commands.admin import NO_ORG, Admin, Record, add_verb, org_found, org_named, scope_path
from proxy.commands.asking import readable
from proxy.commands.places import NotAsked
from proxy.commands.putting import tell_put, written
from proxy.commands.settings_file import SettingsFile, add_file
from proxy.commands.settings_shown import Shown, columns, say
from proxy.commands.shared import Commands, print_json


def add_to(commands: Commands) -> None:
    org = commands.add_parser("org", help="set and tell what orgs may spend")
    verbs = org.add_subparsers(metavar="WHAT", required=True)
    put = add_verb(
        verbs,
        "put",
        "make an org, or put new settings in the place of its own",
        "org put 6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b acme.yaml",
        _put,
    )
    _add_org(put)
    add_file(put)
    _add_org(add_verb(verbs, "show", "tell an org's settings, and what holds now", "org show Acme", _show))
    add_verb(verbs, "list", "list the orgs", "org list --json", _list)


def _add_org(parser: ArgumentParser) -> None:
    parser.add_argument("org", metavar="ORG", help="its id, a UUID, or the name of one that is there")


def _put(admin: Admin, chosen: Namespace) -> int:
    file = SettingsFile(chosen.file)
    path = scope_path(_org_to_put(admin, chosen.org))
    is_new, told = written(admin, path, file)
    tell_put(admin, path, told, is_new=is_new, as_json=chosen.json)
    if not chosen.json:
        _warn_of_apps(admin, path, told)
    return 0


def _org_to_put(admin: Admin, text: str) -> str:
    try:
        return org_named(admin, text)
    except NotAsked as failure:
        raise NotAsked(f"{failure}. A new org needs an id of its own, a UUID such as {uuid4()}") from None


def _warn_of_apps(admin: Admin, path: str, told: Record) -> None:
    """Quotas of an app's own stand in the place of all of its org's, whose ordering may have outgrown them."""
    apps = admin.every(f"{path}/apps", "apps", NO_ORG)
    with readable(admin.api.url):
        known = Shown(told).passed_over
        lines = [
            f"Warning: app {each['app']}: {line}"
            for each in apps
            for line in Shown(each, told).passed_over
            if line not in known
        ]
    say(lines)


def _show(admin: Admin, chosen: Namespace) -> int:
    told = org_found(admin, chosen.org)
    if chosen.json:
        print_json(told)
        return 0
    with readable(admin.api.url):
        lines = Shown(told).lines()
    say(lines)
    return 0


def _list(admin: Admin, chosen: Namespace) -> int:
    orgs = admin.every("/api/v1/orgs", "orgs")
    if chosen.json:
        print_json(orgs)
        return 0
    with readable(admin.api.url):
        rows = [_row(Shown(each)) for each in orgs]
    heads = ("Org", "Id", "Time zone", "Quotas", "Ordering")
    say(columns([heads, *rows]) if rows else ["no orgs yet; price-keeper org put makes one"])
    return 0


def _row(shown: Shown) -> tuple[str, ...]:
    holds = shown.record["in_force"]
    quotas = f"{'for the org' if shown.applies_to_org else 'for each app'}, by {holds['period']}"
    return shown.name, str(shown.record["org"]), str(holds["timezone"]), quotas, shown.ordering or "no budget"
