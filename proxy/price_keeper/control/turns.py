"""Work of which some may go on at once, and some more wait for it: past that the answer would come too late."""

from __future__ import annotations

import asyncio
from types import TracebackType

from price_keeper.errors import Busy


class Turns:
    def __init__(self, at_once: int, waiting: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._room = at_once + waiting

    async def __aenter__(self) -> None:
        """Raises Busy."""
        if self._room <= 0:
            raise Busy("too many ask for this at once; try again", retry_after=2)
        self._room -= 1
        try:
            await self._turns.acquire()
        except BaseException:
            self._room += 1
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room += 1
        self._turns.release()
