"""The rows of the price dimensions agree with the tuples that hold prices, usage and counts."""

from __future__ import annotations

from dataclasses import fields

from price_keeper.config.config_sections import PicoPrices, TierPrices
from price_keeper.price_dimensions import COUNT_FIELDS, COUNTED_UNITS, TOKEN_COUNTERS, TOKEN_NAMES
from price_keeper.usage.token_usage import Usage


def test_token_rows_are_the_fields_of_prices_and_usage_in_their_order() -> None:
    assert tuple(field.name for field in fields(TierPrices)) == PicoPrices._fields == TOKEN_NAMES
    assert Usage._fields[: len(TOKEN_NAMES)] == TOKEN_NAMES


def test_counters_have_one_row_each_and_a_column_of_their_own() -> None:
    assert tuple(unit.counter for unit in COUNTED_UNITS) == COUNT_FIELDS
    assert len({unit.focus_column for unit in COUNTED_UNITS}) == len(COUNTED_UNITS)
    assert set(TOKEN_COUNTERS) <= set(COUNT_FIELDS)
