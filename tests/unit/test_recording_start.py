"""A start and an end on a disk without room: what is left over makes the room itself, and nothing counts twice."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from price_keeper.config import Config
from price_keeper.errors import JournalFull, JournalUnusable
from price_keeper.ledger import recording, segment
from price_keeper.ledger.aggregator import Aggregator, build_total_key
from price_keeper.ledger.journal import SealedSegment
from price_keeper.ledger.known_totals import read_total
from price_keeper.ledger.ledger_entries import ChargedCounters, Intent, Receipt, UsageCounts
from price_keeper.ledger.recording import begin_journal, open_recording
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import encode_line
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.stores.contract import Store
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.clock import ManualClock
from tests.support.recording_harness import RecordingHarness, open_recording_harness

PWRITE = os.pwrite


def a_disk_of(room: Callable[[], bool], code: int = errno.ENOSPC) -> Callable[[int, bytes, int], int]:
    def write(file: int, data: bytes, at: int) -> int:
        if not room():
            raise OSError(code, os.strerror(code))
        return PWRITE(file, data, at)

    return write


def config_of(folder: Path) -> Config:
    plain = Config(labels=Config.development().labels)
    return replace(plain, journal=replace(plain.journal, dir=str(folder)))


async def left_by_a_killed_process(folder: Path, store: Store) -> RecordingHarness:
    """Two segments, neither sealed: one call is recorded in each, one is carried on and ends, one is under way."""
    async with open_recording_harness(folder, store) as rec:
        carried = rec.begin(estimate=1000)
        rec.spend(10)
        assert rec.journal.seal() is not None
        rec.journal.record(carried, Receipt(UsageCounts(1, pico=200)))
        rec.begin(estimate=4)
    assert len(rec.segments()) == 2
    return rec


@pytest.mark.parametrize("files_with_room", [0, 1])
async def test_leftover_segments_make_room_for_start(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, files_with_room: int
) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    before = rec.segments()
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: not all(path.exists() for path in before[files_with_room:])))
    async with open_recording(config_of(tmp_path), rec.store, ManualClock()) as started:
        monkeypatch.setattr(os, "pwrite", PWRITE)
        assert started.flusher.sender.sent_segments >= 1
        assert all(sealed.is_seal_written for sealed in started.recovered.sealed)
        assert await started.flusher.flush()
        assert await rec.read_counts() == (3, 214)
        await started.finish()


async def test_start_without_room_and_store_says_what_is_missing(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = await left_by_a_killed_process(tmp_path / "journal", exact_store)
    rec.store.is_away = True
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False))
    with pytest.raises(JournalFull, match=r"No space left on device; .* cannot be flushed to make room: away"):
        async with open_recording(config_of(tmp_path / "journal"), rec.store, ManualClock()):
            pass
    with pytest.raises(JournalFull, match=r"cannot write to the journal in .*: No space left on device"):
        async with open_recording(config_of(tmp_path / "new"), rec.store, ManualClock()):
            pass
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False, errno.EIO))
    rec.store.is_away = False
    with pytest.raises(JournalUnusable, match="Input/output error"):  # no flush would repair that
        async with open_recording(config_of(tmp_path / "journal"), rec.store, ManualClock()):
            pass
    monkeypatch.setattr(os, "pwrite", PWRITE)
    async with open_recording(config_of(tmp_path / "journal"), rec.store, ManualClock()) as started:
        assert await started.flusher.flush()
        assert await rec.read_counts() == (3, 214)


async def test_disk_error_is_not_reported_as_full_disk(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False))
    left = recover(tmp_path)
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False, errno.EIO))
    with pytest.raises(JournalUnusable, match=r"cannot seal what is left .*: Input/output error") as caught:
        await begin_journal(tmp_path, left, SegmentSender(rec.store, rec.clock), lambda: rec.journal)
    assert not isinstance(caught.value, JournalFull)
    assert rec.store.transactions == []


async def test_segment_is_not_sent_before_unsealed_predecessor(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next start could not know that the call it began has ended since."""
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    rec.store.faults = ["rejected"]
    monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False))
    with pytest.raises(JournalFull, match=r"has no room to seal segment .*: never"):
        async with open_recording(config_of(tmp_path), rec.store, ManualClock()):
            pass
    assert len(rec.segments()) == 2
    for sealed in recover(tmp_path).sealed:  # as a replay does it
        await SegmentSender(rec.store, rec.clock).send(sealed)
    assert await rec.read_counts() == (3, 214)


async def test_refused_write_is_retried_at_shutdown(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "MAX_ROOM_BYTES", 0)
    async with (
        open_recording(config_of(tmp_path), exact_store, ManualClock()) as started,
        open_recording_harness(tmp_path / "other", exact_store) as rec,
    ):
        rec.flusher = started.flusher
        number = rec.begin(estimate=1000)
        monkeypatch.setattr(os, "pwrite", a_disk_of(lambda: False))
        rec.journal.record(number, Receipt(UsageCounts(1, pico=3)))
        monkeypatch.setattr(os, "pwrite", PWRITE)
        await started.finish()
        assert await rec.read_counts() == (1, 3)


# What a flipped bit leaves of it.


def spoil(path: Path, text: bytes) -> None:
    data = path.read_bytes()
    assert data.count(text) == 1
    path.write_bytes(data.replace(text, text.lower()))


async def sums(store: Store, rec: RecordingHarness) -> tuple[int, int]:
    for sealed in recover(rec.folder).sealed:
        await SegmentSender(store, rec.clock).send(sealed)
    return await rec.read_counts()


@pytest.mark.parametrize("text", [b'["H"', b'["C"', b'["E"'])
async def test_carried_calls_are_written_twice(tmp_path: Path, exact_store: Store, text: bytes) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    spoil(rec.segments()[1], text)
    assert await sums(exact_store, rec) == (3, 214)


