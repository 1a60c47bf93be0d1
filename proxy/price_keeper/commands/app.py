"""`price-keeper app`: what single apps of an org may spend, where that differs from what their org says."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    build_scope_path,
    check_response_shape,
    fetch_app,
    fetch_org,
)
from price_keeper.cli.output import format_columns, print_json, print_lines
from price_keeper.cli.settings_file import SettingsFile
from price_keeper.cli.settings_view import SettingsView
from price_keeper.commands.putting import print_put_result, put_settings


def run_app_put(args: Namespace) -> int:
    admin, file = AdminClient(args), SettingsFile(args.file)
    org_record = fetch_org(admin, args.org)
    path = build_scope_path(org_record["org"], args.app)
    is_new, record = put_settings(admin, path, file)
    print_put_result(admin, path, record, org_record, is_new=is_new, as_json=args.json)
    return 0


def run_app_show(args: Namespace) -> int:
    admin = AdminClient(args)
    org_record = fetch_org(admin, args.org)
    record = fetch_app(admin, org_record["org"], args.app)
    if args.json:
        print_json(record)
        return 0
    with check_response_shape(admin.api.url):
        lines = SettingsView(record, org_record).format_lines()
    print_lines(lines)
    return 0


def run_app_list(args: Namespace) -> int:
    admin = AdminClient(args)
    org_record = fetch_org(admin, args.org)
    apps = admin.fetch_list(f"{build_scope_path(org_record['org'])}/apps", "apps", ORG_MISSING_HINT)
    if args.json:
        print_json(apps)
        return 0
    with check_response_shape(admin.api.url):
        rows = [_build_app_row(SettingsView(each, org_record)) for each in apps]
        title = SettingsView(org_record).title
    headers = ("App", "Id", "Ordering", "Enforcement")
    print_lines(
        format_columns(headers, rows) if rows else [f"the org {title} has no apps yet; price-keeper app put makes one"]
    )
    return 0


def _build_app_row(view: SettingsView) -> tuple[str, ...]:
    return (
        view.name,
        str(view.record["app"]),
        view.ordering or "no budget",
        str(view.record["in_force"]["enforcement"]),
    )
