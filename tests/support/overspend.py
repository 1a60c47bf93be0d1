"""How far a fleet in simulated time passes a soft quota under a load, and how far it may at most."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from price_keeper.budgets.budget_state import NEVER
from price_keeper.domain import Caller
from price_keeper.errors import Refusal
from price_keeper.stores import schema
from price_keeper.stores.contract import Update
from price_keeper.usage.meter import UsageForecast

from tests.support.clock import ManualClock, settle
from tests.support.fleet_simulation import USD, FleetWorld, SimulatedProcess, SkewedClock, simulated

QUOTA = 100.0  # USD, of the label that is asked for
HOUR = 3600.0
CALL_SECONDS = 5.0  # from its beginning to its end
MEAN_COST = 0.02  # USD of a call; its length is as good as random, and what it is expected to cost a moving mean
TOKEN = 10**6  # pico-dollars of one token of an answer
STEADY = QUOTA / HOUR  # USD in a second: the quota is reached in an hour
MEASURED_AFTER = 150.0  # seconds without a call on the label that is spent: then all know
MAX_RUN_SECONDS = 3 * HOUR
ORG = "550e8400-e29b-41d4-a716-446655440000"
CALLER = Caller(ORG, "web", "client")


@dataclass(frozen=True)
class Figures:
    """Of one run or one fleet: money in USD, time in seconds."""

    burn: float  # what all sidecars together spend in a second, at the highest mean of so long a time
    flush: float  # until what is recorded is in the store, at most
    refresh: float  # from one look at the store to when a call waits for the next, at most
    totals: float  # the age of the totals that were read instead of shards
    in_flight: float  # what the calls under way cost when the quota was reached
    step: float = 0.0  # the interval that was in force from before the load grew at once

    @property
    def delay(self) -> float:
        return self.flush + self.refresh + self.totals + self.step


def bound(figures: Figures) -> float:
    """USD by which a soft quota may be passed: all that is begun until the last sidecar knows, and what was under way.

    Spend that crosses the quota is in the store after a flush. Each sidecar looks at the store at least once in each of
    its intervals, and what it reads is complete but for the age of a total. An interval was chosen for the burn rate of
    its time, so after a step the old one has to pass first.
    """
    return figures.burn * figures.delay + figures.in_flight


@dataclass(frozen=True)
class LoadShape:
    """How much faster than steady it is at a time, and its steps; `warm` is as if that share had been spent before."""

    name: str
    factor: Callable[[float], float]
    step_at: float | None = None
    spent_before: float = 0.0


IDLE_SECONDS = 900.0
STARTS_SECONDS = 300.0  # in which the sidecars of a fleet start
LOADS = (
    LoadShape("steady", lambda _: 1.0),
    LoadShape("bursty", lambda at: 6.0 if at % 60 < 10 else 0.0),
    LoadShape("step", lambda at: 20.0 if at >= IDLE_SECONDS else 0.0, step_at=IDLE_SECONDS, spent_before=0.5),
)


@dataclass
class OverspendOutcome:
    spent: float
    figures: Figures

    @property
    def overspend(self) -> float:
        return max(0.0, self.spent - QUOTA)


@dataclass
class _Run:
    load: LoadShape
    clock: ManualClock
    fleet: list[SimulatedProcess]
    chance: random.Random
    expected: UsageForecast = field(default_factory=UsageForecast)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    spent: float = 0.0
    under_way: float = 0.0  # on the label whose quota counts
    begun: list[tuple[float, float]] = field(default_factory=list)  # when, and what it cost, on whatever label
    reached: float | None = None
    in_flight: float = 0.0
    flush: float = 0.0
    last_served: float = 0.0
    intervals: dict[tuple[int, float], float] = field(default_factory=dict)  # by sidecar, and since when

    def __post_init__(self) -> None:
        self.began = self.clock.monotonic()

    @property
    def at(self) -> float:
        return self.clock.monotonic() - self.began

    async def call(self, process: SimulatedProcess, tokens: int) -> None:
        usd, label = tokens * TOKEN / USD, "premium"
        self.begun.append((self.at, usd))
        try:
            call = await process.begin(CALLER, label, self.expected.pico or self.expected.output_tokens * TOKEN)
        except Refusal:
            return
        is_counted = call.label == label
        if is_counted:
            self.under_way, self.last_served = self.under_way + usd, self.at
        await self.clock.sleep(CALL_SECONDS)
        process.end(call, tokens * TOKEN)
        self.expected.observe(tokens, tokens * TOKEN)
        if is_counted:
            self.under_way, self.spent = self.under_way - usd, self.spent + usd
            if self.spent >= QUOTA and self.reached is None:
                self._is_reached()

    def _is_reached(self) -> None:
        self.reached, self.in_flight = self.at, self.under_way
        self.flush = max(process.flusher._interval.seconds for process in self.fleet)

    def watch(self) -> None:
        """Which intervals are in force; before the quota is reached, the last ones count."""
        if self.reached is None:
            self.intervals.clear()
        for number, process in enumerate(self.fleet):
            for watch in process.budget_registry._refresh_states.values():
                state, since = watch.budget, watch.spend_read_at - self.began
                if state.active_index or state.get_tracker("premium").spent >= QUOTA * USD:
                    continue  # it knows
                if since > -NEVER and (self.reached is None or since <= self.reached + self.flush):
                    self.intervals[number, since] = watch.stale_at - watch.spend_read_at

    async def run(self) -> None:
        while self.at < MAX_RUN_SECONDS and not self._is_over():
            factor = self.load.factor(self.at)
            if not factor:
                await self.clock.advance(1.0)
                continue
            rate = factor * STEADY / MEAN_COST
            await self.clock.advance(self.chance.expovariate(rate))
            tokens = round(self.chance.lognormvariate(-0.32, 0.8) * MEAN_COST * USD / TOKEN) + 1
            self.calls.add(asyncio.get_running_loop().create_task(self.call(self.chance.choice(self.fleet), tokens)))
            self.watch()
        await self.clock.advance(2 * CALL_SECONDS)
        await asyncio.gather(*self.calls)

    def _is_over(self) -> bool:
        return self.reached is not None and self.at - max(self.reached, self.last_served) > MEASURED_AFTER

    async def warm_up(self) -> None:
        """The sidecars did not start all at once; and what was spent before was one sidecar's."""
        for process in self.fleet:
            process.end(await process.begin(CALLER, "premium", 0), 0)
            await self.clock.advance(STARTS_SECONDS / len(self.fleet))
        if self.load.spent_before:
            process = self.fleet[0]
            call = await process.begin(CALLER, "premium", 0)
            process.end(call, round(self.load.spent_before * QUOTA * USD))
            self.spent = self.load.spent_before * QUOTA
        self.began = self.clock.monotonic()

    async def trickle(self) -> None:
        """So that each knows the scope all the time."""
        while self.load.step_at is not None and self.at < self.load.step_at:
            for process in self.fleet:
                process.end(await process.begin(CALLER, "premium", 0), 1)
            await self.clock.sleep(self.chance.uniform(20, 40))

    def figures(self) -> Figures:
        reached, step_at = self.reached or 0.0, self.load.step_at or 0.0
        refresh = max((wait for (_, since), wait in self.intervals.items() if since >= step_at), default=0.0)
        step = max((wait for (_, since), wait in self.intervals.items() if since < step_at), default=0.0)
        ages = [age for process in self.fleet for at, age in process.links["look"].ages if at >= self.began + reached]
        found = Figures(0.0, self.flush, refresh, max(ages, default=0.0), self.in_flight, step)
        return Figures(self._burn(found.delay), found.flush, found.refresh, found.totals, found.in_flight, found.step)

    def _burn(self, seconds: float) -> float:
        """The highest mean over any time as long, or over all of a run that was shorter."""
        highest = so_far = 0.0
        first = 0
        for at, usd in self.begun:
            so_far += usd
            while self.begun[first][0] < at - seconds:
                so_far -= self.begun[first][1]
                first += 1
            highest = max(highest, so_far)
        return highest / min(seconds, self.at - self.begun[0][0])


def measure(load: LoadShape, sidecars: int, seed: int = 1) -> OverspendOutcome:
    clock, chance = ManualClock(), random.Random(seed)
    with simulated(clock) as (loop, folder):
        world = FleetWorld(clock, folder)
        fleet = [
            SimulatedProcess(world, f"s{number}", SkewedClock(clock, chance.uniform(-2, 2)))
            for number in range(sidecars)
        ]
        return loop.run_until_complete(_measure(world, load, fleet, chance))


async def _measure(
    world: FleetWorld, load: LoadShape, fleet: list[SimulatedProcess], chance: random.Random
) -> OverspendOutcome:
    quotas = {"premium": round(QUOTA * 10**6), "standard": 10**12}
    await world.store.update(
        Update(schema.org_config_key(ORG), set={"model_ordering": list(quotas), "quotas": dict(quotas), "version": 1})
    )
    for process in fleet:
        process.start()
        process.start_background_tasks()
    run = _Run(load, world.clock, fleet, chance)
    await run.warm_up()
    trickle = asyncio.get_running_loop().create_task(run.trickle())
    await run.run()
    await trickle
    for process in fleet:
        process.stop()
    await settle()
    return OverspendOutcome(run.spent, run.figures())
