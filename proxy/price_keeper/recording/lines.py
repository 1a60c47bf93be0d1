"""A journal's lines: a checksum, a space, a JSON list, a line feed. Pure.

A process may die in the middle of a line, and a machine in the middle of a file. The checksum tells what was written
whole. Where nothing was written yet there are zeros, which no line has in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import orjson

_CRC_DIGITS = 8


def encode_line(content: bytes) -> bytes:
    return b"%08x %b\n" % (crc32(content), content)


@dataclass(frozen=True, slots=True)
class JournalLines:
    """`values` of the good ones, with their `texts` as they stand there; `ends` are the offsets behind them. `spoilt`
    counts what was no line; `end` is the offset behind the last good one, where writing may go on.

    `has_gaps`: before that end is something that may have been a line, as one behind it that was never finished is not.
    """

    values: list[list[Any]]
    corrupt_lines: int
    end: int
    has_gaps: bool = False
    texts: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def decode_lines(data: bytes) -> JournalLines:
    """A line that is torn or spoilt is passed over: those behind it are still good."""
    found: list[list[Any]] = []
    texts: list[bytes] = []
    ends: list[int] = []
    at = end = corrupt_lines = 0
    has_gaps = False
    while (stop := data.find(b"\n", at)) >= 0:
        torn, hole, text = data[at:stop].rpartition(b"\0")
        values, start, at = _decode_line(text), at, stop + 1
        if values is not None:
            found.append(values)
            texts.append(data[stop - len(text) : at])
            ends.append(at)
            has_gaps |= start != end or bool(hole)
            end = at
        if values is None or torn.strip(b"\0"):
            corrupt_lines += 1
    return JournalLines(found, corrupt_lines + bool(data[at:].strip(b"\0")), end, has_gaps, texts, ends)


def _decode_line(text: bytes) -> list[Any] | None:
    content = text[_CRC_DIGITS + 1 :]
    if text[: _CRC_DIGITS + 1] != b"%08x " % crc32(content):
        return None
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return values if isinstance(values, list) and values else None
