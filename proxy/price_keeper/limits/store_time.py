"""The store's time, as well as this process can know it: what refill goes by, so that one wrong clock harms nobody.

A `Date` tells whole seconds. An answer sent for at `sent` and here at `received`, by the monotonic clock, says that the
store's time is ahead of that clock by at least `Date - received` and at most `Date + 1 - sent`. What many answers say
together is far more exact than any one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from price_keeper.clock import Clock
from price_keeper.limits.bucket import SKEW_MS

DRIFT = 100e-6  # of the monotonic clock against the store's: what is known grows vague with time
APART_SECONDS = 0.05  # for the clocks of the store's own machines


class _Lead(NamedTuple):
    """By how much the store's time is ahead of the monotonic clock, as known `at`."""

    low: float
    high: float
    at: float

    def aged(self, now: float) -> _Lead:
        vague = max(0.0, now - self.at) * DRIFT
        return _Lead(self.low - vague, self.high + vague, now)

    def narrowed(self, other: _Lead) -> _Lead:
        """By an answer as new as this. If they contradict each other, a clock was set: the answer is right."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return _Lead(low, high, other.at) if low <= high else other


class StoreTime:
    """The machine's wall clock, which all processes on it share, until an answer of the store has a `Date`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lead: _Lead | None = None
        self._last_ms = 0

    def now_ms(self) -> int:
        """It does not go back for a small correction; it does when it turns out to have been altogether wrong."""
        now_ms = int(self._seconds() * 1000)
        if not 0 < self._last_ms - now_ms <= SKEW_MS:
            self._last_ms = now_ms
        return self._last_ms

    def _seconds(self) -> float:
        if self._lead is None:
            return self._clock.now()
        return self._clock.monotonic() + (self._lead.low + self._lead.high) / 2

    def asking(self) -> Callable[[str], None]:
        """To be called when something is sent to the store; what it returns, with the answer's `Date`."""
        sent = self._clock.monotonic()
        return lambda date: self.learn(date, sent, self._clock.monotonic())

    def learn(self, date: str, sent: float, received: float) -> None:
        try:
            told = parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()  # a Date is always in GMT
        except (ValueError, OverflowError):
            return
        heard = _Lead(told - received - APART_SECONDS, told + 1 - sent + APART_SECONDS, received)
        self._lead = heard if self._lead is None else self._lead.aged(received).narrowed(heard)
