"""What a flush costs is what the documents say: two units for the marker, two for each counter."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.write_units import Meter
from tests.support.engines import Engines
from tests.support.recording_harness import open_recording_harness


@pytest.mark.parametrize("counters", [1, 2, 7, 49, 60])
async def test_flush_costs_two_units_plus_two_per_counter(engines: Engines, tmp_path: Path, counters: int) -> None:
    async with engines.open("ministack", tmp_path) as store:
        meter = Meter()
        meter.attach(store.client)  # type: ignore[attr-defined]
        async with open_recording_harness(tmp_path / "journal", store) as rec:
            touched = [rec.counter(f"label{number}") for number in range(counters)]
            parts = -(-counters // 49)
            for is_first in (True, False, False):
                meter.units = 0
                for _ in range(100):
                    rec.spend(1, *touched)
                assert await rec.flusher.flush()
                listed = counters if is_first else 0
                assert meter.units == 2 * (parts + counters + listed)
