"""`price-keeper rotate`: makes a client's next secret, and fetches it once."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from proxy.auth.registering import MOST_GRACE_HOURS
from proxy.commands.admin import Admin, add_admin, scope_path
from proxy.commands.asking import Api, Refused, Unanswered, visible
from proxy.commands.places import NotAsked
from proxy.commands.shared import Commands, add_json_option, print_json
from proxy.control.credentials import RETRIEVAL_TOKEN, USUAL_GRACE_HOURS
from proxy.errors import PriceKeeperError
from proxy.model import is_app_id, is_org_id

FETCHES = 3  # while the store is away the retrieval token stays good
LONGEST_WAIT_SECONDS = 10

_AGAIN = "Rotate again with the same grace: a secret that nobody fetched pushes nothing out"
_UNFETCHED = "the credentials are rotated, but the new secret could not be fetched: {why}. " + _AGAIN
_UNTOLD = "{why}; the credentials may be rotated all the same. " + _AGAIN
_LOST = "{why}. " + _AGAIN
_RETRIEVAL, _SECRET = "secret_retrieval_token", "client_secret"

_EXAMPLE = "Example: price-keeper rotate 6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b --app shop --grace 2"


def add_to(commands: Commands) -> None:
    rotate = commands.add_parser("rotate", help="make a client's next secret and print it", epilog=_EXAMPLE)
    rotate.add_argument("org", metavar="ORG", help="the org's id, a UUID")
    rotate.add_argument("--app", metavar="APP", help="one of its apps; without it, the org's own secret")
    _add_how(rotate)
    add_json_option(rotate)
    add_admin(rotate)
    rotate.set_defaults(run=_rotate)


def _add_how(rotate: ArgumentParser) -> None:
    text = f"how long the secret so far stays good, 0 to {MOST_GRACE_HOURS}; default: {USUAL_GRACE_HOURS}"
    rotate.add_argument("--grace", type=_hours, default=USUAL_GRACE_HOURS, metavar="HOURS", help=text)
    text = "print the retrieval token, for somebody else to fetch the secret once within ten minutes"
    rotate.add_argument("--token-only", action="store_true", help=text)


def _hours(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > MOST_GRACE_HOURS:
        raise ArgumentTypeError(f"expected whole hours from 0 to {MOST_GRACE_HOURS}, not {text[:20]!r}")
    return int(text)


def _rotate(chosen: Namespace) -> int:
    path = _path(chosen)
    admin = Admin(chosen)
    issued = _issued(admin, path, chosen.grace)
    _tell(chosen, issued if chosen.token_only else _fetched(admin.api, path, issued))
    return 0


def _issued(admin: Admin, path: str, grace: int) -> dict[str, Any]:
    try:
        issued = admin.ask("POST", f"{path}/rotate", {"grace_hours": grace})
    except Unanswered as failure:
        raise Unanswered(_LOST.format(why=failure)) from None
    try:
        return _checked(issued, _RETRIEVAL, admin.api)
    except PriceKeeperError as failure:
        raise PriceKeeperError(_UNTOLD.format(why=failure)) from None


def _checked(told: dict[str, Any], name: str, api: Api) -> dict[str, Any]:
    visible(told, "client_id", api.url)
    visible(told, name, api.url)
    return told


def _path(chosen: Namespace) -> str:
    if not is_org_id(chosen.org):
        raise NotAsked("ORG is the org's id, a UUID in lower case, as price-keeper org list tells it")
    if chosen.app is not None and not is_app_id(chosen.app):
        raise NotAsked("--app: an app id is 1 to 64 letters, digits or any of ._-, and neither . nor ..")
    return f"{scope_path(chosen.org, chosen.app)}/credentials"


def _fetched(api: Api, path: str, issued: dict[str, Any]) -> dict[str, Any]:
    shown = {RETRIEVAL_TOKEN: issued[_RETRIEVAL]}
    for left in reversed(range(FETCHES)):
        try:
            return _checked(api.ask("GET", f"{path}/secret", headers=shown), _SECRET, api)
        except Refused as failure:
            if failure.status != 503 or not left:
                raise PriceKeeperError(_UNFETCHED.format(why=failure)) from None
            time.sleep(min(failure.wait or 1, LONGEST_WAIT_SECONDS))
        except PriceKeeperError as failure:
            raise PriceKeeperError(_UNFETCHED.format(why=failure)) from None
    raise AssertionError("the last one answers or raises")


def _tell(chosen: Namespace, told: dict[str, Any]) -> None:
    """What is secret alone goes to the output, so that it can be sent on to where it is kept."""
    if chosen.json:
        print_json({**told, "grace_hours": chosen.grace})
        return
    print(told[_RETRIEVAL if chosen.token_only else _SECRET])
    hours = "ends now" if not chosen.grace else f"stays good for {chosen.grace} h"
    print(f"{told['client_id']}: rotated; the secret so far {hours}", file=sys.stderr)
