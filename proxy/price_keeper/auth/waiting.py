"""Who asks the same waits for one answer, and only so many wait: of one sender, for one answer, and in all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from price_keeper.errors import Busy, Refusal

T = TypeVar("T")


class _Question(Generic[T]):
    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.found: list[T] = []
        self.refusal: Refusal | None = None


class Shared(Generic[T]):
    """The first who asks about something finds it out for all who ask meanwhile, also that it is refused."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, _Question[T]] = {}

    def __contains__(self, about: Hashable) -> bool:
        return about in self._asked

    def __len__(self) -> int:
        return len(self._asked)

    async def told(self, about: Hashable, find_out: Callable[[], Awaitable[T]]) -> T:
        while (asked := self._asked.get(about)) is not None:
            await asked.is_over.wait()
            if asked.refusal is not None:
                raise asked.refusal.with_traceback(None)
            if asked.found:
                return asked.found[0]
            # Else the first went away, or failed for no reason that is to be told: the next one tries.
        question = self._asked[about] = _Question()
        try:
            question.found.append(await find_out())
        except Refusal as refusal:
            question.refusal = refusal
            raise
        finally:
            del self._asked[about]
            question.is_over.set()
        return question.found[0]


class Places:
    """So many for those who wait."""

    def __init__(self, in_all: int, of_one: int) -> None:
        self._in_all = in_all
        self._of_one = of_one
        self._taken = Counter[Hashable]()
        self.taken = 0

    @contextmanager
    def one(self, *whose: Hashable) -> Iterator[None]:
        """It counts for each of these. Raises Busy."""
        if self.taken >= self._in_all or any(self._taken[each] >= self._of_one for each in whose):
            raise Busy("too many callers wait for credentials", retry_after=2)
        self.taken += 1
        self._taken.update(whose)
        try:
            yield
        finally:
            self.taken -= 1
            self._taken.subtract(whose)
            for each in whose:
                if not self._taken[each]:
                    del self._taken[each]
