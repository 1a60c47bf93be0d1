"""`price-keeper session`: which sessions a client has, and how they are ended."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace

from proxy.commands.admin import Admin, Record, add_verb, app_found, app_id, org_found, scope_path
from proxy.commands.app import add_org
from proxy.commands.asking import readable
from proxy.commands.settings_shown import Shown, columns, say
from proxy.commands.shared import Commands, print_json
from proxy.model import is_org_id

ALL = "all"


def add_to(commands: Commands) -> None:
    session = commands.add_parser("session", help="tell and end the sessions of a client")
    verbs = session.add_subparsers(metavar="WHAT", required=True)
    text = "list the sessions of an org or one of its apps, the oldest first"
    listing = add_verb(verbs, "list", text, "session list Acme --app shop", _list)
    text = "end a session, and with it the access tokens made from it"
    revoke = add_verb(verbs, "revoke", text, "session revoke Acme --app shop all", _revoke)
    for parser in (listing, revoke):
        add_org(parser)
        parser.add_argument("--app", type=app_id, metavar="APP", help="one of its apps; without it, the org's own")
    text = f"its id, as session list tells it, or {ALL}"
    revoke.add_argument("session", type=_session_id, metavar="SESSION", help=text)


def _session_id(text: str) -> str:
    if text != ALL and not is_org_id(text.lower()):
        raise ArgumentTypeError(f"a session id is a UUID, or {ALL} for every session, not {text[:80]!r}")
    return text.lower()


def _list(admin: Admin, chosen: Namespace) -> int:
    path, title = _client(admin, chosen)
    told = admin.ask("GET", f"{path}/sessions")
    with readable(admin.api.url):
        sessions = told["sessions"]
        rows = [_row(each) for each in sessions]
    if chosen.json:
        print_json(sessions)
    else:
        heads = ("Session", "Began", "Refreshed", "Expires")
        say(columns([heads, *rows]) if rows else [f"{title} has no sessions"])
    return 0


def _row(session: Record) -> tuple[str, ...]:
    return tuple(str(session[name]) for name in ("session_id", "began_at", "refreshed_at", "expires_at"))


def _revoke(admin: Admin, chosen: Namespace) -> int:
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
