"""From the journal to the store: everything once, whatever goes wrong on the way; sooner or later as it is needed."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from price_keeper.errors import JournalInUse, JournalUnusable, RecordingUnavailable, StoreUnavailable
from price_keeper.ledger import segment
from price_keeper.ledger.aggregator import Aggregator, build_shard_keys, build_total_key
from price_keeper.ledger.counter_writes import to_pico
from price_keeper.ledger.journal import SUMS_PER_PART
from price_keeper.ledger.journal_lock import lock_folder
from price_keeper.ledger.ledger_entries import Receipt, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.ulid import read_created_at
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Delete, Put, Store, Update
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock, settle
from tests.support.recording_harness import USD, RecordingHarness, open_recording_harness


async def test_recorded_calls_are_flushed_and_segment_deleted(rec: RecordingHarness) -> None:
    for _ in range(10):
        rec.spend(3_000_001)
    rec.journal.record(rec.begin(), None)
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (10, 30_000_010)
    assert len(rec.segments()) == 1  # the one that is written to
    assert await rec.flusher.flush()  # nothing new is no write
    assert len(rec.store.transactions) == 1


async def test_flushed_money_is_exact_to_a_pico_dollar(rec: RecordingHarness) -> None:
    for pico in (1, 10**6 - 1, 10**6, 123_456_789_012_345_678):
        rec.spend(pico)
        assert await rec.flusher.flush()
    assert await rec.read_counts() == (4, 123_456_789_012_345_678 + 2 * 10**6)


@pytest.mark.parametrize("fault", ["before", "after", "conflict"])
async def test_failed_flush_is_retried_and_counts_once(rec: RecordingHarness, fault: str) -> None:
    rec.store.faults = [fault, fault]  # type: ignore[list-item]
    rec.spend(5)
    for is_done in (False, fault == "after", True):
        assert await rec.flusher.flush() is is_done
        if is_done:
            assert (await rec.read_counts()) == (1, 5)
    assert len(rec.segments()) == 1
    assert rec.flusher.store_trouble == ""


async def test_lost_flush_answer_is_resolved_by_marker(rec: RecordingHarness) -> None:
    rec.store.faults = ["after"]
    rec.spend(5)
    assert not await rec.flusher.flush()
    assert await rec.read_counts() == (1, 5)
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.flusher.sender.repeated_parts) == ((1, 5), 1)


async def test_segments_are_flushed_in_order(rec: RecordingHarness) -> None:
    rec.store.is_away = True
    for _ in range(5):
        rec.spend(7)
        assert not await rec.flusher.flush()
    # One waits, and the journal goes on in the next for as long as it may.
    assert (rec.flusher.waiting_segments, len(rec.segments()), rec.flusher.unflushed_pico) == (1, 2, 35)
    rec.store.is_away = False
    rec.store.faults = ["before"]
    assert not await rec.flusher.flush()
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.flusher.unflushed_pico) == ((5, 35), 0)


async def test_rejected_segment_does_not_block_others(rec: RecordingHarness) -> None:
    rec.store.faults = ["rejected"]
    rec.spend(1)
    await rec.flusher.flush()
    rec.spend(2)
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), len(rec.flusher.sender.rejected_ulids)) == ((1, 2), 1)
    assert len(rec.segments()) == 2  # it is kept for a person to look at


async def test_many_counters_are_flushed_in_parts(rec: RecordingHarness) -> None:
    counters = [rec.counter(f"label{number}") for number in range(2 * SUMS_PER_PART + 5)]
    rec.store.faults = ["after", "before"]
    for counter in counters:
        rec.spend(11, counter)
    while not await rec.flusher.flush():
        pass
    assert {await rec.read_counts(counter) for counter in counters} == {(1, 11)}
    assert all(len(writes) <= 100 for writes in rec.store.transactions)


async def test_counter_is_listed_on_days_it_is_written(rec: RecordingHarness) -> None:
    for label in ("premium", "premium", "economy"):
        rec.spend(1, rec.counter(label))
        await rec.flusher.flush()
    listed = schema.active_counter_key("20261118", rec.scope, "premium", "DAY#20261118")
    item = await rec.store.get(listed)
    assert item is not None
    assert item["shards_8"] is True
    assert [len(writes) for writes in rec.store.transactions] == [3, 2, 3]
    await rec.clock.advance(86_400)
    rec.spend(1)
    await rec.flusher.flush()
    assert await rec.store.get(listed._replace(pk="ACTIVE#20261119")) is not None


async def test_restart_flushes_segments_and_estimates_open_calls(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path / "journal", exact_store) as first:
        first.spend(100)
        first.begin(estimate=1000)
        first.store.faults = ["after"]
        await first.flusher.flush()
        first.spend(10)
        first.begin(estimate=2000)
    async with open_recording_harness(tmp_path / "journal", exact_store, scope=first.scope) as second:
        assert second.recovered.estimated_calls == 2
        assert second.flusher.unflushed_pico == 3110
        second.spend(1)
        assert await second.flusher.flush()
        assert await second.read_counts() == (5, 3111)
        assert len(second.segments()) == 1
    async with open_recording_harness(tmp_path / "journal", exact_store, scope=first.scope) as third:
        assert third.recovered.sealed == []


async def test_copied_journal_counts_once(tmp_path: Path, exact_store: Store) -> None:
    """As when a disk is restored from a snapshot."""
    async with open_recording_harness(tmp_path / "journal", exact_store) as rec:
        rec.spend(100)
        rec.store.faults = ["before"]
        await rec.flusher.flush()
        shutil.copytree(rec.folder, tmp_path / "copy")
        assert await rec.flusher.flush()
    async with open_recording_harness(tmp_path / "copy", exact_store, scope=rec.scope) as copy:
        assert await copy.flusher.flush()
        assert (await copy.read_counts(), copy.flusher.sender.repeated_parts) == ((1, 100), 1)


async def test_segment_older_than_markers_is_rejected(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path / "journal", exact_store) as first:
        first.spend(100)
        first.store.is_away = True
        await first.flusher.flush()
    clock = ManualClock(first.clock.now() + 35 * 86_400)
    async with open_recording_harness(tmp_path / "journal", exact_store, clock, first.scope) as late:
        assert await late.flusher.flush()
        assert (await late.read_counts(), len(late.flusher.sender.rejected_ulids)) == ((0, 0), 1)
        forced = SegmentSender(late.store, clock, force=True)
        for sealed in recover(late.folder).sealed:
            await forced.send(sealed)
        assert await late.read_counts() == (1, 100)


async def test_forced_segment_reaches_total_without_shards(rec: RecordingHarness) -> None:
    """And one whose shards are still there, once; also where the answer is lost."""
    counters = [rec.counter("premium"), *(rec.counter(f"label{number}") for number in range(SUMS_PER_PART))]
    gone, stays = counters[0], counters[1]
    for counter in counters:
        rec.spend(100, counter)
    assert await rec.flusher.flush()
    aggregator = Aggregator(rec.store, rec.clock, 60)
    await aggregator.write_totals([gone, stays])
    for counter in counters:
        rec.spend(11, counter)
    rec.store.is_away = True
    await rec.flusher.flush()
    rec.store.is_away = False
    await rec.clock.advance(40 * 86_400)
    for key in build_shard_keys(gone):
        await rec.store.delete(Delete(key))
    forced = SegmentSender(rec.store, rec.clock, force=True)
    rec.store.faults = ["after", "after", "after"]
    (sealed,) = rec.flusher._unsent
    for _ in range(6):
        with suppress(StoreUnavailable):
            await forced.send(sealed)
    for _ in range(2):
        for counter in (gone, stays):
            total = await rec.store.get(build_total_key(counter), consistent=True)
            assert total is not None
            assert (total["requests"], to_pico(total["cost_usd_micros"])) == (2, 111)  # type: ignore[arg-type]
        await aggregator.write_totals([gone, stays])
    assert all(len(writes) <= 100 for writes in rec.store.transactions)
    listed = schema.active_counter_key("20261228", rec.scope, "premium", "DAY#20261118")
    assert await rec.store.get(listed) is not None


async def test_segment_of_idle_process_is_not_too_old(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path / "journal", exact_store) as idle:
        carried = idle.begin(estimate=1000)
        for _ in range(40):
            await idle.clock.advance(86_401)
            assert await idle.flusher.flush()
        idle.spend(7)
        idle.journal.record(carried, Receipt(UsageCounts(1, pico=3)))
    async with open_recording_harness(tmp_path / "journal", exact_store, idle.clock, idle.scope) as late:
        assert await late.flusher.flush()
        assert (await late.read_counts(), late.flusher.sender.rejected_ulids) == ((2, 10), [])


async def test_marker_outlives_its_segment_despite_fast_clock(tmp_path: Path, exact_store: Store) -> None:
    clock = ManualClock(ManualClock().now() + 20 * 86_400)
    async with open_recording_harness(tmp_path / "journal", exact_store, clock) as ahead:
        ahead.spend(1)
    clock.set_wall(clock.now() - 20 * 86_400)
    async with open_recording_harness(tmp_path / "journal", exact_store, clock, ahead.scope) as rec:
        name = rec.recovered.newest_ulid
        assert await rec.flusher.flush()
        rec.spend(2)
        assert await rec.flusher.flush()
        assert (await rec.read_counts(), rec.flusher.sender.rejected_ulids) == ((2, 3), [])
        for writes in rec.store.transactions:
            assert isinstance(writes[0], Put)
            assert writes[0].item[EXPIRY_ATTRIBUTE] >= read_created_at(name) + 35 * 86_400 - 1  # type: ignore[operator]


# Policy.


async def test_unflushed_spend_above_limit_refuses_calls(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path / "journal", exact_store, max_usd=2) as rec:
        rec.store.is_away = True
        rec.spend(2 * USD)
        rec.flusher.check_recordable()
        await rec.flusher.flush()
        rec.spend(1)
        with pytest.raises(RecordingUnavailable, match="2 USD waits for the store"):
            rec.flusher.check_recordable()
        with pytest.raises(RecordingUnavailable):
            await rec.flusher.check()
        rec.store.is_away = False
        await rec.flusher.flush()
        rec.flusher.check_recordable()
        await rec.flusher.check()


async def test_refuse_policy_refuses_calls_during_store_outage(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path / "journal", exact_store, refuses=True) as rec:
        rec.flusher.check_recordable()
        rec.store.is_away = True
        rec.spend(1)
        await rec.flusher.flush()
        with pytest.raises(RecordingUnavailable, match="the store that keeps count of spend is away"):
            rec.flusher.check_recordable()
        rec.store.is_away = False
        await rec.flusher.flush()
        rec.flusher.check_recordable()


async def test_full_disk_refuses_new_calls_and_keeps_recorded_ones(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "MAX_ROOM_BYTES", 0)  # from the next segment on
    rec.spend(4)
    assert await rec.flusher.flush()
    number, write = rec.begin(estimate=9), os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RecordingUnavailable, match="No space left on device"):
        rec.begin()
    rec.journal.record(number, Receipt(UsageCounts(1, pico=3)))
    with pytest.raises(RecordingUnavailable, match="No space left"):
        await rec.flusher.check()
    await rec.flusher.flush()
    monkeypatch.setattr(os, "pwrite", write)
    await rec.flusher.sync_journal()
    await rec.flusher.check()
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (2, 7)


def test_second_process_on_journal_is_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(JournalInUse, match="another process"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(JournalUnusable), lock_folder(tmp_path / "file"):
        pass


# Pace.


async def test_flush_interval_grows_with_thin_traffic(rec: RecordingHarness) -> None:
    async with Tasks(rec.clock) as tasks:
        tasks.start("time", rec.flusher.run_flush_timer)
        tasks.start("flushing", rec.flusher.run_flushes)
        gaps = [await until_flushed(rec, requests=1) for _ in range(5)]
        assert gaps == [pytest.approx(gap, abs=0.5) for gap in (1, 2, 4, 8, 15)]
        gaps = [await until_flushed(rec, requests=300) for _ in range(6)]
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] < 2
        before = len(rec.store.transactions)
        await rec.clock.advance(0.8)
        rec.spend(99 * USD)
        rec.flusher.check_recordable()  # which sees how much it is
        await flushes_settle(rec, before + 1, within=1.2)


async def until_flushed(rec: RecordingHarness, requests: int) -> float:
    for _ in range(requests):
        rec.spend(1)
    before, began = len(rec.store.transactions), rec.clock.now()
    while len(rec.store.transactions) == before:
        await rec.clock.advance(0.1)
        await arrived(rec)
    return rec.clock.now() - began


async def flushes_settle(rec: RecordingHarness, count: int, within: float) -> None:
    began = rec.clock.now()
    while len(rec.store.transactions) < count:
        assert rec.clock.now() - began < within
        await rec.clock.advance(0.1)
        await arrived(rec)


async def arrived(rec: RecordingHarness) -> None:
    """What threads and sockets do takes turns of the loop, not time."""
    for _ in range(200):
        await settle()
        if not rec.flusher._flush_gate._is_flushing:
            return
        await asyncio.sleep(0.001)


async def test_unflushed_spend_and_lag_are_reported(rec: RecordingHarness) -> None:
    assert rec.flusher.lag_seconds == 0
    rec.store.is_away = True
    rec.spend(5)
    await rec.clock.advance(10)
    await rec.flusher.flush()
    await rec.clock.advance(20)
    assert rec.flusher.lag_seconds == 30
    assert (rec.flusher.unflushed_pico, rec.flusher.waiting_segments) == (5, 1)
    rec.store.is_away = False
    await rec.flusher.flush()
    assert (rec.flusher.lag_seconds, rec.flusher.unflushed_pico) == (0, 0)


async def test_flush_writes_marker_and_two_updates(rec: RecordingHarness) -> None:
    for _ in range(50):
        rec.spend(1)
    await rec.flusher.flush()
    (writes,) = rec.store.transactions
    assert [type(write).__name__ for write in writes] == ["Put", "Update", "Update"]
    assert isinstance(writes[1], Update)
    assert writes[1].add["requests"] == 50
