"""Conditions and updates carried out on an item in memory. Pure: what an engine without a query language runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from price_keeper.errors import InvalidStoreRequest
from price_keeper.stores.contract import (
    AllOf,
    AnyOf,
    AttributeExists,
    AttributeMissing,
    Compare,
    Condition,
    Item,
    ItemExists,
    ItemMissing,
    Update,
    Value,
)
from price_keeper.stores.values import add_exactly, check_item

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def evaluate_condition(condition: Condition | None, item: Item | None) -> bool:
    """Whether the condition holds on the item; `item` is None where nothing stands."""
    attributes = item if item is not None else {}
    match condition:
        case None:
            return True
        case Compare(name, how, value):
            return name in attributes and _holds_comparison(attributes[name], how, value)
        case AllOf(parts):
            return all(evaluate_condition(part, item) for part in parts)
        case AnyOf(parts):
            return any(evaluate_condition(part, item) for part in parts)
        case AttributeExists(name):
            return name in attributes
        case AttributeMissing(name):
            return name not in attributes
        case ItemExists():
            return item is not None
        case ItemMissing():
            return item is None
    raise TypeError(f"no condition: {condition!r}")


def _holds_comparison(left: Value, operator_name: str, right: Value) -> bool:
    return _comparable_type(left) is _comparable_type(right) and _OPERATORS[operator_name](left, right)


def _comparable_type(value: Value) -> type:
    # True equals 1 in Python but not in a store, while 1 and Decimal("1") are the same number.
    kind = type(value)
    return int if kind is Decimal else kind


def apply_update(update: Update, item: Item | None) -> dict[str, Value]:
    """The item after the update; the one given is left alone."""
    result: dict[str, Value] = dict(item) if item is not None else {}
    result.update(update.set)
    for name, value in update.set_if_missing.items():
        result.setdefault(name, value)
    for name, amount in update.add.items():
        result[name] = _add_number(name, result.get(name, 0), amount)
    for name in update.remove:
        result.pop(name, None)
    check_item(update.key, result)
    return result


def _add_number(name: str, before: Value, amount: int | Decimal) -> int | Decimal:
    if type(before) is not int and type(before) is not Decimal:
        raise InvalidStoreRequest(f"cannot add to attribute {name!r}: it is no number")
    return add_exactly(before, amount)
