"""SIGTERM and SIGINT: they cancel the startup of a process, and make a running one drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_log = logging.getLogger("price_keeper.app")


class StopSignal:
    """Handles SIGTERM and SIGINT. Within `interrupt_startup` they cancel what runs there; from `wait` on they only end
    that wait. The end of `lifeline`, a pipe whose other end the supervisor keeps open, has the same effect."""

    def __init__(self, lifeline: int | None = None) -> None:
        self._requested = asyncio.Event()
        self._startup_timeout: asyncio.Timeout | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        if lifeline is not None:
            loop.add_reader(lifeline, self._on_lifeline_closed, lifeline)

    @asynccontextmanager
    async def interrupt_startup(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as startup:
                self._startup_timeout = startup
                try:
                    yield
                finally:
                    self._startup_timeout = None  # nothing is left to cancel
        except TimeoutError:
            if not startup.expired():
                raise

    async def wait(self) -> None:
        self._startup_timeout = None
        await self._requested.wait()

    def _on_lifeline_closed(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        _log.error("the supervisor has died; this worker drains and ends")
        self._on_stop()

    def _on_stop(self) -> None:
        self._requested.set()
        if self._startup_timeout is not None:
            self._startup_timeout.reschedule(0)
            self._startup_timeout = None
