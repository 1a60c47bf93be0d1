"""Rows by org, app, label and day: sums that are exact, in an order one can read."""

from __future__ import annotations

from datetime import date
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.price_dimensions import UsageCounts, sum_token_counts
from price_keeper.reports import money
from price_keeper.reports.report_rows import (
    DIMENSIONS,
    ReportRow,
    SpendEntry,
    filter_spend,
    group_spend,
    parse_dimensions,
    sum_counts,
)

from tests.support.effort import tries

ACME, BETA = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "11111111-2222-4333-8444-555555555555"
MONDAY, TUESDAY = date(2026, 11, 16), date(2026, 11, 17)


def spent(org: str, app: str | None, label: str, day: date, pico: int) -> SpendEntry:
    return SpendEntry(org, app, label, day, UsageCounts(1, 0, 2, 3, 4, 5, 6, 7, pico))


SPENT = [
    spent(ACME, "shop", "premium", MONDAY, 5),
    spent(ACME, None, "premium", TUESDAY, 70),
    spent(ACME, "bot", "economy", TUESDAY, 30),
    spent(BETA, "shop", "economy", MONDAY, 101),
    spent(ACME, "shop", "economy", TUESDAY, 1),
]


def keys(by: str) -> list[tuple]:
    return [row.keys for row in group_spend(SPENT, by.split(","))]


def test_rows_are_sorted_by_cost_within_groups() -> None:
    assert keys("org") == [(ACME,), (BETA,)]
    assert keys("label") == [("economy",), ("premium",)]
    assert keys("org,app") == [(ACME, None), (ACME, "bot"), (ACME, "shop"), (BETA, "shop")]
    assert keys("label,org") == [("economy", BETA), ("economy", ACME), ("premium", ACME)]


def test_days_are_sorted_by_time() -> None:
    assert keys("day") == [(MONDAY,), (TUESDAY,)]
    assert keys("org,day") == [(ACME, MONDAY), (ACME, TUESDAY), (BETA, MONDAY)]
    assert keys("day,org") == [(MONDAY, BETA), (MONDAY, ACME), (TUESDAY, ACME)]


def test_equal_rows_have_a_stable_order() -> None:
    same = [spent(ACME, "b", "x", MONDAY, 0), spent(ACME, None, "x", MONDAY, 0), spent(ACME, "a", "x", MONDAY, 0)]
    assert [row.keys for row in group_spend(same, ["app"])] == [(None,), ("a",), ("b",)]


def test_rows_sum_every_count() -> None:
    (row,) = (row for row in group_spend(SPENT, ["org"]) if row.keys == (ACME,))
    assert row == ReportRow((ACME,), UsageCounts(4, 0, 8, 12, 16, 20, 24, 28, 106))
    assert sum_token_counts(row.counts) == 8 + 12 + 16 + 20 + 24


@given(
    st.lists(
        st.builds(
            spent,
            st.sampled_from([ACME, BETA]),
            st.sampled_from([None, "shop", "bot"]),
            st.sampled_from(["premium", "economy"]),
            st.sampled_from([MONDAY, TUESDAY]),
            st.integers(0, 10**18),
        )
    ),
    st.lists(st.sampled_from(DIMENSIONS), min_size=1, unique=True),
)
@settings(max_examples=tries(200))
def test_total_is_equal_for_every_grouping(made: list[SpendEntry], by: list[str]) -> None:
    rows = group_spend(made, by)
    assert sum_counts(row.counts for row in rows) == sum_counts(each.counts for each in made)
    assert len({row.keys for row in rows}) == len(rows)


def test_filters_select_app_and_label() -> None:
    assert filter_spend(SPENT, None, None) == SPENT
    assert [each.counts.pico for each in filter_spend(SPENT, "shop", None)] == [5, 101, 1]
    assert [each.counts.pico for each in filter_spend(SPENT, "-", None)] == [70]
    assert [each.counts.pico for each in filter_spend(SPENT, "shop", "economy")] == [101, 1]
    assert filter_spend(SPENT, None, "none") == []


def test_dimensions_are_parsed() -> None:
    assert parse_dimensions("org,label") == ("org", "label")
    assert parse_dimensions("day, org") == ("day", "org")
    assert parse_dimensions("app") == ("org", "app")  # two orgs may each have an app of one name
    assert parse_dimensions("label,app") == ("label", "org", "app")
    assert parse_dimensions("app,org") == ("app", "org")


@pytest.mark.parametrize("text", ["", "model", "org,", "org,,app", "ORG"])
def test_unknown_dimension_lists_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="there are org, app, label, day"):
        parse_dimensions(text)


def test_duplicate_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_dimensions("org,label,org")


@pytest.mark.parametrize(
    ("pico", "shown", "usd", "micros"),
    [
        (0, "$0.000000", "0", "0"),
        (1, "<$0.000001", "0.000000000001", "0.000001"),
        (499_999, "<$0.000001", "0.000000499999", "0.499999"),
        (500_000, "$0.000001", "0.0000005", "0.5"),
        (12_345_000_000, "$0.012345", "0.012345", "12345"),
        (12_345_499_999, "$0.012345", "0.012345499999", "12345.499999"),
        (10**12, "$1.000000", "1", "1000000"),
        (1_234_567 * 10**12 + 890_123 * 10**6 + 1, "$1,234,567.890123", "1234567.890123000001", "1234567890123.000001"),
    ],
)
def test_money_is_formatted(pico: int, shown: str, usd: str, micros: str) -> None:
    assert money.format_usd(pico) == shown
    assert money.format_exact_usd(pico) == usd
    assert money.format_exact_micros(pico) == micros


@given(st.integers(0, 10**30))
@settings(max_examples=tries(300))
def test_exact_money_format_loses_nothing(pico: int) -> None:
    assert Fraction(money.format_exact_usd(pico)) * 10**12 == pico
    assert Fraction(money.format_exact_micros(pico)) * 10**6 == pico
    assert "e" not in (money.format_exact_usd(pico) + money.format_exact_micros(pico)).lower()
