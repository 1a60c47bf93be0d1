"""Background tasks: a crash is logged once and the task restarted; a stop is complete."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
from price_keeper.tasks import Tasks, switch_to_task

from tests.support.clock import ManualClock, settle
from tests.support.raw_clients import eventually

LONGEST = 60


class Script:
    """Work whose every run does the next thing listed; the runs are noted with their time."""

    def __init__(self, clock: ManualClock, *steps: object) -> None:
        self._clock, self._steps = clock, list(steps)
        self._began = clock.monotonic()
        self.runs: list[float] = []

    async def __call__(self) -> None:
        self.runs.append(self._clock.monotonic() - self._began)
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, (int, float)):
            await self._clock.sleep(step)
            raise OSError("after a while")


def always(number: float) -> Callable[[], float]:
    return lambda: number


def most() -> float:
    """Jitter as good as at its top, where a back-off has its full length."""
    return 1.0


def crashes(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "price_keeper.tasks"]


async def test_crash_is_logged_once_and_task_restarts(caplog):
    clock = ManualClock()
    work = Script(clock, OSError("disk"), None)
    async with Tasks(clock, chance=most) as tasks:
        tasks.start("journal fsync", work)
        await settle()
        assert work.runs == [0]
        assert clock.remaining_sleeps() == [1]
        await clock.advance(0.99)
        assert work.runs == [0]
        await clock.advance(0.01)
        assert work.runs == [0, 1]
        await clock.advance(1000)
    assert work.runs == [0, 1], "work that returned is finished"
    (record,) = crashes(caplog)
    assert record.levelno == logging.ERROR
    assert "journal fsync" in record.getMessage()
    assert "disk" in record.getMessage()
    assert record.exc_info is not None


async def test_restart_backoff_doubles_up_to_limit():
    clock = ManualClock()
    work = Script(clock, OSError())
    async with Tasks(clock, chance=most) as tasks:
        tasks.start("work", work)
        waits = []
        for _ in range(10):
            await settle()
            waits += clock.remaining_sleeps()
            await clock.advance(waits[-1])
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST, LONGEST, LONGEST, LONGEST]


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.5), (0.5, 0.75), (0.999, 0.9995)])
async def test_restart_backoff_is_jittered_between_half_and_whole(chance, expected):
    clock = ManualClock()
    async with Tasks(clock, chance=always(chance)) as tasks:
        tasks.start("work", Script(clock, OSError()))
        await settle()
        assert clock.remaining_sleeps() == [expected]


@pytest.mark.parametrize(("ran_for", "expected"), [(LONGEST - 1, 8), (LONGEST, 1)])
async def test_long_run_resets_backoff(ran_for, expected):
    clock = ManualClock()
    work = Script(clock, OSError(), OSError(), OSError(), ran_for)
    async with Tasks(clock, chance=most) as tasks:
        tasks.start("work", work)
        await clock.advance(1 + 2 + 4 + ran_for)
        assert len(work.runs) == 4
        assert clock.remaining_sleeps() == [expected]


async def test_crash_does_not_affect_other_tasks():
    clock = ManualClock()
    steady = Script(clock, 10_000)
    async with Tasks(clock) as tasks:
        tasks.start("crashing", Script(clock, OSError()))
        tasks.start("steady", steady)
        await clock.advance(500)
        assert steady.runs == [0]


async def test_unrequested_cancellation_counts_as_crash(caplog):
    clock = ManualClock()
    work = Script(clock, asyncio.CancelledError(), None)
    async with Tasks(clock, chance=most) as tasks:
        tasks.start("refresh", work)
        await clock.advance(1)
    assert work.runs == [0, 1]
    assert ["refresh" in record.getMessage() for record in crashes(caplog)] == [True]


async def test_external_cancellation_ends_task(caplog):
    clock = ManualClock()
    work = Script(clock, 10_000)
    async with Tasks(clock) as tasks:
        tasks.start("work", work)
        await settle()
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "work"]
        task.cancel()
        await clock.advance(LONGEST)
        assert task.cancelled()
    assert work.runs == [0]
    assert crashes(caplog) == []


async def test_stop_during_backoff_ends_at_once(caplog):
    clock = ManualClock()
    work = Script(clock, OSError())
    tasks = Tasks(clock)
    tasks.start("work", work)
    await settle()
    assert len(clock.remaining_sleeps()) == 1
    await tasks.stop()
    assert clock.remaining_sleeps() == []
    await clock.advance(1000)
    assert work.runs == [0]
    assert len(crashes(caplog)) == 1


async def test_stop_waits_for_cleanup(caplog):
    clock = ManualClock()
    events: list[str] = []

    async def work() -> None:
        try:
            await clock.sleep(10_000)
        finally:
            await clock.sleep(5)
            events.append("cleaned up")

    tasks = Tasks(clock)
    tasks.start("work", work)
    await settle()
    first = asyncio.create_task(tasks.stop())
    await settle()
    impatient = asyncio.create_task(tasks.stop())
    second = asyncio.create_task(tasks.stop())
    await settle()
    impatient.cancel()
    await clock.advance(4)
    assert (first.done(), second.done(), events) == (False, False, [])
    await clock.advance(1)
    assert (first.done(), second.done(), events) == (True, True, ["cleaned up"])
    await tasks.stop()
    assert crashes(caplog) == []


async def test_crash_during_cleanup_is_logged_and_not_retried(caplog):
    clock = ManualClock()
    runs = []

    async def work() -> None:
        runs.append(1)
        try:
            await clock.sleep(10_000)
        finally:
            raise OSError("could not close")

    async with Tasks(clock) as tasks:
        tasks.start("work", work)
        await settle()
    assert runs == [1]
    assert ["could not close" in record.getMessage() for record in crashes(caplog)] == [True]


async def test_stop_ends_periodic_work_that_swallows_cancellation():
    clock = ManualClock()

    async def stubborn() -> None:
        try:
            await clock.sleep(10_000)
        except asyncio.CancelledError:
            return

    tasks = Tasks(clock)
    tasks.run_every("stubborn", 1, stubborn)
    await clock.advance(2)
    stopping = asyncio.create_task(tasks.stop())
    await settle()
    assert stopping.done()


async def test_task_never_scheduled_can_be_stopped():
    clock = ManualClock()
    work = Script(clock, None)
    tasks = Tasks(clock)
    tasks.start("work", work)
    await tasks.stop()
    assert work.runs == []


async def test_spawn_after_stop_is_refused():
    tasks = Tasks(ManualClock())
    await tasks.stop()
    with pytest.raises(RuntimeError, match="late"):
        tasks.start("late", Script(ManualClock(), None))


async def test_task_may_stop_all_tasks():
    clock = ManualClock()
    tasks = Tasks(clock)
    tasks.start("fatal", tasks.stop)
    tasks.start("other", Script(clock, 10_000))
    await settle()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() in ("fatal", "other")] == []


async def test_running_task_is_not_garbage_collected():
    ended = []

    async def forgotten() -> None:
        try:
            await asyncio.get_running_loop().create_future()  # nothing but the task itself knows this future
        finally:
            ended.append(1)

    async with Tasks(ManualClock()) as tasks:
        tasks.start("forgotten", forgotten)
        await settle()
        gc.collect()
        await settle()
        assert ended == []
    assert ended == [1]


async def test_finished_task_is_released():
    async with Tasks(ManualClock()) as tasks:
        tasks.start("short", Script(ManualClock(), None))
        (task,) = [weakref.ref(task) for task in asyncio.all_tasks() if task.get_name() == "short"]
        await settle()
        gc.collect()
        assert task() is None


async def test_periodic_work_runs_after_each_interval():
    clock = ManualClock()
    work = Script(clock, None)
    async with Tasks(clock) as tasks:
        tasks.run_every("sweep", 60, work)
        await clock.advance(59)
        assert work.runs == []
        await clock.advance(181)
        assert work.runs == [60, 120, 180, 240]


async def test_periodic_work_keeps_interval_after_exceptions(caplog):
    clock = ManualClock()
    work = Script(clock, OSError("one"), OSError("two"), OSError("three"), None)
    async with Tasks(clock) as tasks:
        tasks.run_every("sweep", 60, work)
        await clock.advance(300)
    assert work.runs == [60, 120, 180, 240, 300]
    messages = [record.getMessage() for record in crashes(caplog)]
    assert len(messages) == 3
    assert all("sweep" in line for line in messages)


async def test_periodic_work_survives_unrequested_cancellation():
    clock = ManualClock()
    work = Script(clock, asyncio.CancelledError(), None)
    async with Tasks(clock) as tasks:
        tasks.run_every("sweep", 60, work)
        await clock.advance(120)
    assert work.runs == [60, 120]


async def test_periodic_work_never_overlaps():
    clock = ManualClock()
    work = Script(clock, 100)
    async with Tasks(clock) as tasks:
        tasks.run_every("slow", 60, work)
        await clock.advance(400)
    assert work.runs == [60, 220, 380]


@pytest.mark.parametrize(("chance", "wait"), [(0.0, 54), (0.5, 60), (1.0, 66)])
async def test_jitter_spreads_interval_both_ways(chance, wait):
    clock = ManualClock()
    async with Tasks(clock, chance=always(chance)) as tasks:
        tasks.run_every("sweep", 60, Script(clock, None), jitter=0.1)
        await settle()
        assert clock.remaining_sleeps() == [wait]


@pytest.mark.parametrize(("interval", "jitter"), [(0, 0), (-1, 0), (float("nan"), 0), (1, 1), (1, -0.1)])
async def test_zero_interval_is_refused(interval, jitter):
    async with Tasks(ManualClock()) as tasks:
        with pytest.raises(ValueError, match="sweep"):
            tasks.run_every("sweep", interval, Script(ManualClock(), None), jitter=jitter)


async def test_eager_work_waits_for_a_future_without_a_task() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    seen: list[object] = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        seen.append(await first)
        try:
            await second
        except ValueError as failure:
            seen.append(str(failure))

    async with Tasks(ManualClock()) as tasks:
        before = asyncio.all_tasks()
        tasks.spawn_eager(work())
        first.set_result("first")
        await settle()
        assert asyncio.all_tasks() == before
        second.set_exception(ValueError("second"))
        await settle()
    assert seen[1:] == ["first", "second"]


async def test_eager_work_that_asks_for_a_task_has_a_time_limit() -> None:
    released = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        await released
        await switch_to_task()
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")

    async with Tasks(ManualClock()) as tasks:
        tasks.spawn_eager(work())
        released.set_result(None)
        await eventually(lambda: bool(seen))


@pytest.mark.parametrize("waits", [False, True])
async def test_eager_work_that_fails_is_logged_without_its_message(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    released = asyncio.get_running_loop().create_future()

    async def work() -> None:
        if waits:
            await released
        raise RuntimeError("a prompt")

    async with Tasks(ManualClock()) as tasks:
        tasks.spawn_eager(work())
        released.set_result(None)
        await settle()
    assert "<locals>.work' failed with an unexpected RuntimeError" in caplog.text
    assert "a prompt" not in caplog.text
