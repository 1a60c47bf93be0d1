"""Single-flight: concurrent callers that want the same thing share one load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from price_keeper.tasks import log_failure, name_work

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Concurrent callers with the same key share one load: its result, or its failure. Neither is kept afterwards.

    The load runs in a task of its own, to its end, and no caller can cancel it. If a caller is cancelled, the others
    still get the result. If all are, the load continues, and the next caller joins it. A failure is logged if `start`
    began the load, even if callers joined it, and never if `get_or_load` did.
    """

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a load of this key is running."""
        return self._find(key) is not None

    async def get_or_load(self, key: K, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the load that is running, or of a new one. Raises its failure."""
        return await asyncio.shield(self._find(key) or self._start(key, load, _retrieve_failure))

    def start(self, key: K, load: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start a load in the background unless one is running. Its failure is logged."""
        if key not in self:
            self._start(key, load, log_failure)

    async def wait(self, key: K) -> None:
        """Return when the load that is running has ended; at once if there is none. Raises no failure of it."""
        task = self._find(key)
        if task is not None:
            await asyncio.wait([task])

    def _find(self, key: K) -> asyncio.Task[T] | None:
        task = self._running.get(key)
        return None if task is None or task.done() else task  # one that is done is removed in the next turn

    def _start(
        self, key: K, load: Callable[[], Coroutine[Any, Any, T]], on_done: Callable[[asyncio.Task[T]], None]
    ) -> asyncio.Task[T]:
        task = self._running[key] = asyncio.create_task(load(), name=name_work(load))
        task.add_done_callback(partial(self._remove, key))  # called even if the task is cancelled before it begins
        task.add_done_callback(on_done)
        return task

    def _remove(self, key: K, task: asyncio.Task[T]) -> None:
        if self._running.get(key) is task:  # else the next load has begun
            del self._running[key]


def _retrieve_failure(task: asyncio.Task[T]) -> None:
    """Mark a failure as retrieved: all callers may have left, and asyncio would log it."""
    if not task.cancelled():
        task.exception()
