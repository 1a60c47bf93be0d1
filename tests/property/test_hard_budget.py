"""A hard budget is never passed and never loses a cent, whatever dies, is lost, comes late or runs twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from price_keeper.errors import StoreError

from tests.support.clock import ManualClock, settle
from tests.support.effort import seeds, tries
from tests.support.fleet_simulation import simulated
from tests.support.hard_budget_fleet import DelayedStoreLink, HardBudgetSidecar, HardBudgetWorld, replay

QUOTA = 1000
SIDECARS = st.integers(0, 2)
FAULTS = st.sampled_from(("away", "lost", "late", "unheard"))


class Machine(RuleBasedStateMachine):
    @initialize(skews=st.tuples(*[st.sampled_from((0.0, -7200.0, 3.0, 7200.0))] * 3))
    def begin(self, skews: tuple[float, ...]) -> None:
        self.clock = ManualClock()
        self.stack = ExitStack()
        self.loop, folder = self.stack.enter_context(simulated(self.clock))
        self.world = HardBudgetWorld(self.clock, folder, QUOTA)
        self.sidecars = [HardBudgetSidecar(self.world, f"s{number}", skew) for number, skew in enumerate(skews)]
        self.replays: list[asyncio.Task[None]] = []
        self._run(self._start_all())

    async def _start_all(self) -> None:
        for sidecar in self.sidecars:
            sidecar.start()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        async def settled() -> None:
            await work
            await settle()

        self.loop.run_until_complete(settled())

    def _do(self, number: int, work: str, *arguments: int) -> None:
        sidecar = self.sidecars[number]
        if not sidecar.is_running:
            return

        async def begun() -> None:
            match work:
                case "call":
                    sidecar.do(sidecar.call(*arguments))
                case "flush":
                    sidecar.do(sidecar.recording.flusher.flush())
                case "close":
                    sidecar.do(sidecar.recording.return_former_leases())
                case "tick":
                    sidecar.do(sidecar.budget_leases.tick())

        self._run(begun())

    # What sidecars do.

    @rule(number=SIDECARS, worst=st.sampled_from((1, 7, 40, 130)), times=st.integers(1, 4))
    def call(self, number: int, worst: int, times: int) -> None:
        for _ in range(times):
            self._do(number, "call", worst)

    @rule(number=SIDECARS, which=st.integers(0, 50), share=st.integers(0, 4))
    def end(self, number: int, which: int, share: int) -> None:
        sidecar = self.sidecars[number]
        if sidecar.open:
            call = sidecar.open[which % len(sidecar.open)]
            sidecar.end(call, call.cost_ceiling * share // 4)

    @rule(number=SIDECARS, what=st.sampled_from(("flush", "close", "tick")))
    def work(self, number: int, what: str) -> None:
        self._do(number, what)

    @rule(number=SIDECARS, seconds=st.sampled_from((0.5, 7.0, 70.0, 1200.0)))
    def pass_time(self, number: int, seconds: float) -> None:
        """With several ticks a second, so idle money is returned."""
        self._do(number, "tick")
        self._run(self.clock.advance(seconds))
        self._do(number, "tick")

    # What befalls them.

    @rule(number=SIDECARS, fault=FAULTS, passing=st.integers(0, 4))
    def trouble(self, number: int, fault: str, passing: int) -> None:
        if self.sidecars[number].is_running:
            self.sidecars[number].link.set_fault(fault, passing)

    @precondition(lambda self: self.world.gates)
    @rule(which=st.integers(0, 20))
    def arrive(self, which: int) -> None:
        self.world.gates.pop(which % len(self.world.gates)).set()
        self._run(settle())

    @rule(number=SIDECARS, is_found=st.booleans(), fault=FAULTS | st.just(""), passing=st.integers(0, 6))
    def kill(self, number: int, is_found: bool, fault: str, passing: int) -> None:
        """Its disk is perhaps found, copied, and brought to the store elsewhere as well."""
        sidecar = self.sidecars[number]
        if not sidecar.is_running:
            return
        self._run(sidecar.kill())
        if is_found:
            wire = DelayedStoreLink(self.world)
            wire.set_fault(fault, passing)
            self._run(self._replay(sidecar.copy_folder(), wire))

    async def _replay(self, folder: Path, wire: DelayedStoreLink) -> None:
        async def until_failure() -> None:
            with suppress(StoreError):
                await replay(self.world, folder, wire)

        self.replays.append(asyncio.get_running_loop().create_task(until_failure()))

    @rule(number=SIDECARS)
    def start(self, number: int) -> None:
        if not self.sidecars[number].is_running:
            self._run(self._started(self.sidecars[number]))

    async def _started(self, sidecar: HardBudgetSidecar) -> None:
        sidecar.start()

    @rule(number=SIDECARS)
    def stop(self, number: int) -> None:
        """In order, though calls may be under way that take too long."""
        if self.sidecars[number].is_running:
            self._run(self._stopped(self.sidecars[number]))

    async def _stopped(self, sidecar: HardBudgetSidecar) -> None:
        for task in tuple(sidecar.work):
            task.cancel()
        stopping = asyncio.get_running_loop().create_task(sidecar.stop())
        await settle()
        for _ in range(30):
            if not stopping.done():
                await self.clock.advance(1)
        await stopping

    # What others do.

    @rule(more=st.sampled_from((0, 100, 500)), who=st.sets(SIDECARS))
    def raise_quota(self, more: int, who: set[int]) -> None:
        self.world.quota += more
        self.world.version += 1
        self.hear(who)

    @rule(who=st.sets(SIDECARS))
    def hear(self, who: set[int]) -> None:
        for number in who:
            self.sidecars[number].settings = self.world.quota, self.world.version

    @rule(pico=st.sampled_from((5, 200)))
    def spend_elsewhere(self, pico: int) -> None:
        self._run(self.world.spend_elsewhere(pico))

    @invariant()
    def nothing_is_passed_or_lost(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._run(self._bring_to_its_end())
        finally:
            self._run(self._end_all_tasks())
            self.stack.close()

    async def _bring_to_its_end(self) -> None:
        for gate in self.world.gates:
            gate.set()
        await settle()
        for sidecar in self.sidecars:
            if sidecar.is_running:
                await sidecar.kill()
        for sidecar in self.sidecars:
            sidecar.start()
            assert await sidecar.recording.flusher.flush()
            await sidecar.recording.return_former_leases()
            assert not sidecar.recording.has_former_leases
            await self._stopped(sidecar)
            assert not list(sidecar.folder.glob("*holds-*"))
        self.world.check()
        await self.world.check_at_the_end()

    async def _end_all_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


TestHardBudget = Machine.TestCase
TestHardBudget.settings = settings(max_examples=tries(100), stateful_step_count=40)


@pytest.mark.parametrize("seed", seeds(12))
def test_long_random_runs_never_overspend_hard_budget(seed: int) -> None:
    """The same at random: what takes long to come about, as a budget that is dry, and many lives on one disk."""
    chance, faults = random.Random(seed), ("away", "lost", "late", "unheard")
    random.seed(seed)  # of what jitters
    machine = Machine()
    machine.begin(skews=tuple(chance.choice((0.0, -7200.0, 7200.0)) for _ in range(3)))
    try:
        for _ in range(400):
            _one_step(machine, chance, faults)
            machine.nothing_is_passed_or_lost()
    finally:
        machine.teardown()


def _one_step(machine: Machine, chance: random.Random, faults: tuple[str, ...]) -> None:
    number, some = chance.randrange(3), chance.randrange
    match chance.choices(range(11), (30, 20, 12, 12, 10, 8, 3, 8, 1, 1, 2))[0]:
        case 0:
            machine.call(number, chance.choice((1, 7, 40, 130)), some(1, 5))
        case 1:
            machine.end(number, some(50), some(5))
        case 2:
            machine.work(number, chance.choice(("flush", "close", "tick")))
        case 3:
            machine.pass_time(number, chance.choice((0.5, 7.0, 70.0, 1200.0)))
        case 4:
            machine.trouble(number, chance.choice(faults), some(4))
        case 5:
            if machine.world.gates:
                machine.arrive(some(20))
        case 6:
            machine.kill(number, chance.random() < 0.5, chance.choice((*faults, "")), some(7))
        case 7:
            machine.start(number)
        case 8:
            machine.raise_quota(chance.choice((0, 100, 500)), {number})
            machine.hear({some(3)})
        case 9:
            machine.spend_elsewhere(chance.choice((1, 5, 20)))
        case 10:
            machine.stop(number)
