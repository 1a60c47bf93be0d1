"""Values of DynamoDB that are never written here, but may be by a person: they are read as something."""

from __future__ import annotations

import pytest
from price_keeper.stores.dynamodb_expressions import item_from_wire


@pytest.mark.parametrize(
    ("wire", "found"),
    [
        ({"SS": ["a", "b"]}, ["a", "b"]),
        ({"NS": ["1", "2.5"]}, [1, 2.5]),
        ({"BS": [b"x"]}, [b"x"]),
        ({"M": {"premium": {"NULL": True}}}, {"premium": ""}),
        ({"L": [{"NULL": True}]}, [""]),
    ],
)
def test_sets_and_nulls_of_dynamodb_are_read(wire: dict[str, object], found: object) -> None:
    assert item_from_wire({"tags": wire, "none": {"NULL": True}}) == {"tags": found}
