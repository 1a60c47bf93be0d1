"""Threads for what would keep the event loop waiting. They are used again, and the process ends without them."""

from __future__ import annotations

import asyncio
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import Final, ParamSpec, TypeVar

from price_keeper.errors import Busy

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
