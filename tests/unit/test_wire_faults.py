"""The schedule of faults by chance: the seed's alone, and about as many of each as were asked for."""

from __future__ import annotations

from collections import Counter

from tests.support.wire_faults import BEDROCK_RATES, STORE_RATES, Pass, draw_fault


def test_same_seed_gives_same_schedule() -> None:
    for rates in (STORE_RATES, BEDROCK_RATES):
        one, again, other = ([draw_fault(seed, number, rates) for number in range(500)] for seed in ("7", "7", "8"))
        assert one == again != other


def test_fault_rates_match_request() -> None:
    kinds = Counter(isinstance(draw_fault(1, number, STORE_RATES), Pass) for number in range(5000))
    assert abs(kinds[False] / 5000 - sum(STORE_RATES.values())) < 0.02


def test_bedrock_call_is_never_delivered_twice() -> None:
    assert "twice" not in BEDROCK_RATES
