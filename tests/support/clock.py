"""Simulated time: it stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

from price_keeper.clock import SystemClock

_NANOS = 10**9  # time is kept in whole nanoseconds, so that ten steps of 0.1 are one step of 1.0
_QUIET_TURNS = 3  # what one turn wrote to a socket is only seen by a later one
_MAX_TURNS = 100_000


class ManualClock:
    """`now` and `monotonic` advance together; only `set_wall` sets them apart."""

    def __init__(self, wall: float = 1_795_003_200.0) -> None:  # 2026-11-18 12:00 UTC
        self._monotonic = 1000 * _NANOS
        self._wall_lead = _nanos(wall) - self._monotonic
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> float:
        return (self._monotonic + self._wall_lead) / _NANOS

    def monotonic(self) -> float:
        return self._monotonic / _NANOS

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        awake = asyncio.get_running_loop().create_future()
        due = self._monotonic + max(1, _nanos(seconds))  # or who sleeps a rounding error on and on would stop all time
        heapq.heappush(self._sleepers, (due, next(self._order), awake))
        await awake

    def remaining_sleeps(self) -> list[float]:
        """How long each sleeper has yet to sleep, the shortest first."""
        dues = sorted(due for due, _, awake in self._sleepers if not awake.done())
        return [(due - self._monotonic) / _NANOS for due in dues]

    def set_wall(self, wall: float) -> None:
        """The wall clock jumps, as when someone sets it; sleepers do not notice."""
        self._wall_lead = _nanos(wall) - self._monotonic

    async def advance(self, seconds: float) -> None:
        """Let this much time pass. Sleepers wake one by one, each at its time, and act before the next."""
        if seconds < 0:
            raise ValueError("time passes forwards only; set_wall moves the wall clock alone")
        await settle()
        until = self._monotonic + _nanos(seconds)
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, awake = heapq.heappop(self._sleepers)
            if not awake.done():  # it is done already if its sleeper was cancelled
                self._monotonic = max(due, self._monotonic)
                awake.set_result(None)
                await settle()
        self._monotonic = until

    async def leap(self, seconds: float) -> None:
        """The same, but no task gets a turn before all of it is over: a sleeper wakes once."""
        self._monotonic += _nanos(seconds)
        await self.advance(0)


async def settle() -> None:
    """Give every other task its turns until all of them wait for something."""
    loop = asyncio.get_running_loop()
    quiet = 0
    for _ in range(_MAX_TURNS):
        await asyncio.sleep(0)
        quiet = 0 if loop._ready else quiet + 1  # asyncio has no public word for "nothing left to run"
        if quiet == _QUIET_TURNS:
            return
    raise RuntimeError("some task never waits, so time cannot pass")


def _nanos(seconds: float) -> int:
    return round(seconds * _NANOS)


class ShiftedClock(SystemClock):
    """This machine's time, and as much more as a test lets pass."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class StoppedClock(ShiftedClock):
    """Only what a test lets pass passes, however busy the machine is; who sleeps does so by this machine's time."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = SystemClock().now(), SystemClock().monotonic()

    def now(self) -> float:
        return self._stopped[0] + self.ahead

    def monotonic(self) -> float:
        return self._stopped[1] + self.ahead
