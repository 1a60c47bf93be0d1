"""Limits log lines about a problem that comes and goes many times a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

REPEAT_SECONDS: Final = 10.0  # between two lines about the same problem


class LogThrottle:
    """Allows one line per problem and `seconds`, by any clock."""

    def __init__(self, now: Callable[[], float], seconds: float = REPEAT_SECONDS) -> None:
        self._now = now
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}

    def allows(self, trouble: str) -> bool:
        """Whether the caller should log the problem now; if so, it counts as logged."""
        now, last = self._now(), self._logged_at.get(trouble)
        if last is not None and abs(now - last) < self._seconds:  # the clock may be set back by hours
            return False
        self._logged_at[trouble] = now
        return True
