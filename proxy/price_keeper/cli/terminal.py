"""The abilities of an output stream: colours, width and characters.

Colours are used on a terminal. NO_COLOR disables them; FORCE_COLOR and CLICOLOR_FORCE enable them for any stream. Text
from outside is made printable before it is coloured.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from price_keeper.reports.terminal_text import make_printable

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_colored(stream: TextIO) -> bool:
    """NO_COLOR has precedence over the variables that force colours."""
    if os.environ.get("NO_COLOR"):
        return False
    return is_terminal(stream) or any(
        os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    )


def get_terminal_width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


class PaintedText(str):
    """Text that may go to the terminal unchanged: all text from outside in it was made printable."""

    __slots__ = ()

    def __add__(self, text: str) -> PaintedText:
        return PaintedText(f"{self}{_make_safe(text)}")

    def __radd__(self, text: str) -> PaintedText:
        return PaintedText(f"{_make_safe(text)}{self}")


def paint(text: str, color: str, stream: TextIO | None = None) -> PaintedText:
    """Colour the text if the stream, by default standard output, shows colours."""
    safe_text = make_printable(text)
    return PaintedText(f"\x1b[{color}m{safe_text}\x1b[0m" if color and is_colored(stream or sys.stdout) else safe_text)


def _make_safe(text: str) -> str:
    return text if isinstance(text, PaintedText) else make_printable(text)
