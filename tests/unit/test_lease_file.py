"""What a run of a process held and did not spend goes back once, when all that it spent is in the store; not before."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from price_keeper.errors import StoreUnavailable, TransactionFailed
from price_keeper.ledger import lease_rows
from price_keeper.ledger.lease_file import BudgetLeaseFile, release_former_leases
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetKey
from price_keeper.ledger.segment import decode_lines, encode_line
from price_keeper.stores.contract import Store, Write

from tests.support.clock import ManualClock
from tests.support.lease_rows import (
    HOLDER,
    OTHER,
    RealSleepClock,
    list_lease_files,
    new_budget_key,
    put_lease_row,
    read_bucket,
    read_lease_row,
)
from tests.support.memory_store import MemoryStore
from tests.support.recording_harness import ScriptedFaults

CLOSERS = 20


# The file.


async def test_lease_name_is_written_and_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    holds, names = BudgetLeaseFile(tmp_path, HOLDER), [new_budget_key(), new_budget_key("MONTH#202611")]
    await asyncio.gather(*(holds.add(name) for name in names * 3))
    lines = decode_lines((tmp_path / f"holds-{HOLDER}").read_bytes())
    assert (lines.values, lines.corrupt_lines) == ([[*name] for name in names], 0)
    assert len(synced) == 3  # and the folder


async def test_lease_name_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.pwrite, [10, 0]

    def some(file: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        return write(file, data[: room.pop(0)], at)

    holds, name = BudgetLeaseFile(tmp_path, HOLDER), new_budget_key()
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", some)
        with pytest.raises(OSError, match="No space"):
            await holds.add(name)
    await holds.add(name)
    lines = decode_lines((tmp_path / f"holds-{HOLDER}").read_bytes())
    assert (lines.values, lines.corrupt_lines) == ([[*name]], 0)


async def test_failed_sync_moves_all_names_to_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later sync of the first one says proves nothing."""

    synced: list[int] = []  # by the number of the file on its disk

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_ino))
    holds, path, names = (
        BudgetLeaseFile(tmp_path, HOLDER),
        tmp_path / f"holds-{HOLDER}",
        [new_budget_key(), new_budget_key("MONTH#202611")],
    )
    await holds.add(names[0])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", broken)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                await holds.add(names[1])
    await holds.add(names[1])
    lines = decode_lines(path.read_bytes())
    assert (lines.values, lines.corrupt_lines) == ([[*name] for name in names], 0)
    assert synced[-2] != synced[0]  # another file, and then the folder
    assert list_lease_files(tmp_path) == [path.name]


async def test_crash_before_new_file_is_complete_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    holds = BudgetLeaseFile(tmp_path, HOLDER)
    monkeypatch.setattr("os.fsync", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            await holds.add(new_budget_key())
    assert list_lease_files(tmp_path) == [f"holds-{HOLDER}", f"new-holds-{HOLDER}"]
    await release_former_leases(cast(Store, MemoryStore()), RealSleepClock(), tmp_path)
    assert list_lease_files(tmp_path) == []


# Closing, on every engine that isolates transactions.


async def test_concurrent_releases_of_copied_files_return_once(exact_store: Store, tmp_path: Path) -> None:
    """Each with a copy of the folder."""
    name, clock = new_budget_key(), RealSleepClock()
    await put_lease_row(exact_store, name, 600, 150, tmp_path)
    folders = [tmp_path / f"copy{number}" for number in range(CLOSERS)]
    for folder in folders:
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("copy*", "*.db*"))
    back = await asyncio.gather(*(release_former_leases(exact_store, clock, folder) for folder in folders))
    assert sorted(back) == [0] * (CLOSERS - 1) + [450]
    assert (await read_bucket(exact_store, name)).unleased == 850
    assert await read_lease_row(exact_store, name) == BudgetLeaseRow(150, 150, lease_rows.CLOSED_SEQUENCE)
    assert not any(list_lease_files(folder) for folder in folders)


async def test_concurrent_top_ups_and_releases_lose_nothing(exact_store: Store, tmp_path: Path) -> None:
    name = new_budget_key()
    await put_lease_row(exact_store, name, 100, 0, tmp_path)

    async def takes() -> int:
        taken = 0
        for number in range(1, 30):
            try:
                await exact_store.transact(lease_rows.build_take(name, HOLDER, number, 10, 10))
            except TransactionFailed:
                break
            taken += 10
        return taken

    taken, _ = await asyncio.gather(takes(), release_former_leases(exact_store, RealSleepClock(), tmp_path))
    assert taken <= 290
    assert (await read_bucket(exact_store, name)).unleased == 1000
    assert await read_lease_row(exact_store, name) == BudgetLeaseRow(0, 0, lease_rows.CLOSED_SEQUENCE)


@pytest.mark.parametrize(
    "writes",
    [
        lease_rows.build_take(new_budget_key(), HOLDER, 1, 50, 50),
        lease_rows.build_release(new_budget_key(), HOLDER, 1, 50),
    ],
)
async def test_late_write_of_dead_process_is_rejected(writes: list[Any], tmp_path: Path) -> None:
    store, name = MemoryStore(), HardBudgetKey(writes[0].key.pk, "premium", "DAY#20261118")
    await put_lease_row(store, name, 600, 150, tmp_path)
    assert await release_former_leases(store, ManualClock(), tmp_path) == 450
    with pytest.raises(TransactionFailed):
        await store.transact(writes)
    assert (await read_bucket(store, name)).unleased == 850