async def test_empty_end_mark_is_read(tmp_path: Path, exact_store: Store) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    for path in rec.segments():
        path.write_bytes(re.sub(rb'.{8} \["E",.*\n', encode_line(b'["E"]'), path.read_bytes()))
    assert await sums(exact_store, rec) == (3, 214)


@pytest.mark.parametrize("is_gone", [False, True])
async def test_segment_with_only_carried_calls_counts(tmp_path: Path, exact_store: Store, is_gone: bool) -> None:
    async with open_recording_harness(tmp_path, exact_store) as rec:
        rec.begin(estimate=1000)
        rec.spend(10)
        sealed = rec.journal.seal()
        assert sealed is not None
        sealed.write_seal()
        if is_gone:
            await SegmentSender(exact_store, rec.clock).send(sealed)
    spoil(rec.segments()[-1], b'["E"')
    assert await sums(exact_store, rec) == (2, 1010)


async def test_call_with_corrupt_receipt_is_estimated(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path, exact_store) as rec:
        rec.begin(estimate=1000)
        rec.journal.record(rec.begin(estimate=7), Receipt(UsageCounts(1, pico=10)))
        rec.journal.seal()
    spoil(rec.segments()[0], b'["R"')
    assert await sums(exact_store, rec) == (2, 1007)


async def test_empty_segment_stays_readable_while_needed(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path, exact_store) as rec:
        carried = rec.begin(estimate=1000)
        rec.spend(10)
        rec.journal.seal()
        rec.journal.record(carried, None)
    recover(tmp_path)
    spoil(rec.segments()[0], b'["S"')
    assert await sums(exact_store, rec) == (1, 10)
    assert rec.segments() == []


async def test_estimate_found_in_former_segment_is_repeated(tmp_path: Path, exact_store: Store) -> None:
    """The one before comes to nothing, and stays until what was found in it stands elsewhere."""
    async with open_recording_harness(tmp_path, exact_store) as rec:
        rec.begin(estimate=1000)
        rec.journal.tally.requests = 1  # as if it were full
        rec.journal.seal()
    first, second = rec.segments()
    spoil(second, b'["C"')

    def dies(*_: object) -> None:
        raise OSError(errno.EIO, "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedSegment, "write_seal", dies)
        with pytest.raises(OSError, match="killed"):
            recover(tmp_path)
    assert rec.segments() == [first, second]
    assert await sums(exact_store, rec) == (1, 1000)


async def test_call_in_torn_lines_only_is_logged(
    tmp_path: Path, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    first, second = rec.segments()
    spoil(second, b'["C"')
    first.unlink()
    caplog.set_level(logging.WARNING)
    left = recover(tmp_path)
    assert (left.corrupt_lines, left.unrecoverable_calls, left.estimated_calls) == (1, 1, 1)
    assert "1 calls in corrupt lines cannot be recovered; their spend is missing" in caplog.text
    assert recover(tmp_path).unrecoverable_calls == 0  # once it is sealed, the loss has been told


async def test_metrics_tell_unrecoverable_calls_from_estimated_ones(tmp_path: Path, exact_store: Store) -> None:
    rec = await left_by_a_killed_process(tmp_path, exact_store)
    first, second = rec.segments()
    spoil(second, b'["C"')
    first.unlink()
    telemetry = MetricsRegistry()
    with second.open("ab") as more:  # a second call under way: the two figures must differ
        charged = ChargedCounters.from_counters([rec.counter()])
        more.write(encode_line(Intent(charged, 0, 1, 1, 1).encode(99)))
    async with open_recording(config_of(tmp_path), exact_store, ManualClock()) as started:
        started.register_metrics(telemetry)
        lines = telemetry.render_own().splitlines()
    assert "price_keeper_journal_lost_calls_total 2" in lines
    assert "price_keeper_journal_unrecoverable_calls_total 1" in lines


@pytest.mark.parametrize("has_fresh_total", [False, True])
async def test_graceful_end_leaves_a_total_that_has_the_last_calls(
    tmp_path: Path, exact_store: Store, has_fresh_total: bool
) -> None:
    async with open_recording_harness(tmp_path / "other", exact_store) as rec:
        if has_fresh_total:  # another process has just written it
            rec.spend(5)
            assert await rec.flusher.flush()
            assert await TotalSweep(exact_store, rec.clock, Aggregator(exact_store, rec.clock, 60.0)).sweep()
        async with open_recording(config_of(tmp_path / "journal"), exact_store, rec.clock) as running:
            account = ChargedCounters.from_counters([rec.counter()])
            number = running.flusher.journal.write_intent(Intent(account, int(rec.clock.now() * 1000), 7, 7, 0))
            running.flusher.journal.record(number, Receipt(UsageCounts(1, pico=20)))
            await running.finish()
        total = read_total(await exact_store.get(build_total_key(rec.counter()), consistent=True))
        assert total.counts.pico == (25 if has_fresh_total else 20)


async def test_graceful_end_goes_on_when_totals_fail(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_recording(config_of(tmp_path), exact_store, ManualClock()) as running:
        monkeypatch.setattr(running.aggregator, "run", lambda **_: 1 / 0)
        await running.finish()
    assert "a later sweep does it" in caplog.text


async def test_graceful_end_does_not_wait_long_for_totals(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "LAST_FLUSH_TIMEOUT_SECONDS", 0.05)
    async with open_recording(config_of(tmp_path), exact_store, ManualClock()) as running:
        monkeypatch.setattr(running.aggregator, "run", lambda **_: asyncio.Event().wait())
        await running.finish()
    assert "the last totals take too long" in caplog.text
