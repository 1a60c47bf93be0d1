"""A journal's lines: a checksum, a space, a JSON list, a line feed. Pure.

A process may die, and a disk fill up, in the middle of a line. The checksum tells what was written whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import orjson

_CRC_DIGITS = 8


def line(content: bytes) -> bytes:
    return b"%08x %b\n" % (crc32(content), content)


@dataclass(frozen=True, slots=True)
class Lines:
    """`spoilt` counts what was no line; `end` is the offset behind the last good one, where writing may go on."""

    values: list[list[Any]]
    spoilt: int
    end: int


def lines_in(data: bytes) -> Lines:
    """A line that is torn or spoilt is passed over: those behind it are still good."""
    found: list[list[Any]] = []
    at = end = spoilt = 0
    while at < len(data):
        stop = data.find(b"\n", at)
        values = _values(data[at:stop]) if stop >= 0 else None
        at = stop + 1 if stop >= 0 else len(data)
        if values is None:
            spoilt += 1
        else:
            found.append(values)
            end = at
    return Lines(found, spoilt, end)


def _values(text: bytes) -> list[Any] | None:
    content = text[_CRC_DIGITS + 1 :]
    if text[: _CRC_DIGITS + 1] != b"%08x " % crc32(content):
        return None
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return values if isinstance(values, list) and values else None
