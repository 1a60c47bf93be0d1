"""What many ask for at about the same time is found out once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")

MOST_KEPT = 256


class _Found(NamedTuple, Generic[V]):
    task: asyncio.Task[V]
    until: float


class Shared(Generic[V]):
    """A failure is kept as long as any other answer: the store is asked no more often because it is away."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[Hashable, _Found[V]] = {}

    async def of(self, key: Hashable, make: Callable[[], Awaitable[V]], now: float) -> V:
        """`now` is monotonic. What is under way goes on when one of those who wait for it leaves."""
        found = self._found.get(key)
        if found is None or (found.task.done() and now >= found.until):
            if len(self._found) >= MOST_KEPT:
                self._make_room(now)
            task = asyncio.ensure_future(_run(make))
            task.add_done_callback(_seen)
            found = self._found[key] = _Found(task, now + self._seconds)
        return await asyncio.shield(found.task)

    def _make_room(self, now: float) -> None:
        self._found = {key: each for key, each in self._found.items() if now < each.until or not each.task.done()}
        for oldest in list(self._found)[: max(0, len(self._found) - MOST_KEPT // 2)]:
            del self._found[oldest]


async def _run(make: Callable[[], Awaitable[V]]) -> V:
    return await make()


def _seen(task: asyncio.Task[V]) -> None:
    """Nobody may be there any more to hear of a failure."""
    if not task.cancelled():
        task.exception()
