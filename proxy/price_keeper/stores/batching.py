"""One thread that does, in one go, all the work that has come in meanwhile: how a blocking engine serves a loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from price_keeper.errors import StoreThrottled, StoreUnavailable

Work = TypeVar("Work")
Outcome = object  # an exception is raised to the caller, anything else is its answer

MAX_QUEUED = 20_000  # past this the disk is hopelessly behind, and more waiting helps nobody
MAX_BATCH = 1_000  # keeps one commit short, and what is lost to one failing commit small


class BatchThread(Generic[Work]):
    """`run` answers a batch and `finish` comes last of all, both always in the thread."""

    def __init__(
        self, name: str, run: Callable[[Sequence[Work]], Sequence[Outcome]], finish: Callable[[], None]
    ) -> None:
        self._run = run
        self._finish = finish
        self._queue: queue.SimpleQueue[tuple[Work, asyncio.Future[Outcome]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_until_closed, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> asyncio.Future[Outcome]:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        if self._queue.qsize() >= MAX_QUEUED:
            raise StoreThrottled(f"{MAX_QUEUED} requests are waiting for the store already")
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        self._queue.put((work, answer))
        return answer

    async def close(self) -> None:
        """Returns when everything submitted has been answered."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take_batch()
            if batch:
                outcomes = self._run_batch([work for work, _ in batch])
                self._deliver([answer for _, answer in batch], outcomes)
        self._finish()

    def _take_batch(self) -> tuple[list[tuple[Work, asyncio.Future[Outcome]]], bool]:
        """Waits for the first piece of work, then takes whatever else is there."""
        batch = []
        try:
            entry = self._queue.get()
            while entry is not None:
                batch.append(entry)
                if len(batch) == MAX_BATCH:
                    return batch, True
                entry = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _run_batch(self, works: Sequence[Work]) -> Sequence[Outcome]:
        try:
            return self._run(works)
        except Exception as failure:  # a caller must get an answer whatever went wrong
            return [failure] * len(works)

    def _deliver(self, answers: Sequence[asyncio.Future[Outcome]], outcomes: Sequence[Outcome]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed with callers still waiting: nobody is left
            self._loop.call_soon_threadsafe(_resolve, answers, outcomes)


def _resolve(answers: Sequence[asyncio.Future[Outcome]], outcomes: Sequence[Outcome]) -> None:
    for answer, outcome in zip(answers, outcomes, strict=True):
        if answer.done():  # its caller was cancelled
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
