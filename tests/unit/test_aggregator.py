"""Totals: never going down, equal to the shards in the end, whichever process aggregates and however late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger import aggregator as module
from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, Aggregator, build_total_key, sum_shards
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.stores.contract import Item, Key, Page, Query, Store

from tests.support.recording_harness import RecordingHarness, open_recording_harness

INTERVAL = 60.0


@pytest.fixture
async def rec(tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecordingHarness]:
    async with open_recording_harness(tmp_path / "journal", exact_store) as made:
        # The servers' tables are shared by all tests: each has a list of active counters of its own.
        monkeypatch.setattr(module.schema, "active_counters_partition", lambda day: f"ACTIVE#{made.scope.org}#{day}")
        yield made


def aggregator(rec: RecordingHarness, store: Any = None) -> Aggregator:
    made = Aggregator(store or rec.store, rec.clock, INTERVAL)
    made._has_looked_back = True
    return made


async def spend(rec: RecordingHarness, pico: int, *counters: Counter) -> None:
    rec.spend(pico, *counters)
    assert await rec.flusher.flush()


async def total(rec: RecordingHarness, counter: Counter | None = None) -> tuple[int, int] | None:
    item = await rec.store.get(build_total_key(counter or rec.counter()), consistent=True)
    if item is None:
        return None
    return int(item["requests"]), int(item["cost_usd_micros"] * PICO_PER_MICRO)  # type: ignore[arg-type,operator,call-overload]


async def test_total_is_sum_of_its_shards(rec: RecordingHarness) -> None:
    for pico in range(1, 30):
        await spend(rec, pico)
    await spend(rec, 77, rec.counter("economy"), rec.counter("economy", "20261117"))
    await aggregator(rec).run()
    assert await total(rec) == (29, sum(range(1, 30)))
    assert await total(rec, rec.counter("economy")) == (1, 77)
    assert await total(rec, rec.counter("economy", "20261117")) == (1, 77)


async def test_every_total_is_reported_to_listener_whoever_wrote_it(rec: RecordingHarness) -> None:
    await spend(rec, 7)
    reported = list[tuple[str, int, float]]()
    for each in (aggregator(rec), aggregator(rec)):
        each.subscribe(lambda counter, pico, at: reported.append((counter.label, pico, at)))
        await each.run()
        rec.clock.set_wall(rec.clock.now() + 1)
    began = rec.clock.now() - 2
    assert reported == [("premium", 7, pytest.approx(began, abs=0.01))] * 2  # written by the first, found by the other


async def test_fresh_total_is_skipped_unless_stamp_is_in_the_future(rec: RecordingHarness) -> None:
    await spend(rec, 1)
    first, second = aggregator(rec), aggregator(rec)
    await first.run()
    await rec.clock.advance(INTERVAL / 2 - 1)
    await spend(rec, 1)
    await second.run()
    assert (second.totals_written, second.totals_fresh, await total(rec)) == (0, 1, (1, 1))
    await rec.clock.advance(2)
    await second.run()
    assert (second.totals_written, await total(rec)) == (1, (2, 2))
    await rec.clock.advance(3600)
    await first.run()
    rec.clock.set_wall(rec.clock.now() - 1800)
    await spend(rec, 1)
    await second.run()
    assert await total(rec) == (3, 3)


class Away:
    async def query(self, _: Query) -> Page:
        raise StoreUnavailable("it does not answer")


class Slow:
    """A store whose reader of shards is held up, and then comes with what it read long ago."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.goes_on = asyncio.Event()
        self.has_read = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        assert consistent
        found: list[Item | None] = await self._store.get_many(keys, consistent=True)
        self.has_read.set()
        await self.goes_on.wait()
        return found


async def test_delayed_aggregator_does_not_lower_total(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    slow = Slow(rec.store)
    late = asyncio.create_task(aggregator(rec, slow).run())
    await slow.has_read.wait()
    await spend(rec, 6)
    await aggregator(rec).run()
    assert await total(rec) == (2, 11)
    await rec.clock.advance(INTERVAL)
    await spend(rec, 7)
    slow.goes_on.set()
    await late
    assert await total(rec) == (3, 18)  # it saw that it was late, and read again


async def test_ten_concurrent_aggregators_never_lower_total(
    tmp_path: Path, rec: RecordingHarness, monkeypatch: Any
) -> None:
    chance = random.Random(7)
    seen: list[tuple[int, int]] = []

    async def fold() -> None:
        one = aggregator(rec)
        one._interval = 0  # none is ever fresh
        for _ in range(15):
            await one.run()
            found = await total(rec)
            assert found is not None
            seen.append(found)
            await asyncio.sleep(chance.random() / 500)

    async def watch() -> None:
        last = (0, 0)
        while not done.is_set():
            found = await total(rec) or (0, 0)
            assert found >= last
            assert found[1] >= last[1]
            last = found
            await asyncio.sleep(0)

    done = asyncio.Event()
    watcher = asyncio.create_task(watch())
    await spend(rec, 1)
    folding = [asyncio.create_task(fold()) for _ in range(10)]
    for _ in range(60):
        await spend(rec, chance.randrange(1, 10**9))
    await asyncio.gather(*folding)
    done.set()
    await watcher
    last = aggregator(rec)
    last._interval = 0
    await last.run()
    sums = await sum_shards(rec.store, rec.counter())
    assert await total(rec) == (61, int(sums["cost_usd_micros"] * PICO_PER_MICRO)) == await rec.read_counts()


async def test_counter_of_dead_pod_is_aggregated_by_another_days_later(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    await rec.clock.advance(4 * 86_400)
    await aggregator(rec).run()
    assert await total(rec) is None
    newly_started = aggregator(rec)
    newly_started._has_looked_back = False
    await newly_started.run()
    assert await total(rec) == (1, 5)
    await newly_started.run()
    again = aggregator(rec)
    again._has_looked_back = False
    await rec.clock.advance(INTERVAL)
    await again.run()
    assert (again.totals_written, again.totals_fresh) == (
        0,
        1,
    )  # it was read after the last day on which it was written to


async def test_final_totals_of_yesterday_are_not_read_again(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    await rec.clock.advance(15 * 3600)  # 3 o'clock, well past midnight
    one = aggregator(rec)
    await one.run()
    await rec.clock.advance(600)
    await one.run()
    assert (one.totals_written, one.totals_fresh) == (1, 1)
    await spend(rec, 6)  # a replay into the old day lists it again, today
    await one.run()
    assert await total(rec) == (2, 11)


async def test_total_stamp_is_time_at_which_reading_began(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    began = rec.clock.now()
    slow = Slow(rec.store)
    folding = asyncio.create_task(aggregator(rec, slow).run())
    await slow.has_read.wait()
    await rec.clock.advance(10)
    slow.goes_on.set()
    await folding
    item = await rec.store.get(build_total_key(rec.counter()))
    assert item is not None
    assert float(item[AS_OF_ATTRIBUTE]) == began  # type: ignore[arg-type]


async def test_store_outage_is_logged_once_per_pass(rec: RecordingHarness, caplog: pytest.LogCaptureFixture) -> None:
    await spend(rec, 5)
    one = aggregator(rec, Away())
    await rec.clock.advance(INTERVAL)
    await one.run()
    assert rec.clock.monotonic() - one.completed_at == INTERVAL  # which the metric tells
    (line,) = caplog.records
    assert "it does not answer" in line.getMessage()
    assert line.exc_info is None
    one._store = rec.store
    await one.run()
    assert await total(rec) == (1, 5)
