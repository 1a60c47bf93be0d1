"""Totals never go down, equal their shards in the end, and cost a fleet about one sum of a counter an interval."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger import aggregator as aggregator_module
from price_keeper.ledger.aggregator import (
    AS_OF_ATTRIBUTE,
    EARLIEST_LOOK,
    MAX_CLOCK_SKEW_SECONDS,
    TOTAL_ATTRIBUTES,
    Aggregator,
    build_shard_keys,
    build_total_key,
    list_active_counters,
    sum_shards,
)
from price_keeper.ledger.counter_writes import LISTED_PAUSES, LISTING_SECONDS
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.total_sweep import SETTLE_SECONDS, SWEEP_SECONDS, TotalSweep
from price_keeper.stores import schema
from price_keeper.stores.contract import Delete, Item, Key, Put, Store
from price_keeper.telemetry import metrics
from price_keeper.telemetry.incident import REPEAT_SECONDS, Incident
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.metered_store import MeteredStore
from tests.support.recording_harness import RecordingHarness, open_recording_harness

INTERVAL = 60.0
QUIET_SECONDS = LISTING_SECONDS + SETTLE_SECONDS + SWEEP_SECONDS  # after which a sweep has found what was left


@pytest.fixture
async def rec(tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecordingHarness]:
    async with open_recording_harness(tmp_path / "journal", exact_store) as made:
        # The servers' tables are shared by all tests: each has a list of active counters and a sweep of its own.
        monkeypatch.setattr(schema, "active_counters_partition", lambda day: f"ACTIVE#{made.scope.org}#{day}")
        monkeypatch.setattr(
            schema, "totals_sweep_key", lambda: Key("request-dedup", f"SWEEP#{made.scope.org}", "MARKER")
        )
        yield made


def _without_announcement(key: Key) -> Put:
    return Put(key, {"shards_8": True})


def attach_aggregator(rec: RecordingHarness, store: Any = None) -> Aggregator:
    """As in a process, where it is notified of each flush."""
    made = Aggregator(store or rec.store, rec.clock, INTERVAL)
    rec.flusher.sender.subscribe_written(made.note_written)
    return made


def build_sweep(rec: RecordingHarness, store: Any = None) -> TotalSweep:
    return TotalSweep(store or rec.store, rec.clock, Aggregator(store or rec.store, rec.clock, INTERVAL))


async def spend(rec: RecordingHarness, pico: int, *counters: Counter) -> None:
    rec.spend(pico, *counters)
    assert await rec.flusher.flush()


async def spend_and_sum(rec: RecordingHarness, one: Aggregator, pico: int, *counters: Counter) -> None:
    await spend(rec, pico, *counters)
    await rec.clock.advance(INTERVAL)
    await one.run()


async def total(rec: RecordingHarness, counter: Counter | None = None) -> tuple[int, int] | None:
    item = await rec.store.get(build_total_key(counter or rec.counter()), consistent=True)
    if item is None:
        return None
    return int(item["requests"]), int(item["cost_usd_micros"] * PICO_PER_MICRO)  # type: ignore[arg-type,operator,call-overload]


async def test_total_is_sum_of_its_shards(rec: RecordingHarness) -> None:
    one = attach_aggregator(rec)
    for pico in range(1, 30):
        await spend(rec, pico)
    await spend_and_sum(rec, one, 77, rec.counter("economy"), rec.counter("economy", "20261117"))
    assert await total(rec) == (29, sum(range(1, 30)))
    assert await total(rec, rec.counter("economy")) == (1, 77)
    assert await total(rec, rec.counter("economy", "20261117")) == (1, 77)


async def test_aggregator_with_more_counters_than_one_batch_sums_each(rec: RecordingHarness) -> None:
    counters = [rec.counter(f"label{number}") for number in range(60)]
    one = attach_aggregator(rec)
    for number, counter in enumerate(counters):
        rec.spend(number + 1, counter)
    await spend_and_sum(rec, one, 7)
    assert [await total(rec, counter) for counter in counters] == [(1, number + 1) for number in range(60)]


async def test_every_total_is_reported_to_listener_whoever_wrote_it(rec: RecordingHarness) -> None:
    reported = list[tuple[str, int]]()
    first, second = attach_aggregator(rec), attach_aggregator(rec)
    for each in (first, second):
        each.subscribe(lambda counter, pico, _: reported.append((counter.label, pico)))
    await spend(rec, 7)
    await rec.clock.advance(INTERVAL)
    await first.run()
    await second.run()
    assert reported == [("premium", 7)] * 2  # written by the first, found by the other


class TwoProcesses:
    """Two processes that add to the same counters."""

    def __init__(self, one: RecordingHarness, other: RecordingHarness, metered: MeteredStore) -> None:
        self.one, self.other, self.metered = one, other, metered
        self.clock = one.clock
        self.aggregators = [Aggregator(each.store, each.clock, INTERVAL) for each in (one, other)]
        self.sweeps = [TotalSweep(one.store, one.clock, aggregator) for aggregator in self.aggregators]
        for rec, aggregator in zip((one, other), self.aggregators, strict=True):
            rec.flusher.sender.subscribe_written(aggregator.note_written)

    async def pass_time(self, seconds: float, counters: Sequence[Counter] = ()) -> None:
        """While both spend on these counters, each of them once in 15 seconds."""
        for second in range(0, int(seconds), 3):
            for number, rec in enumerate((self.one, self.other)):
                if counters and second % 15 == 6 * number:
                    for counter in counters:
                        rec.spend(1, counter)
                    assert await rec.flusher.flush()
            for each, sweep in zip(self.aggregators, self.sweeps, strict=True):
                await each.run()
                if second % int(SWEEP_SECONDS / 2) == 0:
                    await sweep.run()
            await self.clock.advance(3)


@pytest.fixture
async def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoProcesses]:
    metered = MeteredStore()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(open_recording_harness(tmp_path / "one", metered))
        other = await stack.enter_async_context(
            open_recording_harness(tmp_path / "other", metered, one.clock, one.scope)
        )
        yield TwoProcesses(one, other, metered)


async def test_two_busy_processes_read_and_write_each_counter_about_once_an_interval(two: TwoProcesses) -> None:
    counters = [two.one.counter(f"label{number}") for number in range(40)]
    await two.pass_time(300, counters)
    two.metered.reset()
    await two.pass_time(3600, counters)
    intervals = 3600 / INTERVAL
    sums = two.metered.reads["usage-agg-sharded"] / 8 / len(counters)
    assert 0.8 * intervals <= sums <= 1.35 * intervals
    assert two.metered.writes["daily-total"] / len(counters) == sums
    assert two.metered.reads["daily-total"] / len(counters) <= 2.7 * intervals  # by each process


async def test_counters_to_which_nobody_adds_cost_nothing(two: TwoProcesses) -> None:
    counters = [two.one.counter(f"label{number}") for number in range(40)]
    await two.pass_time(60, counters)
    await two.pass_time(2 * 3600)
    two.metered.reset()
    await two.pass_time(3600)
    assert not two.metered.writes["daily-total"]
    assert not two.metered.reads["usage-agg-sharded"]
    assert not two.metered.reads["daily-total"]
    assert two.metered.units.reads <= 50  # the row of the sweep, and the list of what is active


async def test_a_counter_that_rests_is_swept_twice_and_no_more(two: TwoProcesses) -> None:
    await two.pass_time(60, [two.one.counter()])
    await two.pass_time(120)
    before = two.metered.reads["usage-agg-sharded"]
    await two.pass_time(5 * 3600)
    assert two.metered.reads["usage-agg-sharded"] - before == 2 * 8


@pytest.mark.parametrize("exact_store", ["sqlite"], indirect=True)  # days of flushes, which no engine sees differently
async def test_a_flush_announces_its_counters_once_in_a_quarter_of_an_hour(rec: RecordingHarness) -> None:
    for _ in range(4 * 60):
        await spend(rec, 1)
        await rec.clock.advance(15)
    listed = [
        write.key.pk
        for transaction in rec.store.transactions
        for write in transaction
        if write.key.pk.startswith("ACTIVE#")
    ]
    assert len(listed) == 3600 / LISTING_SECONDS


@pytest.mark.parametrize("exact_store", ["sqlite"], indirect=True)  # days of flushes, which no engine sees differently
async def test_flushes_that_are_far_apart_seldom_announce_their_counters(rec: RecordingHarness) -> None:
    for _ in range(4 * 86):
        await spend(rec, 1)
        await rec.clock.advance(1000)
    listed = [write for writes in rec.store.transactions for write in writes if write.key.pk.startswith("ACTIVE#")]
    assert len(listed) <= 4 * 86 / 15


async def test_additions_are_in_a_total_within_an_interval_and_the_lag_is_measured(rec: RecordingHarness) -> None:
    one = attach_aggregator(rec)
    for _ in range(40):
        await spend(rec, 1)
        for _ in range(20):
            await rec.clock.advance(one.tick_seconds)
            await one.run()
    assert await total(rec) == (40, 40)
    assert sum(one.lag.counts) == 40
    assert one.lag.counts[one.lag.bounds.index(45)] + one.lag.counts[one.lag.bounds.index(60)] == 40
    assert EARLIEST_LOOK * INTERVAL <= one.lag.total / 40 <= INTERVAL


async def test_fresh_total_is_skipped_unless_stamp_is_in_the_future(rec: RecordingHarness) -> None:
    first, second = attach_aggregator(rec), Aggregator(rec.store, rec.clock, INTERVAL)
    await spend_and_sum(rec, first, 1)
    second._interval = 1  # it looks soon
    await spend(rec, 1)
    second.note_written(rec.counter())
    second._interval = INTERVAL
    await rec.clock.advance(INTERVAL / 2 - 2)
    await second.run()
    assert (second.totals_written, second.totals_fresh, await total(rec)) == (0, 1, (1, 1))
    await rec.clock.advance(INTERVAL)
    await second.run()
    assert (second.totals_written, await total(rec)) == (1, (2, 2))
    await rec.clock.advance(3600)
    await spend_and_sum(rec, first, 1)
    rec.clock.set_wall(rec.clock.now() - 1800)
    await spend(rec, 1)
    second.note_written(rec.counter())
    await rec.clock.advance(INTERVAL)
    await second.run()
    assert await total(rec) == (4, 4)


async def test_a_total_stamped_by_a_clock_some_seconds_ahead_is_not_taken_for_later(rec: RecordingHarness) -> None:
    """The other process read the shards before this addition, and its clock says that it was after it."""
    ahead = attach_aggregator(rec)
    await spend(rec, 1)
    await rec.clock.advance(INTERVAL)
    rec.clock.set_wall(rec.clock.now() + 4)
    await ahead.run()
    rec.clock.set_wall(rec.clock.now() - 4)
    one = attach_aggregator(rec)
    await spend_and_sum(rec, one, 2)
    assert await total(rec) == (2, 3)


class Away:
    def __getattr__(self, _: str) -> Any:
        async def fail(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("it does not answer")

        return fail


class Slow:
    """A store whose reader of shards is held up, and then comes with what it read long ago."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.goes_on = asyncio.Event()
        self.has_read = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        found: list[Item | None] = await self._store.get_many(keys, consistent=consistent)
        if keys[0].table == "usage-agg-sharded":
            assert consistent
            self.has_read.set()
            await self.goes_on.wait()
        return found