async def test_lease_named_but_never_taken_is_closed(tmp_path: Path) -> None:
    store, name = MemoryStore(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    await BudgetLeaseFile(tmp_path, HOLDER).add(name)
    assert await release_former_leases(store, ManualClock(), tmp_path) == 0
    with pytest.raises(TransactionFailed):
        await store.transact(lease_rows.build_take(name, HOLDER, 0, 10, 10))


async def test_release_of_former_leases_logs_each_budget_that_got_money_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, name, spent = MemoryStore(), new_budget_key(), new_budget_key()
    file = BudgetLeaseFile(tmp_path, HOLDER)
    for key, leased in ((name, 600), (spent, 150)):
        await put_lease_row(store, key, leased, 150)
        await file.add(key)
    caplog.set_level("INFO", "price_keeper.hard")
    await release_former_leases(store, ManualClock(), tmp_path)
    (line,) = caplog.messages
    assert " ".join(name) in line
    assert " ".join(spent) not in line


async def test_missing_bucket_does_not_keep_lease_open(tmp_path: Path) -> None:
    store, name = MemoryStore(), new_budget_key()
    await put_lease_row(store, name, 600, 150, tmp_path)
    del store.items[name.bucket_key]
    assert await release_former_leases(store, RealSleepClock(), tmp_path) == 450
    assert name.bucket_key not in store.items
    assert await read_lease_row(store, name) == BudgetLeaseRow(150, 150, lease_rows.CLOSED_SEQUENCE)


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_lost_release_answer_returns_money_once(fault: Any, tmp_path: Path) -> None:
    store, name = ScriptedFaults(MemoryStore()), new_budget_key()
    await put_lease_row(store._store, name, 600, 150, tmp_path)
    store.faults = [fault]
    with pytest.raises(StoreUnavailable):
        await release_former_leases(store, ManualClock(), tmp_path)  # type: ignore[arg-type]
    assert list_lease_files(tmp_path) == [f"holds-{HOLDER}"]
    await release_former_leases(store, ManualClock(), tmp_path)  # type: ignore[arg-type]
    assert (await read_bucket(store._store, name)).unleased == 850
    assert list_lease_files(tmp_path) == []
    assert len(store.transactions) == (1 if fault == "after" else 2)  # it finds that it was done


class Overtaking(MemoryStore):
    """Where others are faster, once."""

    def __init__(self) -> None:
        super().__init__()
        self.faster: list[Sequence[Write]] = []

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        if self.faster:
            await super().transact(self.faster.pop())
        await super().transact(writes, token=token)


@pytest.mark.parametrize(("who", "left"), [("take", 850), ("give back", 850), ("flush", 800), ("closer", 850)])
async def test_row_changed_during_release_is_read_again(who: str, left: int, tmp_path: Path) -> None:
    store, name = Overtaking(), new_budget_key()
    await put_lease_row(store, name, 600, 150, tmp_path)
    store.faster = [
        {
            "take": lease_rows.build_take(name, HOLDER, 1, 50, 50),
            "give back": lease_rows.build_release(name, HOLDER, 1, 50),
            "flush": [lease_rows.build_spend(name, HOLDER, 50)],
            "closer": lease_rows.build_close(name, HOLDER, store.items[name.build_lease_key(HOLDER)]),
        }[who]
    ]
    await release_former_leases(store, RealSleepClock(), tmp_path)
    assert (await read_bucket(store, name)).unleased == left
    assert (await read_lease_row(store, name)).leased == (await read_lease_row(store, name)).used == 1000 - left


async def test_overspent_lease_is_deducted_on_release(tmp_path: Path) -> None:
    store, name = MemoryStore(), new_budget_key()
    await put_lease_row(store, name, 100, 130, tmp_path)
    await release_former_leases(store, ManualClock(), tmp_path)
    assert (await read_bucket(store, name)).unleased == 870


async def test_lease_file_of_past_period_is_deleted(tmp_path: Path) -> None:
    store, clock = MemoryStore(), ManualClock()
    over, now = new_budget_key("DAY#20261115"), new_budget_key("DAY#20261116")
    await put_lease_row(store, over, 100, 0, tmp_path)
    await BudgetLeaseFile(tmp_path, OTHER).add(now)
    (tmp_path / f"kept-holds-{HOLDER}").write_bytes((tmp_path / f"holds-{HOLDER}").read_bytes())
    (tmp_path / f"kept-holds-{OTHER}").write_bytes((tmp_path / f"holds-{OTHER}").read_bytes())
    assert await release_former_leases(store, clock, tmp_path) == 0
    assert list_lease_files(tmp_path) == [
        f"kept-holds-{OTHER}"
    ]  # which ended a day and a half ago in UTC, but not everywhere
    assert (await read_bucket(store, over)).unleased == 900
    assert now.build_lease_key(OTHER) in store.items


async def test_corrupt_lease_lines_keep_their_money(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, name = MemoryStore(), new_budget_key()
    await put_lease_row(store, name, 100, 0, tmp_path)
    path = tmp_path / f"holds-{HOLDER}"
    path.write_bytes(b"0000 torn\n" + path.read_bytes() + encode_line(b'["a","b","c"]') + encode_line(b"[1]") + b"0123")
    assert await release_former_leases(store, ManualClock(), tmp_path) == 100
    assert "4 lines are torn" in caplog.text
