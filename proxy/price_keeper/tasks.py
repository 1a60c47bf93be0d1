"""Background work: supervised asyncio tasks, and threads for work that would block the event loop.

No task fails unnoticed. `Tasks.start` restarts work that crashes, `run_every` repeats an action, `spawn` runs a
coroutine to its end, and `spawn_eager` does so without a task unless it asks for one; loads that callers share run in
`single_flight`. `run_large_work` processes one large body at a time in a thread; `DaemonThreadPool` is the executor
behind `asyncio.to_thread`, and its threads do not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
from _thread import start_new_thread
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock
from types import TracebackType, coroutine
from typing import Any, Final, ParamSpec, Self, TypeVar

from price_keeper.clock import Clock
from price_keeper.errors import Busy
from price_keeper.telemetry.logs import format_traceback

Work = Callable[[], Coroutine[Any, Any, object]]

MAX_IDLE_THREADS: Final = 8

P = ParamSpec("P")
T = TypeVar("T")

_MIN_BACKOFF_SECS = 1.0
_MAX_BACKOFF_SECS = 60.0

_large_work_lock = Lock()
_log = logging.getLogger("price_keeper.tasks")


class Tasks:
    """The background tasks of a process. Use as `async with Tasks(clock) as tasks`; leaving the block cancels the
    supervised ones and waits for them."""

    def __init__(self, clock: Clock, *, chance: Callable[[], float] = random.random) -> None:
        """`chance` returns a number in [0, 1), used for jitter."""
        self._clock = clock
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._spawned: set[asyncio.Task[None]] = set()
        self._supervised: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references to tasks
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self, name: str, work: Work) -> None:
        """Run until it returns; run it again, after a growing backoff, each time it crashes."""
        if self._is_stopping:
            raise RuntimeError(f"cannot start {name!r}: the background tasks are stopping")
        task = asyncio.create_task(self._supervise(name, work), name=name)
        self._supervised.add(task)
        task.add_done_callback(self._supervised.discard)

    def spawn_eager(self, work: Coroutine[Any, Any, None]) -> None:
        """Like `spawn`, but start to run now, and without a task: most calls only wait for a future, the end of their
        response, and a task would cost more than that wait. So `asyncio.timeout` works only after `switch_to_task`."""
        self._advance(work)

    def _advance(self, work: Coroutine[Any, Any, None], _: object = None) -> None:
        """Run up to where the coroutine waits next, and have it continued when what it waits for is there."""
        try:
            pending = work.send(None)
        except StopIteration:
            return
        except Exception as failure:
            _log_failure(name_work(work), failure)
            return
        if pending is None:  # from `switch_to_task`
            self.spawn(work)
        else:
            pending._asyncio_future_blocking = False  # as a task does, to tell that it has seen the future
            pending.add_done_callback(partial(self._advance, work))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, even while the process stops. Meant for many short coroutines that handle their
        own failures; an exception that escapes is logged."""
        task = self._loop.create_task(work, name=name_work(work))
        self._spawned.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        log_failure(task)

    def run_every(self, name: str, interval: float, action: Work, *, jitter: float = 0.0) -> None:
        """Wait an interval, run the action, and repeat. A failed action is logged, and the next one runs as usual.

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
        """Cancel the supervised tasks and wait until they have cleaned up. Idempotent: a later call only waits."""
        if not self._is_stopping:
            self._is_stopping = True
            for task in self._supervised:
                task.cancel()
        if self._supervised:
            # Cancelling this wait does not cancel the tasks again, which would interrupt their clean-up.
            await asyncio.wait(set(self._supervised))

    async def _supervise(self, name: str, work: Work) -> None:
        backoff = _MIN_BACKOFF_SECS
        while True:
            started_at = self._clock.monotonic()
            if await self._run_logged(name, work) or self._is_stopping:
                return
            if self._clock.monotonic() - started_at >= _MAX_BACKOFF_SECS:
                backoff = _MIN_BACKOFF_SECS  # it ran well for a while, so this crash has a new cause
            await self._clock.sleep(backoff * (0.5 + self._chance() / 2))
            backoff = min(2 * backoff, _MAX_BACKOFF_SECS)

    async def _run_logged(self, name: str, work: Work) -> bool:
        """Whether the work came to its end; if it crashed instead, that has been logged."""
        try:
            await work()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # This task was not cancelled; something it waited for was, and that must not end it silently.
            _log.error("background task %r crashed: an operation it awaited was cancelled", name, exc_info=error)
            return False
        except Exception as error:
            _log.error("background task %r crashed: %r", name, error, exc_info=error)
            return False
        return True


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the exception of a task that ended with one."""
    failure = None if task.cancelled() else task.exception()
    if failure is not None:
        _log_failure(task.get_name(), failure)


@coroutine
def switch_to_task() -> Generator[None, None, None]:
    """After awaiting this, the coroutine runs in a task, even if `spawn_eager` started it without one."""
    yield


def name_work(work: object) -> str | None:
    """The name of a function or coroutine, for its task; None if it has none."""
    return getattr(work, "__qualname__", None)


def _log_failure(name: str | None, failure: BaseException) -> None:
    """The exception's message is left out, because it may contain data of a caller."""
    message = "background task %r failed with an unexpected %s"
    _log.error(message, name, type(failure).__name__, extra={"where": format_traceback(failure)})


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_large_work(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run work on a large body in a thread, one at a time in this process: each may briefly take several times the
    body's memory, and under the GIL several at once would not finish sooner."""

    exclusively: Callable[..., T] = _run_exclusively
    return await asyncio.to_thread(exclusively, work, *arguments, **named)


def _run_exclusively(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    with _large_work_lock:
        return work(*arguments, **named)


class DaemonThreadPool(ThreadPoolExecutor):
    """The executor for `asyncio.to_thread`. Some work may never end, such as that of a credential provider, so the
    number of threads is not limited and exit does not wait for them. Work that must finish has to be awaited by its
    owner.

    Threads are started without waiting until they run, unlike with `Thread.start`: when memory is short, a thread may
    end before it has begun, and the event loop would then wait forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = Lock()
        self._alive = 0
        self._idle = 0  # running threads without work, minus queued work

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Run the work in a thread. Raises Busy if there is no thread and none can be started."""
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments, **named))
                except BaseException as failure:  # passed on to the awaiting caller
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
        except RuntimeError:  # out of memory, or at the system's limit: an existing thread will do the work
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
