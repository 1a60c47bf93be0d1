"""A caller's limits as one sidecar keeps them by itself while the store is away. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from price_keeper.limits.bucket import RateBucket
from price_keeper.limits.lease import Costs, select_slowest_refill

LONGEST_WAIT_MS = 60_000


class Alone:
    """The whole of each limit: so a fleet that is cut off lets through as often that as it has sidecars."""

    __slots__ = ("_capacity", "_rate", "_since", "_there", "buckets")

    def __init__(self, buckets: Sequence[RateBucket], now: float) -> None:
        limits = select_slowest_refill(buckets).values()
        self.buckets = buckets
        self._capacity = [limit.capacity for limit in limits]
        self._rate = [limit.amount * 1000 / limit.period_ms for limit in limits]
        self._there = [float(limit.capacity) for limit in limits]
        self._since = now

    def take(self, costs: Costs, now: float) -> int:
        """0, or how many milliseconds to wait."""
        passed, self._since = now - self._since, now
        wait = 0.0
        for place, cost in enumerate(costs):
            rate = self._rate[place]
            self._there[place] = there = min(self._capacity[place], self._there[place] + passed * rate)
            if cost > there:
                wait = max(wait, (cost - there) / rate * 1000 if rate > 0 else LONGEST_WAIT_MS)
        if wait:
            return min(LONGEST_WAIT_MS, int(wait) + 1)
        for place, cost in enumerate(costs):
            self._there[place] -= cost
        return 0

    def give_back(self, estimate: Costs, actual: Costs) -> None:
        for place, cost in enumerate(estimate):
            self._there[place] += cost - actual[place]
