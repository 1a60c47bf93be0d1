"""What was recorded since this process started."""

from __future__ import annotations

from proxy.recording.entries import Account, Receipt


class Recorded:
    def __init__(self) -> None:
        self.requests = self.estimated_requests = self.pico = 0

    def add(self, _: Account, receipt: Receipt) -> None:
        counts = receipt.counts
        self.requests += counts.requests
        self.estimated_requests += counts.estimated_requests
        self.pico += counts.pico
