"""Commands about who may call: `token`, `rotate`, `session`."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds
from price_keeper.commandline.options import add_admin_options, add_api_option, add_json_option, add_org_argument
from price_keeper.control.terms import DEFAULT_GRACE_HOURS

ACCESS_HEADING = "Access"
CLIENT_SECRET_VARIABLE = "PRICE_KEEPER_CLIENT_SECRET"  # noqa: S105 - its name
DEFAULT_DATA_URL = "http://127.0.0.1:8080"
_EXAMPLE_CLIENT_ID = "org-6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b-app-shop"


def add_access_commands(root: CommandParser) -> None:
    _add_token(root)
    _add_rotate(root)
    _add_session(root)


def _add_token(root: CommandParser) -> None:
    token = root.add_command(
        "token",
        "log a client in and print its access token",
        "The secret is never an argument, which every user of the machine could see.",
        ("The token alone", f"price-keeper token {_EXAMPLE_CLIENT_ID} --secret-file shop.secret"),
        (
            "Point this shell's AWS SDKs at the sidecar",
            f'eval "$(price-keeper token {_EXAMPLE_CLIENT_ID} --secret-file shop.secret --env)"',
        ),
        target="token.run_token",
        heading=ACCESS_HEADING,
    )
    token.add_argument("client_id", metavar="CLIENT_ID", help="org-ORG or org-ORG-app-APP")
    text = f"the file with its secret; default: the variable {CLIENT_SECRET_VARIABLE}, or a question without echo"
    token.add_argument("--secret-file", type=Path, metavar="FILE", help=text)
    outputs = token.add_mutually_exclusive_group()
    outputs.add_argument("--env", action="store_true", help="print the lines that an app's shell needs")
    text = "print all that was answered, the refresh token too; errors as JSON"
    outputs.add_argument("--json", action="store_true", help=text)
    text = f"with --env: where the app sends its calls; default: {DEFAULT_DATA_URL}"
    token.add_argument("--data", default=DEFAULT_DATA_URL, metavar="URL", help=text)
    add_api_option(token)


def _add_rotate(root: CommandParser) -> None:
    rotate = root.add_command(
        "rotate",
        "make a client's next secret and print it",
        "The secret so far stays good for a while, so that nothing stops. The new one alone goes to the output, so "
        "that it can be sent on to where it is kept.",
        ("An app's, with two hours to change it", "price-keeper rotate Acme --app shop --grace 2 > shop.secret"),
        ("For somebody else to fetch", "price-keeper rotate Acme --app shop --token-only"),
        target="rotate.run_rotate",
        heading=ACCESS_HEADING,
    )
    add_org_argument(rotate)
    rotate.add_argument(
        "--app", type=kinds.parse_app_id, metavar="APP", help="one of its apps; without it, the org's own secret"
    )
    text = f"how long the secret so far stays good, 0 to 168; default: {DEFAULT_GRACE_HOURS}"
    rotate.add_argument(
        "--grace", type=kinds.parse_grace_hours, default=DEFAULT_GRACE_HOURS, metavar="HOURS", help=text
    )
    text = "print the retrieval token, for somebody else to fetch the secret once within ten minutes"
    rotate.add_argument("--token-only", action="store_true", help=text)
    add_json_option(rotate)
    add_admin_options(rotate)


def _add_session(root: CommandParser) -> None:
    session = root.add_command("session", "tell and end the sessions of a client", "", heading=ACCESS_HEADING)
    listing = session.add_command(
        "list",
        "list the sessions of an org or one of its apps, the oldest first",
        "",
        ("Those of an app", "price-keeper session list Acme --app shop"),
        target="session.run_session_list",
    )
    revoke = session.add_command(
        "revoke",
        "end a session, and with it the access tokens made from it",
        "",
        ("All of an app's", "price-keeper session revoke Acme --app shop all"),
        target="session.run_session_revoke",
    )
    for parser in (listing, revoke):
        add_org_argument(parser)
        parser.add_argument(
            "--app", type=kinds.parse_app_id, metavar="APP", help="one of its apps; without it, the org's own"
        )
        add_json_option(parser)
        add_admin_options(parser)
    text = f"its id, as session list tells it, or {kinds.ALL_SESSIONS}"
    revoke.add_argument("session", type=kinds.parse_session_id, metavar="SESSION", help=text)
    revoke.suggestions["SESSION"] = (kinds.ALL_SESSIONS,)
