"""The control API's buckets against a plain model, which counts what ran in and what was taken."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from price_keeper.control import api_rate_limits as limits
from price_keeper.control.api_rate_limits import LocalApiRateLimiter

from tests.support.effort import tries

NANOS = 10**9


class Model:
    def __init__(self, burst: int, each: int) -> None:
        self.burst, self.each = burst, each
        self.level, self.at = Fraction(burst), 0

    def take(self, now: int) -> tuple[bool, int]:
        self.level = min(Fraction(self.burst), self.level + Fraction(now - self.at, self.each))
        self.at = now
        if self.level < 1:
            return False, 0
        self.level -= 1
        return True, int(self.level)


@settings(max_examples=tries(200))
@given(
    burst=some.integers(1, 20),
    each_ms=some.sampled_from([1, 50, 1000, 5000]),
    steps=some.lists(some.tuples(some.integers(0, 4000), some.sampled_from("ab")), max_size=60),
)
def test_bucket_matches_plain_model(burst: int, each_ms: int, steps: list[tuple[int, str]]) -> None:
    now = 0
    rates = LocalApiRateLimiter(lambda: now / 1000, burst, 1000 / each_ms)
    models = {who: Model(burst, each_ms * NANOS // 1000) for who in "ab"}
    for wait_ms, who in steps:
        now += wait_ms
        is_given, left = models[who].take(now * NANOS // 1000)
        taken = rates.take_now(who)
        assert (taken.wait_seconds == 0, taken.remaining) == (is_given, left)
        assert taken.limit == burst
        assert 0 <= taken.reset_seconds <= burst * each_ms / 1000
        if not is_given:  # a caller that waits this long gets one, and not a moment sooner
            assert taken.wait_seconds * 1000 == pytest.approx(float((1 - models[who].level) * each_ms), abs=1e-5)


def test_callers_are_bounded() -> None:
    rates = LocalApiRateLimiter(lambda: 0.0, 1, 0.001)
    for number in range(3 * limits.MAX_CALLERS):
        assert rates.take_now(str(number)).wait_seconds == 0
    assert len(rates._buckets._empty_at) <= limits.MAX_CALLERS
    assert rates.take_now(str(number)).wait_seconds > 0
