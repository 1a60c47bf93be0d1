"""What a single argument may be. What takes long to import is imported when there is something to be looked at."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

MOST_CHANGES = 100_000  # of an audit, at once
ALL = "all"  # of sessions
_KID = re.compile(r"(?![.-])[A-Za-z0-9._-]{1,100}")  # it is the name of files, too


def port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) <= 65_535):
        raise ArgumentTypeError(f"a port is a number up to 65535, and 0 any free one, not {text[:20]}")
    return int(text)


def workers(text: str) -> int:
    from price_keeper.workers.place import MAX_WORKERS

    return _whole(text, 1, MAX_WORKERS)


def hours(text: str) -> int:
    from price_keeper.auth.registering import MAX_GRACE_HOURS

    return _whole(text, 0, MAX_GRACE_HOURS, "whole hours")


def changes(text: str) -> int:
    return _whole(text, 1, MOST_CHANGES)


def kid(text: str) -> str:
    if not _KID.fullmatch(text):
        raise ArgumentTypeError(f"the name of a key is 1 to 100 letters, digits or any of ._-, not {text[:100]!r}")
    return text


def app_id(text: str) -> str:
    from price_keeper.model import is_app_id

    if not is_app_id(text):
        raise ArgumentTypeError(
            f"an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .., not {text[:80]!r}"
        )
    return text


def session_id(text: str) -> str:
    from price_keeper.model import is_org_id

    if text != ALL and not is_org_id(text.lower()):
        raise ArgumentTypeError(f"a session id is a UUID, or {ALL} for every session, not {text[:80]!r}")
    return text.lower()


def days(text: str) -> Any:
    from price_keeper.reporting.days import parse

    return _parsed(parse, text)


def dimensions(text: str) -> Any:
    from price_keeper.reporting.totals import dimensions

    return _parsed(dimensions, text)


def _parsed(parse: Callable[[str], object], text: str) -> object:
    """argparse tells the message of this error alone."""
    try:
        return parse(text)
    except ValueError as failure:
        raise ArgumentTypeError(str(failure)) from None


def _whole(text: str, least: int, most: int, what: str = "a number") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and least <= int(text) <= most):
        raise ArgumentTypeError(f"expected {what} from {least} to {most}, not {text[:20]}")
    return int(text)
