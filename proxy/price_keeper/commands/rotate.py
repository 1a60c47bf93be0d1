"""`price-keeper rotate`: makes a client's next secret, and fetches it once."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    ApiOutcomeUnknown,
    ApiRefusal,
    ControlApiClient,
    StatusHints,
    build_scope_path,
    read_visible_text,
    resolve_org_id,
)
from price_keeper.cli.output import print_json
from price_keeper.control.terms import RETRIEVAL_TOKEN_HEADER
from price_keeper.errors import PriceKeeperError

MAX_FETCHES = 3  # while the store is away the retrieval token stays good
MAX_WAIT_SECONDS = 10

_ROTATE_AGAIN = "Rotate again with the same grace: a secret that nobody fetched pushes nothing out"
_NOT_FETCHED = "the credentials are rotated, but the new secret could not be fetched: {why}. " + _ROTATE_AGAIN
_UNCLEAR_ROTATION = "{why}; the credentials may be rotated all the same. " + _ROTATE_AGAIN
_LOST_ROTATION = "{why}. " + _ROTATE_AGAIN
_RETRIEVAL_TOKEN_FIELD, _CLIENT_SECRET_FIELD = "secret_retrieval_token", "client_secret"


def run_rotate(args: Namespace) -> int:
    admin = AdminClient(args)
    org = resolve_org_id(admin, args.org)
    path = f"{build_scope_path(org, args.app)}/credentials"
    missing_hint = (
        ORG_MISSING_HINT if args.app is None else {404: f"price-keeper app list {org} tells which apps there are"}
    )
    issued = _rotate(admin, path, args.grace, missing_hint)
    _print_rotation(args, issued if args.token_only else _fetch_secret(admin.api, path, issued))
    return 0


def _rotate(admin: AdminClient, path: str, grace: int, hints: StatusHints) -> dict[str, Any]:
    try:
        issued = admin.request("POST", f"{path}/rotate", {"grace_hours": grace}, hints)
    except ApiOutcomeUnknown as failure:
        raise ApiOutcomeUnknown(_LOST_ROTATION.format(why=failure)) from None
    try:
        return _check_response(issued, _RETRIEVAL_TOKEN_FIELD, admin.api)
    except PriceKeeperError as failure:
        raise PriceKeeperError(_UNCLEAR_ROTATION.format(why=failure)) from None


def _check_response(response: dict[str, Any], name: str, api: ControlApiClient) -> dict[str, Any]:
    read_visible_text(response, "client_id", api.url)
    read_visible_text(response, name, api.url)
    return response


def _fetch_secret(api: ControlApiClient, path: str, issued: dict[str, Any]) -> dict[str, Any]:
    headers = {RETRIEVAL_TOKEN_HEADER: issued[_RETRIEVAL_TOKEN_FIELD]}
    for attempts_left in reversed(range(MAX_FETCHES)):
        try:
            return _check_response(api.request("GET", f"{path}/secret", headers=headers), _CLIENT_SECRET_FIELD, api)
        except ApiRefusal as failure:
            if failure.status != 503 or not attempts_left:
                raise PriceKeeperError(_NOT_FETCHED.format(why=failure)) from None
            time.sleep(min(failure.retry_after or 1, MAX_WAIT_SECONDS))
        except PriceKeeperError as failure:
            raise PriceKeeperError(_NOT_FETCHED.format(why=failure)) from None
    raise AssertionError("the last one answers or raises")


def _print_rotation(args: Namespace, response: dict[str, Any]) -> None:
    """What is secret alone goes to the output, so that it can be sent on to where it is kept."""
    if args.json:
        print_json({**response, "grace_hours": args.grace})
        return
    print(response[_RETRIEVAL_TOKEN_FIELD if args.token_only else _CLIENT_SECRET_FIELD])
    hours = "ends now" if not args.grace else f"stays good for {args.grace} h"
    print(f"{response['client_id']}: rotated; the secret so far {hours}", file=sys.stderr)
