"""`price-keeper session`: which sessions a client has, and how they are ended."""

from __future__ import annotations

from argparse import Namespace

from price_keeper.commandline.kinds import ALL
from price_keeper.commands.admin import Admin, Record, app_found, org_found, scope_path
from price_keeper.commands.asking import readable
from price_keeper.commands.settings_shown import Shown
from price_keeper.commands.shared import columns, print_json, say


def list_all(chosen: Namespace) -> int:
    admin = Admin(chosen)
    path, title = _client(admin, chosen)
    told = admin.ask("GET", f"{path}/sessions")
    with readable(admin.api.url):
        sessions = told["sessions"]
        rows = [_row(each) for each in sessions]
    if chosen.json:
        print_json(sessions)
    else:
        heads = ("Session", "Began", "Refreshed", "Expires")
        say(columns(heads, rows) if rows else [f"{title} has no sessions"])
    return 0


def _row(session: Record) -> tuple[str, ...]:
    return tuple(str(session[name]) for name in ("session_id", "began_at", "refreshed_at", "expires_at"))


def revoke(chosen: Namespace) -> int:
    admin = Admin(chosen)
    path, title = _client(admin, chosen)
    one = "" if chosen.session == ALL else f"/{chosen.session}"
    told = admin.ask("DELETE", f"{path}/sessions{one}")
    if chosen.json:
        print_json(told)
    elif told.get("ended") == 0 and one:
        say([f"{title}: it was over already; no access token made from it is good any more"])
    else:
        say([f"{title}: {told.get('ended')} ended"])
    return 0


def _client(admin: Admin, chosen: Namespace) -> tuple[str, str]:
    """Where its sessions are, and what it is called."""
    above = org_found(admin, chosen.org)
    with readable(admin.api.url):
        org = above["org"]
        shown = Shown(above) if chosen.app is None else Shown(app_found(admin, org, chosen.app), above)
        return scope_path(org, chosen.app), shown.title
