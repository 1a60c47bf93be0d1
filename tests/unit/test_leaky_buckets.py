"""Buckets that hold a burst and leak one per interval, against their promises and a plain model."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.leaky_buckets import LeakyBuckets

from tests.support.clock import ManualClock
from tests.support.effort import tries


async def test_add_beyond_the_burst_waits_for_the_leak() -> None:
    clock = ManualClock()
    buckets = LeakyBuckets(clock.monotonic, 3, 10.0, 100)
    assert [buckets.add("a") for _ in range(5)] == [0, 0, 0, 10, 10]  # refused attempts do not prolong the wait
    assert buckets.add("b") == 0
    await clock.advance(9)
    assert buckets.add("a") == buckets.wait_seconds("a") == 1
    await clock.advance(1)
    assert [buckets.add("a") for _ in range(2)] == [0, 10]
    await clock.advance(1000)
    assert [buckets.add("a") for _ in range(4)] == [0, 0, 0, 10]


def test_add_that_is_not_counted_has_a_wait_though_the_clock_moves_meanwhile() -> None:
    times = iter([0.0, 1.0 - 1e-6, 1.0, 2.0])  # room comes between the second look and the third
    buckets = LeakyBuckets(lambda: next(times), 1, 1.0, 100)
    assert buckets.add("a") == 0
    assert buckets.add("a") == pytest.approx(1e-6)
    assert buckets.add("a") == 0


@settings(max_examples=tries(100))
@given(st.lists(st.integers(0, 40), max_size=60))
def test_add_never_exceeds_burst_and_leak(waits: list[int]) -> None:
    now = 1000.0
    buckets = LeakyBuckets(lambda: now, 4, 5.0, 100)
    taken: list[float] = []
    for wait in waits:
        now += wait
        found = buckets.add("a")
        if not found:
            taken.append(now)
        assert 0 <= found <= 5
        for begin in taken:
            assert sum(begin <= each for each in taken) <= 4 + (now - begin) / 5


class Model:
    """A bucket by its level, which leaks one per interval."""

    def __init__(self) -> None:
        self.level, self.at = Fraction(0), Fraction(0)

    def move_to(self, now: Fraction, interval: Fraction) -> None:
        self.level = max(Fraction(0), self.level - (now - self.at) / interval)
        self.at = now


STEPS = st.tuples(st.integers(0, 4000), st.sampled_from("ab"), st.sampled_from([None, 0, 500, 5000]))


@settings(max_examples=tries(200))
@given(burst=st.integers(1, 20), interval_ms=st.sampled_from([1, 50, 1000, 5000]), steps=st.lists(STEPS, max_size=60))
def test_buckets_agree_with_a_model(burst: int, interval_ms: int, steps: list[tuple[int, str, int | None]]) -> None:
    now_ms = 0
    buckets = LeakyBuckets(lambda: now_ms / 1000, burst, interval_ms / 1000, 100)
    models = {key: Model() for key in "ab"}
    for pause_ms, key, max_wait_ms in steps:
        now_ms += pause_ms
        model = models[key]
        model.move_to(Fraction(now_ms), Fraction(interval_ms))
        wait_ms = max(Fraction(0), (model.level + 1 - burst) * interval_ms)
        assert buckets.wait_seconds(key) * 1000 == pytest.approx(float(wait_ms), abs=1e-5)
        assert buckets.drain_seconds(key) * 1000 == pytest.approx(float(model.level * interval_ms), abs=1e-5)
        assert buckets.room(key) == max(0, int(burst - model.level))
        if max_wait_ms is None:
            assert (buckets.add(key) == 0) == (wait_ms == 0)
        else:
            found = buckets.reserve(key, max_wait_ms / 1000)
            assert (found is not None) == (wait_ms <= max_wait_ms)
            assert found is None or found * 1000 == pytest.approx(float(wait_ms), abs=1e-5)
        if wait_ms <= (max_wait_ms or 0):
            model.level += 1


def test_many_keys_are_bounded_and_the_fullest_is_kept() -> None:
    buckets = LeakyBuckets(lambda: 1000.0, 3, 10.0, 100)
    for _ in range(3):
        buckets.add("guesser")
    for number in range(1000):
        buckets.add(number)
        assert len(buckets._empty_at) <= 100
    assert buckets.add("guesser") == 10
    assert buckets.add(number) == 0
    assert buckets.room(number) == 1  # the newest key was counted too


async def test_empty_buckets_make_room_before_full_ones() -> None:
    clock = ManualClock()
    buckets = LeakyBuckets(clock.monotonic, 1, 1.0, 10)
    for number in range(10):
        buckets.add(number)
    await clock.advance(1)
    buckets.add("new")
    assert len(buckets._empty_at) == 1
