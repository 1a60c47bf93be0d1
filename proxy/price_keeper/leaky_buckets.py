"""Leaky buckets in memory: a burst at once, then one per interval, for each of a bounded number of keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable

_NANOS_PER_SECOND = 10**9  # time is counted in whole nanoseconds, so that rounding cannot delay anything


class LeakyBuckets:
    """A leaky bucket per key: it holds `burst` and leaks one per `interval_seconds`. `monotonic` returns the time.

    If there are more than `max_keys`, the fullest half is kept, so that many keys that are used once cannot evict one
    that is used much.
    """

    def __init__(self, monotonic: Callable[[], float], burst: int, interval_seconds: float, max_keys: int) -> None:
        self._monotonic = monotonic
        self._interval = round(interval_seconds * _NANOS_PER_SECOND)
        self._capacity = burst * self._interval
        self._burst = burst
        self._max_keys = max_keys
        self._empty_at: dict[Hashable, int] = {}  # one number is the whole state of a bucket

    def wait_seconds(self, key: Hashable) -> float:
        """Return how long until one more attempt is allowed; 0 if it is now."""
        return max(0, self._wait(key, self._now())) / _NANOS_PER_SECOND

    def drain_seconds(self, key: Hashable) -> float:
        """Return how long until the bucket is empty."""
        now = self._now()
        return (self._read_empty_at(key, now) - now) / _NANOS_PER_SECOND

    def room(self, key: Hashable) -> int:
        """Return how many attempts are allowed now."""
        now = self._now()
        return max(0, (self._capacity - self._read_empty_at(key, now) + now) // self._interval)

    def add(self, key: Hashable) -> float:
        """Try one attempt: return 0 if it is allowed, and count it; else how long until it is. A refused attempt is not
        counted, so it does not prolong the wait."""
        now = self._now()
        return 0.0 if self._take(key, 0, now) is not None else self._wait(key, now) / _NANOS_PER_SECOND

    def reserve(self, key: Hashable, max_wait_seconds: float) -> float | None:
        """Count the next attempt, and return how long it has to wait. None: nothing was counted, because that is longer
        than `max_wait_seconds`."""
        wait = self._take(key, round(max_wait_seconds * _NANOS_PER_SECOND), self._now())
        return None if wait is None else wait / _NANOS_PER_SECOND

    def _take(self, key: Hashable, max_wait: int, now: int) -> int | None:
        wait = max(0, self._wait(key, now))
        if wait > max_wait:
            return None
        if key not in self._empty_at and len(self._empty_at) >= self._max_keys:
            fullest = sorted(self._empty_at.items(), key=lambda entry: entry[1], reverse=True)[: self._max_keys // 2]
            self._empty_at = {other: empty_at for other, empty_at in fullest if empty_at > now}
        self._empty_at[key] = self._read_empty_at(key, now) + self._interval
        return wait

    def _now(self) -> int:
        return round(self._monotonic() * _NANOS_PER_SECOND)

    def _read_empty_at(self, key: Hashable, now: int) -> int:
        return max(self._empty_at.get(key, now), now)

    def _wait(self, key: Hashable, now: int) -> int:
        return self._read_empty_at(key, now) + self._interval - now - self._capacity
