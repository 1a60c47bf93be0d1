"""Simulated time for many processes: each has an event loop of its own, and all take their turns in one order.

A process that is killed never takes another turn, so nothing of it is cleaned up. One that is stopped takes its turns
when it continues. What depends on where things lie in memory, as the order of a set of tasks, goes by numbers here.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Final, Protocol

BEGINNING: Final = 1000.0
MOST_TURNS: Final = 400_000
TICK: Final = 1e-6


class Killed(BaseException):
    """The process is dead. `is_whole`: what it was just writing is complete."""

    def __init__(self, *, is_whole: bool = False) -> None:
        super().__init__()
        self.is_whole = is_whole


class Process(Protocol):
    is_dead: bool

    def bury(self) -> None:
        """After the turn in which it died."""


class Turn:
    __slots__ = ("_when", "arguments", "callback")

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...], when: float = 0.0) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.arguments = arguments
        self._when = when

    def cancel(self) -> None:
        self.callback, self.arguments = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self._when


class NumberedFuture(asyncio.Future):  # type: ignore[type-arg]
    """So that a set of them has the same order each time."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._place = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._place


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    def __init__(self, number: int, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._place = number
        super().__init__(work, loop=loop)

    def __hash__(self) -> int:
        return self._place


class Loop(asyncio.AbstractEventLoop):
    """Of one process; or of the world, which is none."""

    def __init__(self, scheduler: Scheduler, process: Process | None = None) -> None:
        self.scheduler = scheduler
        self.process = process
        self.is_stopped = False
        self.parked: list[Turn] = []
        self._numbers = count(1)

    def time(self) -> float:
        return self.scheduler.now

    # Nothing here has a context of its own.

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
        turn = Turn(callback, arguments)
        self.scheduler.ready.append((self, turn))
        return turn

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        least = TICK if delay > 0 else 0.0  # or who sleeps a rounding error on and on would stop all time
        return self.call_at(self.scheduler.now + (delay if delay > least else least), callback, *arguments)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        turn = Turn(callback, arguments, when)
        scheduler = self.scheduler
        heapq.heappush(scheduler.later, (when, next(scheduler.order), self, turn))
        return turn

    async def sleep(self, seconds: float) -> None:
        awake: asyncio.Future[None] = asyncio.Future(loop=self)
        turn = self.call_later(seconds, _wake, awake)
        try:
            await awake
        finally:
            turn.cancel()

    def create_future(self) -> Any:
        return NumberedFuture(next(self._numbers), self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        return NumberedTask(next(self._numbers), coro, self)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """A thread's work is done at one moment, a little later."""
        future = self.create_future()

        def done() -> None:
            try:
                found = func(*args)
            except Exception as failure:
                if not future.done():
                    future.set_exception(failure)
            else:
                if not future.done():
                    future.set_result(found)

        self.call_later(self.scheduler.thread_seconds(), done)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Of what is left lying about; what matters is raised in a turn."""

    def go_on(self) -> None:
        self.is_stopped, parked = False, self.parked
        self.parked = []
        self.scheduler.ready.extend((self, turn) for turn in parked)


class Scheduler:
    def __init__(self, thread_seconds: Callable[[], float]) -> None:
        self.now = BEGINNING
        self.ready: deque[tuple[Loop, Turn]] = deque()
        self.current: Process | None = None  # whose turn it is
        self.failures: list[BaseException] = []
        self.turns = 0
        self.thread_seconds = thread_seconds
        self.later: list[tuple[float, int, Loop, Turn]] = []
        self.order = count()
        self._running: Loop | None = None

    def run_until(self, until: float) -> None:
        try:
            self._run_until(until)
        finally:
            self._running = None
            asyncio._set_running_loop(None)

    def _run_until(self, until: float) -> None:
        ready, later = self.ready, self.later
        while True:
            while ready:
                self._take(*ready.popleft())
            if not later or later[0][0] > until:
                break
            when, _, loop, turn = heapq.heappop(later)
            if turn.callback is not None:
                if when > self.now:
                    self.now = when
                self._take(loop, turn)
        self.now = max(self.now, until)

    def run(self, work: Coroutine[Any, Any, Any], loop: Loop, most_seconds: float) -> Any:
        """What it returns. Raises TimeoutError."""
        until, task = self.now + most_seconds, loop.create_task(work)
        while not task.done() and self.now < until:
            self.run_until(min(until, self.now + 0.25))
        if not task.done():
            raise TimeoutError
        return task.result()

    def _take(self, loop: Loop, turn: Turn) -> None:
        callback, process = turn.callback, loop.process
        if callback is None or (process is not None and process.is_dead):
            return
        if loop.is_stopped:
            loop.parked.append(turn)
            return
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise RuntimeError(f"some task never waits, so time cannot pass: {_who(callback)}")
        self.current = process
        if loop is not self._running:
            self._running = loop
            asyncio._set_running_loop(loop)
        try:
            callback(*turn.arguments)
        except Killed:
            pass
        except Exception as failure:
            self.failures.append(failure)
        finally:
            self.current = None
        if process is not None and process.is_dead:
            process.bury()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _who(callback: Any) -> str:
    """Whose turn it is: of a task, where it is."""
    task = getattr(callback, "__self__", None)
    frames = task.get_stack() if isinstance(task, asyncio.Task) else []
    return " ".join(f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in frames) or repr(callback)
