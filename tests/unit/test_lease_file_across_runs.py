"""From one run of a process to the next: what the first held and did not spend is there for the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from uuid import uuid4

import orjson
import pytest
from price_keeper.app import open_store
from price_keeper.cli.replay_command import _replay
from price_keeper.config import Config
from price_keeper.config.config_sections import StoreConfig as StoreConfig
from price_keeper.ledger import lease_rows
from price_keeper.ledger.aggregator import list_active_counters, read_spent_pico
from price_keeper.ledger.journal import SUMS_PER_PART, Journal, SegmentSeal
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetKey
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts, UsageTally
from price_keeper.ledger.recording import Recording, open_recording
from price_keeper.ledger.segment import decode_lines
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock
from tests.support.lease_rows import (
    HOLDER,
    RealSleepClock,
    list_lease_files,
    new_budget_key,
    read_bucket,
    read_lease_row,
)
from tests.support.memory_store import MemoryStore
from tests.support.recording_harness import ScriptedFaults


def config_of(folder: Path) -> Config:
    plain = Config(labels=Config.development().labels)
    return replace(plain, journal=replace(plain.journal, dir=str(folder / "journal")))


@asynccontextmanager
async def run_of(folder: Path, store: Store, clock: ManualClock) -> AsyncIterator[Recording]:
    async with open_recording(config_of(folder), store, clock) as recording:
        yield recording
        recording.flusher.journal._segment.close()


async def taken_for(recording: Recording, name: HardBudgetKey, pico: int) -> ChargedCounters:
    await recording.lease_file.add(name)
    await recording.store.transact(lease_rows.build_take(name, recording.lease_file.holder, 0, pico, pico))
    return ChargedCounters.from_counters(
        [Counter(*name, 8), Counter.for_lease(name.scope, name.label, recording.lease_file.holder, name.period, 8)]
    )


def spend(recording: Recording, account: ChargedCounters, worst: int, pico: int | None) -> None:
    number = recording.flusher.journal.write_intent(Intent(account, 0, 1, 1, worst))
    if pico is not None:
        recording.flusher.journal.record(number, Receipt(UsageCounts(1, pico=pico)))


@pytest.mark.parametrize("is_away", [False, True])
async def test_next_start_releases_when_journal_is_flushed(is_away: bool, tmp_path: Path) -> None:
    store, clock, name = ScriptedFaults(MemoryStore()), ManualClock(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with run_of(tmp_path, store, clock) as first:  # type: ignore[arg-type]
        account = await taken_for(first, name, 500)
        spend(first, account, 100, 20)
        spend(first, account, 100, None)  # killed before its end is known
    async with run_of(tmp_path, store, clock) as second:  # type: ignore[arg-type]
        await second.return_former_leases()
        assert (await read_bucket(store._store, name)).unleased == 500  # its segment is not in the store yet
        store.is_away = is_away
        assert await second.flusher.flush() is not is_away
        await second.return_former_leases()
        assert second.has_former_leases is is_away
        store.is_away = False
        await second.flusher.flush()
        await second.return_former_leases()
        assert not second.has_former_leases
        assert (await read_bucket(store._store, name)).unleased == 880
        assert await read_lease_row(store._store, name, first.lease_file.holder) == BudgetLeaseRow(
            120, 120, lease_rows.CLOSED_SEQUENCE
        )
        assert await read_spent_pico(store._store, name) == 120  # and no hold is among the active counters
        assert {each.counter[:3] for each in await list_active_counters(store._store, [_today(clock)])} == {name}
    assert list_lease_files(tmp_path / "journal") == []


def _today(clock: ManualClock) -> date:
    return datetime.fromtimestamp(clock.now(), UTC).date()


async def test_rejected_segment_keeps_leases(tmp_path: Path) -> None:
    store, clock, name = ScriptedFaults(MemoryStore()), ManualClock(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with run_of(tmp_path, store, clock) as first:  # type: ignore[arg-type]
        spend(first, await taken_for(first, name, 500), 100, 20)
    async with run_of(tmp_path, store, clock) as second:  # type: ignore[arg-type]
        store.faults = ["rejected"]
        assert await second.flusher.flush()
        assert second.flusher.sender.rejected
        await second.return_former_leases()
        assert (await read_bucket(store._store, name)).unleased == 500
        await second.finish()
    assert list_lease_files(tmp_path / "journal") == [f"holds-{first.lease_file.holder}"]


async def test_damaged_journal_keeps_leases_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line is lost with unknown content; an unfinished line is another matter."""
    for is_damaged in (False, True):
        store, clock, name = MemoryStore(), ManualClock(), new_budget_key()
        folder = tmp_path / str(is_damaged)
        await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
        async with run_of(folder, store, clock) as first:
            account = await taken_for(first, name, 500)
            spend(first, account, 100, 20)
            spend(first, account, 100, 30)
        (segment,) = (folder / "journal").glob("*.seg")
        data = segment.read_bytes()
        at = data.index(b'["I",1,')
        segment.write_bytes(data[:at] + b"?" + data[at + 1 :] if is_damaged else data + b"0123 torn")
        for _ in range(2):  # the second finds a journal in which nothing is wrong
            async with run_of(folder, store, clock) as later:
                assert await later.flusher.flush()
                await later.return_former_leases()
        assert (await read_bucket(store, name)).unleased == (500 if is_damaged else 950)
        assert list_lease_files(folder / "journal") == ([f"kept-holds-{first.lease_file.holder}"] if is_damaged else [])
        assert ("has lost lines" in caplog.text) is is_damaged
        assert ("of 1 hard budgets stays leased" in caplog.text) is is_damaged
        assert (" ".join(name) in caplog.text) is is_damaged


