"""How fast is spent, when a quota will be reached, and what would be with another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.budgets import label_policy
from price_keeper.control.page.spend_forecast import (
    HOUR_SECONDS,
    BudgetView,
    SpendCurve,
    SpendSample,
    compute_spend_rate,
    describe_outcome,
    find_serving_label,
    forecast_quota,
    simulate_quota,
)
from price_keeper.domain import PICO_PER_USD

NOON = 1_795_003_200.0  # 2026-11-18 12:00 UTC
ENDS = NOON + 12 * HOUR_SECONDS


def course(*points: tuple[float, float]) -> SpendCurve:
    """Of hours before noon, and dollars spent by then."""
    made = SpendCurve(SpendSample(NOON + points[0][0] * HOUR_SECONDS, round(points[0][1] * PICO_PER_USD)))
    for hours, usd in points[1:]:
        made.add_sample(NOON + hours * HOUR_SECONDS, round(usd * PICO_PER_USD))
    return made


def view(spent: dict[str, float], active: int = 0, **courses: SpendCurve) -> BudgetView:
    return BudgetView(
        ordering=("premium", "standard", "economy"),
        quotas=dict.fromkeys(("premium", "standard", "economy"), 10 * PICO_PER_USD),
        spent={label: round(spent.get(label, 0) * PICO_PER_USD) for label in ("premium", "standard", "economy")},
        active=active,
        is_sticky=True,
        tight_pct=95,
        curves=courses,
        now=NOON,
        ends_at=ENDS,
    )


def test_spend_rate_is_of_last_hour() -> None:
    known = course((-5, 0), (-1, 1), (0, 3))
    found = compute_spend_rate(known, NOON)
    assert found is not None
    assert (found.pico_per_hour, found.observed_seconds) == (2 * PICO_PER_USD, HOUR_SECONDS)
    young = compute_spend_rate(course((-0.25, 1), (0, 2)), NOON)
    assert young is not None
    assert (young.pico_per_hour, young.observed_seconds) == (4 * PICO_PER_USD, HOUR_SECONDS / 4)


@pytest.mark.parametrize("known", [None, course((0, 1)), course((-1 / HOUR_SECONDS * 59, 1), (0, 9))])
def test_less_than_a_minute_gives_no_spend_rate(known: SpendCurve | None) -> None:
    assert compute_spend_rate(known, NOON) is None


def test_time_of_reaching_quota_is_forecast() -> None:
    def forecast(usd: float, known: SpendCurve | None, quota: float = 10) -> tuple[str, str | None]:
        seen = view({"premium": usd}, **({} if known is None else {"premium": known}))
        found = forecast_quota(seen, "premium", round(quota * PICO_PER_USD))
        return found["state"], found["at"]

    assert forecast(3, course((-2, 1), (0, 3))) == ("expected", "2026-11-18T19:00:00Z")
    assert forecast(3, course((-2, 2.9), (0, 3))) == ("not_in_this_period", None)
    assert forecast(3, course((-2, 3), (-1, 3), (0, 3))) == ("not_in_this_period", None)
    assert forecast(3, None) == ("unknown", None)
    assert forecast(3, course((-2, 1), (0, 3)), quota=2) == ("reached", "2026-11-18T11:00:00Z")
    assert forecast(3, course((-2, 2.5), (0, 3)), quota=2) == ("reached", None)
    assert forecast(0, None, quota=0) == ("reached", None)


def test_larger_quota_keeps_label_and_smaller_ends_it() -> None:
    seen = view({"premium": 6, "standard": 1}, premium=course((-3, 0), (0, 6)))
    smaller = simulate_quota(seen, "premium", 4 * PICO_PER_USD)
    assert smaller["as_it_is"]["serves"] == "premium"
    assert smaller["as_it_would_be"]["serves"] == "standard"
    premium = smaller["as_it_would_be"]["labels"][0]
    assert (premium["quota_pct"], premium["mode"], premium["quota_usd_micros"]) == (150, "EXCEEDED", 4_000_000)
    assert premium["reached"] == {"state": "reached", "at": "2026-11-18T11:00:00Z"}
    larger = simulate_quota(seen, "premium", 14 * PICO_PER_USD)["as_it_would_be"]["labels"][0]
    assert larger["reached"] == {"state": "expected", "at": "2026-11-18T16:00:00Z"}


def test_left_label_is_not_served_again_in_period() -> None:
    left = view({"premium": 10, "standard": 2}, active=1, premium=course((-5, 0), (-4, 10)))
    found = simulate_quota(left, "premium", 20 * PICO_PER_USD)["as_it_would_be"]
    assert (found["serves"], found["would_have_served"]) == ("standard", "premium")
    everything = simulate_quota(
        view({"premium": 10, "standard": 10, "economy": 10}, active=2), "economy", 9 * PICO_PER_USD
    )
    assert everything["as_it_would_be"]["serves"] is None


def test_newly_serving_label_uses_its_last_spend_rate() -> None:
    seen = view({"premium": 10}, premium=course((-5, 0), (-3, 10), (0, 10)))
    assert forecast_quota(seen, "premium", 20 * PICO_PER_USD)["state"] == "not_in_this_period"
    found = simulate_quota(seen, "premium", 20 * PICO_PER_USD)["as_it_would_be"]
    assert found["serves"] == "premium"
    assert found["labels"][0]["reached"] == {"state": "expected", "at": "2026-11-18T14:00:00Z"}


def test_forecast_without_chain_names_no_label() -> None:
    bare = replace(view({}), ordering=(), quotas={}, spent={})
    assert describe_outcome(bare, {}) == {"serves": None, "would_have_served": None, "labels": []}


AMOUNTS = st.integers(0, 12)


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=4), st.integers(0, 3))
def test_serving_label_matches_policy(figures: list[tuple[int, int]], active: int) -> None:
    labels = [f"label-{number}" for number in range(len(figures))]
    active = min(active, len(labels) - 1)
    spent = {label: amount for label, (amount, _) in zip(labels, figures, strict=True)}
    quotas = {label: quota for label, (_, quota) in zip(labels, figures, strict=True)}
    seen = replace(view({}), ordering=labels, quotas=quotas, spent=spent, active=active)
    may = label_policy.find_candidates(labels[0], labels, quotas, active)
    expected = next((label for label in may if spent[label] < quotas[label]), None)
    assert find_serving_label(seen, quotas, active) == expected
