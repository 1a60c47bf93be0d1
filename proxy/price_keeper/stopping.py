"""How a process is told to end: while it starts at once, later when it has drained."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_log = logging.getLogger("price_keeper.app")


class Stop:
    """SIGTERM and SIGINT: they break off what goes on inside `breaks_off_the_start`, until somebody waits for them.
    So does the end of `lifeline`, a pipe that somebody holds for as long as this process is wanted."""

    def __init__(self, lifeline: int | None = None) -> None:
        self._came = asyncio.Event()
        self._start: asyncio.Timeout | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._come)
        if lifeline is not None:
            loop.add_reader(lifeline, self._let_go, lifeline)

    @asynccontextmanager
    async def breaks_off_the_start(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as start:
                self._start = start
                try:
                    yield
                finally:
                    self._start = None  # what is over cannot be broken off any more
        except TimeoutError:
            if not start.expired():
                raise

    async def comes(self) -> None:
        self._start = None
        await self._came.wait()

    def _let_go(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        _log.error("the supervisor of the workers is gone, so this one ends")
        self._come()

    def _come(self) -> None:
        self._came.set()
        if self._start is not None:
            self._start.reschedule(0)
            self._start = None
