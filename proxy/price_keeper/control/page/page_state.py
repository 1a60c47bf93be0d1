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

from price_keeper.control.api_errors import ERROR_CODES, ApiError
from price_keeper.control.api_types import Principal
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.page.spend_forecast import SpendHistory

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


class _CacheEntry(NamedTuple, Generic[V]):
    task: asyncio.Task[V]
    expires_at: float


class SingleFlightCache(Generic[V]):
    """Caches results and failures for a TTL. Failures are cached too, so that an unreachable store is not asked more
    often than a reachable one."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._entries: dict[Hashable, _CacheEntry[V]] = {}

    async def get_or_load(self, key: Hashable, load: Callable[[], Awaitable[V]], now: float) -> V:
        """The cached result, or that of the load that all concurrent callers share. The load continues if a caller is
        cancelled. `now` is monotonic time."""
        entry = self._entries.get(key)
        if entry is None or (entry.task.done() and now >= entry.expires_at):
            if len(self._entries) >= MAX_CACHE_ENTRIES:
                self._evict(now)
            task = asyncio.ensure_future(_run_load(load))
            task.add_done_callback(_consume_failure)
            entry = self._entries[key] = _CacheEntry(task, now + self._ttl_seconds)
        return await asyncio.shield(entry.task)

    def _evict(self, now: float) -> None:
        self._entries = {
            key: entry for key, entry in self._entries.items() if now < entry.expires_at or not entry.task.done()
        }
        for oldest in list(self._entries)[: max(0, len(self._entries) - MAX_CACHE_ENTRIES // 2)]:
            del self._entries[oldest]


async def _run_load(load: Callable[[], Awaitable[V]]) -> V:
    return await load()


def _consume_failure(task: asyncio.Task[V]) -> None:
    """Mark a failure as retrieved: all callers may have left, and asyncio would log a warning."""
    if not task.cancelled():
        task.exception()


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

    def __init__(self, tick_seconds: float = TICK_SECONDS, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.tick_seconds = tick_seconds
        self.spend_history = SpendHistory()
        self.subscriptions = PageSubscriptions(limits)
        self.board_cache: SingleFlightCache[dict[str, Any]] = SingleFlightCache(tick_seconds)
        self.list_cache: SingleFlightCache[Any] = SingleFlightCache(STORE_TTL_SECONDS)
        self.event_cache: SingleFlightCache[list[dict[str, Any]]] = SingleFlightCache(STORE_TTL_SECONDS)
        self.closed = asyncio.Event()

    def close(self) -> None:
        """End all event streams, so that the drain does not wait for them."""
        self.closed.set()
