"""Output of commands: lines, JSON, aligned columns, and the progress of a long command.

Results go to standard output, progress to standard error: on a terminal one line that is redrawn, otherwise a plain
line every 10 seconds. Unprintable characters are replaced, so that names cannot control the terminal.

A command raises CommandError when it cannot do what was requested; the message says what to do instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from price_keeper.cli.terminal import BOLD, PaintedText, can_show, get_terminal_width, is_terminal, paint
from price_keeper.errors import ConfigError
from price_keeper.reports.terminal_text import make_printable, measure_width, pad_to_width, truncate

MAX_PADDED_WIDTH = 300  # cells are padded at most to this width; a longer cell overflows its column
MIN_COLUMN_WIDTH = 12  # columns are truncated at least to this width on a narrow terminal
_UNCUT_COLUMNS = ("Id", "Session")  # a truncated id is useless


class CommandError(ConfigError):
    """The command cannot do what was requested; the message says what to do instead."""

    is_located = False

    def __init__(self, *messages: str) -> None:
        super().__init__(messages)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines. Names may hold any character, so unprintable ones are replaced."""
    encoding = sys.stdout.encoding or "ascii"
    for line in lines:
        safe_line = line if isinstance(line, PaintedText) else make_printable(line)
        print(safe_line.encode(encoding, "replace").decode(encoding))


def format_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned columns. On a terminal the widest columns are truncated to fit its width where possible."""
    widths = [min(MAX_PADDED_WIDTH, max(map(measure_width, cells))) for cells in zip(headers, *rows, strict=True)]
    ellipsis = ""
    if is_terminal(sys.stdout):
        ellipsis = "…" if can_show("…", sys.stdout) else "~"
        _narrow_columns(
            widths, [head not in _UNCUT_COLUMNS for head in headers], get_terminal_width() - 2 * (len(widths) - 1)
        )
    lines = [
        "  ".join(
            pad_to_width(truncate(make_printable(cell), column_width, ellipsis) if ellipsis else cell, column_width)
            for cell, column_width in zip(row, widths, strict=True)
        ).rstrip()
        for row in (headers, *rows)
    ]
    return [paint(lines[0], BOLD), *lines[1:]]


def _narrow_columns(widths: list[int], may_be_cut: Sequence[bool], available_width: int) -> None:
    while sum(widths) > available_width:
        widest = max((width, index) for index, width in enumerate(widths) if may_be_cut[index])
        if widest[0] <= MIN_COLUMN_WIDTH:
            return
        widths[widest[1]] -= 1


REDRAW_SECONDS = 0.1
LOG_LINE_SECONDS = 10.0  # an hour adds some hundreds of lines to a log


class Progress:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._is_interactive = is_terminal(sys.stderr)
        self._next_update_at = now() + (0 if self._is_interactive else LOG_LINE_SECONDS)
        self._is_shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, at: TracebackType | None
    ) -> None:
        self.clear()

    def update(self, text: str) -> None:
        now = self._now()
        if now < self._next_update_at:
            return
        self._next_update_at = now + (REDRAW_SECONDS if self._is_interactive else LOG_LINE_SECONDS)
        if self._is_interactive:
            line = truncate(make_printable(text), get_terminal_width() - 1, "~")
            self._write(f"\r{line}\x1b[K")
            self._is_shown = True
        else:
            self._write(f"{make_printable(text)}\n")

    def clear(self) -> None:
        """Erase the progress line. Call it before printing anything else."""
        if self._is_shown:
            self._write("\r\x1b[K")
            self._is_shown = False
            self._next_update_at = self._now()

    def _write(self, text: str) -> None:
        encoding = sys.stderr.encoding or "ascii"
        sys.stderr.write(text.encode(encoding, "replace").decode(encoding))
        sys.stderr.flush()
