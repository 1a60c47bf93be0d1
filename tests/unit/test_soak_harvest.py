"""What a soak says of the segments that are left in a journal when its sidecar has ended in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from price_keeper.ledger.ledger_entries import Receipt, UsageCounts
from price_keeper.stores.contract import Store

from tests.soak.harvest import holds_calls
from tests.support.recording_harness import RecordingHarness, open_recording_harness


def _tear_only_call(rec: RecordingHarness) -> None:
    rec.begin()
    rec.journal._segment.close()
    path = rec.segments()[-1]
    path.write_bytes(path.read_bytes()[:-3])


def _seal(rec: RecordingHarness) -> None:
    rec.spend(10)
    sealed = rec.journal.seal()
    assert sealed is not None
    sealed.write_seal()


UNFLUSHED: dict[str, Callable[[RecordingHarness], object]] = {
    "under way": lambda rec: rec.begin(),
    "one of two under way": lambda rec: rec.journal.record(min(rec.begin(), rec.begin()), None),
    "recorded": lambda rec: rec.spend(10),
    "recorded at no cost": lambda rec: rec.journal.record(rec.begin(), Receipt(UsageCounts(1))),
    "sealed": _seal,
    "torn": _tear_only_call,
}


@pytest.mark.parametrize("what", UNFLUSHED)
async def test_left_segment_with_unflushed_call_is_reported(tmp_path: Path, exact_store: Store, what: str) -> None:
    async with open_recording_harness(tmp_path, exact_store) as rec:
        UNFLUSHED[what](rec)
    assert any(holds_calls(path) for path in rec.segments())


async def test_left_segment_whose_calls_cost_nothing_is_not_reported(tmp_path: Path, exact_store: Store) -> None:
    """The last flush has nothing to send then, and the next start removes the segment and counts nothing."""
    async with open_recording_harness(tmp_path, exact_store) as rec:
        rec.journal.record(rec.begin(estimate=1000), None)
        assert await rec.flusher.flush()
        await rec.flusher.close()
        (left,) = rec.segments()
        assert rec.flusher.is_fully_flushed
    assert b'["I"' in left.read_bytes()
    assert not holds_calls(left)
    async with open_recording_harness(tmp_path, exact_store, scope=rec.scope) as later:
        assert await later.flusher.flush()
        assert left not in later.segments()
        assert await later.read_counts() == (0, 0)
