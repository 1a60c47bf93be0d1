"""The log lines of a trouble that lasts: one when it starts, at most one a minute while it lasts, one when it ends.

Whoever meets the trouble calls `report` each time, and `end` each time all is well: both may be called for every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

REPEAT_SECONDS: Final = 60.0  # between two lines that report one trouble


class Incident:
    """One trouble, by any clock. If it comes and goes, it is still reported at most once a minute, and an end is logged
    only if the start was."""

    def __init__(self, log: logging.Logger, now: Callable[[], float], level: int = logging.WARNING) -> None:
        self._log = log
        self._now = now
        self._level = level
        self._began_at = 0.0
        self._logged_at: float | None = None
        self._is_on = self._is_logged = False

    def report(self, message: str, *arguments: object) -> bool:
        """The trouble is there. The message says its cause, its effect and what to do. Returns whether it is logged."""
        now = self._now()
        if not self._is_on:
            self._is_on, self._began_at = True, now
        # A clock may be set back by hours.
        if self._logged_at is not None and abs(now - self._logged_at) < REPEAT_SECONDS:
            return False
        self._is_logged, self._logged_at = True, now
        self._log.log(self._level, message, *arguments)
        return True

    def end(self, message: str, *arguments: object) -> None:
        """All is well. Costs next to nothing unless there was a trouble."""
        if not self._is_on:
            return
        self._is_on = False
        if self._is_logged:
            self._is_logged = False
            self._log.warning(f"{message}, after %.0f s", *arguments, abs(self._now() - self._began_at))
