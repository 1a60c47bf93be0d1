"""How spend grew, as samples: a bounded number of them, and close to the reported values."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from price_keeper.control.page.spend_forecast import (
    MAX_CURVES,
    MAX_SAMPLES,
    MAX_UNSPENT_CURVES,
    MIN_SAMPLE_SECONDS,
    SpendCurve,
    SpendHistory,
    SpendSample,
)
from price_keeper.ledger.ledger_entries import Counter

SAMPLES = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 10**9)), max_size=1500)


@given(SAMPLES)
def test_history_is_bounded_monotonic_and_keeps_ends(steps: list[tuple[int, int]]) -> None:
    course, now, pico = SpendCurve(SpendSample(1000.0, 5)), 1000.0, 5
    for seconds, more in steps:
        now, pico = now + seconds, pico + more
        course.add_sample(now, pico)
    assert len(course.samples) <= MAX_SAMPLES
    assert course.samples[0] == SpendSample(1000.0, 5)
    assert (course.estimate_at(now), course.last_seen_at) == (pico, now)
    assert all(before.at < after.at and before.pico <= after.pico for before, after in pairwise(course.samples))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=MAX_SAMPLES - 1))
def test_sparse_samples_are_kept_exactly(amounts: list[int]) -> None:
    samples, pico = [], 0
    for number, more in enumerate(amounts):
        pico += more
        samples.append((1000.0 + 60 * number, pico))
    course = SpendCurve(SpendSample(*samples[0]))
    for at, known in samples[1:]:
        course.add_sample(at, known)
    assert [course.estimate_at(at) for at, _ in samples] == [known for _, known in samples]


def test_estimate_is_linear_between_samples() -> None:
    course = SpendCurve(SpendSample(0.0, 0))
    course.add_sample(100.0, 1000)
    course.add_sample(200.0, 1000)
    course.add_sample(300.0, 3000)
    assert [course.estimate_at(at) for at in (-5, 0, 50, 100, 150, 200, 250, 300, 999)] == [
        *(0, 0, 500, 1000, 1000, 1000, 2000, 3000, 3000)
    ]
    assert [course.estimate_when_reached(pico) for pico in (1, 500, 2000, 3000, 3001)] == [
        0.1,
        50.0,
        250.0,
        300.0,
        None,
    ]
    assert SpendCurve(SpendSample(10.0, 700)).estimate_when_reached(500) is None  # before anything is known


def test_late_or_lower_sample_is_ignored() -> None:
    course = SpendCurve(SpendSample(100.0, 10))
    course.add_sample(100.0, 20)
    course.add_sample(90.0, 30)
    course.add_sample(200.0, 9)
    assert course.samples == [SpendSample(100.0, 10)]


def test_frequent_samples_replace_each_other() -> None:
    course = SpendCurve(SpendSample(0.0, 0))
    for tick in range(1, 101):
        course.add_sample(tick * MIN_SAMPLE_SECONDS / 10, tick)
    assert len(course.samples) < 15
    assert course.samples[-1] == SpendSample(10 * MIN_SAMPLE_SECONDS, 100)


def test_unreported_spend_is_reported_once() -> None:
    course = SpendCurve(SpendSample(0.0, 100))
    assert [course.has_unreported_spend(100), course.has_unreported_spend(99), course.has_unreported_spend(99)] == [
        False,
        True,
        False,
    ]
    course.add_sample(1.0, 101)
    assert course.has_unreported_spend(100)


def test_full_history_evicts_least_recently_used_counter() -> None:
    history = SpendHistory()
    counters = [Counter(f"ORG#{number}", "premium", "DAY#20261118", 8) for number in range(MAX_CURVES + 1)]
    for number, counter in enumerate(counters[:-1]):
        history.record(counter, 1, float(number))
    history.record(counters[0], 2, 1e6)
    history.record(counters[-1], 1, 1e6)
    assert history.get(*counters[0][:3]) is not None
    assert history.get(*counters[1][:3]) is None
    assert history.get(*counters[-1][:3]) is not None
    assert list(history.get_curves("ORG#2", "DAY#20261118", {"premium": 0, "economy": 0})) == ["premium"]
    assert history.get_curves("ORG#2", "DAY#20261119", {"premium": 0}) == {}


def test_unspent_counters_do_not_displace_spent_ones() -> None:
    """A page may ask for any number of apps that do not exist."""
    history = SpendHistory()
    spent = Counter("ORG#0", "premium", "DAY#20261118", 8)
    history.record(spent, 0, 0.0)
    history.record(spent, 1, 10.0)
    for number in range(1, MAX_CURVES + MAX_UNSPENT_CURVES + 1):
        history.record(Counter(f"ORG#{number}", "premium", "DAY#20261118", 8), 0, float(number))
    course = history.get(*spent[:3])
    assert course is not None
    assert [each.pico for each in course.samples] == [0, 1]
    known = (history.get(f"ORG#{number}", *spent[1:3]) for number in range(1, MAX_CURVES + MAX_UNSPENT_CURVES + 1))
    assert sum(each is not None for each in known) == MAX_UNSPENT_CURVES
