"""Figures that stand on two pages are the same on both."""

from __future__ import annotations

import re

from price_keeper.config.config_sections import DEMO_LABELS

from bench.state_units import table
from tests.support.doc_pages import ROOT

RATES = ("1", "100", "1,000")


def rows(page: str) -> list[list[str]]:
    lines = re.findall(r"^\| (\d.*) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def test_documented_dynamodb_costs_match_measurement() -> None:
    measured = {(row[0], row[1]): row[3] for row in rows("recording.md")}
    fleets = [row for row in rows("cost.md") if len(row) == 1 + len(RATES)]
    documented = {(row[0], rate): usd for row in fleets for rate, usd in zip(RATES, row[1:], strict=True)}
    assert len(documented) == 9
    assert documented == {key: measured[key] for key in documented}


def test_what_state_costs_to_read_is_what_is_computed() -> None:
    assert table() in (ROOT / "docs" / "cost.md").read_text()


def test_first_answer_takes_two_minutes_at_most() -> None:
    page = (ROOT / "docs" / "five-minutes.md").read_text()
    found = re.search(r"to the first metered answer\*\* \| \*\*([\d.]+)\*\* \|", page)
    assert found, "make newcomer measures it"
    assert float(found.group(1)) < 120


def test_documented_cheapest_label_price_is_right() -> None:
    """A fiftieth of the dearest for input, and less for output."""
    dear, cheap = (DEMO_LABELS[name].prices_usd_per_1m for name in ("premium", "economy"))
    assert dear.input == 50 * cheap.input
    assert dear.output > 50 * cheap.output
