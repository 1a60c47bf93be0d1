"""SingleFlight against a plain model: callers join and leave in any order, and loads succeed or fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as some
from price_keeper.single_flight import SingleFlight

from tests.support.clock import settle
from tests.support.effort import tries

KEYS = "ab"
ACTIONS = ["call", "call", "start", "leave", "succeed", "fail"]
STEPS = some.tuples(some.sampled_from(ACTIONS), some.sampled_from(KEYS), some.integers(0, 9))


@dataclass
class Running:
    """One load as the model knows it, and the callers that joined it."""

    end: asyncio.Future[int]
    callers: list[tuple[asyncio.Task[int], bool]] = field(default_factory=list)  # whether it has left


class Fleet:
    def __init__(self) -> None:
        self.flights = SingleFlight[str, int]()
        self.running: dict[str, Running] = {}
        self.started = 0

    async def take(self, action: str, key: str, number: int) -> None:
        running = self.running.get(key)
        if action in ("call", "start"):
            started_before, expected_new = self.started, running is None
            if running is None:
                running = self.running[key] = Running(asyncio.get_running_loop().create_future())

            async def load() -> int:
                self.started += 1
                return await running.end

            if action == "start":
                self.flights.start(key, load)
            else:
                running.callers.append((asyncio.create_task(self.flights.get_or_load(key, load)), False))
            await settle()
            assert self.started - started_before == expected_new
        elif running is not None and action == "leave" and running.callers:
            place = number % len(running.callers)
            caller, _ = running.callers[place]
            caller.cancel()
            running.callers[place] = caller, True
            await settle()
            assert caller.cancelled()
        elif running is not None and action in ("succeed", "fail"):
            await self.finish(key, number, fails=action == "fail")
        assert {each for each in KEYS if each in self.flights} == self.running.keys()

    async def finish(self, key: str, number: int, *, fails: bool) -> None:
        running = self.running.pop(key)
        if fails:
            running.end.set_exception(OSError(str(number)))
        else:
            running.end.set_result(number)
        await settle()
        for caller, has_left in running.callers:
            assert caller.done()
            if has_left:
                assert caller.cancelled()
            elif fails:
                assert str(caller.exception()) == str(number)
            else:
                assert caller.result() == number


@settings(max_examples=tries(150))
@given(steps=some.lists(STEPS, max_size=40))
def test_single_flight_in_any_order_gives_each_caller_its_load(steps: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        fleet = Fleet()
        for step in steps:
            await fleet.take(*step)
        for key in tuple(fleet.running):
            await fleet.finish(key, 1, fails=False)
        assert len(fleet.flights._running) == 0

    asyncio.run(run())
