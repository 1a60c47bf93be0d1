"""A store whose file is deleted, renamed, replaced, cut or overwritten while it is in use."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from price_keeper.errors import StoreUnavailable
from price_keeper.stores import sqlite_file
from price_keeper.stores.contract import Key, Put, Update
from price_keeper.stores.sqlite import SqliteStore
from price_keeper.stores.sqlite_file import connect, prepare_file

KEY = Key("config", "p", "s")
ADD_ONE = Update(KEY, add={"n": 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    monkeypatch.setattr(sqlite_file, "_RETRY_SECONDS", 0.0)
    opened = await SqliteStore(path, lambda: 1000.0).open()
    await opened.update(ADD_ONE)
    await opened.get(KEY)
    yield opened
    await opened.close()


async def refusals(store: SqliteStore) -> list[str]:
    """The refusals of a write, a read and a probe."""
    found = []
    for work in (lambda: store.update(ADD_ONE), lambda: store.get(KEY), store.check_file):
        with pytest.raises(StoreUnavailable) as refused:
            await work()  # type: ignore[operator]
        assert not refused.value.maybe_applied
        found.append(str(refused.value))
    return found


def numbers(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [item for (item,) in connection.execute("SELECT item FROM config")]


async def test_write_after_deletion_is_refused(store: SqliteStore, path: Path) -> None:
    os.unlink(path)
    assert all("was deleted or renamed" in text for text in await refusals(store))
    assert not os.access(path, os.F_OK)  # nothing made a new one


async def test_renamed_file_is_used_again_when_moved_back(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "price_keeper.stores")
    away = path.with_name("away.db")
    os.rename(path, away)
    await refusals(store)
    await refusals(store)
    assert numbers(away) == ['{"n":1}']
    os.rename(away, path)
    assert await store.update(ADD_ONE) == {"n": 2}
    assert await store.get(KEY) == {"n": 2}
    said = [record.getMessage() for record in caplog.records]
    assert ["deleted or renamed" in text for text in said] == [True, False]
    assert "back in its place" in said[1]


def test_connecting_to_deleted_file_creates_no_empty_one(path: Path) -> None:
    prepare_file(path)
    path.unlink()
    with pytest.raises(sqlite3.OperationalError):
        connect(path)
    assert not path.exists()


async def test_backup_moved_over_the_file_is_refused_and_gets_no_old_log(store: SqliteStore, path: Path) -> None:
    backup = path.with_name("backup.db")
    prepare_file(backup)
    os.replace(backup, path)
    assert all("was replaced by another file" in text and "restart" in text for text in await refusals(store))
    await store.close()
    assert numbers(path) == []  # neither the refused writes nor the log of the former file
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    restarted = await SqliteStore(path, lambda: 1000.0).open()
    assert await restarted.update(ADD_ONE) == {"n": 1}
    await restarted.close()


@pytest.mark.parametrize("ending", ["-wal", "-shm"])
async def test_deleted_log_is_detected_and_loses_no_acknowledged_write(
    store: SqliteStore, path: Path, ending: str
) -> None:
    os.unlink(f"{path}{ending}")
    assert all("-wal or -shm was deleted" in text for text in await refusals(store))
    copied = path.with_name("copied.db")
    shutil.copy(path, copied)
    assert numbers(copied) == ['{"n":1}']  # though this process may be killed next
    await store.close()
    restarted = await SqliteStore(path, lambda: 1000.0).open()
    assert await restarted.update(ADD_ONE) == {"n": 2}
    await restarted.close()


async def test_truncated_file_is_unavailable_until_restart(store: SqliteStore, path: Path) -> None:
    await store._writer.submit(lambda group: None)
    os.truncate(path, 4096)
    assert all("was cut, vacuumed or overwritten" in text for text in await refusals(store))
    with path.open("ab") as file:
        file.truncate(1_000_000)
    assert all("was cut, vacuumed or overwritten" in text for text in await refusals(store))


async def test_older_copy_written_over_file_is_detected(store: SqliteStore, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, closing(sqlite3.connect(path.with_name("old.db"))) as old:
        connection.backup(old)
    for number in range(200):
        await store.put(Put(Key("config", "p", f"{number:04}"), {"text": "x" * 4000}))
    await asyncio.to_thread(checkpoint, path)
    await store.check_file()
    shutil.copyfile(path.with_name("old.db"), path)
    assert all("was cut, vacuumed or overwritten" in text for text in await refusals(store))


@pytest.mark.parametrize("written", [b"These are a person's notes. " * 4096, b"\0" * 1_000_000])
async def test_foreign_bytes_written_over_file_are_detected(store: SqliteStore, path: Path, written: bytes) -> None:
    await asyncio.to_thread(path.write_bytes, written)
    assert all("was cut, vacuumed or overwritten" in text for text in await refusals(store))


def checkpoint(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


async def test_checkpoint_by_another_process_is_no_damage(store: SqliteStore, path: Path) -> None:
    for number in range(300):
        await store.put(Put(Key("config", "p", f"{number:04}"), {"text": "x" * 4000}))
    before = os.stat(path).st_size
    await asyncio.to_thread(checkpoint, path)
    assert os.stat(path).st_size > before
    await store.check_file()
    assert await store.update(ADD_ONE) == {"n": 2}


async def test_half_written_checkpoint_is_checked_again(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter([sqlite3.DatabaseError("malformed"), sqlite3.DatabaseError("malformed")])

    def has_our_header(_: object) -> bool:
        for trouble in reads:
            raise trouble
        return True

    monkeypatch.setattr(sqlite_file.FileWatch, "_has_our_header", has_our_header)
    os.utime(path)
    await store.check_file()


WRITE = "import sys; file = open(sys.argv[1], 'r+b'); file.write(sys.stdin.buffer.read())"


async def half_checkpointed(store: SqliteStore, path: Path) -> int:
    """As another process leaves the file that is killed in a checkpoint: with the log's page 1, which comes first.

    The bytes that the file has when it is whole.
    """
    for number in range(30):
        await store.put(Put(Key("config", "p", f"{number:04}"), {"text": "x" * 9000}))
    log = await asyncio.to_thread(Path(f"{path}-wal").read_bytes)
    size = int.from_bytes(log[8:12], "big")
    frames = [log[at : at + 24 + size] for at in range(32, len(log), 24 + size)]
    page = [frame[24:] for frame in frames if frame[:4] == b"\0\0\0\1"][-1]
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", WRITE, str(path)], input=page, check=True)
    whole = int.from_bytes(page[28:32], "big") * size
    assert whole > os.stat(path).st_size
    return whole


async def test_checkpoint_of_killed_process_is_finished(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = await half_checkpointed(store, path)
    assert await store.update(ADD_ONE) == {"n": 2}
    await store.check_file()
    assert not caplog.records
    assert os.stat(path).st_size >= whole


async def test_checkpoint_that_cannot_finish_now_is_no_damage(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await half_checkpointed(store, path)
    with monkeypatch.context() as held:
        held.setattr(sqlite_file, "_truncate_log", lambda _: False)
        assert all("Nothing is lost" in text for text in await refusals(store))
    assert await store.update(ADD_ONE) == {"n": 2}


async def test_file_deleted_during_a_commit_is_not_acknowledged(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        await store._writer.submit(lambda group: (group.write(ADD_ONE), path.unlink()))
    assert refused.value.maybe_applied
