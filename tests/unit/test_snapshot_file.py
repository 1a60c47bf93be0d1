"""Notes on the disk: whole whenever a process dies, of no harm when they are spoilt, and out of the journal's way."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from price_keeper.budgets import budget_snapshot as book
from price_keeper.budgets.budget_snapshot import SnapshotFile
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope
from price_keeper.ledger.segment import encode_line
from price_keeper.stores.contract import Store

from tests.support import disks
from tests.support.budget_fleet import USD, new_caller, open_budget_sidecar, put_budget
from tests.support.clock import ManualClock
from tests.support.commands import ROOT

KILLS = 4
NOTE = encode_line(b'[1,"settings","ORG#00000001-0000-4000-8000-000000000000",{}]')
WRITES_WITHOUT_END = """
import asyncio, sys
from pathlib import Path
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope
from price_keeper.budgets.budget_snapshot import SnapshotFile

async def main():
    notebook, number = SnapshotFile(Path(sys.argv[1]), SystemClock()), 0
    await notebook.open()
    while True:
        number += 1
        for each in range(200):
            notebook.snapshot.record_settings(Scope(f"{each:08d}-0000-4000-8000-000000000000"), {"version": number})
        await notebook.write()
        print(number, flush=True)

asyncio.run(main())
"""

with_disks = pytest.mark.skipif(bool(disks.why_unavailable()), reason=disks.why_unavailable())


def scope(number: int) -> Scope:
    return Scope(f"{number:08d}-0000-4000-8000-000000000000")


async def written(folder: Path, *numbers: int, worker: int = 0, version: int = 1) -> SnapshotFile:
    made = SnapshotFile(folder, ManualClock(), worker, worker + 1)
    for number in numbers:
        made.snapshot.record_settings(scope(number), {"version": version})
    await made.write()
    return made


async def read(folder: Path, worker: int = 0, workers: int = 1) -> SnapshotFile:
    made = SnapshotFile(folder, ManualClock(), worker, workers)
    await made.open()
    return made


def known(snapshot_file: SnapshotFile, most: int = 10) -> set[int]:
    return {number for number in range(most) if snapshot_file.snapshot.find_settings(scope(number)) is not None}


async def test_written_snapshot_is_read_back(tmp_path: Path) -> None:
    await written(tmp_path, 1, 2, 3)
    assert os.listdir(tmp_path) == ["notes-0"]
    assert stat.S_IMODE((tmp_path / "notes-0").stat().st_mode) == 0o600
    found = await read(tmp_path)
    assert known(found) == {1, 2, 3}
    assert not found.snapshot.has_changes


async def test_changed_settings_are_written_at_once_and_unchanged_not(tmp_path: Path) -> None:
    clock = ManualClock()
    snapshot_file, file = SnapshotFile(tmp_path, clock), tmp_path / "notes-0"

    async def is_written() -> bool:
        before = file.stat().st_ino if file.exists() else 0
        await snapshot_file.write_if_due()
        return file.exists() and file.stat().st_ino != before

    assert not await is_written()
    snapshot_file.snapshot.record_settings(scope(1), {"version": 1})
    assert await is_written()
    await clock.advance(book.WRITE_CHECK_SECONDS)
    assert not await is_written()
    snapshot_file.snapshot.record_settings(scope(1), {"version": 1})
    assert not await is_written()
    snapshot_file.snapshot.record_settings(scope(1), {"version": 2})
    assert await is_written()


async def test_spend_is_written_periodically(tmp_path: Path, exact_store: Store) -> None:
    clock, who, file = ManualClock(), new_caller(), tmp_path / "notes-0"
    snapshot_file = SnapshotFile(tmp_path, clock)
    await put_budget(exact_store, who.org, {"premium": 100})
    async with open_budget_sidecar(tmp_path / "journal", exact_store, clock, snapshot=snapshot_file.snapshot) as one:
        await one.decide(who)
        await snapshot_file.write_if_due()
        seen = set[bytes]()
        for _ in range(60):
            await one.spend(who, 1 * USD)
            await one.flusher.flush()
            await clock.advance(1)
            await snapshot_file.write_if_due()
            seen.add(file.read_bytes())
            stood = (await read(tmp_path)).snapshot.find_budget(Scope(who.org, "web"), "DAY#20261118")
            assert stood is not None
            known = (await one.caller_day(who)).budget.get_tracker("premium").spent
            assert known - 6 * USD <= sum(stood.spent["premium"]) <= known
        assert 10 <= len(seen) <= 14
        await one.wait_for_refresh()
        for is_more in (True, False):  # known news are no reason to write
            if is_more:
                await one.spend(who, 1 * USD)
            before = file.stat().st_mtime_ns
            snapshot_file.snapshot.mark_changed(next(iter(one.budget_registry._refresh_states.values())))
            await clock.advance(book.BUDGET_WRITE_SECONDS)
            await snapshot_file.write_if_due()
            assert (file.stat().st_mtime_ns != before) == is_more
            assert not snapshot_file.snapshot.pending_count


async def test_label_change_is_written_soon(tmp_path: Path, exact_store: Store) -> None:
    clock, who = ManualClock(), new_caller()
    snapshot_file = SnapshotFile(tmp_path, clock)
    await put_budget(exact_store, who.org, {"premium": 10, "economy": 1})
    async with open_budget_sidecar(tmp_path / "journal", exact_store, clock, snapshot=snapshot_file.snapshot) as one:
        await one.decide(who)
        await snapshot_file.write_if_due()
        await one.spend(who, 10 * USD)
        await one.flusher.flush()
        await clock.advance(book.WRITE_CHECK_SECONDS)
        await one.decide(who)
        await one.wait_for_refresh()
        await snapshot_file.write_if_due()
    stood = (await read(tmp_path)).snapshot.find_budget(Scope(who.org, "web"), "DAY#20261118")
    assert stood is not None
    assert stood.sticky_item["active_model_label"] == "economy"


async def test_large_snapshot_is_written_less_often(tmp_path: Path) -> None:
    clock = ManualClock()
    snapshot_file, file = SnapshotFile(tmp_path, clock), tmp_path / "notes-0"
    writes = 0
    for second in range(60):
        for number in range(20):
            snapshot_file.snapshot.record_settings(scope(number), {"version": second, "quotas": {"x" * 60_000: 1}})
        before = file.stat().st_ino if file.exists() else 0
        await snapshot_file.write_if_due()
        writes += file.stat().st_ino != before
        await clock.advance(1)
    assert file.stat().st_size > 10**6
    assert 5 < writes <= 60 * book.MAX_BYTES_PER_SECOND / file.stat().st_size + 2


async def test_each_worker_reads_all_snapshots_and_removes_outdated_ones(tmp_path: Path) -> None:
    for worker in range(4):
        await written(tmp_path, worker, 7, worker=worker, version=worker)
    (tmp_path / "new-notes-3").write_bytes(b"half of one")
    second = await read(tmp_path, worker=1, workers=2)
    assert known(second) == {0, 1, 2, 3, 7}
    first = await read(tmp_path, workers=2)
    assert len(os.listdir(tmp_path)) == 5  # nothing goes before it stands elsewhere
    first.snapshot.record_settings(scope(5), None)
    await first.write()
    assert sorted(os.listdir(tmp_path)) == ["notes-0", "notes-1"]
    (tmp_path / "notes-1").unlink()
    assert known(await read(tmp_path)) == {0, 1, 2, 3, 5, 7}


async def test_later_snapshot_of_other_worker_is_read_on_demand(tmp_path: Path) -> None:
    clock = ManualClock()
    second = SnapshotFile(tmp_path, clock, 1, 2)
    await second.open()
    await written(tmp_path, 1)
    assert known(second) == set()
    await second.reread()
    assert known(second) == {1}
    await written(tmp_path, 1, 2)
    await second.reread()
    assert known(second) == {1}
    await clock.advance(book.REREAD_SECONDS)
    await second.reread()
    assert known(second) == {1, 2}


async def test_read_does_not_wait_for_slow_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is for a call, and a disk may take its time over a sync."""
    at_it, gate = threading.Event(), threading.Event()

    def slow(file: int) -> None:
        at_it.set()
        gate.wait()

    second = SnapshotFile(tmp_path, ManualClock(), 1, 2)
    await written(tmp_path, 1)
    second.snapshot.record_settings(scope(2), None)
    monkeypatch.setattr(os, "fsync", slow)
    writing = asyncio.create_task(second.write())
    try:
        assert await asyncio.to_thread(at_it.wait, 30)
        async with asyncio.timeout(60):
            await second.reread()
        assert known(second) == {1, 2}
        assert not writing.done()
    finally:
        gate.set()
        await writing


