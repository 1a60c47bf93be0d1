"""What must not happen to a journal in a long life: poisoned segments, refused money, files and memory without end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from price_keeper.ledger import aggregator as aggregating
from price_keeper.ledger import journal as limits
from price_keeper.ledger.aggregator import Aggregator, build_total_key
from price_keeper.ledger.journal import SealedSegment
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter
from price_keeper.ledger.recovery import InternedValues, read_segment, recover
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.operations import Operation
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store, Write
from price_keeper.tasks import Tasks
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.meter import Meter, OperationPricing, UsageForecast
from price_keeper.usage.price_table import Cost, Pricer
from price_keeper.usage.token_usage import Usage

from tests.support.clock import settle
from tests.support.recording_harness import RecordingHarness, open_recording_harness
from tests.unit.test_flusher import arrived


@pytest.fixture
async def rec(tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecordingHarness]:
    async with open_recording_harness(tmp_path / "journal", exact_store) as made:
        monkeypatch.setattr(
            aggregating.schema, "active_counters_partition", lambda day: f"ACTIVE#{made.scope.org}#{day}"
        )
        yield made


def wider(counter: Counter, shards: int) -> Counter:
    return counter._replace(shards=shards)


async def test_counter_with_changed_shard_count_counts_every_call(rec: RecordingHarness) -> None:
    """An org's configuration was changed while calls were under way, or the fleet's defaults are being changed."""
    for shards in (8, 16, 8, 64, 32):
        for _ in range(3):
            rec.spend(1, wider(rec.counter(), shards), wider(rec.counter(), 8))
            rec.spend(2, wider(rec.counter(), 16))
        assert await rec.flusher.flush()
    assert rec.flusher.sender.rejected_ulids == []
    one = Aggregator(rec.store, rec.clock, 60)
    sweep = TotalSweep(rec.store, rec.clock, one)
    await sweep.sweep()
    total = await rec.store.get(build_total_key(rec.counter()))
    assert total is not None
    # Calls that name one counter twice, which only a test does, count twice.
    assert (total["requests"], total["cost_usd_micros"] * 10**6) == (15 * 3, 15 * 4)  # type: ignore[operator]
    await rec.clock.advance(60)
    rec.spend(5, wider(rec.counter(), 8))
    assert await rec.flusher.flush()
    await one.write_totals([wider(rec.counter(), 8)])
    total = await rec.store.get(build_total_key(rec.counter()))
    assert total is not None
    assert total["requests"] == 46


async def test_process_idle_for_months_flushes_new_spend(rec: RecordingHarness) -> None:
    await rec.clock.advance(90 * 86_400)
    rec.spend(7)
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.flusher.sender.rejected_ulids) == ((1, 7), [])


async def test_failing_flushes_leak_neither_files_nor_segments(rec: RecordingHarness) -> None:
    rec.store.is_away = True
    rec.spend(1)
    await rec.flusher.flush()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        rec.spend(1)
        await rec.flusher.flush()
    assert len(rec.segments()) == 2
    assert len(os.listdir("/proc/self/fd")) <= before
    assert all(sealed.is_seal_written for sealed in rec.flusher._unsent)  # all that ended is on the disk
    rec.store.is_away = False
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (51, 51)


async def test_store_outage_backs_off_even_when_urgent(rec: RecordingHarness) -> None:
    rec.store.is_away = True
    async with Tasks(rec.clock) as tasks:
        tasks.start("time", rec.flusher.run_flush_timer)
        tasks.start("flushing", rec.flusher.run_flushes)
        for _ in range(120):
            rec.spend(10**12)
            rec.flusher.request_flush()
            await rec.clock.advance(0.5)
            await arrived(rec)
    assert len(rec.store.transactions) < 10


async def test_free_calls_do_not_fill_disk(rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    for _ in range(500):
        rec.journal.record(rec.begin(), None)
        if rec.journal.is_full:
            assert await rec.flusher.flush()
    assert len(rec.segments()) == 1
    assert rec.journal._segment.size < 25_000
    assert await rec.read_counts() == (0, 0)


async def test_recovered_calls_share_charged_counters(rec: RecordingHarness) -> None:
    for _ in range(100):
        rec.spend(1)
        rec.begin()
    (path,) = rec.segments()
    found = read_segment(path)
    assert len({id(intent.charged) for intent in found.open.values()}) == 1
    found.tally.sums()
    assert len(found.tally._sums) == 1


async def test_recovered_seals_share_counters(tmp_path: Path, exact_store: Store) -> None:
    scope = None
    for _ in range(5):
        async with open_recording_harness(tmp_path, exact_store, scope=scope) as rec:
            scope = rec.scope
            for label in ("premium", "economy"):
                rec.spend(1, rec.counter(label))
                rec.begin(rec.counter(label))
    recover(tmp_path)
    seals = [sealed.seal for sealed in recover(tmp_path).sealed]
    assert len(seals) == 5
    assert len({id(counter) for seal in seals for part in seal.parts for counter, _ in part}) == 2


async def test_recovered_segments_share_charged_counters(rec: RecordingHarness) -> None:
    rec.store.is_away = True
    rec.begin()
    rec.spend(1)
    await rec.flusher.flush()
    known = InternedValues()
    found = [read_segment(path, None, known) for path in rec.segments()]
    assert len(found) == 2
    assert len({id(intent.charged) for each in found for intent in each.open.values()}) == 1


async def begins_to_flush(rec: RecordingHarness, patch: pytest.MonkeyPatch) -> tuple[asyncio.Task[bool], asyncio.Event]:
    """The store answers once the event is set."""
    patch.setattr(limits, "SEGMENT_BYTES", 5_000)
    asked, answers, transact = asyncio.Event(), asyncio.Event(), rec.store.transact

    async def hangs(writes: Sequence[Write], *, token: str | None = None) -> None:
        asked.set()
        await answers.wait()
        await transact(writes, token=token)

    patch.setattr(rec.store, "transact", hangs)
    rec.spend(1)
    flushing = asyncio.create_task(rec.flusher.flush())
    await asked.wait()
    return flushing, answers


async def test_full_segment_is_sealed_during_store_outage(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing, answers = await begins_to_flush(rec, monkeypatch)
    for _ in range(20):
        for _ in range(10):
            rec.spend(1)
        await rec.flusher.sync_journal()
        assert rec.journal._segment.size < 10_000
    assert rec.flusher.waiting_segments > 5
    answers.set()
    assert await flushing
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (201, 201)


async def test_segment_is_not_sent_before_its_seal_is_synced(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing, answers = await begins_to_flush(rec, monkeypatch)
    goes_on, secure, send = threading.Event(), SealedSegment.write_seal, rec.flusher.sender.send

    def slowly(sealed: SealedSegment) -> None:
        assert goes_on.wait(60)
        secure(sealed)

    async def checked(sealed: SealedSegment) -> None:
        assert sealed.is_seal_written
        await send(sealed)

    monkeypatch.setattr(SealedSegment, "write_seal", slowly)
    monkeypatch.setattr(rec.flusher.sender, "send", checked)
    while not rec.journal.is_full:
        rec.spend(1)
    on_disk = asyncio.create_task(rec.flusher.sync_journal())
    await settle()
    assert rec.flusher.waiting_segments == 2
    answers.set()
    assert await flushing
    assert (await rec.read_counts(), rec.flusher.waiting_segments) == ((1, 1), 1)
    goes_on.set()
    await on_disk
    assert await rec.flusher.flush()
    assert rec.flusher.unflushed_pico == 0


async def test_bad_row_or_segment_does_not_block_others(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture
) -> None:
    listed = schema.active_counter_key("20261118", rec.scope, "premium", "DAY#20261118")
    await rec.store.put(Put(listed._replace(sk="nonsense"), {"shards_8": True}))
    await rec.store.put(Put(listed._replace(sk=f"{rec.scope.key}#LABEL#odd#DAY#20261118"), {"shards": 8}))
    rec.spend(1, Counter("ORG#nobody", "premium", "DAY#20261118", 8))
    assert await rec.flusher.flush()
    assert len(rec.flusher.sender.rejected_ulids) == 1
    rec.spend(2)
    assert await rec.flusher.flush()
    caplog.set_level(logging.CRITICAL)
    await TotalSweep(rec.store, rec.clock, Aggregator(rec.store, rec.clock, 60)).sweep()
    total = await rec.store.get(build_total_key(rec.counter()))
    assert total is not None
    assert total["requests"] == 1


async def test_unreadable_store_answer_is_not_logged(rec: RecordingHarness, caplog: pytest.LogCaptureFixture) -> None:
    def of(usage: Usage) -> Cost:
        if usage != Usage(7, 7):
            raise ValueError("what the model said")
        return Cost(5)

    price = Pricer(of, "config")
    target = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
    account = ChargedCounters.from_counters([rec.counter()])
    terms = OperationPricing("premium", Operation.CONVERSE, "", lambda _: price, lambda _: Usage(7, 7), UsageForecast())
    meter = Meter(rec.journal, terms, account, target, Usage(7, 7), rec.clock.now())
    meter.on_sent(target)
    meter.on_head(200, {b"content-type": b"application/json"})
    meter.on_data(b'{"usage":{"inputTokens":1,"outputTokens":1}}')
    meter.on_end(True)
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (1, 5)
    assert "ValueError" in caplog.text
    assert "model said" not in caplog.text


async def test_repeated_recovery_gives_same_seals(rec: RecordingHarness) -> None:
    for _ in range(5):
        rec.spend(1)
    rec.begin(estimate=9)
    first, second = recover(rec.folder), recover(rec.folder)
    assert [sealed.seal for sealed in first.sealed] == [sealed.seal for sealed in second.sealed]
    assert first.sealed[0].seal.pico == 14
