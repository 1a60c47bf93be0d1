"""Copies of a journal's segments, counted while the original grows: the marker says which lines are in the store."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import Scope
from price_keeper.errors import CancellationReason, TransactionFailed
from price_keeper.ledger.journal import SUMS_PER_PART
from price_keeper.ledger.ledger_entries import Receipt, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, ItemMissing, Page, Put, Query, Store

from tests.support.recording_harness import RecordingHarness, open_recording_harness

GUESS = 1000


def copied(rec: RecordingHarness, name: str) -> Path:
    return Path(shutil.copytree(rec.folder, rec.folder.parent / name))


async def replayed(rec: RecordingHarness, folder: Path) -> SegmentSender:
    sender = SegmentSender(rec.store, rec.clock)
    for sealed in recover(folder).sealed:
        await sender.send(sealed)
    return sender


def ends(rec: RecordingHarness, number: int, pico: int) -> None:
    rec.journal.record(number, Receipt(UsageCounts(1, 0, 10, 20, pico=pico)))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SEGMENT_SUFFIX}"))


async def markers(rec: RecordingHarness, ulid: str) -> dict[str, Any]:
    page = await rec.store.query(Query("request-dedup", f"SEG#{ulid}", consistent=True))
    return {row.key.sk: row.item for row in page.rows}


# Copies that grow.


async def test_replay_of_copy_then_of_dead_original_counts_every_call(rec: RecordingHarness, tmp_path: Path) -> None:
    for _ in range(5):
        rec.spend(7)
    copy = copied(rec, "copy")
    for _ in range(6):
        rec.spend(11)
    original = copied(rec, "original")  # as its process leaves it
    await replayed(rec, copy)
    assert await rec.read_counts() == (5, 35)
    await replayed(rec, original)
    assert await rec.read_counts() == (11, 101)
    assert segments(copy) == segments(original) == []


async def test_flush_of_living_owner_after_replays_of_copies_counts_every_call(rec: RecordingHarness) -> None:
    for number, calls in enumerate((5, 8, 4)):
        for _ in range(calls):
            rec.spend(7)
        await replayed(rec, copied(rec, f"copy{number}"))
        assert await rec.read_counts() == (sum((5, 8, 4)[: number + 1]), 7 * sum((5, 8, 4)[: number + 1]))
    for _ in range(11):
        rec.spend(7)
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (28, 196)
    assert rec.flusher.sender.rejected_ulids == []
    assert len(rec.segments()) == 1


async def test_replay_of_shorter_copy_after_longer_adds_nothing(rec: RecordingHarness) -> None:
    rec.spend(7)
    short = copied(rec, "short")
    rec.spend(7)
    assert await rec.flusher.flush()
    sender = await replayed(rec, short)
    assert (await rec.read_counts(), sender.repeated_parts, sender.outdated_folders) == ((2, 14), 1, {short})
    assert segments(short) == []


async def test_estimate_of_replayed_copy_stays_and_its_record_is_reported(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture
) -> None:
    call = rec.begin(estimate=GUESS)
    await replayed(rec, copied(rec, "copy"))
    ends(rec, call, 3)
    rec.spend(7)
    with caplog.at_level(logging.WARNING):
        assert await rec.flusher.flush()
    assert await rec.read_counts() == (2, GUESS + 7)
    assert rec.flusher.sender.late_calls == 1
    assert "1 calls stay counted as estimated" in caplog.text


@pytest.mark.parametrize("restarts", [False, True])
async def test_estimate_stays_when_its_call_is_carried_into_later_segments(
    tmp_path: Path, exact_store: Store, restarts: bool
) -> None:
    """Also by a process that finds them later, when the first one is in the store and gone."""
    async with open_recording_harness(tmp_path / "journal", exact_store) as rec:
        call = rec.begin(estimate=GUESS)
        await replayed(rec, copied(rec, "copy"))
        for _ in range(2):
            rec.spend(7)
            assert await rec.flusher.flush()
        ends(rec, call, 3)
        rec.spend(7)
        if not restarts:
            assert await rec.flusher.flush()
    async with open_recording_harness(tmp_path / "journal", exact_store, scope=rec.scope) as later:
        assert await later.flusher.flush()
        assert await later.read_counts() == (4, GUESS + 21)


async def test_lost_answers_of_a_grown_segment_count_once(rec: RecordingHarness) -> None:
    """In several parts, some of which other processes began to send."""
    counters = [rec.counter(f"label{number}") for number in range(SUMS_PER_PART + 3)]
    for counter in counters:
        rec.spend(11, counter)
    copy = copied(rec, "copy")
    rec.store.faults = ["after"]
    sender = SegmentSender(rec.store, rec.clock)
    (left,) = recover(copy).sealed
    with pytest.raises(Exception, match="the answer was lost"):
        await sender.send(left)
    for counter in counters:
        rec.spend(2, counter)
    rec.store.faults = ["conflict", "before", "after", "after", "before", "after"]
    while not await rec.flusher.flush():
        pass
    assert {await rec.read_counts(counter) for counter in counters} == {(2, 13)}


async def test_half_counted_later_copy_keeps_the_shorter_one(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture
) -> None:
    counters = [rec.counter(f"label{number}") for number in range(SUMS_PER_PART + 3)]
    rec.spend(11, counters[0])
    short = copied(rec, "short")
    for counter in counters:
        rec.spend(11, counter)
    longer = copied(rec, "longer")
    rec.store.faults = ["after"]
    (left,) = recover(longer).sealed
    with pytest.raises(Exception, match="the answer was lost"):
        await SegmentSender(rec.store, rec.clock).send(left)
    sender = await replayed(rec, short)
    assert (len(sender.rejected_ulids), len(segments(short))) == (1, 1)
    assert "a later copy of it is only partly counted" in caplog.text
    await replayed(rec, longer)
    assert (await replayed(rec, short)).rejected_ulids == []
    assert await rec.read_counts(counters[0]) == (2, 22)


# What is no copy.


@pytest.mark.parametrize("change", ["other lines", "grown from other lines"])
async def test_segment_with_other_lines_under_a_counted_name_is_kept(
    rec: RecordingHarness, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    rec.spend(7)
    copy, other = copied(rec, "copy"), copied(rec, "other")
    await replayed(rec, copy)
    async with open_recording_harness(rec.folder.parent / "else", rec.store._store, scope=rec.scope) as twin:
        twin.spend(9)
        if change == "grown from other lines":
            twin.spend(9)
        (target,) = segments(other)
        target.write_bytes(twin.segments()[0].read_bytes())
    sender = await replayed(rec, other)
    assert (await rec.read_counts(), sender.rejected_ulids) == ((1, 7), [target.stem])
    assert target.exists()
    assert "are not those that were counted under its name" in caplog.text


async def test_living_owner_keeps_a_segment_of_which_more_lines_were_counted(
    rec: RecordingHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Two machines from one image, one process in the memory of both: no other process can have more of its lines."""
    rec.spend(7)
    twin, (own,) = copied(rec, "twin"), rec.segments()
    (path,) = segments(twin)
    lines = path.read_bytes().rstrip(b"\0").splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, *lines[-2:]]))
    await replayed(rec, twin)
    counted = await rec.read_counts()
    assert await rec.flusher.flush()  # others are not held up
    assert (await rec.read_counts(), rec.flusher.sender.rejected_ulids) == (counted, [own.stem])
    assert own.exists()
    assert "this process wrote fewer" in caplog.text


