"""Whose turn it is: one flush, or any number of those who must not meet one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FlushGate:
    """A flush that waits goes before those who come after it, so that nobody keeps it waiting for long."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_flushing = False
        self._flushes_waiting = 0
        self._excluding = 0

    @asynccontextmanager
    async def flush(self) -> AsyncIterator[None]:
        self._flushes_waiting += 1
        try:
            await self._wait_until(lambda: not (self._is_flushing or self._excluding))
            self._is_flushing = True
        finally:
            self._flushes_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._is_flushing = False
            self._wake()

    @asynccontextmanager
    async def exclude_flush(self, timeout_seconds: float) -> AsyncIterator[bool]:
        """Whether no flush is under way meanwhile; if it does not come to that in so many seconds, one may be."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wait_until(lambda: not (self._is_flushing or self._flushes_waiting))
        except TimeoutError:
            yield False
            return
        self._excluding += 1
        try:
            yield True
        finally:
            self._excluding -= 1
            self._wake()

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
