"""The bound of limits is neither wider nor narrower than what is stated."""

from __future__ import annotations

from tests.sim.ledger import SECONDS_BEYOND, Ledger
from tests.sim.setup import setup_of


def bucket() -> Ledger:
    """Of four and one more every five seconds, all of which were just let through."""
    ledger = Ledger(capacity=4.0, rate=0.2)
    ledger.passes(4.0 + SECONDS_BEYOND * 0.2, 0.0, now=100.0)
    return ledger


def test_bound_is_bucket_plus_refill() -> None:
    ledger = bucket()
    ledger.passes(1.0, 0.0, now=105.0)
    assert ledger.beyond <= 1e-6
    ledger.passes(0.01, 0.0, now=105.0)
    assert ledger.beyond > 1e-6


def test_clock_set_ahead_fills_bucket_once() -> None:
    ledger = bucket()
    ledger.clock_is_set(-3600.0)
    ledger.clock_is_set(3600.0)
    ledger.passes(4.0, 0.0, now=100.0)
    assert ledger.beyond <= 1e-6
    ledger.passes(0.01, 0.0, now=100.0)
    assert ledger.beyond > 1e-6


def test_processes_on_store_without_time_share_a_clock() -> None:
    """One whose clock was an hour off would fill a bucket each time that another one has set it back."""
    found = [setup_of(seed, "limits") for seed in range(200)]
    assert any(each.is_one_machine and each.sidecars > 1 and each.wrong_by[0] for each in found)
    assert all(len(set(each.wrong_by)) == 1 for each in found if each.is_one_machine)
    assert any(len(set(each.wrong_by)) > 1 for each in found)
