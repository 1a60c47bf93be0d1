"""Work of which some may go on at once, and some more wait for it: past that the answer would come too late."""

from __future__ import annotations

import asyncio
from types import TracebackType

from price_keeper.errors import Busy


class BoundedConcurrency:
    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._running = asyncio.Semaphore(max_running)
        self._free_places = max_running + max_waiting

    async def __aenter__(self) -> None:
        """Raises Busy."""
        if self._free_places <= 0:
            raise Busy("too many ask for this at once; try again", retry_after=2)
        self._free_places -= 1
        try:
            await self._running.acquire()
        except BaseException:
            self._free_places += 1
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free_places += 1
        self._running.release()
