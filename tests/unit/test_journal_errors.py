"""A disk that is full, broken, or holds corrupt lines: trouble is reported, nothing is lost, and it ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import orjson
import pytest
from price_keeper.cli import replay_command
from price_keeper.domain import Scope
from price_keeper.errors import JournalUnusable, RecordingUnavailable
from price_keeper.ledger import journal, recording
from price_keeper.ledger.aggregator import Aggregator, build_total_key
from price_keeper.ledger.journal_lock import lock_folder
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recording import open_recording
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import encode_line, sync_folder
from price_keeper.stores.contract import Store, Update, Write

from tests.support.clock import ManualClock
from tests.support.compiled import replaces_a_method
from tests.support.recording_harness import RecordingHarness, ScriptedFaults, open_recording_harness, sum_pending
from tests.unit.test_recording_start import PWRITE, config_of


def with_free(free: int) -> Callable[[int, bytes, int], int]:
    """A disk where no file grows beyond so many bytes."""

    def write(file: int, data: bytes, at: int) -> int:
        if at + len(data) > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return PWRITE(file, data, at)

    return write


def refused(code: int) -> Callable[..., Any]:
    def refuses(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuses


async def test_nearly_full_disk_still_takes_seal_and_next_segment(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec.begin(estimate=3)
    rec.spend(1)
    monkeypatch.setattr(os, "pwrite", with_free(4096))
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.journal.trouble) == ((1, 1), "")
    rec.spend(2)
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (2, 3)


async def test_no_room_for_next_segment_is_trouble(rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    rec.spend(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", with_free(0))
        await rec.clock.advance(5)
        await rec.flusher.flush()
        rec.spend(2)
        assert rec.journal.trouble == "No space left on device"
        assert rec.flusher.lag_seconds >= 5
        with pytest.raises(RecordingUnavailable, match="cannot be written: No space left"):
            await rec.flusher.check()
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.journal.trouble) == ((2, 3), "")
    await rec.flusher.check()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_segment_with_failed_close_is_flushed(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    rec.spend(777)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refused(code))
        assert await rec.flusher.flush()
    assert await rec.read_counts() == (1, 777)
    rec.spend(5)
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), len(rec.segments())) == ((2, 782), 1)


async def test_failing_sync_does_not_prevent_shutdown(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    async with open_recording_harness(folder, exact_store) as rec:
        rec.begin(estimate=3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refused(errno.EIO))
            rec.journal.close()
    assert any("cannot be synced" in each.message for each in caplog.records)
    left = recover(folder)
    assert (left.estimated_calls, left.corrupt_lines, [each.seal.pico for each in left.sealed]) == (1, 0, [3])


@replaces_a_method
async def test_shutdown_waits_for_slow_sync(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file must not be closed under a thread that syncs it."""
    at_it, gate, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()
    syncing: list[asyncio.Task[None]] = []

    def slow(folder: Path) -> None:
        if threading.current_thread() is not threading.main_thread() and syncing:
            at_it.set()
            gate.wait(5)
        sync_folder(folder)

    class Slow(ScriptedFaults):
        async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
            """The segment that follows is written to while the last one is sent."""
            if not syncing:
                syncing.append(asyncio.create_task(running.flusher.sync_journal()))
                assert await asyncio.to_thread(at_it.wait, 5)
                loop.call_later(0.2, gate.set)
            await super().transact(writes, token=token)

    async with open_recording(config_of(tmp_path), cast(Any, Slow(exact_store)), ManualClock()) as running:
        journalled = running.flusher.journal
        account = ChargedCounters.from_counters([Counter(Scope(str(uuid4())).key, "premium", "DAY#20261118", 8)])
        journalled.record(journalled.write_intent(Intent(account, 1, 1, 1, 0)), Receipt(UsageCounts(1, pico=5)))
        monkeypatch.setattr(journal, "sync_folder", slow)
        await running.finish()
        await syncing[0]
    assert (caplog.records, journalled.trouble) == ([], "")