# The store.


async def test_marker_says_how_many_lines_were_counted_in_few_bytes(rec: RecordingHarness) -> None:
    rec.spend(7)
    (path,) = rec.segments()
    assert await rec.flusher.flush()
    ((name, item),) = (await markers(rec, path.stem)).items()
    assert (name, item["lines"], item["parts"], len(str(item["digest"]))) == ("PART#0000", 4, 1, 64)
    assert len(f"SEG#{path.stem}{name}{item}") < 1024  # more would be another write unit
    assert [len(writes) for writes in rec.store.transactions] == [3]  # marker, counter, list of active ones


async def test_marker_of_a_former_version_stands_for_all_lines(rec: RecordingHarness) -> None:
    rec.spend(7)
    (path,) = rec.segments()
    await rec.store.put(Put(schema.segment_marker_key(path.stem, 0), {EXPIRY_ATTRIBUTE: 1_798_027_200}, ItemMissing()))
    rec.spend(7)
    assert await rec.flusher.flush()
    assert (await rec.read_counts(), rec.flusher.sender.repeated_parts) == ((0, 0), 1)
    assert not path.exists()


async def test_journal_of_a_former_version_is_counted(tmp_path: Path, exact_store: Store) -> None:
    """One segment with its seal, and one that carries a call on; as that version wrote them, to the byte."""
    folder = tmp_path / "journal"
    folder.mkdir()
    for name, text in FORMER.items():
        (folder / f"{name}{SEGMENT_SUFFIX}").write_bytes(text)
    scope = Scope("0b5e8400-e29b-41d4-a716-446655440000")
    async with open_recording_harness(folder, exact_store, scope=scope) as rec:
        assert rec.recovered.estimated_calls == 1
        assert rec.recovered.corrupt_lines == 0
        assert await rec.flusher.flush()
        assert await rec.read_counts() == (3, 1110)