async def test_foreign_files_are_kept(tmp_path: Path) -> None:
    for name in ("notes-", "notes-01", "notes-x", "notes-1.txt", "notes-5000000000"):
        (tmp_path / name).write_bytes(encode_line(b'["NOTES",1]'))
    found = await read(tmp_path)
    found.snapshot.record_settings(scope(1), None)
    await found.write()
    assert len(os.listdir(tmp_path)) == 6


async def test_truncated_snapshot_is_read_up_to_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(tmp_path, 1, 2, 3)
    whole = (tmp_path / "notes-0").read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole)):
        (tmp_path / "notes-0").write_bytes(whole[:size])
        caplog.clear()
        found = known(await read(tmp_path))
        assert found == set(range(1, max(1, sum(end < size for end in ends))))
        assert len(caplog.records) == (0 if size - 1 in ends else 1), size


@pytest.mark.parametrize("seed", range(5))
async def test_corrupted_snapshot_never_prevents_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    chance = random.Random(seed)
    await written(tmp_path, 1, 2, 3)
    whole = (tmp_path / "notes-0").read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        caplog.clear()
        (tmp_path / "notes-0").write_bytes(data)
        found = await read(tmp_path)
        assert known(found) < {1, 2, 3} or bytes(data) == whole
        assert all(found.snapshot.find_settings(scope(each)) == {"version": 1} for each in known(found))
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 5000, b"\n\n\n", encode_line(b'["NOTES",2]') + NOTE, NOTE, encode_line(b"[]"), b"x" * 10**6],
    ids=["empty", "zeros", "lines", "of another version", "no head", "an empty line", "noise"],
)
async def test_file_with_other_content_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "notes-0").write_bytes(content)
    found = await read(tmp_path)
    assert found.snapshot.export_lines() == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "too large"])