@replaces_a_method
async def test_intermittent_trouble_is_logged_once_a_minute(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where descriptors are short, and each becomes free for a moment: of a disk, then of the store."""
    number = rec.begin()
    for seconds, lines in ((0, 1), (59.5, 1), (0.5, 2)):
        await rec.clock.advance(seconds)
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(rec.journal._segment, "append", refused(errno.EMFILE))
                with pytest.raises(RecordingUnavailable):
                    rec.begin()
            assert rec.journal.trouble
            rec.journal.record(number, None)
            assert not rec.journal.trouble
            number = rec.begin()
            rec.store.faults = ["before"]
            rec.spend(1)
            assert not await rec.flusher.flush()
            assert await rec.flusher.flush()
        logged = [each.message for each in caplog.records]
        assert sum("cannot be written: Too many open files" in each for each in logged) == lines
        assert sum("USD wait, above" in each for each in logged if "spend cannot be flushed" in each) == lines


async def test_failed_sync_is_trouble_until_next_segment_is_synced(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a later sync says of the same file is worth nothing: the pages that it lost count as clean."""
    number = rec.begin()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused(errno.EIO))
        for _ in range(3):
            await rec.flusher.sync_journal()
    assert [each.message for each in caplog.records if "cannot be synced" in each.message] != []
    assert len([each for each in caplog.records if "cannot be synced" in each.message]) == 1
    (before,) = rec.segments()
    rec.journal.record(number, None)
    await rec.flusher.sync_journal()
    with pytest.raises(RecordingUnavailable, match="Input/output error"):
        await rec.flusher.check()
    await rec.clock.advance(journal.RESYNC_SECONDS + 1)
    await rec.flusher.sync_journal()
    assert before != rec.segments()[-1]
    rec.spend(1)
    await rec.flusher.sync_journal()
    await rec.flusher.check()


async def test_sums_above_64_bits_are_sealed_recovered_and_sent(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path, exact_store) as first:
        for _ in range(30):
            first.spend(10**18)
        for _ in range(30):
            first.begin(estimate=10**18)
    async with open_recording_harness(tmp_path, exact_store, scope=first.scope, max_usd=10**9) as second:
        assert recover(tmp_path).sealed[0].seal == second.recovered.sealed[0].seal
        assert await second.flusher.flush()
        assert await second.read_counts() == (60, 60 * 10**18)


