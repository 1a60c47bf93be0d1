"""The clock of everything that serves calls and keeps count; tests inject their own.

Three others read the system's clock: `workers.supervisor`, which has no event loop; commands of the CLI that show or
parse a time; and AWS credential providers where no `now` is given.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

_SHORTEST_SECONDS = 0.001  # uvloop takes less than half a millisecond for no time at all


class Clock(Protocol):
    def now(self) -> float:
        """Wall time in epoch seconds: for dates, never for measuring. It may jump either way."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever grow: for measuring, with no meaning outside this process."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait by the monotonic clock, never shorter; zero or less still lets other tasks take a turn."""
        ...


class SystemClock:
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        # uvloop's timers count whole milliseconds, and end up to 1.5 ms early.
        while (left := until - time.monotonic()) > 0:  # noqa: ASYNC110  # no event tells of time
            await asyncio.sleep(max(left, _SHORTEST_SECONDS))