async def test_delayed_aggregator_does_not_lower_total(rec: RecordingHarness) -> None:
    slow = Slow(rec.store)
    one, other = attach_aggregator(rec, slow), Aggregator(rec.store, rec.clock, INTERVAL)
    await spend(rec, 5)
    await rec.clock.advance(INTERVAL)
    late = asyncio.create_task(one.run())
    await slow.has_read.wait()
    rec.flusher.sender.subscribe_written(other.note_written)
    await spend_and_sum(rec, other, 6)
    assert await total(rec) == (2, 11)
    await spend(rec, 7)
    slow.goes_on.set()
    await late
    assert await total(rec) == (3, 18)  # it saw that it was late, and read again


async def test_additions_while_the_shards_are_read_are_looked_after_too(rec: RecordingHarness) -> None:
    slow = Slow(rec.store)
    one = attach_aggregator(rec, slow)
    await spend(rec, 5)
    await rec.clock.advance(INTERVAL)
    summing = asyncio.create_task(one.run())
    await slow.has_read.wait()
    await spend(rec, 6)
    slow.goes_on.set()
    await summing
    assert await total(rec) == (1, 5)
    await rec.clock.advance(INTERVAL)
    await one.run()
    assert await total(rec) == (2, 11)


async def test_additions_of_one_that_uses_fewer_shards_are_in_the_total(rec: RecordingHarness) -> None:
    one = attach_aggregator(rec)
    for _ in range(20):
        await spend(rec, 1, rec.counter()._replace(shards=64))
    await rec.clock.advance(INTERVAL)
    await one.run()
    other = attach_aggregator(rec)
    await spend_and_sum(rec, other, 1)
    assert await total(rec) == (21, 21)


