"""How long spend waits in the journal: not long when there is much of it, longer to save writes. Pure."""

from __future__ import annotations

BUSY_REQUESTS = 200  # in one flush: at this rate its price in writes is lost among the requests


class FlushInterval:
    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self.min_seconds = min_seconds
        self._max_seconds = max_seconds
        self.seconds = min_seconds

    def on_flushed(self, requests: int) -> None:
        if requests >= BUSY_REQUESTS:
            self.seconds = max(self.min_seconds, self.seconds / 2)
        elif requests:
            self.on_failed()

    def on_failed(self) -> None:
        """Or met with conflicts: others write to the same counters at the same time."""
        self.seconds = min(self._max_seconds, self.seconds * 2)
