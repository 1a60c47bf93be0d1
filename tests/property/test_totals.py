"""Totals of a fleet whose processes come and go and whose clocks differ: none is ever lowered, and none misses an
addition for good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import (
    CLOCK_MARGIN_SECONDS,
    MAX_CLOCK_SKEW_SECONDS,
    Aggregator,
    build_total_key,
    list_active_counters,
    read_as_of,
)
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, DAY_SECONDS, CounterListing, build_addition
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.total_sweep import SWEEP_SECONDS, TotalSweep
from price_keeper.reports.spend_report import build_counter_query
from price_keeper.stores.contract import Item, Key, Store

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.fleet_simulation import SkewedClock
from tests.support.memory_store import MemoryStore

INTERVAL = 60.0
ORG = "550e8400-e29b-41d4-a716-446655440000"
COUNTERS = [Counter(Scope(ORG, app).key, "premium", "DAY#20261118", 8) for app in ("web", "batch")]
IN_TOTAL_SECONDS = INTERVAL + 10  # after which an addition of a process that lives is in the total

pauses = st.sampled_from((0.0, 1.0, 10.0, 50.0, 300.0, 1000.0, 20_000.0))
# Who does something, what, to which counter, and how much time passes then. A killed process is followed by another.
steps = st.tuples(
    st.integers(0, 2), st.sampled_from(("add", "add", "add", "add and die", "die", "sweep")), st.integers(0, 1), pauses
)


class TotalsStore(MemoryStore):
    """Fails when a total goes down."""

    def _keep(self, key: Key, item: Item | None) -> None:
        if key.table == "daily-total":
            assert item is not None
            assert read_micros(item) >= read_micros(self.items.get(key))
        super()._keep(key, item)


def read_micros(item: Any) -> Decimal:
    return Decimal((item or {}).get(COST_ATTRIBUTE, 0))


class TotalsFleet:
    def __init__(self, skews: Sequence[float]) -> None:
        self.clock, self.store = ManualClock(), TotalsStore()
        self.clocks = [SkewedClock(self.clock, skew) for skew in skews]
        self.added = [0, 0]  # micro-dollars, by counter
        self.listings = [CounterListing() for _ in skews]
        self.aggregators = [self._new_aggregator(place) for place in range(len(skews))]

    def _new_aggregator(self, place: int) -> Aggregator:
        return Aggregator(cast(Store, self.store), cast(Any, self.clocks[place]), INTERVAL, lambda: 0.5)

    async def add(self, place: int, number: int) -> None:
        counter, now = COUNTERS[number], self.clocks[place].now()
        entries = self.listings[place].build_entries([counter], now)
        name = f"{self.added} of {place}"
        await self.store.transact([build_addition(name, counter, UsageCounts(1, pico=10**6), now), *entries])
        self.listings[place].confirm([counter], now)
        self.aggregators[place].note_written(counter)
        self.added[number] += 1

    def kill(self, place: int) -> None:
        self.listings[place], self.aggregators[place] = CounterListing(), self._new_aggregator(place)

    async def sweep(self, place: int) -> None:
        await TotalSweep(cast(Store, self.store), cast(Any, self.clocks[place]), self.aggregators[place]).run()

    async def pass_time(self, seconds: float) -> None:
        """While all look at their totals, a step for longer times, in which nobody adds."""
        end = self.clock.monotonic() + seconds
        while (left := end - self.clock.monotonic()) > 1e-6:
            await self.clock.advance(min(left, 3.0 if left < 200 else 100.0))
            for aggregator in self.aggregators:
                await aggregator.run()

    def read_total(self, number: int) -> int:
        return int(read_micros(self.store.items.get(build_total_key(COUNTERS[number]))))

    async def list_complete(self) -> list[int]:
        """The counters whose totals a report takes for complete."""
        now, start = self.clock.now(), datetime(2026, 11, 18, tzinfo=UTC)
        days = [start.date() + timedelta(number) for number in range(int((now - start.timestamp()) // DAY_SECONDS) + 1)]
        listed = await list_active_counters(cast(Store, self.store), days)
        return [
            COUNTERS.index(each.counter)
            for each in listed
            if build_counter_query(each).complete_after
            <= read_as_of(self.store.items.get(build_total_key(each.counter)), now)
        ]


@given(
    skews=st.lists(st.sampled_from((0.0, -2.0, 2.0, -1800.0, -3000.0)), min_size=1, max_size=3),
    script=st.lists(steps, min_size=3, max_size=30),
)
@example(  # the second announces less than the first, which adds after that is over, and is killed
    skews=[0.0, 0.0],
    script=[
        (0, "add", 0, 1000.0),
        (0, "add", 0, 1.0),
        (1, "add", 0, 1000.0),
        *[(1, "none", 0, 1000.0)] * 4,
        (1, "sweep", 0, 1.0),
        (0, "add and die", 0, 0.0),
    ],
)
@settings(max_examples=tries(60), deadline=None, derandomize=True)
def test_totals_never_go_down_and_lack_nothing_once_they_are_taken_for_complete(
    skews: list[float], script: list[tuple[int, str, int, float]]
) -> None:
    async def play() -> None:
        fleet = TotalsFleet(skews)
        for who, action, number, pause in script:
            place = who % len(skews)
            if action.startswith("add"):
                await fleet.add(place, number)
            if action.endswith("die"):
                fleet.kill(place)
            if action == "sweep":
                await fleet.sweep(place)
            await fleet.pass_time(pause)
            assert all(fleet.read_total(each) <= fleet.added[each] for each in (0, 1))
            assert all(fleet.read_total(each) == fleet.added[each] for each in await fleet.list_complete())
        await fleet.pass_time(INTERVAL)
        for _ in range(3):
            await fleet.clock.advance(DAY_SECONDS + MAX_CLOCK_SKEW_SECONDS + SWEEP_SECONDS)
            await fleet.sweep(0)
        assert [fleet.read_total(each) for each in (0, 1)] == fleet.added

    asyncio.run(play())


@given(
    skews=st.lists(st.floats(-CLOCK_MARGIN_SECONDS / 2, CLOCK_MARGIN_SECONDS / 2), min_size=1, max_size=3),
    script=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.floats(0, 70)), min_size=3, max_size=30),
)
@settings(max_examples=tries(60), deadline=None, derandomize=True)
def test_an_addition_of_a_living_process_is_in_the_total_within_an_interval(
    skews: list[float], script: list[tuple[int, int, float]]
) -> None:
    async def play() -> None:
        fleet = TotalsFleet(skews)
        added = list[tuple[float, int, int]]()  # when, to which counter, and its sum then
        for who, number, pause in script:
            await fleet.add(who % len(skews), number)
            added.append((fleet.clock.monotonic(), number, fleet.added[number]))
            await fleet.pass_time(pause)
            for at, each, micros in added:
                if fleet.clock.monotonic() - at >= IN_TOTAL_SECONDS:
                    assert fleet.read_total(each) >= micros

    asyncio.run(play())
