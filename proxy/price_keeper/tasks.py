"""Background work: supervised asyncio tasks, and threads for work that would block the event loop.

No other module creates a task, so none can fail unnoticed or be left behind. `Tasks.start` restarts what crashes,
`run_every` repeats an action, `spawn` runs a coroutine to its end, and `spawn_eager` does so without a task until it
first waits. `run_large_work` processes one large body at a time in a thread; `DaemonThreadPool` is the executor behind
`asyncio.to_thread`, and its threads do not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
from _thread import start_new_thread
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from types import TracebackType, coroutine
from typing import Any, Final, ParamSpec, Self, TypeVar

from price_keeper.clock import Clock
from price_keeper.errors import Busy
from price_keeper.telemetry.logs import format_traceback

Work = Callable[[], Coroutine[Any, Any, object]]

_log = logging.getLogger("price_keeper.tasks")

_MIN_BACKOFF_SECS = 1.0
_MAX_BACKOFF_SECS = 60.0


class Tasks:
    """Use as `async with Tasks(clock) as tasks`; on the way out everything is stopped and waited for."""

    def __init__(self, clock: Clock, *, chance: Callable[[], float] = random.random) -> None:
        """`chance` gives a number in [0, 1) for each wait that is jittered."""
        self._clock = clock
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._spawned: set[asyncio.Task[None]] = set()
        self._supervised: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks only weakly
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self, name: str, work: Work) -> None:
        """Run until it returns; run it again, after a growing back-off, each time it crashes."""
        if self._is_stopping:
            raise RuntimeError(f"cannot start {name!r}: the background tasks are stopping")
        task = asyncio.create_task(self._supervise(name, work), name=name)
        self._supervised.add(task)
        task.add_done_callback(self._supervised.discard)

    def spawn_eager(self, work: Coroutine[Any, Any, None]) -> None:
        """As `once`, but run at once, and without a task until it first waits: most calls never do before they are
        written to Bedrock. Until then `asyncio.timeout` does not work; see `in_task`."""
        try:
            pending = work.send(None)
        except StopIteration:
            return
        self.spawn(_continue_in_task(work, pending))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to its end, come what may: made for the many and short, whose failures are their own to tell."""
        task = self._loop.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            # Its message is left out, as it could hold a piece of what a caller sent.
            _log.error("a task ended with %s", type(failure).__name__, extra={"where": format_traceback(failure)})

    def run_every(self, name: str, interval: float, action: Work, *, jitter: float = 0.0) -> None:
        """Wait an interval, act, and so on; a failed action is logged and the next one comes as usual.

        The interval runs from the end of an action to the start of the next, so actions never overlap.
        `jitter` is the share of the interval, less than 1, by which each wait may be shorter or longer.
        """
        if not (interval > 0 and 0 <= jitter < 1):
            raise ValueError(f"{name!r} cannot run every {interval} s with a jitter of {jitter}")

        async def repeat() -> None:
            while not self._is_stopping:
                await self._clock.sleep(interval * (1 + jitter * (2 * self._chance() - 1)))
                await self._run_logged(name, action)

        self.start(name, repeat)

    async def stop(self) -> None:
        """Cancel everything and wait until it has cleaned up. Any later call only waits."""
        if not self._is_stopping:
            self._is_stopping = True
            for task in self._supervised:
                task.cancel()
        if self._supervised:
            # If this wait is cancelled, the tasks are not: a second cancellation would break off their clean-up.
            await asyncio.wait(set(self._supervised))

    async def _supervise(self, name: str, work: Work) -> None:
        backoff = _MIN_BACKOFF_SECS
        while True:
            started_at = self._clock.monotonic()
            if await self._run_logged(name, work) or self._is_stopping:
                return
            if self._clock.monotonic() - started_at >= _MAX_BACKOFF_SECS:
                backoff = _MIN_BACKOFF_SECS  # it ran well for a while, so this crash is a new trouble
            await self._clock.sleep(backoff * (0.5 + self._chance() / 2))
            backoff = min(2 * backoff, _MAX_BACKOFF_SECS)

    async def _run_logged(self, name: str, work: Work) -> bool:
        """Whether the work came to its end; if it crashed instead, that has been logged."""
        try:
            await work()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Nobody cancelled this task: something it waited for was, and that must not end it silently.
            _log.error("background task %r crashed: what it waited for was cancelled", name, exc_info=error)
            return False
        except Exception as error:
            _log.error("background task %r crashed: %r", name, error, exc_info=error)
            return False
        return True


@coroutine
def switch_to_task() -> Generator[None, None, None]:
    """What comes behind this runs in a task, also of work that was begun without one."""
    yield


async def _continue_in_task(work: Coroutine[Any, Any, None], pending: Any) -> None:
    await _continue(work, pending)


@coroutine
def _continue(work: Coroutine[Any, Any, None], pending: Any) -> Generator[Any, Any, None]:
    """Waits for what the work waits for already, and then does the rest of it."""
    try:
        while True:
            try:
                yield pending
            except BaseException as failure:
                pending = work.throw(failure)
            else:
                pending = work.send(None)
    except StopIteration:
        pass


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


MAX_IDLE_THREADS: Final = 8

P = ParamSpec("P")
T = TypeVar("T")


_large_work_lock = Lock()


async def run_large_work(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Work on a large body, in a thread. One at a time: each may take several times the body's memory for a moment, and
    as the interpreter runs one thread at a time, several would end no sooner."""

    exclusively: Callable[..., T] = _run_exclusively
    return await asyncio.to_thread(exclusively, work, *arguments, **named)


def _run_exclusively(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    with _large_work_lock:
        return work(*arguments, **named)


class DaemonThreadPool(ThreadPoolExecutor):
    """For `asyncio.to_thread`. Some work may never end, as that of a provider of credentials, so there are as many
    threads as there is work; for what must be done, its owner waits.

    A thread is started without waiting until it runs, as `Thread.start` does: where memory is short one may end before
    it has begun, and the event loop would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = Lock()
        self._alive = 0
        self._idle = 0  # threads that have begun and wait for work, less the work that waits for one

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Raises Busy where there is no thread, nor can one be started."""
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments, **named))
                except BaseException as failure:  # it is for whoever waits
                    future.set_exception(failure)

        with self._lock:
            if self._idle <= 0:
                self._start_thread()
            self._idle -= 1
        self._work.put(do)
        return future

    def _start_thread(self) -> None:
        try:
            start_new_thread(self._run, ())
        except RuntimeError:  # no memory, or as many threads as the system allows: the next that is free does it
            if not self._alive:
                raise Busy("the sidecar cannot start a thread; try again", retry_after=1) from None
        else:
            self._alive += 1

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._idle >= MAX_IDLE_THREADS:
                    self._alive -= 1
                    return
                self._idle += 1
            self._work.get()()
