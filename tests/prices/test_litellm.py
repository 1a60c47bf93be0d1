"""The oracle's prices agree with LiteLLM's table, or `differences.yaml` says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from tests.support.price_oracle import GUARDRAIL_UNITS, IMAGE_PRICES, ROWS, TITAN_IMAGE, Five, Listed

ROOT = Path(__file__).parents[2]
TABLE = "lib/python3*/site-packages/litellm/model_prices_and_context_window_backup.json"
KINDS = (
    "input_cost_per_token",
    "output_cost_per_token",
    "cache_read_input_token_cost",
    "cache_creation_input_token_cost",
    "cache_creation_input_token_cost_above_1hr",
)


def load_table() -> dict[str, Any]:
    (path,) = (ROOT / ".venv/clients").glob(TABLE)
    return json.loads(path.read_text(), parse_float=str, parse_int=str)  # type: ignore[no-any-return]


def named_prices(listed: Listed) -> Iterator[tuple[str, str]]:
    """Each price of the row, with LiteLLM's name for it."""

    def name_each(five: Five, suffix: str) -> Iterator[tuple[str, str]]:
        yield from ((kind + suffix, price) for kind, price in zip(KINDS, five, strict=True))

    yield from name_each(listed.prices, "")
    for tier, five in listed.tiers.items():
        yield from name_each(five, f"_{tier}")
    if listed.above < 10**9:
        yield from name_each(listed.long, f"_above_{listed.above // 1000}k_tokens")
    if listed.piece_name:
        yield listed.piece_name, listed.piece


def find_differences(table: dict[str, Any]) -> Iterator[str]:
    for listed in ROWS:
        row = table.get(listed.model)
        if row is None:
            yield f"{listed.model}: no row"
            continue
        for name, price in named_prices(listed):
            theirs = row.get(name, "0")
            per_size = theirs.values() if isinstance(theirs, dict) else [theirs]
            if {Fraction(each) for each in per_size} != {Fraction(price)}:
                yield f"{listed.model}: {name} {price} here, {theirs} there"
    units = table["bedrock/guardrails"]["guardrail_cost_per_unit"]
    for name, price in GUARDRAIL_UNITS.items():
        if Fraction(units.get(name, -1)) != Fraction(price):
            yield f"guardrails: {name} {price} here, {units.get(name)} there"
    for (most, quality), price in IMAGE_PRICES.items():
        theirs = table[TITAN_IMAGE.model]["output_cost_per_image"]
        if Fraction(theirs) != Fraction(price):
            yield f"{TITAN_IMAGE.model}: {most} {quality} {price} here, {theirs} there"


def test_every_difference_from_litellm_is_explained() -> None:
    explained = yaml.safe_load((Path(__file__).parent / "differences.yaml").read_text())
    assert set(find_differences(load_table())) == explained.keys()
    assert all(len(reason) > 20 for reason in explained.values())
