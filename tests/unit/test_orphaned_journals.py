"""Journals of workers that no longer exist: all of them reach the store once, whichever process dies on the way."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.cli.replay_command import _replay
from price_keeper.config import Config
from price_keeper.errors import JournalInUse, JournalUnusable, RecordingUnavailable
from price_keeper.ledger import lease_rows
from price_keeper.ledger.journal_lock import lock_folder
from price_keeper.ledger.orphaned_journals import OrphanedJournals, find_worker_folders, locate_worker_folder
from price_keeper.ledger.recording import Recording, open_recording
from price_keeper.ledger.recovery import RecoveredJournal, recover
from price_keeper.stores.contract import Store

from tests.support.clock import ManualClock
from tests.support.lease_rows import new_budget_key, read_bucket
from tests.support.memory_store import MemoryStore
from tests.support.recording_harness import RecordingHarness as Left
from tests.support.recording_harness import ScriptedFaults, open_recording_harness
from tests.unit.test_lease_file_across_runs import spend, taken_for


def config_of(folder: Path, **more: Any) -> Config:
    plain = Config(labels=Config.development().labels)
    return replace(plain, journal=replace(plain.journal, dir=str(folder), **more))


@asynccontextmanager
async def run_of(folder: Path, store: Any, workers: int = 1, **more: Any) -> AsyncIterator[Recording]:
    """The first of so many workers; killed at the end."""
    adoption, clock = OrphanedJournals(folder, workers), ManualClock()
    async with open_recording(config_of(folder, **more), store, clock, adoption) as running:
        yield running
        running.flusher.journal._segment.close()


async def left_by(folder: Path, store: Store, number: int, pico: int) -> Left:
    """By a worker that was killed: one call is recorded, one is under way."""
    async with open_recording_harness(locate_worker_folder(folder, number), store) as left:
        left.spend(pico)
        left.begin(estimate=7)
    return left


async def counted(store: Store, *lefts: Left) -> list[tuple[int, int]]:
    for left in lefts:
        left.store = ScriptedFaults(store)
    return [await left.read_counts() for left in lefts]


async def test_journals_without_worker_in_this_run_are_adopted(tmp_path: Path, exact_store: Store) -> None:
    lefts = [await left_by(tmp_path, exact_store, number, 10 * number) for number in (1, 2, 7)]
    async with run_of(tmp_path, exact_store, workers=2) as running:
        assert running.flusher.unflushed_pico == (20 + 7) + (70 + 7)
        assert running.recovered.estimated_calls == 2
        assert sum(running.flusher.unflushed_by_counter().values()) == 104  # for readers of spend from now on
        assert await running.flusher.flush()
        await running.adopt_orphans()
        assert await counted(exact_store, *lefts) == [(0, 0), (2, 27), (2, 77)]
        assert find_worker_folders(tmp_path) == [tmp_path / "worker-1"]
    async with run_of(tmp_path, exact_store) as running:
        assert await running.flusher.flush()
        await running.finish()  # also of a run too short to do it before
    assert await counted(exact_store, *lefts) == [(2, 17), (2, 27), (2, 77)]
    assert find_worker_folders(tmp_path) == []


async def test_store_outage_keeps_orphaned_journals(tmp_path: Path, exact_store: Store) -> None:
    left, away = await left_by(tmp_path, exact_store, 2, 10**12), ScriptedFaults(exact_store)
    away.is_away = True
    async with run_of(tmp_path, away, max_unflushed_usd=1) as running:
        assert not await running.flusher.flush()
        await running.adopt_orphans()
        assert find_worker_folders(tmp_path) == [tmp_path / "worker-2"]
        with pytest.raises(RecordingUnavailable, match="waits for the store"):  # what waits there counts, too
            running.flusher.check_recordable()
        away.is_away = False
        assert await running.flusher.flush()
        await running.adopt_orphans()
        running.flusher.check_recordable()
    assert find_worker_folders(tmp_path) == []
    assert await counted(exact_store, left) == [(2, 10**12 + 7)]


async def test_journal_of_living_worker_is_adopted_after_its_exit(tmp_path: Path, exact_store: Store) -> None:
    left, books = await left_by(tmp_path, exact_store, 1, 10), _Books()
    with lock_folder(tmp_path / "worker-1"):
        async with run_of(tmp_path, exact_store) as running:
            assert running.flusher.unflushed_pico == 0
            await running.adopt_orphans()
            assert find_worker_folders(tmp_path) == [tmp_path / "worker-1"]
    async with run_of(tmp_path / "other", exact_store) as running:
        running.flusher.sender.subscribe(books)
        os.rename(tmp_path / "worker-1", tmp_path / "other" / "worker-1")  # as if it had been freed just now
        await running.adopt_orphans()
        assert running.flusher.unflushed_pico == 17
        # What budgets are reckoned from was read before, so for them it is what others spent.
        assert running.flusher.unflushed_by_counter() == {}
        assert await running.flusher.flush()
        await running.adopt_orphans()
        assert not (tmp_path / "other" / "worker-1").exists()
        assert books.reported_pico == 0
    assert await counted(exact_store, left) == [(2, 17)]


class _Books:
    reported_pico = 0

    def on_acknowledged(self, counter: object, pico: int) -> None:
        self.reported_pico += pico


async def test_leases_of_orphaned_journal_are_released(tmp_path: Path) -> None:
    store, clock, name = ScriptedFaults(MemoryStore()), ManualClock(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with open_recording(config_of(tmp_path / "worker-1"), store, clock) as killed:  # type: ignore[arg-type]
        spend(killed, await taken_for(killed, name, 500), 100, 20)
        killed.flusher.journal._segment.close()
    async with run_of(tmp_path, store) as running:
        await running.adopt_orphans()
        assert (await read_bucket(store._store, name)).unleased == 500  # what was spent is not in the store yet
        store.faults = ["before"]
        assert not await running.flusher.flush()
        await running.adopt_orphans()
        assert (await read_bucket(store._store, name)).unleased == 500
        assert await running.flusher.flush()
        store.faults = ["before"]
        await running.adopt_orphans()  # the store is away again when it should go back
        assert (tmp_path / "worker-1" / f"holds-{killed.lease_file.holder}").exists()
        await running.adopt_orphans()
        assert (await read_bucket(store._store, name)).unleased == 980
        await running.adopt_orphans()
    assert (await read_bucket(store._store, name)).unleased == 980
    assert find_worker_folders(tmp_path) == []


async def test_adopt_after_an_unexpected_failure_takes_every_journal(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is kept, with all frames it came through: no lock may depend on when those are collected."""
    name = new_budget_key()
    await exact_store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with run_of(tmp_path, exact_store) as running:
        lefts = [await left_by(tmp_path, exact_store, number, 10 * number) for number in (2, 3)]
        async with open_recording(config_of(tmp_path / "worker-1"), exact_store, ManualClock()) as killed:
            spend(killed, await taken_for(killed, name, 500), 100, 20)
            killed.flusher.journal._segment.close()
        with monkeypatch.context() as patch:
            patch.setattr("price_keeper.ledger.orphaned_journals.recover", _without_memory_for("worker-2"))
            with pytest.raises(MemoryError) as failure:
                await running.adopt_orphans()
        assert running.flusher.has_unflushed_in(tmp_path / "worker-1")
        await running.adopt_orphans()
        assert (await read_bucket(exact_store, name)).unleased == 500  # what was spent is not in the store yet
        assert await running.flusher.flush()
        await running.adopt_orphans()
        assert failure.traceback
    assert (await read_bucket(exact_store, name)).unleased == 980
    assert await counted(exact_store, *lefts) == [(2, 27), (2, 37)]
    assert find_worker_folders(tmp_path) == []