@pytest.mark.parametrize("failure", [TypeError("x"), OverflowError("x"), KeyError("x"), ValueError("x")])
async def test_journal_read_failure_is_reported_as_unusable(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fails(_: Path) -> None:
        raise failure

    monkeypatch.setattr(recording, "recover", fails)
    with pytest.raises(JournalUnusable, match="cannot be read"):
        async with open_recording(config_of(tmp_path), exact_store, ManualClock()):
            pass


PAID_BY = [["ORG#a", "premium", "DAY#20261118", 8]]


@pytest.mark.parametrize(
    "values",
    [
        ["H"],
        ["C", 1],
        ["C", [], 1, 1, 1, 1, PAID_BY],
        ["C", 7, 1, 1, 1, "dear", PAID_BY],
        ["C", 7, 1, 1, 1, 1, [["ORG#a", "premium", "DAY#20261118", "8"]]],
        ["C", 7, 1, 1, 1, 1, 5],
        ["C", 7, 1, 1, 1, 1, [[1, 2, 3, 4]]],
        ["I", 7, 1, 1, 1, 1, [["ORG#a", "premium", 20261118, 8]]],
        ["E", 1, 2, 3],
        ["E", "x", "many"],
        ["I", 7],
        ["R", 1],
        ["R", 1, ["a", "b"], {}],
        ["R", 1, [*range(1, len(UsageCounts._fields) + 2)], {}],
        ["R", 1, [1, 0, 1, 1, 0, 0, 0, 0, 5, "many"], {}],
        ["R", 1, [1, 0, 1, 1, 0, 0, 0, 0, 5, 1.5], {}],
        ["R", 1, [1, 0, 1, 1, 0, 0, 0, 0, 5, -1], {}],
        ["S", "x", 1, 1, [[["ORG#a", "premium", "DAY#20261118", 8, 1, 0, 0, 0, 0, 0, 0, 0, 5, "many"]]]],
        ["S", "x", 1, 1, [[["ORG#a", "premium", "DAY#20261118", 8, 1, 0, 0, 0, 0, 0, 0, 0, 5, -1]]]],
        ["R", {}, [1], {}],
        ["N", []],
        ["N"],
        ["S"],
        ["S", "x", "much", 1, []],
        ["S", "x", 1, 1, [[[1]]]],
        ["S", 1, 1, 1, []],
        ["S", "x", 1, "1", []],
        ["S", "x", 1, 1, [[["ORG#a", "premium", 20261118, 8, 1, 0, 0, 0, 0, 0, 0, 0, 5]]]],
        [None],
        [[]],
    ],
)
async def test_malformed_line_is_counted_as_corrupt(rec: RecordingHarness, values: list[Any]) -> None:
    rec.begin(estimate=7)
    rec.spend(1)
    rec.journal._segment.append(orjson.dumps(values))
    left = recover(rec.folder)
    assert left.sealed[0].seal.requests == 2
    assert left.corrupt_lines == (0 if values in ([None], [[]]) else 1)


async def test_malformed_end_mark_loses_no_carried_calls(rec: RecordingHarness) -> None:
    rec.begin(estimate=7)
    rec.journal.record(rec.begin(), Receipt(UsageCounts(1, pico=1)))
    rec.journal.seal()
    path = rec.segments()[1]
    _, carried, _ = path.read_bytes().rstrip(b"\0").splitlines()
    head = orjson.dumps(["H", path.stem, rec.segments()[0].stem, 1])
    path.write_bytes(encode_line(head) + carried + b"\n" + encode_line(b'["E","x","many"]') + encode_line(b'["N",99]'))
    left = recover(rec.folder)
    assert (sum(each.seal.pico for each in left.sealed), left.corrupt_lines) == (8, 1)


async def test_carried_calls_of_truncated_segment_count_once(rec: RecordingHarness) -> None:
    """A has no seal, the first page of B is missing, and C carries what A began."""
    calls = [rec.begin(estimate=1000) for _ in range(5)]
    rec.spend(1)
    rec.journal.seal()
    rec.spend(2)
    rec.journal.seal()
    for call in calls[:3]:
        rec.journal.record(call, Receipt(UsageCounts(1, pico=10)))
    second = rec.segments()[1]
    data = second.read_bytes()
    lost = data.index(b'["I"') - 9
    second.write_bytes(bytes(lost) + data[lost:])
    for _ in range(2):
        left = recover(rec.folder)
        assert sum(each.seal.requests for each in left.sealed) == 7
        assert sum(each.seal.pico for each in left.sealed) == 2 * 1000 + 3 * 10 + 1 + 2


async def test_other_process_with_same_call_numbers_loses_no_call(tmp_path: Path, exact_store: Store) -> None:
    async with open_recording_harness(tmp_path, exact_store) as first:
        first.begin(estimate=1000)
    (old,) = first.segments()
    kept = old.read_bytes()
    async with open_recording_harness(tmp_path, exact_store, scope=first.scope) as second:
        second.begin(estimate=2000)
        second.spend(1)
        second.journal.seal()
    old.write_bytes(kept)  # as if it had never been sealed
    left = recover(tmp_path)
    assert sum(each.seal.pico for each in left.sealed) == 3001


async def test_total_above_its_shards_is_logged_once(rec: RecordingHarness, caplog: pytest.LogCaptureFixture) -> None:
    one = Aggregator(rec.store, rec.clock, 60)
    rec.flusher.sender.subscribe_written(one.note_written)
    rec.spend(1)
    assert await rec.flusher.flush()
    await sum_pending(one)
    await rec.store.update(Update(build_total_key(rec.counter()), add={"requests": 5}))  # as a replay by force may
    caplog.set_level(logging.WARNING)
    for _ in range(4):
        await rec.clock.advance(60)
        rec.spend(1)
        assert await rec.flusher.flush()
        await sum_pending(one)
    assert caplog.text.count("is higher than its shards") == 1


def test_read_only_journal_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refused(errno.EROFS))
    message = r"cannot use the journal in .*: Read-only file system; copy it to a disk that can be written to"
    with pytest.raises(JournalUnusable, match=message), lock_folder(tmp_path, create=False):
        pass


async def test_replay_without_room_for_seal_is_reported(rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    rec.begin()
    rec.spend(1)
    monkeypatch.setattr(os, "truncate", refused(errno.EROFS))
    with pytest.raises(JournalUnusable, match=r"cannot bring the journal in .* to its end: Read-only file system"):
        replay_command._recover_journal(rec.folder)
