"""`price-keeper rotate`: makes a client's next secret, and fetches it once."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from price_keeper.commands.admin import ORG_MISSING_HINT, AdminClient, StatusHints, resolve_org_id, build_scope_path
from price_keeper.commands.asking import ControlApiClient, ApiRefusal, ApiOutcomeUnknown, read_visible_text
from price_keeper.commands.shared import print_json
from price_keeper.control.terms import RETRIEVAL_TOKEN_HEADER
from price_keeper.errors import PriceKeeperError

FETCHES = 3  # while the store is away the retrieval token stays good
LONGEST_WAIT_SECONDS = 10

_AGAIN = "Rotate again with the same grace: a secret that nobody fetched pushes nothing out"
_UNFETCHED = "the credentials are rotated, but the new secret could not be fetched: {why}. " + _AGAIN
_UNTOLD = "{why}; the credentials may be rotated all the same. " + _AGAIN
_LOST = "{why}. " + _AGAIN
_RETRIEVAL, _SECRET = "secret_retrieval_token", "client_secret"


def rotate(args: Namespace) -> int:
    admin = AdminClient(args)
    org = resolve_org_id(admin, args.org)
    path = f"{build_scope_path(org, args.app)}/credentials"
    there = ORG_MISSING_HINT if args.app is None else {404: f"price-keeper app list {org} tells which apps there are"}
    issued = _issued(admin, path, args.grace, there)
    _tell(args, issued if args.token_only else _fetched(admin.api, path, issued))
    return 0


def _issued(admin: AdminClient, path: str, grace: int, hints: StatusHints) -> dict[str, Any]:
    try:
        issued = admin.request("POST", f"{path}/rotate", {"grace_hours": grace}, hints)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(_LOST.format(why=failure)) from None
    try:
        return _checked(issued, _RETRIEVAL, admin.api)
    except PriceKeeperError as failure:
        raise PriceKeeperError(_UNTOLD.format(why=failure)) from None


def _checked(told: dict[str, Any], name: str, api: ControlApiClient) -> dict[str, Any]:
    read_visible_text(told, "client_id", api.url)
    read_visible_text(told, name, api.url)
    return told


def _fetched(api: ControlApiClient, path: str, issued: dict[str, Any]) -> dict[str, Any]:
    shown = {RETRIEVAL_TOKEN_HEADER: issued[_RETRIEVAL]}
    for left in reversed(range(FETCHES)):
        try:
            return _checked(api.request("GET", f"{path}/secret", headers=shown), _SECRET, api)
        except ApiRefusal as failure:
            if failure.status != 503 or not left:
                raise PriceKeeperError(_UNFETCHED.format(why=failure)) from None
            time.sleep(min(failure.retry_after or 1, LONGEST_WAIT_SECONDS))
        except PriceKeeperError as failure:
            raise PriceKeeperError(_UNFETCHED.format(why=failure)) from None
    raise AssertionError("the last one answers or raises")


def _tell(args: Namespace, told: dict[str, Any]) -> None:
    """What is secret alone goes to the output, so that it can be sent on to where it is kept."""
    if args.json:
        print_json({**told, "grace_hours": args.grace})
        return
    print(told[_RETRIEVAL if args.token_only else _SECRET])
    hours = "ends now" if not args.grace else f"stays good for {args.grace} h"
    print(f"{told['client_id']}: rotated; the secret so far {hours}", file=sys.stderr)