def _without_memory_for(name: str) -> Callable[[Path], RecoveredJournal]:
    def failing(folder: Path) -> RecoveredJournal:
        if folder.name == name:
            raise MemoryError
        return recover(folder)

    return failing


async def test_orphaned_journal_with_lost_lines_keeps_leases(tmp_path: Path) -> None:
    store, name = MemoryStore(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    worker = tmp_path / "worker-1"
    async with open_recording(config_of(worker), store, ManualClock()) as killed:
        account = await taken_for(killed, name, 500)
        spend(killed, account, 100, 20)
        spend(killed, account, 100, 20)
        killed.flusher.journal._segment.close()
    (segment,) = worker.glob("*.seg")
    segment.write_bytes(segment.read_bytes().replace(b'["I",1,', b'?"I",1,'))
    async with run_of(tmp_path, store) as running:
        assert await running.flusher.flush()
        await running.adopt_orphans()
    assert (await read_bucket(store, name)).unleased == 500
    assert find_worker_folders(tmp_path) == []
    assert (tmp_path / f"kept-holds-{killed.lease_file.holder}").exists()


@pytest.mark.parametrize("steps", range(12))
async def test_adoption_crash_at_any_step_counts_once(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Before the given one of all that changes the disk or the store; the next one ends what it began."""
    left, name = await left_by(tmp_path, exact_store, 1, 10), new_budget_key()
    await exact_store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with open_recording(config_of(tmp_path / "worker-2"), exact_store, ManualClock()) as killed:
        spend(killed, await taken_for(killed, name, 500), 100, 20)
        killed.flusher.journal._segment.close()
    (tmp_path / "worker-1" / "alerts").mkdir()
    (tmp_path / "worker-1" / "alerts" / "one.json").write_text("{}")

    async def adopted() -> None:
        async with run_of(tmp_path, exact_store) as running:
            await running.flusher.flush()
            await running.adopt_orphans()

    died = False
    with monkeypatch.context() as patch:
        deaths = _Deaths(steps)
        for owner, step in ((os, "rename"), (os, "truncate"), (Path, "unlink"), (Path, "rmdir"), (Path, "rename")):
            patch.setattr(owner, step, deaths.before(getattr(owner, step)))
        patch.setattr(type(exact_store), "transact", deaths.before(type(exact_store).transact))
        try:
            await adopted()
        except _Killed:
            died = True
    assert died or steps > 8, "there are not so many steps"
    await adopted()
    assert await counted(exact_store, left) == [(2, 17)]
    assert (await read_bucket(exact_store, name)).unleased == 980
    assert find_worker_folders(tmp_path) == []
    assert [path.name for path in (tmp_path / "alerts").iterdir()] == ["one.json"]


class _Killed(BaseException):
    pass


class _Deaths:
    def __init__(self, steps: int) -> None:
        self._left = steps

    def before(self, act: Any) -> Any:
        def do(*arguments: Any, **named: Any) -> Any:
            if self._left <= 0:
                raise _Killed
            self._left -= 1
            return act(*arguments, **named)

        return do


async def test_alerts_of_orphaned_journal_are_delivered(tmp_path: Path) -> None:
    there, outbox = tmp_path / "worker-3" / "alerts", AlertOutbox(tmp_path / "alerts")
    there.mkdir(parents=True)
    (there / "000000000001-a.json").write_text("{}")
    (there / "half.tmp").write_text("{")
    async with run_of(tmp_path, MemoryStore()) as running:
        assert running.orphans is not None
        running.orphans.subscribe(outbox.names.update)
        await running.adopt_orphans()
    assert outbox.names == {"000000000001-a"}
    assert [path.name for path in (tmp_path / "alerts").iterdir()] == ["000000000001-a.json"]
    assert find_worker_folders(tmp_path) == []


async def test_foreign_file_stays_and_is_logged_once(
    tmp_path: Path, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    left = await left_by(tmp_path, exact_store, 1, 10)
    (tmp_path / "worker-1" / "notes").write_text("of a person")
    for name in ("worker-0", "worker-02", "worker-x", "worker"):
        (tmp_path / name).mkdir()
    (tmp_path / "worker-4").write_text("a file")
    (tmp_path / "worker-5").symlink_to(tmp_path / "worker-x")
    async with run_of(tmp_path, exact_store) as running:
        assert await running.flusher.flush()
        for _ in range(3):
            await running.adopt_orphans()
    assert await counted(exact_store, left) == [(2, 17)]
    assert sorted(path.name for path in (tmp_path / "worker-1").iterdir()) == ["lock", "notes"]
    assert "NOT counted" not in caplog.text
    assert caplog.text.count("worker-1 is counted; remove its folder") == 1
    assert (tmp_path / "worker-02").exists()


async def test_unreadable_orphaned_journal_does_not_prevent_start(
    tmp_path: Path, exact_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    left = await left_by(tmp_path, exact_store, 1, 10)
    (tmp_path / "worker-2" / "01ARZ3NDEKTSV4RRFFQ69G5FAV.seg").mkdir(parents=True)
    caplog.set_level(logging.ERROR)
    async with run_of(tmp_path, exact_store) as running:
        assert await running.flusher.flush()
        await running.adopt_orphans()
    assert "is NOT counted: " in caplog.text
    assert f"price-keeper replay {tmp_path / 'worker-2'}" in caplog.text
    assert await counted(exact_store, left) == [(2, 17)]
    assert find_worker_folders(tmp_path) == [tmp_path / "worker-2"]


async def test_lock_on_removed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process opened it just before its owner removed the folder, and has locked nothing."""
    import fcntl

    folder, flock = tmp_path / "worker-1", fcntl.flock

    def late(file: int, how: int) -> None:
        (folder / "lock").unlink()
        folder.rmdir()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(JournalInUse), lock_folder(folder):
        pass


async def test_replay_takes_all_folders_or_none(
    tmp_path: Path, exact_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lefts = [await left_by(tmp_path, exact_store, number, 10) for number in (0, 1, 2)]

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Store]:
        yield exact_store

    monkeypatch.setattr("price_keeper.cli.replay_command.open_store", opened)
    config = config_of(tmp_path)
    with lock_folder(tmp_path / "worker-2"), pytest.raises(JournalInUse):
        await _replay(config, tmp_path, ManualClock(), force=False)
    assert await counted(exact_store, *lefts) == [(0, 0)] * 3
    for _ in range(2):
        assert await _replay(config, tmp_path, ManualClock(), force=False) == 0
        assert await counted(exact_store, *lefts) == [(2, 17)] * 3
    assert "6 calls of 0.000000 USD are in the store; 3 of them are estimated" in capsys.readouterr().out
    with pytest.raises(JournalUnusable):
        await _replay(config, tmp_path / "nowhere", ManualClock(), force=False)
