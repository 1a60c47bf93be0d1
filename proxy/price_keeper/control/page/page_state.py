"""What the status page keeps in memory: spend history, cached results, and the open event streams.

`SingleFlightCache` loads a result once for all concurrent callers and keeps it, or the failure, for its TTL.
`PageSubscriptions` limits the event streams, each of which occupies a connection of the control port.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from cachetools import TLRUCache

from price_keeper.control.api_errors import ERROR_CODES, ApiError
from price_keeper.control.api_types import Principal
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.page.spend_forecast import SpendHistory
from price_keeper.single_flight import SingleFlight

V = TypeVar("V")

MAX_CACHE_ENTRIES = 256
# Limits for open pages. Together they are well below the connections of one address, because behind a proxy all pages
# have the same address. With lower connection limits they are scaled down.
MAX_ADMIN_PAGES = 24
MAX_CLIENT_PAGES = 16  # of all clients together, so that they cannot lock administrators out
MAX_PAGES_PER_CLIENT = 4
SUBSCRIBE_RETRY_SECONDS = 30.0
TICK_SECONDS = 2.0  # TTL of a board, however many pages show it
STORE_TTL_SECONDS = 10.0  # TTL of what has to be read from the store


class _Outcome(NamedTuple, Generic[V]):
    """The result of a load, or its failure. `expires_at` is monotonic time."""

    expires_at: float
    results: tuple[V, ...] = ()
    failure: Exception | None = None


class SingleFlightCache(Generic[V]):
    """Caches results and failures for a TTL, which begins with the load. Failures are cached too, so that an
    unreachable store is not asked more often than a reachable one. Concurrent callers share one load."""

    def __init__(self, ttl_seconds: float, monotonic: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._monotonic = monotonic
        self._single_flight = SingleFlight[Hashable, _Outcome[V]]()
        self._outcomes = TLRUCache[Hashable, _Outcome[V]](
            MAX_CACHE_ENTRIES, lambda _key, outcome, _now: outcome.expires_at, timer=monotonic
        )

    async def get_or_load(self, key: Hashable, load: Callable[[], Awaitable[V]]) -> V:
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = await self._single_flight.get_or_load(key, lambda: self._load(key, load))
        if outcome.failure is not None:
            raise outcome.failure.with_traceback(None)
        return outcome.results[0]

    async def _load(self, key: Hashable, load: Callable[[], Awaitable[V]]) -> _Outcome[V]:
        expires_at = self._monotonic() + self._ttl_seconds
        try:
            outcome = _Outcome(expires_at, (await load(),))
        except Exception as failure:
            outcome = _Outcome(expires_at, failure=failure)
        self._outcomes[key] = outcome
        return outcome


class PageSubscriptions:
    """Counts the open event streams of administrators and clients, and limits them."""

    def __init__(self, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        def scale_bound(most: int) -> int:
            return max(1, most * limits.max_per_network // DEFAULT_PORT_LIMITS.max_per_network)

        self._max_admin_pages, self._max_client_pages, self._max_pages_per_client = map(
            scale_bound, (MAX_ADMIN_PAGES, MAX_CLIENT_PAGES, MAX_PAGES_PER_CLIENT)
        )
        self._clients: Counter[str] = Counter()
        self._admins = 0

    def __len__(self) -> int:
        return self._admins + self._clients.total()

    @contextmanager
    def subscribe(self, principal: Principal) -> Iterator[None]:
        """Count a stream within the block. Raises ApiError (503) if there are too many."""
        if not self._has_room(principal):
            message = "too many pages have an event stream open; this page has to poll"
            raise ApiError(503, ERROR_CODES[503], message, retry_after=SUBSCRIBE_RETRY_SECONDS)
        self._change_count(principal, 1)
        try:
            yield
        finally:
            self._change_count(principal, -1)

    def _has_room(self, principal: Principal) -> bool:
        if principal.is_admin:
            return self._admins < self._max_admin_pages
        return (
            self._clients.total() < self._max_client_pages
            and self._clients[principal.name] < self._max_pages_per_client
        )

    def _change_count(self, principal: Principal, change: int) -> None:
        if principal.is_admin:
            self._admins += change
            return
        self._clients[principal.name] += change
        if not self._clients[principal.name]:
            del self._clients[principal.name]


class PageState:
    """What all open pages of a process share."""

    def __init__(self, monotonic: Callable[[], float], limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.tick_seconds = TICK_SECONDS
        self.spend_history = SpendHistory()
        self.subscriptions = PageSubscriptions(limits)
        self.board_cache = SingleFlightCache[dict[str, Any]](TICK_SECONDS, monotonic)
        self.list_cache = SingleFlightCache[Any](STORE_TTL_SECONDS, monotonic)
        self.event_cache = SingleFlightCache[list[dict[str, Any]]](STORE_TTL_SECONDS, monotonic)
        self.closed = asyncio.Event()

    def close(self) -> None:
        """End all event streams, so that the drain does not wait for them."""
        self.closed.set()
