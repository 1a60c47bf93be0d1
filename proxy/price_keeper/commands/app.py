"""`price-keeper app`: what single apps of an org may spend, where that differs from what their org says."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.commands.admin import ORG_MISSING_HINT, AdminClient, fetch_app, fetch_org, build_scope_path
from price_keeper.commands.asking import check_response_shape
from price_keeper.commands.putting import tell_put, written
from price_keeper.commands.settings_file import SettingsFile
from price_keeper.commands.settings_shown import SettingsView
from price_keeper.commands.shared import format_columns, print_json, print_lines


def put(args: Namespace) -> int:
    admin, file = AdminClient(args), SettingsFile(args.file)
    above = fetch_org(admin, args.org)
    path = build_scope_path(above["org"], args.app)
    is_new, told = written(admin, path, file)
    tell_put(admin, path, told, above, is_new=is_new, as_json=args.json)
    return 0


def show(args: Namespace) -> int:
    admin = AdminClient(args)
    above = fetch_org(admin, args.org)
    told = fetch_app(admin, above["org"], args.app)
    if args.json:
        print_json(told)
        return 0
    with check_response_shape(admin.api.url):
        lines = SettingsView(told, above).format_lines()
    print_lines(lines)
    return 0


def list_all(args: Namespace) -> int:
    admin = AdminClient(args)
    above = fetch_org(admin, args.org)
    apps = admin.fetch_list(f"{build_scope_path(above['org'])}/apps", "apps", ORG_MISSING_HINT)
    if args.json:
        print_json(apps)
        return 0
    with check_response_shape(admin.api.url):
        rows = [_row(SettingsView(each, above)) for each in apps]
        title = SettingsView(above).title
    heads = ("App", "Id", "Ordering", "Enforcement")
    print_lines(format_columns(heads, rows) if rows else [f"the org {title} has no apps yet; price-keeper app put makes one"])
    return 0


def _row(shown: SettingsView) -> tuple[str, ...]:
    return (
        shown.name,
        str(shown.record["app"]),
        shown.ordering or "no budget",
        str(shown.record["in_force"]["enforcement"]),
    )
