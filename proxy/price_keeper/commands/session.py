"""`price-keeper session`: which sessions a client has, and how they are ended."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.commandline.kinds import ALL_SESSIONS
from price_keeper.commands.admin import AdminClient, ApiRecord, fetch_app, fetch_org, build_scope_path
from price_keeper.commands.asking import check_response_shape
from price_keeper.commands.settings_shown import SettingsView
from price_keeper.commands.shared import format_columns, print_json, print_lines


def list_all(args: Namespace) -> int:
    admin = AdminClient(args)
    path, title = _client(admin, args)
    told = admin.request("GET", f"{path}/sessions")
    with check_response_shape(admin.api.url):
        sessions = told["sessions"]
        rows = [_row(each) for each in sessions]
    if args.json:
        print_json(sessions)
    else:
        heads = ("Session", "Began", "Refreshed", "Expires")
        print_lines(format_columns(heads, rows) if rows else [f"{title} has no sessions"])
    return 0


def _row(session: ApiRecord) -> tuple[str, ...]:
    return tuple(str(session[name]) for name in ("session_id", "began_at", "refreshed_at", "expires_at"))


def revoke(args: Namespace) -> int:
    admin = AdminClient(args)
    path, title = _client(admin, args)
    one = "" if args.session == ALL_SESSIONS else f"/{args.session}"
    told = admin.request("DELETE", f"{path}/sessions{one}")
    if args.json:
        print_json(told)
    elif told.get("ended") == 0 and one:
        print_lines([f"{title}: it was over already; no access token made from it is good any more"])
    else:
        print_lines([f"{title}: {told.get('ended')} ended"])
    return 0


def _client(admin: AdminClient, args: Namespace) -> tuple[str, str]:
    """Where its sessions are, and what it is called."""
    above = fetch_org(admin, args.org)
    with check_response_shape(admin.api.url):
        org = above["org"]
        shown = SettingsView(above) if args.app is None else SettingsView(fetch_app(admin, org, args.app), above)
        return build_scope_path(org, args.app), shown.title
