"""`price-keeper org`: what orgs may spend, on which labels, and when their day begins."""

from __future__ import annotations

from argparse import Namespace
from uuid import uuid4

from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    ApiRecord,
    build_scope_path,
    check_response_shape,
    fetch_org,
    resolve_org_id,
)
from price_keeper.cli.output import CommandError, format_columns, print_json, print_lines
from price_keeper.cli.settings_file import SettingsFile
from price_keeper.cli.settings_view import SettingsView, format_warning
from price_keeper.commands.putting import print_put_result, put_settings


def run_org_put(args: Namespace) -> int:
    admin, file = AdminClient(args), SettingsFile(args.file)
    path = build_scope_path(_resolve_org_to_put(admin, args.org))
    is_new, record = put_settings(admin, path, file)
    print_put_result(admin, path, record, is_new=is_new, as_json=args.json)
    if not args.json:
        _warn_about_apps(admin, path, record)
    return 0


def _resolve_org_to_put(admin: AdminClient, text: str) -> str:
    try:
        return resolve_org_id(admin, text)
    except CommandError as failure:
        raise CommandError(f"{failure}. A new org needs an id of its own, a UUID such as {uuid4()}") from None


def _warn_about_apps(admin: AdminClient, path: str, org_record: ApiRecord) -> None:
    """Quotas of an app's own stand in the place of all of its org's, whose ordering may have outgrown them."""
    apps = admin.fetch_list(f"{path}/apps", "apps", ORG_MISSING_HINT)
    with check_response_shape(admin.api.url):
        org_problems = SettingsView(org_record).problems
        lines = [
            format_warning(f"app {each['app']}: {line}")
            for each in apps
            for line in SettingsView(each, org_record).problems
            if line not in org_problems
        ]
    print_lines(lines)


def run_org_show(args: Namespace) -> int:
    admin = AdminClient(args)
    record = fetch_org(admin, args.org)
    if args.json:
        print_json(record)
        return 0
    with check_response_shape(admin.api.url):
        lines = SettingsView(record).format_lines()
    print_lines(lines)
    return 0


def run_org_list(args: Namespace) -> int:
    admin = AdminClient(args)
    orgs = admin.fetch_list("/api/v1/orgs", "orgs")
    if args.json:
        print_json(orgs)
        return 0
    with check_response_shape(admin.api.url):
        rows = [_build_org_row(SettingsView(each)) for each in orgs]
    headers = ("Org", "Id", "Time zone", "Quotas", "Ordering")
    print_lines(format_columns(headers, rows) if rows else ["no orgs yet; price-keeper org put makes one"])
    return 0


def _build_org_row(view: SettingsView) -> tuple[str, ...]:
    in_force = view.record["in_force"]
    quotas = f"{'for the org' if view.applies_to_org else 'for each app'}, by {in_force['period']}"
    return view.name, str(view.record["org"]), str(in_force["timezone"]), quotas, view.ordering or "no budget"
