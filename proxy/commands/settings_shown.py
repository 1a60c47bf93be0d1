"""What commands about settings print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from proxy.commands.shared import print_json
from proxy.reporting.settings_shown import Shown
from proxy.reporting.table import printable


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def tell(shown: Shown, *, as_json: bool) -> None:
    """What holds for an org or an app."""
    if as_json:
        print_json(shown.record())
    else:
        say(shown.lines())


def say(lines: Iterable[str]) -> None:
    """What was written by hand may hold anything; the terminal gets what it can show."""
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        print(printable(line).encode(encoding, "replace").decode(encoding))
