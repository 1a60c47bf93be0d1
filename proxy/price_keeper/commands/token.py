"""`price-keeper token`: logs a client in, and prints what an app needs of it."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from price_keeper.cli.api_client import ControlApiClient, read_secret, read_visible_text, validate_secret
from price_keeper.cli.output import CommandError, print_json
from price_keeper.cli.root_parser import CLIENT_SECRET_VARIABLE
from price_keeper.config.checks import url as url_complaint
from price_keeper.model import parse_client_id

DEFAULT_REGION = "us-east-1"  # SDKs want one; to which region a call goes, the sidecar says


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
    """Lines for a shell. SDKs send a Bedrock API key that it has set, and then no session token."""
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
