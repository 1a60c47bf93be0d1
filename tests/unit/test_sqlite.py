"""What only the embedded engine does: its file, its threads, its house-keeping."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.errors import (
    ConditionFailed,
    InvalidStoreRequest,
    StoreMisconfigured,
    StoreThrottled,
    StoreUnavailable,
)
from price_keeper.stores import sqlite, sqlite_commit, sqlite_file
from price_keeper.stores.contract import (
    AllOf,
    AnyOf,
    AttributeExists,
    AttributeMissing,
    Compare,
    ConditionCheck,
    Delete,
    ItemExists,
    ItemMissing,
    Key,
    Prefix,
    Put,
    Query,
    Update,
    equals,
)
from price_keeper.stores.schema import TABLES
from price_keeper.stores.sqlite import SqliteStore, first_after_prefix
from price_keeper.stores.sqlite_file import find_missing_tables, prepare_file

KEY = Key("config", "p", "s")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore(tmp_path / "store.db", lambda: 1000.0).open()
    yield opened
    await opened.close()


async def test_acknowledged_write_is_visible_to_other_process(store: SqliteStore, tmp_path: Path) -> None:
    await store.put(Put(KEY, {"a": 1}))
    reader = sqlite3.connect(tmp_path / "store.db")
    assert reader.execute("SELECT item, expires_at FROM config").fetchall() == [('{"a":1}', None)]
    reader.close()


async def test_file_is_private(store: SqliteStore, tmp_path: Path) -> None:
    await store.put(Put(KEY, {"secret_hash": "x"}))
    with os.scandir(tmp_path) as files:
        open_to_others = [file.name for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077]
    assert open_to_others == []


async def test_transaction_digest_equals_that_of_version_0_1(store: SqliteStore, tmp_path: Path) -> None:
    """It is kept with the token: a process of another version that sends the transaction again must find the same."""
    some = AllOf((Compare("a", "<=", 7), AnyOf((AttributeMissing("b"), Compare("c", "=", 9))), AttributeExists("a")))
    other, gone, seen = (Key("config", "p", name) for name in ("other", "gone", "seen"))
    for key in (KEY, gone, seen):
        await store.put(Put(key, {"a": 1}))
    changes = Update(KEY, set={"x": "y"}, add={"n": Decimal("2.50")}, condition=some)
    writes = [
        Put(other, {"a": 1}, ItemMissing()),
        changes,
        Delete(gone, ItemExists()),
        ConditionCheck(seen, ItemExists()),
    ]
    await store.transact(writes, token="t")
    reader = sqlite3.connect(tmp_path / "store.db")
    ((digest,),) = reader.execute("SELECT digest FROM transaction_tokens WHERE token='t'").fetchall()
    reader.close()
    assert digest.hex() == "ae0f398d31a4f77ccddd7079a7ebcd1d8bb623057a67e28983381a0f407a06fd"


async def test_every_commit_is_synced(store: SqliteStore) -> None:
    found = await store._writer.submit(lambda group: group._connection.execute("PRAGMA synchronous").fetchone())
    assert found == (2,)  # FULL


async def test_failing_write_does_not_affect_its_group(store: SqliteStore) -> None:
    await store.put(Put(KEY, {"text": "x"}))
    outcomes = await asyncio.gather(
        store.update(Update(KEY, add={"n": 1})),
        store.update(Update(KEY, add={"text": 1})),
        store.update(Update(KEY, add={"n": 1}, condition=equals("n", 99))),
        store.transact([Put(Key("config", "p", "other"), {}), Update(KEY, add={"text": 1})]),
        store.update(Update(KEY, add={"n": 1})),
        return_exceptions=True,
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [dict, InvalidStoreRequest, ConditionFailed, InvalidStoreRequest, dict]
    assert await store.get(KEY) == {"text": "x", "n": 2}
    assert await store.get(Key("config", "p", "other")) is None


async def test_sum_above_38_digits_is_refused(store: SqliteStore) -> None:
    await store.put(Put(KEY, {"n": 10**38 - 1}))
    with pytest.raises(InvalidStoreRequest):
        await store.update(Update(KEY, add={"n": Decimal("0.1")}))
    assert await store.update(Update(KEY, add={"n": 1})) == {"n": 10**38}


async def test_item_cannot_grow_above_limit(store: SqliteStore) -> None:
    await store.put(Put(KEY, {"a": "x" * 400_000}))
    with pytest.raises(InvalidStoreRequest):
        await store.update(Update(KEY, set={"b": "x" * 10_000}))


async def test_results_of_one_group_are_independent_copies(store: SqliteStore) -> None:
    await store.put(Put(KEY, {"list": [1]}))
    outcomes = await asyncio.gather(
        *(store.put(Put(KEY, {}, equals("list", "no"))) for _ in range(2)), return_exceptions=True
    )
    first, second = (outcome.item for outcome in outcomes if isinstance(outcome, ConditionFailed))
    first["list"].append(2)
    assert second == {"list": [1]}


async def test_cancelled_write_does_not_affect_others(store: SqliteStore) -> None:
    tasks = [asyncio.ensure_future(store.update(Update(KEY, add={"n": 1}))) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(task.cancelled() for task in tasks) == 1
    assert (await store.update(Update(KEY, add={"n": 1})))["n"] in (10, 11)


async def test_close_waits_for_pending_writes(tmp_path: Path) -> None:
    store = await SqliteStore(tmp_path / "store.db", lambda: 0.0).open()
    writes = [asyncio.ensure_future(store.update(Update(KEY, add={"n": 1}))) for _ in range(500)]
    await asyncio.sleep(0)
    await store.close()
    assert [item["n"] for item in await asyncio.gather(*writes)] == list(range(1, 501))
    with pytest.raises(StoreUnavailable):
        await store.get(KEY)
    await store.close()


async def test_excess_pending_writes_are_throttled(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MAX_QUEUED", 5)
    writes = [asyncio.ensure_future(store.update(Update(KEY, add={"n": 1}))) for _ in range(5000)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, StoreThrottled)]
    assert refused
    found = await store.get(KEY)
    assert found == {"n": 5000 - len(refused)}


async def test_unstorable_write_fails_alone(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sqlite_commit.codec.encode_item

    def encode(item: Any) -> bytes:
        if "poison" in item:
            raise RuntimeError("what no check foresaw")
        return real(item)

    monkeypatch.setattr(sqlite_commit.codec, "encode_item", encode)
    outcomes = await asyncio.gather(
        store.update(Update(KEY, add={"n": 1})),
        store.put(Put(Key("config", "p", "bad"), {"poison": 1})),
        store.update(Update(KEY, add={"n": 1})),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [dict, InvalidStoreRequest, dict]
    assert await store.get(KEY) == {"n": 2}


async def test_corrupt_row_fails_only_its_read(store: SqliteStore, tmp_path: Path) -> None:
    await store.put(Put(KEY, {"n": 1}))
    by_hand = sqlite3.connect(tmp_path / "store.db")
    by_hand.execute("INSERT INTO config VALUES ('p', 'bad', NULL, 'no json')")
    by_hand.commit()
    by_hand.close()
    good, bad, also_good = await asyncio.gather(
        store.get(KEY), store.get(Key("config", "p", "bad")), store.get(KEY), return_exceptions=True
    )
    assert good == also_good == {"n": 1}
    assert isinstance(bad, StoreMisconfigured)


async def test_item_changed_by_caller_while_waiting_is_not_written(store: SqliteStore) -> None:
    given = {"list": [1], "map": {"a": [1]}}
    writing = asyncio.ensure_future(store.put(Put(KEY, given)))
    await asyncio.sleep(0)
    given["list"].append(2)  # type: ignore[union-attr]
    given["map"]["a"].append(2)  # type: ignore[index, union-attr, call-overload]
    given["new"] = [3]
    await writing
    assert await store.get(KEY) == {"list": [1], "map": {"a": [1]}}


async def test_failed_commit_is_reported_as_maybe_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql == "COMMIT" and is_failing:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *arguments)

    is_failing = False
    real = sqlite3.connect
    monkeypatch.setattr(sqlite_file.sqlite3, "connect", lambda *a, **k: real(*a, **k, factory=Failing))
    store = await SqliteStore(tmp_path / "store.db", lambda: 0.0).open()
    await store.put(Put(KEY, {"n": 1}))
    is_failing = True
    with pytest.raises(StoreUnavailable) as refused:
        await store.put(Put(KEY, {"n": 2}))
    assert refused.value.maybe_applied
    is_failing = False
    await store.put(Put(KEY, {"n": 3}))
    await store.close()


async def test_probe_detects_what_a_read_does_not(store: SqliteStore, tmp_path: Path) -> None:
    await store.probe()
    (tmp_path / "store.db").chmod(0o600)
    await store._writer.submit(lambda group: group._connection.execute("PRAGMA query_only=ON").fetchone())
    with pytest.raises(StoreUnavailable):
        await store.probe()
    assert await store.get(KEY) is None


async def test_purge_deletes_only_expired_items(store: SqliteStore) -> None:
    expired = [Key("audit", "p", f"{number:04}") for number in range(1500)]
    await asyncio.gather(*(store.put(Put(key, {"expires_at_epoch": 500})) for key in expired))
    lasting = {
        Key("revoked-tokens", "later"): {"expires_at_epoch": 501},
        Key("sessions", "p", "never"): {"a": 1},
        Key("sessions", "p", "text"): {"expires_at_epoch": "500"},
    }
    for key, item in lasting.items():
        await store.put(Put(key, item))
    await store.put(Put(Key("daily-total", "p", "d"), {"expires_at_epoch": 500}))
    await store.update(Update(Key("daily-total", "p", "d"), set={"expires_at_epoch": 900}))
    deleted = [await store.purge(501), await store.purge(501), await store.purge(501)]
    assert deleted == [1000, 500, 0]
    assert (await store.query(Query("audit", "p"))).rows == ()
    assert await store.get_many(list(lasting)) == list(lasting.values())
    assert await store.get(Key("daily-total", "p", "d")) == {"expires_at_epoch": 900}


async def test_purge_within_write_group_is_correct(store: SqliteStore) -> None:
    await store.put(Put(KEY, {"expires_at_epoch": 1, "n": 1}))
    outcomes = await asyncio.gather(
        store.update(Update(KEY, add={"n": 1})),
        store.purge(10),
        store.update(Update(KEY, add={"n": 1})),
        store.update(Update(KEY, add={"n": 5}, condition=ItemExists())),
    )
    assert outcomes == [{"expires_at_epoch": 1, "n": 2}, 1, {"n": 1}, {"n": 6}]
    assert await store.get(KEY) == {"n": 6}


async def test_locked_file_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_SECONDS", 0.05)
    store = await SqliteStore(tmp_path / "store.db", lambda: 0.0).open()
    await store.put(Put(KEY, {"n": 1}))
    holder = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable) as refused:
        await store.put(Put(KEY, {"n": 2}))
    assert not refused.value.maybe_applied
    assert await store.get(KEY) == {"n": 1}
    holder.execute("ROLLBACK")
    await store.put(Put(KEY, {"n": 3}))
    assert await store.get(KEY) == {"n": 3}
    holder.close()
    await store.close()


async def test_full_disk_loses_no_acknowledged_write(store: SqliteStore) -> None:
    """SQLite's own limit on pages stands for the disk's end."""
    await store.put(Put(KEY, {"n": 1}))
    await store._writer.submit(lambda group: group._connection.execute("PRAGMA max_page_count=60").fetchone())
    with pytest.raises(StoreUnavailable) as refused:
        await store.put(Put(Key("config", "p", "big"), {"text": "x" * 390_000}))
    assert not refused.value.maybe_applied
    assert "full" in str(refused.value)
    await store.put(Put(KEY, {"n": 2}))
    assert await store.get(KEY) == {"n": 2}
    assert await store.get(Key("config", "p", "big")) is None


def test_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("These are a person's notes, and must stay as they are." * 20)
    for use in (prepare_file, find_missing_tables):
        with pytest.raises(StoreMisconfigured, match=r"store\.db"):
            use(path)
    assert path.read_text().startswith("These are")


def test_file_of_newer_version_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    prepare_file(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={sqlite_file.SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreMisconfigured, match="newer version"):
        prepare_file(path)


def test_database_of_other_program_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE config (id INTEGER)")
    connection.close()
    before = path.read_bytes()
    for use in (prepare_file, find_missing_tables):
        with pytest.raises(StoreMisconfigured, match="another program's"):
            use(path)
    assert path.read_bytes() == before


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreMisconfigured, match="cannot make"):
        prepare_file(tmp_path / "file" / "store.db")


def test_missing_tables_are_found_without_creating_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    assert find_missing_tables(path) == list(TABLES)
    assert not path.exists()
    prepare_file(path)
    assert find_missing_tables(path) == []
    prepare_file(path)
    connection = sqlite3.connect(path)
    connection.execute('DROP TABLE "audit"')
    connection.close()
    assert find_missing_tables(path) == ["audit"]


@pytest.mark.parametrize(
    ("prefix", "after"),
    [("a", "b"), ("APP#", "APP$"), ("a\U0010ffff", "b"), ("\ud7ff", "\ue000"), ("\U0010ffff", None), ("", None)],
)
def test_prefix_end_is_computed(prefix: str, after: str | None) -> None:
    assert first_after_prefix(prefix) == after


async def test_prefix_at_end_of_unicode_is_queried(store: SqliteStore) -> None:
    for sk in ("\U0010ffff", "\U0010ffffa", "\U0010fffe"):
        await store.put(Put(Key("config", "p", sk), {}))
    found = await store.query(Query("config", "p", Prefix("\U0010ffff")))
    assert [row.key.sk for row in found.rows] == ["\U0010ffff", "\U0010ffffa"]


async def test_concurrent_opens_create_one_file(tmp_path: Path) -> None:
    opened = await asyncio.gather(*(SqliteStore(tmp_path / "new.db", lambda: 0.0).open() for _ in range(8)))
    await asyncio.gather(*(store.update(Update(KEY, add={"n": 1})) for store in opened for _ in range(20)))
    assert await opened[0].get(KEY) == {"n": 160}
    await asyncio.gather(*(store.close() for store in opened))
    assert os.listdir(tmp_path) == ["new.db"]  # the last to leave folds the log into the file


async def test_file_being_created_by_another_process_is_awaited(tmp_path: Path) -> None:
    """SQLite itself would give up at once: it asks no busy handler when a file's kind of log is changed."""
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE passing (n)")
    other.execute("DROP TABLE passing")
    other.execute("BEGIN IMMEDIATE")
    opening = asyncio.create_task(SqliteStore(path, lambda: 0.0).open())
    assert not (await asyncio.wait([opening], timeout=0.2))[0]
    other.execute("COMMIT")
    other.close()
    await (await opening).close()
