"""A process that dies anywhere between a threshold and its delivery: the receiver gets exactly one alert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from price_keeper.alerts.alert_raiser import SETTLE_SECONDS
from price_keeper.alerts.webhook import WebhookResponse
from price_keeper.domain import Scope
from price_keeper.tasks import Tasks

from tests.support.alerts import (
    CrashingProcess,
    CrashPoint,
    ProcessKilled,
    ScriptedAlertStore,
    ScriptedReceiver,
    files,
    scope,
)
from tests.support.clock import ManualClock, settle

STEPS = [
    "before the file",
    "within the file",
    "after the file",
    "before put",
    "after put",
    "before send",
    "after send",
    "before drop",
    "after drop",
]
DELIVERED_TWICE = {"after send", "before drop"}  # the receiver has it, and the disk does not know


@dataclass
class World:
    """What outlives a process: its disk, the store, the receiver, and time."""

    folder: Path
    rows: ScriptedAlertStore = field(default_factory=ScriptedAlertStore)
    receiver: ScriptedReceiver = field(default_factory=ScriptedReceiver)
    clock: ManualClock = field(default_factory=ManualClock)
    whom: Scope = field(default_factory=scope)
    delivered_twice: int = 0  # deaths between the receiver's yes and the disk's knowing of it

    @asynccontextmanager
    async def process(self, death: CrashPoint | None = None, name: str = "own") -> AsyncIterator[CrashingProcess]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # of tasks that were killed
        async with Tasks(self.clock) as tasks:
            made = CrashingProcess(self.folder / name, self.rows, self.receiver, self.clock, tasks, death)
            await made.outbox.open()
            yield made

    async def live(self, death: CrashPoint | None = None, name: str = "own", *, reaches: bool = True) -> str:
        """Starts, takes up what is left, reaches a threshold and delivers; the step at which it dies, if it does."""
        death = death or CrashPoint()
        delivered = len(self.receiver.received)
        async with self.process(death, name) as made:
            try:
                await made.alerts.settle_unfinished()
                if reaches:
                    await made.raise_alert(self.whom)
                await rest(self.clock)
            except ProcessKilled:
                pass
        self.delivered_twice += death.at in DELIVERED_TWICE and len(self.receiver.received) > delivered
        return death.at

    def is_delivered(self) -> None:
        """The one alert that has the marker, delivered no more often than lost answers explain."""
        ((_, marker),) = self.rows.items.items()
        assert set(self.receiver.ids) == {marker["alert"]}
        assert len(self.receiver.received) == 1 + self.delivered_twice

    async def is_quiet(self) -> None:
        """Every process starts once more, for good: nothing is left anywhere."""
        for name in ("own", "other"):
            async with self.process(name=name) as made:
                made.alerts.start(made.deliveries._tasks)
                await rest(self.clock)
                await self.clock.advance(3 * SETTLE_SECONDS)
                await rest(self.clock)
                assert made.deliveries.pending == 0
            assert [name for name in files(self.folder / name) if not name.endswith(".tmp")] == []


async def rest(clock: ManualClock) -> None:
    """Threads write files while the loop has nothing to do."""
    for _ in range(3):
        await settle()
        await asyncio.sleep(0.002)
    await settle()


@pytest.fixture
def worlds(tmp_path: Path) -> Callable[[], World]:
    numbers = count()

    def new() -> World:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return World(folder)

    return new


async def test_alert_crash_points_are_as_listed(worlds: Callable[[], World]) -> None:
    found = [await worlds().live(CrashPoint(step)) for step in range(len(STEPS) + 1)]
    assert found == [*STEPS, ""]


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
async def test_single_crash_at_each_step_delivers_alert(worlds: Callable[[], World], step: int) -> None:
    world = worlds()
    await world.live(CrashPoint(step))
    await world.live()
    await world.is_quiet()
    world.is_delivered()
    assert world.delivered_twice == (STEPS[step] in DELIVERED_TWICE)


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
async def test_crash_without_further_threshold_check_delivers_alert_from_disk(
    worlds: Callable[[], World], step: int
) -> None:
    """Alerts on the disk are delivered although the next process never sees the threshold itself."""
    world = worlds()
    await world.live(CrashPoint(step))
    await world.is_quiet()
    if step >= STEPS.index("after the file"):
        world.is_delivered()
    else:
        assert (world.receiver.received, world.rows.items) == ([], {})


@pytest.mark.parametrize("first", range(len(STEPS)), ids=STEPS)
async def test_two_crashes_in_a_row_deliver_alert(worlds: Callable[[], World], first: int) -> None:
    for second in range(len(STEPS) + 1):
        world = worlds()
        await world.live(CrashPoint(first))
        await world.live(CrashPoint(second))
        await world.live()
        await world.is_quiet()
        world.is_delivered()


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
async def test_other_process_raises_alert_while_first_is_down(worlds: Callable[[], World], step: int) -> None:
    for other_dies_at in (*range(len(STEPS)), None):
        world = worlds()
        await world.live(CrashPoint(step))
        await world.live(CrashPoint(other_dies_at), "other")
        await world.live()
        await world.is_quiet()
        world.is_delivered()


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_crash_while_awaiting_store_answer_delivers_alert(worlds: Callable[[], World], fault: str) -> None:
    world = worlds()
    world.rows.faults = [fault]
    await world.live()  # ends with the alert in doubt
    assert world.receiver.received == []
    await world.live(name="other")
    await world.is_quiet()
    world.is_delivered()


async def test_crash_between_two_attempts_delivers_alert(worlds: Callable[[], World]) -> None:
    world = worlds()
    world.receiver.answers = [WebhookResponse(500), WebhookResponse(None, "away")]
    await world.live()
    await world.live(reaches=False)
    assert world.receiver.received == []
    await world.live(reaches=False)
    assert len(world.receiver.received) == 1
    await world.is_quiet()
    assert len(world.receiver.received) == 1


async def test_alert_raised_while_stopping_stays_on_disk(worlds: Callable[[], World]) -> None:
    """An alert raised while background tasks stop stays on the disk."""
    world = worlds()
    async with world.process() as made:
        await made.deliveries._tasks.stop()
        assert await made.raise_alert(world.whom)
        await rest(world.clock)
        assert world.receiver.attempts == 0
    await world.is_quiet()
    assert len(world.receiver.received) == 1


async def test_concurrent_processes_deliver_one_alert(worlds: Callable[[], World]) -> None:
    world = worlds()
    async with AsyncExitStack() as running:
        fleet = [await running.enter_async_context(world.process(name=f"process {number}")) for number in range(10)]
        raised = await asyncio.gather(*(each.raise_alert(world.whom) for each in fleet))
        assert sorted(raised) == [False] * 9 + [True]
        await rest(world.clock)
    assert len(world.receiver.received) == 1
    left = [name for number in range(10) for name in files(world.folder / f"process {number}")]
    assert [name for name in left if not name.endswith(".tmp")] == []
