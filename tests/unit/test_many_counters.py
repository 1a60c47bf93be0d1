"""How late totals are when many counters are added to by two processes, in simulated time."""

from __future__ import annotations

from bench.many_counters import DELAY_SECONDS, simulate


async def test_totals_of_500_counters_that_two_processes_share_are_within_a_minute() -> None:
    """With 8 ms for each request, which takes the speed of the machine out of it."""
    processes, wrong = await simulate(500, 120, 30, DELAY_SECONDS)
    assert wrong == 0
    assert sum(each["lags"] for each in processes) >= 1000
    assert [each["above 60 s"] for each in processes] == [0, 0]