async def test_ten_concurrent_aggregators_never_lower_total(rec: RecordingHarness) -> None:
    chance = random.Random(7)

    async def sum_often() -> None:
        one = Aggregator(rec.store, rec.clock, 0)  # no total is ever fresh
        for _ in range(15):
            one.note_written(rec.counter())
            await one.run()
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
    summing = [asyncio.create_task(sum_often()) for _ in range(10)]
    for _ in range(60):
        await spend(rec, chance.randrange(1, 10**9))
    await asyncio.gather(*summing)
    done.set()
    await watcher
    last = attach_aggregator(rec)
    last.note_written(rec.counter())
    await rec.clock.advance(INTERVAL)
    await last.run()
    sums = await sum_shards(rec.store, rec.counter())
    assert await total(rec) == (61, int(sums["cost_usd_micros"] * PICO_PER_MICRO)) == await rec.read_counts()


async def test_malformed_rows_are_named_and_stop_neither_totals_nor_sweeps(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator_module, "malformed_rows", Incident(aggregator_module._log, rec.clock.now))
    one, counters = attach_aggregator(rec), [rec.counter(f"label{number}") for number in range(5)]
    shard = build_shard_keys(counters[1])[0]
    await rec.store.put(Put(shard, {"requests": "one"}))
    await rec.store.put(Put(build_total_key(counters[3]), {"requests": 0, AS_OF_ATTRIBUTE: "soon"}))
    for counter in counters[2:]:
        await spend(rec, 7, counter)
    await rec.clock.advance(INTERVAL)
    await one.run()
    assert [await total(rec, counter) for counter in counters[2:]] == [(1, 7)] * 3
    assert caplog.text.count("is no number in the row") == 1
    assert str(build_total_key(counters[3])[1:]) in caplog.text
    await rec.store.put(Put(build_total_key(counters[4]), {"requests": [], AS_OF_ATTRIBUTE: "soon"}))
    await rec.store.delete(Delete(build_total_key(counters[2])))
    assert await sum_shards(rec.store, counters[1]) == dict.fromkeys(TOTAL_ATTRIBUTES, 0)
    await rec.clock.advance(REPEAT_SECONDS)
    assert await build_sweep(rec).sweep()
    assert await total(rec, counters[2]) == (1, 7)
    assert caplog.text.count("is no number in the row") == 2


