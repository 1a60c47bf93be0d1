"""Who asks the same waits for one answer, and only so many wait: of one sender, for one answer, and in all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from price_keeper.errors import Busy, Refusal

T = TypeVar("T")


class _SharedLoad(Generic[T]):
    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.results: list[T] = []
        self.refusal: Refusal | None = None


class SingleFlight(Generic[T]):
    """The first who asks about something finds it out for all who ask meanwhile, also that it is refused."""

    def __init__(self) -> None:
        self._loads: dict[Hashable, _SharedLoad[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    async def get_or_load(self, key: Hashable, load: Callable[[], Awaitable[T]]) -> T:
        while (running := self._loads.get(key)) is not None:
            await running.done.wait()
            if running.refusal is not None:
                raise running.refusal.with_traceback(None)
            if running.results:
                return running.results[0]
            # Else the first went away, or failed for no reason that is to be told: the next one tries.
        load_state = self._loads[key] = _SharedLoad()
        try:
            load_state.results.append(await load())
        except Refusal as refusal:
            load_state.refusal = refusal
            raise
        finally:
            del self._loads[key]
            load_state.done.set()
        return load_state.results[0]


class WaiterLimit:
    """So many for those who wait."""

    def __init__(self, total: int, per_key: int) -> None:
        self._max_total = total
        self._max_per_key = per_key
        self._count_by_key = Counter[Hashable]()
        self.waiting = 0

    @contextmanager
    def hold(self, *keys: Hashable) -> Iterator[None]:
        """It counts for each of these. Raises Busy."""
        if self.waiting >= self._max_total or any(self._count_by_key[each] >= self._max_per_key for each in keys):
            raise Busy("too many callers wait for credentials", retry_after=2)
        self.waiting += 1
        self._count_by_key.update(keys)
        try:
            yield
        finally:
            self.waiting -= 1
            self._count_by_key.subtract(keys)
            for each in keys:
                if not self._count_by_key[each]:
                    del self._count_by_key[each]
