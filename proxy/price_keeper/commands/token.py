"""`price-keeper token`: logs a client in, and prints what an app needs of it."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from price_keeper.commandline.access import CLIENT_SECRET_VARIABLE
from price_keeper.commands.asking import ControlApiClient, validate_secret, read_secret, read_visible_text
from price_keeper.commands.shared import CommandError, print_json
from price_keeper.config.checks import url as url_complaint
from price_keeper.model import parse_client_id

USUAL_REGION = "us-east-1"  # SDKs want one; to which region a call goes, the sidecar says


def token(args: Namespace) -> int:
    if parse_client_id(args.client_id) is None:
        raise CommandError("a client id is org-ORG or org-ORG-app-APP, where ORG is a UUID in lower case")
    complaint = url_complaint(args.data)
    if complaint:
        raise CommandError(f"--data: {complaint}")
    api = ControlApiClient(args.api)
    given = {"client_id": args.client_id, "client_secret": _secret(args)}
    told = api.request("POST", "/auth/token", given)
    read_visible_text(told, "access_token", api.url)
    _print(args, told)
    return 0


def _print(args: Namespace, told: Mapping[str, Any]) -> None:
    if args.json:
        print_json(told)
    elif args.env:
        print("\n".join(_exports(args.data, told["access_token"])))
    else:
        print(told["access_token"])


def _exports(data: str, token: str) -> list[str]:
    """Lines for a shell. SDKs send a Bedrock API key that it has set, and then no session token."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or USUAL_REGION
    variables = {
        "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": data,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_SESSION_TOKEN": token,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return ["unset AWS_BEARER_TOKEN_BEDROCK", *exports]


def _secret(args: Namespace) -> str:
    what = "a client secret"
    found = read_secret(args.secret_file, CLIENT_SECRET_VARIABLE, what)
    if found is not None:
        return found
    if not sys.stdin.isatty():
        raise CommandError(f"the client's secret comes from the variable {CLIENT_SECRET_VARIABLE}, or from --secret-file FILE")
    try:
        return validate_secret(getpass.getpass(f"Secret of {args.client_id}: ").strip(), "what was typed", what)
    except EOFError:
        raise CommandError("no secret was typed") from None