async def test_other_file_type_in_place_of_snapshot_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = tmp_path / "notes-0"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/dev/zero")
        case _:
            with path.open("wb") as file:
                file.truncate(book.MAX_FILE_BYTES + 1)
    found = await read(tmp_path)
    assert len(caplog.records) == 1
    found.snapshot.record_settings(scope(1), None)
    await found.write()
    assert len(caplog.records) == 1 + (kind == "folder")
    if kind != "folder":
        assert known(await read(tmp_path)) == {1}


async def test_symbolic_link_is_never_written_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "somebodys").write_bytes(b"precious")
    (tmp_path / "new-notes-0").symlink_to(tmp_path / "somebodys")
    await written(tmp_path, 1)
    assert (tmp_path / "somebodys").read_bytes() == b"precious"
    assert len(caplog.records) == 1


@with_disks
async def test_nearly_full_disk_is_left_to_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    with disks.small_disk(tmp_path, 12) as disk:
        snapshot_file = SnapshotFile(disk, clock)
        snapshot_file.snapshot.record_settings(scope(1), None)
        await snapshot_file.write_if_due()
        assert known(await read(disk)) == {1}
        (disk / "more").write_bytes(bytes(5 * 2**20))
        for _ in range(3):
            snapshot_file.snapshot.record_settings(scope(2), None)
            await snapshot_file.write_if_due()
            await clock.advance(book.FAILURE_PAUSE_SECONDS)
        assert sorted(path.name for path in disk.iterdir()) == ["more", "notes-0"]
        assert len(caplog.records) == 1
        (disk / "more").unlink()
        await snapshot_file.write_if_due()
        assert known(await read(disk)) == {1, 2}


@with_disks
async def test_read_only_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(tmp_path, 1)
    clock = ManualClock()
    with disks.read_only(tmp_path):
        snapshot_file = SnapshotFile(tmp_path, clock)
        await snapshot_file.open()
        for number in range(2, 5):
            snapshot_file.snapshot.record_settings(scope(number), None)
            await snapshot_file.write_if_due()
            await clock.advance(book.FAILURE_PAUSE_SECONDS)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["Read-only file system"]
    assert known(await read(tmp_path)) == {1}


async def test_kill_at_any_moment_leaves_last_or_former_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance, least = random.Random(20261119), 0
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITES_WITHOUT_END, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
            assert process.stdout is not None
            version = int(process.stdout.readline())
            time.sleep(chance.uniform(0, 0.05))  # noqa: ASYNC251
            process.send_signal(signal.SIGKILL)
            version = max([version, *(int(each) for each in process.stdout.read().split())])
        snapshot_file = SnapshotFile(tmp_path, SystemClock())
        await snapshot_file.open()
        versions = {(snapshot_file.snapshot.find_settings(scope(each)) or {}).get("version") for each in range(200)}
        assert versions in ({version}, {version + 1})
        least += version
    assert caplog.records == []
    print(f"{least} writes, {KILLS} kills")
