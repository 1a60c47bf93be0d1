"""How far a command is that takes long: one line that moves on a terminal, else a plain line now and then.

It goes to standard error, so what the command prints stays what it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from price_keeper.cli.terminal import get_terminal_width, is_terminal
from price_keeper.reporting.letters import make_printable, truncate

REDRAW_SECONDS = 0.1
LOG_LINE_SECONDS = 10.0  # a log of an hour has some hundred lines of it


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
        """Before anything else is printed."""
        if self._is_shown:
            self._write("\r\x1b[K")
            self._is_shown = False
            self._next_update_at = self._now()

    def _write(self, text: str) -> None:
        encoding = sys.stderr.encoding or "ascii"
        sys.stderr.write(text.encode(encoding, "replace").decode(encoding))
        sys.stderr.flush()
