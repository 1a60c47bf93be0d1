"""What the documents say that reading state costs is what sidecars read, counted in simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.state_units import measure_flips, state_units
from tests.support.state_readers import new_callers, open_state_readers

SECONDS = 1800


@pytest.mark.parametrize("sidecars", [1, 3])
async def test_state_units_computed_are_those_that_sidecars_read(tmp_path: Path, sidecars: int) -> None:
    async with open_state_readers(tmp_path, sidecars) as readers:
        callers = await new_callers(readers.store, 1)
        await readers.serve(callers, 120, 1)
        readers.store.reset()
        await readers.serve(callers, SECONDS, 1)
        reads, units = readers.store.reads, readers.store.units.reads
    computed = state_units(sidecars)._replace(limits=0, tokens=0)  # which bench/store_requests.py counts
    assert units / SECONDS == pytest.approx(sum(computed), rel=0.1)
    assert units / SECONDS <= 1.02 * sum(computed)
    settings = reads["config"] / 2  # the org's and the app's, and in the same request a sticky state
    assert 3 * settings / SECONDS == pytest.approx(computed.settings, rel=0.1)
    assert (reads["sticky-state"] - settings) / SECONDS == pytest.approx(computed.active_label, rel=0.1)


async def test_sidecars_that_nobody_calls_read_no_state_but_whose_turn_it_is_to_sweep(tmp_path: Path) -> None:
    async with open_state_readers(tmp_path, 2) as readers:
        await readers.serve(await new_callers(readers.store, 20), 60, 5)
        await readers.clock.advance(3 * 3600)
        readers.store.reset()
        await readers.clock.advance(3600)
        assert set(readers.store.reads) == {"request-dedup"}
        assert readers.store.units.reads <= 2 * 18


async def test_flips_are_followed_within_five_seconds() -> None:
    took = await measure_flips(5)
    assert len(took) == 5
    assert 0 < took[-1] <= 5
