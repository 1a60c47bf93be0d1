"""JSON of which the beginning may be lost: whatever its end still tells. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

_MAX_TRIES: Final = 16
_DECODER: Final = json.JSONDecoder()


def parse_json(data: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return orjson.loads(data)
    except ValueError:
        return None


def find_last_object(data: bytes, name: str, member: str) -> dict[str, Any]:
    """The last object of this name that has this member; empty if there is none."""
    text = data.decode("utf-8", "replace")
    for found in _iter_objects_from_end(text, name):
        if isinstance(found, dict) and member in found:
            return found
    return {}


def _iter_objects_from_end(text: str, name: str) -> Iterator[Any]:
    starts = [match.end() - 1 for match in re.finditer(rf'"{name}"\s*:\s*\{{', text)]
    for start in starts[: -_MAX_TRIES - 1 : -1]:
        try:
            yield _DECODER.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
