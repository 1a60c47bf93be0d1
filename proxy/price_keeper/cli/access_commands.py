"""`price-keeper token`, `rotate` and `session`: log a client in, rotate its secret, list, end and look up its
sessions.

Secrets are never arguments, which other users of the machine could see. Only the secret or token goes to standard
output, so that it can be piped to a secret store.
"""

from __future__ import annotations

import getpass
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from price_keeper.cli.api_client import (
    ORG_MISSING_HINT,
    AdminClient,
    ApiOutcomeUnknown,
    ApiRecord,
    ApiRefusal,
    ControlApiClient,
    StatusHints,
    build_scope_path,
    check_response_shape,
    fetch_app,
    fetch_org,
    read_secret,
    read_visible_text,
    resolve_org_id,
    validate_secret,
)
from price_keeper.cli.output import CommandError, format_columns, print_json, print_lines
from price_keeper.cli.root_parser import CLIENT_SECRET_VARIABLE
from price_keeper.cli.settings_view import SettingsView
from price_keeper.cli.shared_arguments import ALL_SESSIONS
from price_keeper.config.value_checks import url as url_complaint
from price_keeper.control.api_constants import RETRIEVAL_TOKEN_HEADER
from price_keeper.domain import parse_client_id
from price_keeper.errors import PriceKeeperError
from price_keeper.reports.settings_report import format_utc

DEFAULT_REGION = "us-east-1"  # SDKs require a region, but the sidecar selects the one that a call goes to


def run_token(args: Namespace) -> int:
    if parse_client_id(args.client_id) is None:
        raise CommandError("a client id is org-ORG or org-ORG-app-APP, where ORG is a UUID in lower case")
    complaint = url_complaint(args.data)
    if complaint:
        raise CommandError(f"--data: {complaint}")
    api = ControlApiClient(args.api)
    body = {"client_id": args.client_id, "client_secret": _read_client_secret(args)}
    response = api.request("POST", "/auth/token", body)
    read_visible_text(response, "access_token", api.url)
    _print_token(args, response)
    return 0


def _print_token(args: Namespace, response: Mapping[str, Any]) -> None:
    if args.json:
        print_json(response)
    elif args.env:
        print("\n".join(_build_exports(args.data, response["access_token"])))
    else:
        print(response["access_token"])


def _build_exports(data_url: str, token: str) -> list[str]:
    """Lines for a shell. They unset the Bedrock API key: SDKs would send it instead of the session token."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    variables = {
        "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": data_url,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_SESSION_TOKEN": token,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return ["unset AWS_BEARER_TOKEN_BEDROCK", *exports]


def _read_client_secret(args: Namespace) -> str:
    description = "a client secret"
    secret = read_secret(args.secret_file, CLIENT_SECRET_VARIABLE, description)
    if secret is not None:
        return secret
    if not sys.stdin.isatty():
        raise CommandError(
            f"the client's secret comes from the variable {CLIENT_SECRET_VARIABLE}, or from --secret-file FILE"
        )
    try:
        return validate_secret(getpass.getpass(f"Secret of {args.client_id}: ").strip(), "what was typed", description)
    except EOFError:
        raise CommandError("no secret was typed") from None


MAX_FETCHES = 3  # the retrieval token stays valid while the store is unreachable
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
    _print_rotation(args, issued if args.token_only else fetch_secret(admin.api, path, issued, _NOT_FETCHED))
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


def fetch_secret(api: ControlApiClient, path: str, issued: ApiRecord, not_fetched: str) -> ApiRecord:
    """The secret for a retrieval token, which is good once. `not_fetched` says {why} not, and what to do then."""
    headers = {RETRIEVAL_TOKEN_HEADER: issued[_RETRIEVAL_TOKEN_FIELD]}
    for attempts_left in reversed(range(MAX_FETCHES)):
        try:
            return _check_response(api.request("GET", f"{path}/secret", headers=headers), _CLIENT_SECRET_FIELD, api)
        except ApiRefusal as failure:
            if failure.status != 503 or not attempts_left:
                raise PriceKeeperError(not_fetched.format(why=failure)) from None
            time.sleep(min(failure.retry_after or 1, MAX_WAIT_SECONDS))
        except PriceKeeperError as failure:
            raise PriceKeeperError(not_fetched.format(why=failure)) from None
    raise AssertionError("the last one answers or raises")


def _print_rotation(args: Namespace, response: dict[str, Any]) -> None:
    """Only the secret goes to standard output, so that it can be piped to a secret store."""
    if args.json:
        print_json({**response, "grace_hours": args.grace})
        return
    print(response[_RETRIEVAL_TOKEN_FIELD if args.token_only else _CLIENT_SECRET_FIELD])
    hours = "ends now" if not args.grace else f"stays good for {args.grace} h"
    print(f"{response['client_id']}: rotated; the secret so far {hours}", file=sys.stderr)


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


def run_session_show(args: Namespace) -> int:
    admin = AdminClient(args)
    path, title = _resolve_client(admin, args)
    revocation = admin.request("GET", f"{path}/revocations/{args.session}")
    if args.json:
        print_json(revocation)
        return 0
    with check_response_shape(admin.api.url):
        revoked_at, expiry, kept_until = (
            format_utc(int(revocation[name]))
            for name in ("revoked_at_epoch", "original_expiry_epoch", "expires_at_epoch")
        )
        lines = [
            f"{title}: {revocation['id']} is revoked",
            f"  token type      {revocation['token_type']}",
            f"  client          {revocation['client_id']}",
            f"  revoked at      {revoked_at}",
            f"  would expire    {expiry}",
            f"  row kept until  {kept_until}",
        ]
    print_lines(lines)
    return 0


def _resolve_client(admin: AdminClient, args: Namespace) -> tuple[str, str]:
    """The API path of the client's sessions, and its title for people."""
    org_record = fetch_org(admin, args.org)
    with check_response_shape(admin.api.url):
        org = org_record["org"]
        view = (
            SettingsView(org_record) if args.app is None else SettingsView(fetch_app(admin, org, args.app), org_record)
        )
        return build_scope_path(org, args.app), view.title
