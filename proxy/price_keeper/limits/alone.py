"""A caller's limits as one sidecar keeps them by itself while the store is away. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from price_keeper.rates.rate_lease import Costs, select_slowest_refill
from price_keeper.rates.token_bucket import RateBucket

MAX_WAIT_MS = 60_000


class OfflineLimiter:
    """The whole of each limit: so a fleet that is cut off lets through as often that as it has sidecars."""

    __slots__ = ("_capacity", "_rate", "_refilled_at", "_tokens", "buckets")

    def __init__(self, buckets: Sequence[RateBucket], now: float) -> None:
        limits = select_slowest_refill(buckets).values()
        self.buckets = buckets
        self._capacity = [limit.capacity for limit in limits]
        self._rate = [limit.amount * 1000 / limit.period_ms for limit in limits]
        self._tokens = [float(limit.capacity) for limit in limits]
        self._refilled_at = now

    def take(self, costs: Costs, now: float) -> int:
        """0, or how many milliseconds to wait."""
        elapsed, self._refilled_at = now - self._refilled_at, now
        wait = 0.0
        for place, cost in enumerate(costs):
            rate = self._rate[place]
            self._tokens[place] = tokens = min(self._capacity[place], self._tokens[place] + elapsed * rate)
            if cost > tokens:
                wait = max(wait, (cost - tokens) / rate * 1000 if rate > 0 else MAX_WAIT_MS)
        if wait:
            return min(MAX_WAIT_MS, int(wait) + 1)
        for place, cost in enumerate(costs):
            self._tokens[place] -= cost
        return 0

    def settle(self, estimate: Costs, actual: Costs) -> None:
        for place, cost in enumerate(estimate):
            self._tokens[place] += cost - actual[place]
