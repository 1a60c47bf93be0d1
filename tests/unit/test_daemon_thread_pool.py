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


def test_work_one_after_another_needs_one_thread(starts: Starts) -> None:
    pool = DaemonThreadPool()
    for number in range(50):
        assert pool.submit(lambda each: each + 1, number).result(SECONDS) == number + 1
    assert starts.made <= 2  # one may not be back yet when the next work comes


def test_work_that_never_ends_keeps_no_other_waiting(starts: Starts) -> None:
    pool, is_over = DaemonThreadPool(), threading.Event()
    stuck = [pool.submit(is_over.wait) for _ in range(3 * MAX_IDLE_THREADS)]
    assert pool.submit(lambda: "done").result(SECONDS) == "done"
    assert not any(each.done() for each in stuck)
    is_over.set()
    assert all(each.result(SECONDS) for each in stuck)


def test_what_fails_is_for_who_waits_and_its_thread_goes_on(starts: Starts) -> None:
    pool = DaemonThreadPool()
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(SECONDS)
    assert pool.submit(lambda: "done").result(SECONDS) == "done"


def test_without_a_thread_to_be_had_it_waits_for_one_that_is_there(starts: Starts) -> None:
    pool, is_over = DaemonThreadPool(), threading.Event()
    first = pool.submit(is_over.wait)
    starts.is_refused = True
    waiting: list[Future[int]] = [pool.submit(lambda each=number: each) for number in range(5)]
    is_over.set()
    assert first.result(SECONDS)
    assert [each.result(SECONDS) for each in waiting] == list(range(5))


def test_without_any_it_is_a_clear_refusal(starts: Starts) -> None:
    pool = DaemonThreadPool()
    starts.is_refused = True
    with pytest.raises(Busy, match="cannot start a thread"):
        pool.submit(lambda: None)
    starts.is_refused = False
    assert pool.submit(lambda: "done").result(SECONDS) == "done"


def test_nobody_waits_for_a_thread_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short it may never: a loop that waits for that stands still for good."""
    monkeypatch.setattr(tasks, "start_new_thread", lambda *_: 0)
    assert not DaemonThreadPool().submit(lambda: None).done()


def test_what_a_thread_that_never_began_was_to_do_is_done_by_the_next(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DaemonThreadPool()
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "start_new_thread", lambda *_: 0)
        forsaken = pool.submit(lambda: "late")
    assert pool.submit(lambda: "done").result(SECONDS) == "done"
    assert forsaken.result(SECONDS) == "late"
