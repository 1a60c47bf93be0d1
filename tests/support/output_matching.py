"""Whether what a command printed is what a page says it prints. `…` stands for whatever differs. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

ANYTHING = "…"


def matches_text(expected: str, printed: str) -> bool:
    """Line by line; a line that is `…` alone stands for any number of them, and spaces for as many as there are."""
    pattern = "".join(map(_line_pattern, expected.strip("\n").splitlines()))
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


def _line_pattern(expected: str) -> str:
    if expected.strip() == ANYTHING:
        return r"(?:.*\n)*?"
    words = [".*".join(map(re.escape, word.split(ANYTHING))) for word in expected.split()]
    return r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n"


def matches_json(expected: str, printed: str) -> bool:
    """`"…"` stands for any value; as a name, for more names; at the end of a list, for more of it."""
    try:
        return _matches_value(json.loads(expected), json.loads(printed))
    except ValueError:
        return False


def _matches_value(expected: Any, actual: Any) -> bool:
    if isinstance(expected, str) and isinstance(actual, str):
        return re.fullmatch(".*".join(map(re.escape, expected.split(ANYTHING))), actual, re.DOTALL) is not None
    if expected == ANYTHING:
        return True
    if isinstance(expected, dict) and isinstance(actual, dict):
        named = {name: value for name, value in expected.items() if name != ANYTHING}
        is_whole = named.keys() == actual.keys() if ANYTHING not in expected else named.keys() <= actual.keys()
        return is_whole and all(_matches_value(value, actual[name]) for name, value in named.items())
    if isinstance(expected, list) and isinstance(actual, list):
        first = expected[:-1] if expected[-1:] == [ANYTHING] else expected
        is_whole = len(first) == len(actual) if first is expected else len(first) <= len(actual)
        return is_whole and all(map(_matches_value, first, actual))
    return type(expected) is type(actual) and bool(expected == actual)