async def test_totals_whose_look_fails_for_any_reason_are_looked_at_again(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach_aggregator(rec)
    await spend(rec, 7)
    await rec.clock.advance(INTERVAL)
    with monkeypatch.context() as patch:
        patch.setattr(one, "_is_stale", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await one.run()
    await one.run()
    assert await total(rec) == (1, 7)


async def test_what_a_killed_process_left_is_swept_by_another(rec: RecordingHarness) -> None:
    await spend_and_sum(rec, attach_aggregator(rec), 5)
    await spend(rec, 6)  # killed before it is in the total
    sweep = build_sweep(rec)
    await sweep.run()
    assert await total(rec) == (1, 5)
    await rec.clock.advance(QUIET_SECONDS)
    await sweep.run()
    assert await total(rec) == (2, 11)


async def test_short_announcement_does_not_shorten_a_longer_one(two: TwoProcesses) -> None:
    """The one process flushes seldom and the other begins after it. Then the one is killed right after a flush."""
    start, counter = two.clock.now(), two.one.counter()
    for pause in (3600, 60):
        await spend(two.one, 1)
        await two.pass_time(pause)
    await spend(two.other, 1)
    (listed,) = await list_active_counters(two.one.store, [datetime.fromtimestamp(start, UTC).date()])
    assert listed.writes_until >= start + 3600 + LISTED_PAUSES * 3600 or listed.writes_until == listed.day_end
    await two.pass_time(2 * 3600)  # the announcement of the other is over, and a sweep has seen it
    await spend(two.one, 50)
    two.one.flusher.sender._on_written.clear()
    two.aggregators[0]._pending.clear()
    await two.clock.advance(listed.writes_until + SETTLE_SECONDS - two.clock.now())
    await two.pass_time(2 * SWEEP_SECONDS)
    assert await total(two.one, counter) == (4, 53)


async def test_what_was_left_days_ago_is_swept(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    await rec.clock.advance(4 * 86_400)
    sweep = build_sweep(rec)
    await sweep.run()
    assert await total(rec) == (1, 5)
    await rec.clock.advance(4 * 86_400)
    await spend(rec, 6)  # a replay into the old day
    await rec.clock.advance(QUIET_SECONDS)
    await sweep.run()
    assert await total(rec) == (2, 11)


async def test_what_a_slow_clock_announced_is_swept_an_hour_later(rec: RecordingHarness) -> None:
    """It is half an hour behind, so it adds after the time that it announced."""
    attach_aggregator(rec)
    await spend(rec, 5)
    await rec.clock.advance(LISTING_SECONDS + SETTLE_SECONDS + 60)
    sweep = build_sweep(rec)
    await sweep.run()
    rec.clock.set_wall(rec.clock.now() - 1800)
    rec.flusher.sender._listing._until = {rec.counter(): 2**40}
    await spend(rec, 6)
    rec.clock.set_wall(rec.clock.now() + 1800)
    await rec.clock.advance(SWEEP_SECONDS)
    await sweep.run()
    assert await total(rec) == (1, 5)
    await rec.clock.advance(3600)
    await sweep.run()
    assert await total(rec) == (2, 11)


async def test_a_counter_listed_by_an_earlier_version_is_swept_after_its_day(rec: RecordingHarness) -> None:
    await spend_and_sum(rec, attach_aggregator(rec), 5)
    listed = schema.active_counter_key("20261118", rec.scope, "premium", "DAY#20261118")
    await rec.store.put(_without_announcement(listed))
    await spend(rec, 6)
    sweep = build_sweep(rec)
    await rec.clock.advance(QUIET_SECONDS)
    await sweep.run()
    assert await total(rec) == (1, 5)
    await rec.clock.advance(86_400)
    await sweep.run()
    assert await total(rec) == (2, 11)


async def test_what_an_earlier_version_adds_after_an_announcement_is_swept_after_its_day(rec: RecordingHarness) -> None:
    """It leaves the entries of others as they are, sums up all counters while it lives, and ends before the last."""
    earlier_version = attach_aggregator(rec)
    await spend_and_sum(rec, earlier_version, 5)
    rec.flusher.sender._listing._until = {rec.counter(): 2**40}
    sweep = build_sweep(rec)
    await rec.clock.advance(LISTING_SECONDS + MAX_CLOCK_SKEW_SECONDS + SWEEP_SECONDS)
    await sweep.run()
    await spend_and_sum(rec, earlier_version, 6)
    await spend(rec, 7)
    await rec.clock.advance(QUIET_SECONDS)
    await sweep.run()
    assert await total(rec) == (2, 11)
    await rec.clock.advance(86_400)
    await sweep.run()
    assert await total(rec) == (3, 18)


async def test_a_fleet_sweeps_once_in_its_interval(rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    swept, sweep_all = list[float](), TotalSweep.sweep

    async def count_sweep(sweep: TotalSweep, completed_at: float) -> bool:
        swept.append(completed_at)
        return await sweep_all(sweep, completed_at)

    monkeypatch.setattr(TotalSweep, "sweep", count_sweep)
    began = rec.clock.now()
    for _ in range(3):
        await asyncio.gather(*(build_sweep(rec).run() for _ in range(10)))
        await rec.clock.advance(SWEEP_SECONDS)
    assert swept == [0, began, began + SWEEP_SECONDS]


@pytest.mark.parametrize(
    "row",
    [
        {"began_at_epoch": "yesterday"},
        {"began_at_epoch": "1795000000", "completed_at_epoch": "1795000000"},
        {"began_at_epoch": Decimal("1795000000.5"), "completed_at_epoch": [True]},
        {"began_at_epoch": {"at": 0}, "completed_at_epoch": 1_795_003_200},
        {"began_at_epoch": 0, "completed_at_epoch": False},
        {"completed_at_epoch": b"now"},
        {"note": "edited"},
    ],
)
async def test_malformed_row_of_last_sweep_is_named_and_replaced(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture, row: Item
) -> None:
    await rec.store.put(Put(schema.totals_sweep_key(), row))
    await spend(rec, 5)
    await build_sweep(rec).run()
    assert await total(rec) == (1, 5)
    assert str(schema.totals_sweep_key()[1:]) in caplog.text
    caplog.clear()
    await rec.clock.advance(SWEEP_SECONDS)
    await build_sweep(rec).run()
    (item,) = [*await rec.store.get_many([schema.totals_sweep_key()], consistent=True)]
    assert item is not None
    assert item["began_at_epoch"] == item["completed_at_epoch"] == int(rec.clock.now())
    assert not caplog.text


async def test_a_sweep_that_fails_is_not_taken_for_done(rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await spend(rec, 5)
    await rec.clock.advance(3 * 86_400)

    async def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("it does not answer")

    sweep = build_sweep(rec)
    with monkeypatch.context() as patch:
        patch.setattr(rec.store._store, "put", fail)
        await sweep.run()
    assert await total(rec) is None
    await rec.clock.advance(SWEEP_SECONDS)
    await sweep.run()
    assert await total(rec) == (1, 5)


async def test_a_sweep_by_a_clock_a_day_ahead_hides_nothing(rec: RecordingHarness) -> None:
    await spend(rec, 5)
    rec.clock.set_wall(rec.clock.now() + 86_400)
    await build_sweep(rec).run()
    rec.clock.set_wall(rec.clock.now() - 86_400)
    await spend(rec, 6)
    sweep = build_sweep(rec)
    await sweep.run()
    assert await total(rec) == (2, 11)
    await rec.clock.advance(2 * 86_400)
    await spend(rec, 7)
    await rec.clock.advance(QUIET_SECONDS)
    await sweep.run()
    assert await total(rec) == (3, 18)


async def test_total_stamp_is_time_at_which_reading_began(rec: RecordingHarness) -> None:
    slow = Slow(rec.store)
    one = attach_aggregator(rec, slow)
    await spend(rec, 5)
    await rec.clock.advance(INTERVAL)
    began = rec.clock.now()
    summing = asyncio.create_task(one.run())
    await slow.has_read.wait()
    await rec.clock.advance(10)
    slow.goes_on.set()
    await summing
    item = await rec.store.get(build_total_key(rec.counter()))
    assert item is not None
    assert float(item[AS_OF_ATTRIBUTE]) == began  # type: ignore[arg-type]


async def test_store_outage_is_logged_once_per_pass(rec: RecordingHarness, caplog: pytest.LogCaptureFixture) -> None:
    one = attach_aggregator(rec, Away())
    for number in range(30):
        await spend(rec, 5, rec.counter(f"label{number}"))
    await rec.clock.advance(INTERVAL)
    await one.run()
    assert rec.clock.monotonic() - one.completed_at == INTERVAL  # which the metric tells
    (line,) = caplog.records
    assert line.getMessage() == ("30 totals are not brought up to date; the next run tries again: it does not answer")
    assert line.exc_info is None
    one._store = rec.store
    await one.run()
    assert await total(rec, rec.counter("label7")) == (1, 5)
    assert one.completed_at == rec.clock.monotonic()


async def test_the_lag_is_in_the_metrics(rec: RecordingHarness) -> None:
    one, telemetry = attach_aggregator(rec), MetricsRegistry()
    telemetry.add(metrics.TOTALS_LAG_SECONDS, lambda: [({}, one.lag)])
    await spend_and_sum(rec, one, 1)
    assert 'price_keeper_totals_lag_seconds_bucket{le="45"} 0\n' in telemetry.render_own()
    assert 'price_keeper_totals_lag_seconds_bucket{le="60"} 1\n' in telemetry.render_own()
