"""What many ask for at about the same time is found out once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")

MAX_CACHE_ENTRIES = 256


class _CacheEntry(NamedTuple, Generic[V]):
    task: asyncio.Task[V]
    expires_at: float


class SingleFlightCache(Generic[V]):
    """A failure is kept as long as any other answer: the store is asked no more often because it is away."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._entries: dict[Hashable, _CacheEntry[V]] = {}

    async def get_or_load(self, key: Hashable, load: Callable[[], Awaitable[V]], now: float) -> V:
        """`now` is monotonic. What is under way goes on when one of those who wait for it leaves."""
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
            key: each for key, each in self._entries.items() if now < each.expires_at or not each.task.done()
        }
        for oldest in list(self._entries)[: max(0, len(self._entries) - MAX_CACHE_ENTRIES // 2)]:
            del self._entries[oldest]


async def _run_load(load: Callable[[], Awaitable[V]]) -> V:
    return await load()


def _consume_failure(task: asyncio.Task[V]) -> None:
    """Nobody may be there any more to hear of a failure."""
    if not task.cancelled():
        task.exception()
