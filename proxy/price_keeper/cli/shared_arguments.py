"""Types of single arguments, and options that several commands share.

A type parses one argument or raises ArgumentTypeError with a message for the user. Modules that are slow to import are
imported when an argument is parsed. The metavars FILE and DIR make shells complete files and directories.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

from price_keeper.cli.command_parser import CommandParser

MAX_AUDIT_LIMIT = 100_000  # records of one `audit` command
ALL_SESSIONS = "all"  # in place of a session id
_KEY_ID = re.compile(r"(?![.-])[A-Za-z0-9._-]{1,100}")  # a key id is also part of file names


def parse_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) <= 65_535):
        raise ArgumentTypeError(f"a port is a number up to 65535, and 0 any free one, not {text[:20]}")
    return int(text)


def parse_worker_count(text: str) -> int:
    from price_keeper.workers.worker_slot import MAX_WORKERS

    return _parse_integer(text, 1, MAX_WORKERS)


def parse_grace_hours(text: str) -> int:
    from price_keeper.auth.registration import MAX_GRACE_HOURS

    return _parse_integer(text, 0, MAX_GRACE_HOURS, "whole hours")


def parse_audit_limit(text: str) -> int:
    return _parse_integer(text, 1, MAX_AUDIT_LIMIT)


def parse_key_id(text: str) -> str:
    if not _KEY_ID.fullmatch(text):
        raise ArgumentTypeError(f"the name of a key is 1 to 100 letters, digits or any of ._-, not {text[:100]!r}")
    return text


def parse_tag(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ArgumentTypeError(f"a tag is NAME=VALUE, not {text[:100]!r}")
    return name, value


def parse_app_id(text: str) -> str:
    from price_keeper.domain import is_app_id

    if not is_app_id(text):
        raise ArgumentTypeError(
            f"an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .., not {text[:80]!r}"
        )
    return text


def parse_session_id(text: str) -> str:
    from price_keeper.domain import is_org_id

    if text != ALL_SESSIONS and not is_org_id(text.lower()):
        raise ArgumentTypeError(f"a session id is a UUID, or {ALL_SESSIONS} for every session, not {text[:80]!r}")
    return text.lower()


def parse_revoked_id(text: str) -> str:
    from price_keeper.domain import is_org_id

    if not is_org_id(text.lower()):
        raise ArgumentTypeError(f"the id of a session or token is a UUID, not {text[:80]!r}")
    return text.lower()


def parse_period(text: str) -> Any:
    from price_keeper.reports.report_period import parse_report_period

    return _parse_argument(parse_report_period, text)


def parse_group_by(text: str) -> Any:
    from price_keeper.reports.report_rows import parse_dimensions

    return _parse_argument(parse_dimensions, text)


def _parse_argument(parse: Callable[[str], object], text: str) -> object:
    """argparse prints the message of ArgumentTypeError, but not that of ValueError."""
    try:
        return parse(text)
    except ValueError as failure:
        raise ArgumentTypeError(str(failure)) from None


def _parse_integer(text: str, minimum: int, maximum: int, what: str = "a number") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and minimum <= int(text) <= maximum):
        raise ArgumentTypeError(f"expected {what} from {minimum} to {maximum}, not {text[:20]}")
    return int(text)


API_URL_VARIABLE = "PRICE_KEEPER_API_URL"
DEFAULT_API_URL = "http://127.0.0.1:8081"
ADMIN_KEY_VARIABLE = "PRICE_KEEPER_API_KEY"
_CONFIG_HELP = "the configuration; default: config.yaml here"


def add_config_option(parser: CommandParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("config.yaml"),
        metavar="FILE",
        help=_CONFIG_HELP,
    )


def add_store_options(parser: CommandParser) -> None:
    """The options that select a store: that of a configuration, or that of `price-keeper dev`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of price-keeper dev, without a FILE")


def add_json_option(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; errors too")


def add_api_option(parser: CommandParser) -> None:
    text = f"where the control API listens; default: the variable {API_URL_VARIABLE}, or {DEFAULT_API_URL}"
    parser.add_argument("--api", metavar="URL", help=text)


def add_admin_options(parser: CommandParser) -> None:
    text = f"the file with the admin key; default: the variable {ADMIN_KEY_VARIABLE}"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)
    add_api_option(parser)


def add_port_options(parser: CommandParser) -> None:
    for option, purpose in (("--port", "for apps"), ("--control-port", "for health and the control API")):
        default = 8080 if option == "--port" else 8081
        text = f"{purpose}; default: {default}; 0 takes any free one"
        parser.add_argument(option, type=parse_port, default=default, metavar="PORT", help=text)


def add_org_argument(parser: CommandParser) -> None:
    parser.add_argument("org", metavar="ORG", help="the org's id or name")


def add_app_option(parser: CommandParser, text: str) -> None:
    parser.add_argument("--app", type=parse_app_id, metavar="APP", help=text)
