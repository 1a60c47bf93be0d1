"""How commands print, and how they say that nothing can be done."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from price_keeper.commandline.terminal import BOLD, PaintedText, can_show, is_terminal, paint, get_terminal_width
from price_keeper.errors import ConfigError
from price_keeper.reporting.letters import cut, padded, printable, width_of

WIDEST = 300  # to this the cells of a column are filled up; one that is longer stands out
LEAST = 12  # to this a column is cut where a terminal has no room
_WHOLE = ("Id", "Session")  # columns that are of use as a whole alone


class NotAsked(ConfigError):
    """Nothing can do what was asked for; the message says what can be."""

    def __init__(self, message: str) -> None:
        super().__init__([message])


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def say(lines: Iterable[str]) -> None:
    """What was written by hand may hold anything; the terminal gets what it can show."""
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        shown = line if isinstance(line, PaintedText) else printable(line)
        print(shown.encode(encoding, "replace").decode(encoding))


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """On a terminal no wider than that, if cutting what is longest helps."""
    widths = [min(WIDEST, max(map(width_of, cells))) for cells in zip(heads, *rows, strict=True)]
    sign = ""
    if is_terminal(sys.stdout):
        sign = "…" if can_show("…", sys.stdout) else "~"
        _narrowed(widths, [head not in _WHOLE for head in heads], get_terminal_width() - 2 * (len(widths) - 1))
    lines = [
        "  ".join(
            padded(cut(printable(cell), room, sign) if sign else cell, room)
            for cell, room in zip(row, widths, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    ]
    return [paint(lines[0], BOLD), *lines[1:]]


def _narrowed(widths: list[int], may_be_cut: Sequence[bool], room: int) -> None:
    while sum(widths) > room:
        widest = max((width, place) for place, width in enumerate(widths) if may_be_cut[place])
        if widest[0] <= LEAST:
            return
        widths[widest[1]] -= 1
