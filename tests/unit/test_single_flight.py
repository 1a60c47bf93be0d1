"""Concurrent callers share one load, whichever of them leave, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from price_keeper.single_flight import SingleFlight

from tests.support.clock import settle


class GatedLoad:
    """Counts its calls, and ends when the gate is opened."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.count = self.finished = 0
        self.gate = asyncio.Event()
        self._failure = failure

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        await self.gate.wait()
        self.finished += 1
        if self._failure is not None:
            raise self._failure
        return number


async def test_get_or_load_concurrent_callers_share_one_load() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad()
    callers = [asyncio.create_task(flights.get_or_load("a", load)) for _ in range(100)]
    other = asyncio.create_task(flights.get_or_load("b", load))
    await settle()
    assert ("a" in flights, "b" in flights, "c" in flights, len(flights._running)) == (True, True, False, 2)
    load.gate.set()
    assert await asyncio.gather(*callers, other) == [1] * 100 + [2]
    assert len(flights._running) == 0
    assert await flights.get_or_load("a", load) == 3  # results are not cached


async def test_get_or_load_failure_is_shared_and_not_kept() -> None:
    flights, failing, load = SingleFlight[str, int](), GatedLoad(OSError("away")), GatedLoad()
    callers = [asyncio.create_task(flights.get_or_load("a", failing)) for _ in range(10)]
    await settle()
    failing.gate.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert [str(each) for each in found] == ["away"] * 10
    assert failing.count == 1
    load.gate.set()
    assert await flights.get_or_load("a", load) == 1


async def test_get_or_load_cancelled_caller_leaves_the_load_to_the_others() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad()
    callers = [asyncio.create_task(flights.get_or_load("a", load)) for _ in range(3)]
    await settle()
    callers[0].cancel()  # the one that started it
    await settle()
    load.gate.set()
    assert await asyncio.gather(*callers[1:]) == [1, 1]
    assert callers[0].cancelled()


async def test_get_or_load_all_cancelled_next_caller_joins_the_same_load() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad()
    callers = [asyncio.create_task(flights.get_or_load("a", load)) for _ in range(3)]
    await settle()
    for caller in callers:
        caller.cancel()
    await settle()
    late = asyncio.create_task(flights.get_or_load("a", load))
    await settle()
    load.gate.set()
    assert (await late, load.count, len(flights._running)) == (1, 1, 0)


async def test_get_or_load_failure_after_all_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    flights, load = SingleFlight[str, int](), GatedLoad(OSError("away"))
    caller = asyncio.create_task(flights.get_or_load("a", load))
    await settle()
    caller.cancel()
    load.gate.set()
    await settle()
    assert load.finished == 1
    del caller
    gc.collect()  # asyncio reports unread exceptions when it collects their tasks
    assert caplog.records == []


async def test_start_runs_in_the_background_and_callers_join_it() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad()
    flights.start("a", load)
    flights.start("a", load)
    assert "a" in flights  # at once, so that a caller in the same turn joins it
    joined = asyncio.create_task(flights.get_or_load("a", load))
    await settle()
    load.gate.set()
    assert (await joined, load.count) == (1, 1)


async def test_load_cancelled_before_it_begins_frees_its_key() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad()
    load.gate.set()
    before = asyncio.all_tasks()
    flights.start("a", load)
    (task,) = asyncio.all_tasks() - before
    task.cancel()  # as `asyncio.run` does at its end
    await settle()
    assert (len(flights._running), load.count) == (0, 0)
    assert await flights.get_or_load("a", load) == 1


async def test_load_that_has_ended_is_joined_by_nobody() -> None:
    """Not even in the turn in which it ended: what is asked for then may have changed since it was read."""
    flights, in_same_turn, started = SingleFlight[str, int](), list[bool](), list[int]()

    async def load() -> int:
        started.append(1)
        asyncio.get_running_loop().call_soon(at_the_end)
        return 1

    def at_the_end() -> None:  # is called before the callbacks of the task
        in_same_turn.append("a" in flights)
        if len(started) == 1:
            flights.start("a", load)

    flights.start("a", load)
    await settle()
    assert (in_same_turn, len(started), len(flights._running)) == ([False, False], 2, 0)


async def test_start_failure_is_logged_once_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    flights, load = SingleFlight[str, int](), GatedLoad(OSError("secret of a caller"))
    flights.start("a", load.__call__)
    load.gate.set()
    await settle()
    message = "background task 'GatedLoad.__call__' failed with an unexpected OSError"
    assert [(each.name, each.levelno, each.getMessage()) for each in caplog.records] == [
        ("price_keeper.tasks", logging.ERROR, message)
    ]


async def test_wait_returns_at_the_end_of_the_load_and_raises_nothing() -> None:
    flights, load = SingleFlight[str, int](), GatedLoad(OSError("away"))
    await flights.wait("a")  # none is running
    caller = asyncio.create_task(flights.get_or_load("a", load))
    await settle()
    gone, waiter = (asyncio.create_task(flights.wait("a")) for _ in range(2))
    await settle()
    gone.cancel()
    await settle()
    assert not waiter.done()
    load.gate.set()
    await waiter
    assert "a" not in flights
    with pytest.raises(OSError, match="away"):
        await caller