@pytest.mark.parametrize("trouble", ["", "open", "away", "before", "rejected", "late"])
async def test_stop_releases_leases_if_all_is_flushed(
    trouble: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock, name = ScriptedFaults(MemoryStore()), ManualClock(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with run_of(tmp_path, store, clock) as only:  # type: ignore[arg-type]
        account = await taken_for(only, name, 500)
        spend(only, account, 100, 20)
        if trouble == "open":
            spend(only, account, 100, None)
        if trouble == "away":
            store.is_away = True
        if trouble in ("before", "rejected"):
            store.faults = [trouble]  # type: ignore[list-item]
        if trouble == "late":
            flush = only.flusher.flush

            async def flushed() -> bool:
                done = await flush()
                spend(only, account, 100, 30)
                return done

            only.flusher.flush = flushed  # type: ignore[method-assign]
        await only.finish()
        left = 980 if not trouble else 500
        assert (await read_bucket(store._store, name)).unleased == left
        assert list_lease_files(tmp_path / "journal") == ([f"holds-{only.lease_file.holder}"] if trouble else [])


async def test_stop_without_store_answer_leaves_release_to_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock, name = ScriptedFaults(MemoryStore()), ManualClock(), new_budget_key()
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    async with run_of(tmp_path, store, clock) as only:  # type: ignore[arg-type]
        await taken_for(only, name, 500)
        store.faults = ["after"]  # nothing was spent, so closing is the first thing that is sent
        await only.finish()
    assert "at the next start" in caplog.text
    async with run_of(tmp_path, store, clock) as later:  # type: ignore[arg-type]
        await later.return_former_leases()
    assert (await read_bucket(store._store, name)).unleased == 1000


async def test_replay_releases_leases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock, name = RealSleepClock(), new_budget_key()
    config = replace(config_of(tmp_path), store=StoreConfig(path=str(tmp_path / "store.db")))
    async with Tasks(clock) as tasks, open_store(config.store, clock, tasks) as store:
        await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
        async with run_of(tmp_path, store, clock) as dead:
            spend(dead, await taken_for(dead, name, 500), 100, 20)
    for is_reported in (True, False):
        assert await _replay(config, tmp_path / "journal", clock, force=False) == 0
        assert ("they are released" in capsys.readouterr().out) is is_reported
    async with Tasks(clock) as tasks, open_store(config.store, clock, tasks) as store:
        assert (await read_bucket(store, name)).unleased == 980


# Where counters go.


def test_lease_and_its_counter_stay_in_one_part() -> None:
    tally, scope = UsageTally(), f"ORG#{uuid4()}"
    for number in range(2 * SUMS_PER_PART):
        label = f"l{number:03}"
        counters = [Counter(scope, label, period, 8) for period in ("DAY#20261118", "MONTH#202611")]
        hold = Counter.for_lease(scope, label, HOLDER, "MONTH#202611", 8)
        tally.add(ChargedCounters.from_counters([*counters, hold]), UsageCounts(1, pico=1))
    seal = SegmentSeal.from_tally(HOLDER, tally)
    assert sum(map(len, seal.parts)) == 6 * SUMS_PER_PART
    for part in seal.parts:
        names = {counter[:3] for counter, _ in part}
        assert len(part) <= SUMS_PER_PART
        assert all((each.scope, each.label, each.budget_period) in names for each, _ in part)
    assert SegmentSeal.from_values(orjson.loads(seal.encode()), {}) == seal


def test_call_is_settled_once_after_its_receipt_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Receipt | None] = []

    class Listener:
        def on_completed(self, receipt: Receipt | None) -> None:
            settled.append(receipt)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path, UlidFactory(lambda: 0.0, lambda size: bytes(size)))
    account = ChargedCounters.from_counters([Counter(*new_budget_key(), 8)])
    numbers = [
        journal.write_intent(Intent(account, 0, 1, 1, 5, completion_listeners=(Listener(), Listener())))
        for _ in range(3)
    ]
    receipt = Receipt(UsageCounts(1, pico=3), {"long": "x" * 10**6})
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        journal.record(numbers[0], receipt)
    assert settled == []
    journal.retry_unwritten()
    journal.record(numbers[0], None)
    journal.record(numbers[1], None)
    assert settled == [receipt, receipt, None, None]
    journal.close()
    assert [values[0] for values in decode_lines(next(tmp_path.glob("*.seg")).read_bytes()).values] == list("HEIIIRN")
