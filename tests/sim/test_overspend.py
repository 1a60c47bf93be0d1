"""How far a fleet passes a soft quota stays within what is stated, whatever the load."""

from __future__ import annotations

import pytest

from tests.support.effort import seeds
from tests.support.overspend import LOADS, QUOTA, Figures, LoadShape, bound, measure


@pytest.mark.parametrize("sidecars", [1, 8, 20])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_overspend_stays_within_bound(load: LoadShape, sidecars: int) -> None:
    for seed in seeds(1):
        outcome = measure(load, sidecars, seed)
        assert QUOTA <= outcome.spent <= QUOTA + bound(outcome.figures)


def test_overspend_bound_covers_detection_delay_and_calls_in_flight() -> None:
    figures = Figures(burn=0.5, flush=15, refresh=60, totals=0, in_flight=2, step=300)
    assert bound(figures) == 0.5 * (15 + 60 + 300) + 2
