"""`price-keeper session`: which sessions a client has, and how they are ended."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.cli.api_client import (
    AdminClient,
    ApiRecord,
    build_scope_path,
    check_response_shape,
    fetch_app,
    fetch_org,
)
from price_keeper.cli.output import format_columns, print_json, print_lines
from price_keeper.cli.settings_view import SettingsView
from price_keeper.cli.shared_arguments import ALL_SESSIONS


def run_session_list(args: Namespace) -> int:
    admin = AdminClient(args)
    path, title = _resolve_client(admin, args)
    response = admin.request("GET", f"{path}/sessions")
    with check_response_shape(admin.api.url):
        sessions = response["sessions"]
        rows = [_build_session_row(each) for each in sessions]
    if args.json:
        print_json(sessions)
    else:
        headers = ("Session", "Began", "Refreshed", "Expires")
        print_lines(format_columns(headers, rows) if rows else [f"{title} has no sessions"])
    return 0


def _build_session_row(session: ApiRecord) -> tuple[str, ...]:
    return tuple(str(session[name]) for name in ("session_id", "began_at", "refreshed_at", "expires_at"))


def run_session_revoke(args: Namespace) -> int:
    admin = AdminClient(args)
    path, title = _resolve_client(admin, args)
    subpath = "" if args.session == ALL_SESSIONS else f"/{args.session}"
    response = admin.request("DELETE", f"{path}/sessions{subpath}")
    if args.json:
        print_json(response)
    elif response.get("ended") == 0 and subpath:
        print_lines([f"{title}: it was over already; no access token made from it is good any more"])
    else:
        print_lines([f"{title}: {response.get('ended')} ended"])
    return 0


def _resolve_client(admin: AdminClient, args: Namespace) -> tuple[str, str]:
    """Where its sessions are, and what it is called."""
    org_record = fetch_org(admin, args.org)
    with check_response_shape(admin.api.url):
        org = org_record["org"]
        view = (
            SettingsView(org_record) if args.app is None else SettingsView(fetch_app(admin, org, args.app), org_record)
        )
        return build_scope_path(org, args.app), view.title
