"""Estimate the store's wall-clock time. Refill uses it, so one machine with a wrong clock does no harm.

`app.run` passes `StoreTime.start_request` to DynamoDB's engine, which reports the `Date` of each response. SQLite, on
one machine, has none.

A `Date` header has a resolution of one second. A response requested at `sent` and received at `received`, on the
monotonic clock, says that the store's clock is ahead of that clock by at least `Date - received` and at most
`Date + 1 - sent`. Intersecting the intervals of many responses is far more exact than any single one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from price_keeper.clock import Clock
from price_keeper.rates.token_bucket import SKEW_MS

MAX_DRIFT = 100e-6  # of the monotonic clock against the store's: the estimate grows less exact with time
STORE_CLOCK_SPREAD_SECONDS = 0.05  # how far the clocks of the store's own machines may differ


class _ClockOffset(NamedTuple):
    """By how much the store's time is ahead of the monotonic clock, as known at the monotonic time `at`."""

    low: float
    high: float
    at: float

    def widen(self, now: float) -> _ClockOffset:
        uncertainty = max(0.0, now - self.at) * MAX_DRIFT
        return _ClockOffset(self.low - uncertainty, self.high + uncertainty, now)

    def narrow(self, other: _ClockOffset) -> _ClockOffset:
        """Intersect with a sample of the same time. If they contradict each other, a clock was set: the sample wins."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return _ClockOffset(low, high, other.at) if low <= high else other


class StoreTime:
    """The store's time. Until a response of the store has a `Date` it is the machine's wall clock, which all processes
    on the machine share."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: _ClockOffset | None = None
        self._last_ms = 0

    def now_ms(self) -> int:
        """Return epoch milliseconds. They do not go back for a small correction, but do for one above SKEW_MS, when
        the clock turns out to have been altogether wrong."""
        now_ms = int(self._seconds() * 1000)
        if not 0 < self._last_ms - now_ms <= SKEW_MS:
            self._last_ms = now_ms
        return self._last_ms

    def _seconds(self) -> float:
        if self._offset is None:
            return self._clock.now()
        return self._clock.monotonic() + (self._offset.low + self._offset.high) / 2

    def start_request(self) -> Callable[[str], None]:
        """Call this when a request to the store is sent, and the returned function with the response's `Date`."""
        sent = self._clock.monotonic()
        return lambda date: self.add_sample(date, sent, self._clock.monotonic())

    def add_sample(self, date: str, sent: float, received: float) -> None:
        try:
            date_seconds = parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()  # a Date is always in GMT
        except (ValueError, OverflowError):
            return
        sample = _ClockOffset(
            date_seconds - received - STORE_CLOCK_SPREAD_SECONDS,
            date_seconds + 1 - sent + STORE_CLOCK_SPREAD_SECONDS,
            received,
        )
        self._offset = sample if self._offset is None else self._offset.widen(received).narrow(sample)
