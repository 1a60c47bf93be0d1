"""How long spend waits in the journal: not long when there is much of it, longer to save writes. Pure."""

from __future__ import annotations

BUSY_REQUESTS = 200  # in one flush: at this rate its price in writes is lost among the requests


class Pace:
    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        self.least = least_seconds
        self._most = most_seconds
        self.seconds = least_seconds

    def flushed(self, requests: int) -> None:
        if requests >= BUSY_REQUESTS:
            self.seconds = max(self.least, self.seconds / 2)
        elif requests:
            self.failed()

    def failed(self) -> None:
        """Or met with conflicts: others write to the same counters at the same time."""
        self.seconds = min(self._most, self.seconds * 2)
