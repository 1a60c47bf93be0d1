"""The simulated clock is what every other test of time stands on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest
import uvloop
from price_keeper.clock import Clock, SystemClock

from tests.support.clock import ManualClock, settle


async def test_sleepers_wake_in_order_of_deadline():
    clock = ManualClock()
    began = clock.monotonic()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic() - began))

    tasks = [asyncio.create_task(sleeper(name, secs)) for name, secs in [("c", 3), ("a", 1), ("b", 2), ("z", 9)]]
    await clock.advance(5)
    assert woken == [("a", 1), ("b", 2), ("c", 3)]
    assert clock.monotonic() - began == 5
    assert clock.remaining_sleeps() == [4]
    await clock.advance(4)
    assert woken[-1] == ("z", 9)
    await asyncio.gather(*tasks)


async def test_sleepers_with_equal_deadline_wake_in_order_of_sleeping():
    clock = ManualClock()
    woken: list[int] = []

    async def sleeper(number: int) -> None:
        await clock.sleep(1)
        woken.append(number)

    tasks = [asyncio.create_task(sleeper(number)) for number in range(5)]
    await clock.advance(1)
    assert woken == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)


async def test_effects_of_sleeper_happen_before_next_wakes():
    clock = ManualClock()
    events: list[str] = []

    async def early() -> None:
        await clock.sleep(1)
        for _ in range(20):  # far more turns of the loop than waking takes
            await asyncio.sleep(0)
        events.append("early is through")

    async def late() -> None:
        await clock.sleep(2)
        events.append("late wakes")

    tasks = [asyncio.create_task(late()), asyncio.create_task(early())]
    await clock.advance(10)
    assert events == ["early is through", "late wakes"]
    await asyncio.gather(*tasks)


async def test_repeated_sleeper_wakes_as_often_as_time_allows():
    clock = ManualClock()
    ticks: list[float] = []

    async def ticker() -> None:
        while True:
            await clock.sleep(0.1)
            ticks.append(clock.now())

    task = asyncio.create_task(ticker())
    await clock.advance(1.0)
    assert len(ticks) == 10
    task.cancel()


async def test_cancelled_sleeper_neither_wakes_nor_holds_time():
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1))
    await settle()
    assert clock.remaining_sleeps() == [1]
    task.cancel()
    await settle()
    assert clock.remaining_sleeps() == []
    await clock.advance(2)
    assert task.cancelled()


async def test_wall_clock_jump_wakes_nobody():
    clock = ManualClock(wall=5000)
    task = asyncio.create_task(clock.sleep(10))
    await settle()
    monotonic = clock.monotonic()
    clock.set_wall(1_000_000)
    await settle()
    assert (clock.now(), clock.monotonic(), task.done()) == (1_000_000, monotonic, False)
    clock.set_wall(10)
    await clock.advance(10)
    assert (clock.now(), clock.monotonic(), task.done()) == (20, monotonic + 10, True)


async def test_zero_sleep_yields_to_other_tasks():
    clock = ManualClock()
    events: list[str] = []

    async def other() -> None:
        events.append("other")

    task = asyncio.create_task(other())
    await clock.sleep(0)
    assert events == ["other"]
    await task


async def test_manual_clock_refuses_to_go_back():
    with pytest.raises(ValueError, match="forwards"):
        await ManualClock().advance(-1)


async def test_task_that_never_waits_is_detected():
    async def restless() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    task = asyncio.create_task(restless())
    with pytest.raises(RuntimeError, match="never waits"):
        await ManualClock().advance(1)
    task.cancel()


async def test_system_clock_matches_time_module():
    clock: Clock = SystemClock()
    before, begun = time.time(), time.monotonic()
    wall, monotonic = clock.now(), clock.monotonic()
    await clock.sleep(0)
    assert before <= wall <= time.time()
    assert begun <= monotonic <= time.monotonic()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_system_clock_sleep_never_ends_early(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    clock = SystemClock()
    chance = random.Random(1)

    async def left_after(seconds: float) -> float:
        until = clock.monotonic() + seconds
        await clock.sleep(until - clock.monotonic())
        return until - clock.monotonic()

    async def left() -> list[float]:
        return await asyncio.gather(*(left_after(chance.uniform(0.01, 0.2)) for _ in range(200)))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert [seconds for seconds in runner.run(left()) if seconds > 0] == []
