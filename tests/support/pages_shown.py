"""Whether what a command printed is what a page says it prints. `…` stands for whatever differs. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

ANYTHING = "…"


def fits(shown: str, printed: str) -> bool:
    """Line by line; a line that is `…` alone stands for any number of them, and spaces for as many as there are."""
    pattern = "".join(map(_line, shown.strip("\n").splitlines()))
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


def _line(shown: str) -> str:
    if shown.strip() == ANYTHING:
        return r"(?:.*\n)*?"
    words = [".*".join(map(re.escape, word.split(ANYTHING))) for word in shown.split()]
    return r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n"


def fits_json(shown: str, printed: str) -> bool:
    """`"…"` stands for any value; as a name, for more names; at the end of a list, for more of it."""
    try:
        return _is_such(json.loads(shown), json.loads(printed))
    except ValueError:
        return False


def _is_such(shown: Any, found: Any) -> bool:
    if isinstance(shown, str) and isinstance(found, str):
        return re.fullmatch(".*".join(map(re.escape, shown.split(ANYTHING))), found, re.DOTALL) is not None
    if shown == ANYTHING:
        return True
    if isinstance(shown, dict) and isinstance(found, dict):
        named = {name: value for name, value in shown.items() if name != ANYTHING}
        is_whole = named.keys() == found.keys() if ANYTHING not in shown else named.keys() <= found.keys()
        return is_whole and all(_is_such(value, found[name]) for name, value in named.items())
    if isinstance(shown, list) and isinstance(found, list):
        first = shown[:-1] if shown[-1:] == [ANYTHING] else shown
        is_whole = len(first) == len(found) if first is shown else len(first) <= len(found)
        return is_whole and all(map(_is_such, first, found))
    return type(shown) is type(found) and bool(shown == found)
