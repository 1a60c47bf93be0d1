"""Threads for `asyncio.to_thread`: reused, never awaited at exit, and optional where none can be started."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from price_keeper import tasks
from price_keeper.errors import Busy
from price_keeper.tasks import MAX_IDLE_THREADS, DaemonThreadPool

SECONDS = 10


class Starts:
    """In place of the system: some of the threads that are asked for cannot be had, or end before they begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.is_refused = False
        monkeypatch.setattr(tasks, "start_new_thread", self)

    def __call__(self, work: Any, arguments: tuple[Any, ...]) -> int:
        if self.is_refused:
            raise RuntimeError("can't start new thread")
        self.made += 1
        return _thread.start_new_thread(work, arguments)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


def test_sequential_work_uses_one_thread(starts: Starts) -> None:
    pool = DaemonThreadPool()
    for number in range(50):
        assert pool.submit(lambda each: each + 1, number).result(SECONDS) == number + 1
    assert starts.made <= 2  # one may not be back yet when the next work comes


def test_stuck_work_blocks_no_other(starts: Starts) -> None:
    pool, is_over = DaemonThreadPool(), threading.Event()
    stuck = [pool.submit(is_over.wait) for _ in range(3 * MAX_IDLE_THREADS)]
    assert pool.submit(lambda: "done").result(SECONDS) == "done"
    assert not any(each.done() for each in stuck)
    is_over.set()
    assert all(each.result(SECONDS) for each in stuck)


def test_failure_reaches_caller_and_thread_continues(starts: Starts) -> None:
    pool = DaemonThreadPool()
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(SECONDS)
    assert pool.submit(lambda: "done").result(SECONDS) == "done"


def test_thread_start_failure_waits_for_existing_thread(starts: Starts) -> None:
    pool, is_over = DaemonThreadPool(), threading.Event()
    first = pool.submit(is_over.wait)
    starts.is_refused = True
    waiting: list[Future[int]] = [pool.submit(lambda each=number: each) for number in range(5)]
    is_over.set()
    assert first.result(SECONDS)
    assert [each.result(SECONDS) for each in waiting] == list(range(5))


def test_thread_start_failure_without_threads_is_refused(starts: Starts) -> None:
    pool = DaemonThreadPool()
    starts.is_refused = True
    with pytest.raises(Busy, match="cannot start a thread"):
        pool.submit(lambda: None)
    starts.is_refused = False
    assert pool.submit(lambda: "done").result(SECONDS) == "done"


def test_submit_does_not_wait_for_thread_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short it may never: a loop that waits for that stands still for good."""
    monkeypatch.setattr(tasks, "start_new_thread", lambda *_: 0)
    assert not DaemonThreadPool().submit(lambda: None).done()


def test_work_of_thread_that_never_started_is_done_by_next(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DaemonThreadPool()
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "start_new_thread", lambda *_: 0)
        forsaken = pool.submit(lambda: "late")
    assert pool.submit(lambda: "done").result(SECONDS) == "done"
    assert forsaken.result(SECONDS) == "late"