# An engine that refuses a marker without saying what stands there.


def says_nothing_of_markers(rec: RecordingHarness) -> None:
    transact = rec.store._store.transact

    async def without_items(*given: Any, **named: Any) -> None:
        try:
            await transact(*given, **named)
        except TransactionFailed as failure:
            raise TransactionFailed([CancellationReason(reason.code) for reason in failure.reasons]) from None

    rec.store._store.transact = without_items  # type: ignore[method-assign]


async def test_rest_of_what_a_former_version_began_is_counted_where_an_engine_says_nothing(
    rec: RecordingHarness,
) -> None:
    says_nothing_of_markers(rec)
    counters = [rec.counter(f"label{number:03}") for number in range(SUMS_PER_PART + 3)]
    rec.spend(11, *counters)
    (path,) = rec.segments()
    await rec.store.put(Put(schema.segment_marker_key(path.stem, 0), {EXPIRY_ATTRIBUTE: 1_798_027_200}, ItemMissing()))
    assert await rec.flusher.flush()
    assert [await rec.read_counts(each) for each in counters[-3:]] == [(1, 11)] * 3
    assert await rec.read_counts(counters[0]) == (0, 0)


async def test_lines_behind_a_faster_copy_are_counted_where_an_engine_says_nothing(rec: RecordingHarness) -> None:
    says_nothing_of_markers(rec)
    rec.spend(7)
    first = copied(rec, "first")
    rec.spend(11)
    second = copied(rec, "second")
    rec.spend(13)
    await replayed(rec, first)
    query, is_raced = rec.store._store.query, False

    async def raced(asked: Query) -> Page:
        nonlocal is_raced
        found = await query(asked)
        if not is_raced:
            is_raced = True
            await replayed(rec, second)
        return found

    rec.store._store.query = raced  # type: ignore[method-assign]
    assert await rec.flusher.flush()
    assert await rec.read_counts() == (3, 31)


FORMER = {
    "01M7Q8ECG00007000000000000": b"""\
226cbd09 ["H","01M7Q8ECG00007000000000000","",1]
0db92172 ["E","",0]
5a3ec36b ["I",1,1795003200000,7,7,0,[["ORG#0b5e8400-e29b-41d4-a716-446655440000","premium","DAY#20261118",8]]]
3a26e1c9 ["R",1,[1,0,10,20,0,0,0,0,100],{}]
737f5044 ["I",2,1795003200000,7,7,1000,[["ORG#0b5e8400-e29b-41d4-a716-446655440000","premium","DAY#20261118",8]]]
f3f6bdcd ["S","01M7Q8ECG00007000000000000",100,1,[[["ORG#0b5e8400-e29b-41d4-a716-446655440000","premium",\
"DAY#20261118",8,1,0,10,20,0,0,0,0,100]]]]
""",
    "01M7Q8ECG10007000000000001": b"""\
f56a0f62 ["H","01M7Q8ECG10007000000000001","01M7Q8ECG00007000000000000",1]
72cfbb30 ["C",2,1795003200000,7,7,1000,[["ORG#0b5e8400-e29b-41d4-a716-446655440000","premium","DAY#20261118",8]]]
b80c650d ["E","01M7Q8ECG00007000000000000",1]
3f42deae ["I",3,1795003200000,7,7,0,[["ORG#0b5e8400-e29b-41d4-a716-446655440000","premium","DAY#20261118",8]]]
2957465e ["R",3,[1,0,10,20,0,0,0,0,10],{}]
""",
}
