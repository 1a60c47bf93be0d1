"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from price_keeper.stores.contract import Store

from tests.support.clock import ManualClock
from tests.support.recording_harness import RecordingHarness, open_recording_harness


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def rec(tmp_path: Path, exact_store: Store) -> AsyncIterator[RecordingHarness]:
    async with open_recording_harness(tmp_path / "journal", exact_store) as made:
        yield made
