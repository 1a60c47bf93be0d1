"""Which values an item may hold, and what conditions and updates do to an item in memory. Pure.

The rules are DynamoDB's and hold on every engine: 38 significant digits, no floats, 400 KB an item, no empty keys.
The `check_*` functions raise InvalidStoreRequest before a request leaves for an engine. `evaluate_condition` and
`apply_update` do what DynamoDB does on its side.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, DecimalException, DivisionByZero, Inexact, InvalidOperation, Overflow
from typing import Any

from price_keeper.errors import InvalidStoreRequest
from price_keeper.stores import contract
from price_keeper.stores.contract import (
    AllOf,
    AnyOf,
    AttributeExists,
    AttributeMissing,
    Between,
    Compare,
    Condition,
    ConditionCheck,
    Delete,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    Prefix,
    Put,
    Query,
    Update,
    Value,
    Write,
)
from price_keeper.stores.schema import TABLES

SIGNIFICANT_DIGITS = 38
_LARGEST_EXPONENT = 125
_SMALLEST_EXPONENT = -130
_FITS_UNCHECKED = 10**SIGNIFICANT_DIGITS

# Raises instead of rounding: a counter that cannot be held exactly must not be held at all.
EXACT_CONTEXT = Context(prec=SIGNIFICANT_DIGITS, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])

_KEY_NAMES = frozenset({"PK", "SK"})
_MAX_NESTING = 32  # DynamoDB's own depth limit for lists and maps


def normalize_number(value: int | Decimal) -> int | Decimal:
    """The number in its canonical form: int where whole, else a Decimal without trailing zeros."""
    if type(value) is int and -_FITS_UNCHECKED < value < _FITS_UNCHECKED:
        return value
    try:
        exact = EXACT_CONTEXT.create_decimal(value).normalize(EXACT_CONTEXT)
    except (DecimalException, ValueError):
        raise InvalidStoreRequest(f"a number has at most {SIGNIFICANT_DIGITS} significant digits") from None
    if not exact.is_finite():
        raise InvalidStoreRequest("a number must be finite")
    if exact and not _SMALLEST_EXPONENT <= exact.adjusted() <= _LARGEST_EXPONENT:
        raise InvalidStoreRequest(f"a number lies between 1E{_SMALLEST_EXPONENT} and 1E{_LARGEST_EXPONENT + 1}")
    return int(exact) if exact == exact.to_integral_value() else exact


def add_exactly(left: int | Decimal, right: int | Decimal) -> int | Decimal:
    """Exact addition. Raises InvalidStoreRequest when the sum has more digits than a store keeps."""
    if type(left) is int and type(right) is int:
        return normalize_number(left + right)
    try:
        return normalize_number(EXACT_CONTEXT.add(Decimal(left), Decimal(right)))
    except DecimalException:
        raise InvalidStoreRequest(f"a sum has more than {SIGNIFICANT_DIGITS} significant digits") from None


def check_value(value: Any, depth: int = 0) -> int:
    """The size in bytes, as DynamoDB counts it (to within a byte or two a value)."""
    kind = type(value)
    if kind is str:
        return _count_utf8_bytes(value)
    if kind is int or kind is Decimal:
        return len(str(normalize_number(value))) // 2 + 2
    if kind is bool:
        return 1
    if kind is bytes:
        return len(value)
    if depth >= _MAX_NESTING:
        raise InvalidStoreRequest(f"lists and maps nest at most {_MAX_NESTING} deep")
    if kind is list:
        return 3 + sum(1 + check_value(part, depth + 1) for part in value)
    if kind is dict:
        return 3 + sum(1 + _measure_name(name) + check_value(part, depth + 1) for name, part in value.items())
    raise InvalidStoreRequest(f"a store keeps str, int, Decimal, bool, bytes, list and dict, not {kind.__name__}")


def _measure_name(name: Any) -> int:
    if type(name) is not str:
        raise InvalidStoreRequest(f"an attribute is named by a str, not by {type(name).__name__}")
    return _count_utf8_bytes(name)


def _count_utf8_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidStoreRequest("text must be valid Unicode (it holds a lone surrogate)") from None


def check_attributes(attributes: Mapping[str, Value]) -> int:
    size = 0
    for name, value in attributes.items():
        size += check_name(name) + check_value(value)
    return size


def check_name(name: str) -> int:
    size = _measure_name(name)
    if name in _KEY_NAMES or not 0 < size <= 255:
        raise InvalidStoreRequest(f"{name!r} cannot name an attribute: 1 to 255 bytes, and not PK or SK")
    return size


def check_item(key: Key, item: Item) -> int:
    size = check_attributes(item) + _count_utf8_bytes(key.pk) + _count_utf8_bytes(key.sk) + len("PKSK")
    if size > contract.MAX_ITEM_BYTES:
        raise InvalidStoreRequest(f"an item holds at most {contract.MAX_ITEM_BYTES} bytes; this one has about {size}")
    return size


def check_key(key: Key) -> None:
    table = TABLES.get(key.table)
    if table is None:
        raise InvalidStoreRequest(f"there is no table {key.table!r}; there are {', '.join(TABLES)}")
    _check_key_part("partition key", key.pk, contract.MAX_PARTITION_KEY_BYTES)
    if table.has_sort_key:
        _check_key_part("sort key", key.sk, contract.MAX_SORT_KEY_BYTES)
    elif key.sk:
        raise InvalidStoreRequest(f"table {key.table!r} has no sort key")


def _check_key_part(what: str, text: str, max_bytes: int) -> None:
    if not text:
        raise InvalidStoreRequest(f"a {what} cannot be empty")
    if _count_utf8_bytes(text) > max_bytes:
        raise InvalidStoreRequest(f"a {what} has at most {max_bytes} bytes")


def check_condition(condition: Condition | None) -> None:
    for name in contract.iterate_attributes(condition):
        check_name(name)
    _check_comparison_types(condition)


def _check_comparison_types(condition: Condition | None) -> None:
    match condition:
        case AllOf(parts) | AnyOf(parts):
            if not parts:
                raise InvalidStoreRequest("a condition of several parts needs at least one")
            for part in parts:
                _check_comparison_types(part)
        case Compare(_, operator, value):
            check_value(value)
            if not isinstance(value, (str, int, Decimal, bytes)) or (
                (value is True or value is False) and operator != "="
            ):
                raise InvalidStoreRequest(f"{type(value).__name__} cannot be compared with {operator}")


def check_write(write: Write) -> int:
    """Check a write. Returns the size in bytes of what it stores; raises InvalidStoreRequest."""
    return _CHECKS[type(write)](write)


def _check_put(put: Put) -> int:
    check_key(put.key)
    check_condition(put.condition)
    return check_item(put.key, put.item)


def _check_update(update: Update) -> int:
    check_key(update.key)
    names = [*update.set, *update.set_if_missing, *update.add, *update.remove]
    if not names:
        raise InvalidStoreRequest("an update must change something")
    if len(set(names)) < len(names):
        raise InvalidStoreRequest("an update names an attribute only once")
    for name in update.remove:
        check_name(name)
    for name, amount in update.add.items():
        check_name(name)
        if type(amount) is not int and type(amount) is not Decimal:
            raise InvalidStoreRequest(f"only a number can be added, not {type(amount).__name__}")
        normalize_number(amount)
    check_condition(update.condition)
    return check_item(update.key, {**update.set, **update.set_if_missing})


def _check_delete(write: Delete | ConditionCheck) -> int:
    check_key(write.key)
    check_condition(write.condition)
    return 0


_CHECKS: dict[type, Callable[[Any], int]] = {
    Put: _check_put,
    Update: _check_update,
    Delete: _check_delete,
    ConditionCheck: _check_delete,
}


def check_transaction(writes: Sequence[Write], token: str | None) -> None:
    if not 0 < len(writes) <= contract.MAX_TRANSACTION_WRITES:
        raise InvalidStoreRequest(f"a transaction has 1 to {contract.MAX_TRANSACTION_WRITES} writes, not {len(writes)}")
    if len({write.key for write in writes}) < len(writes):
        raise InvalidStoreRequest("a transaction names an item only once")
    if token is not None and not 0 < len(token) <= contract.MAX_TOKEN_CHARACTERS:
        raise InvalidStoreRequest(f"a transaction's token has 1 to {contract.MAX_TOKEN_CHARACTERS} characters")
    size = sum(check_write(write) for write in writes)
    if size > contract.MAX_TRANSACTION_BYTES:
        raise InvalidStoreRequest(
            f"a transaction holds at most {contract.MAX_TRANSACTION_BYTES} bytes; this one has about {size}"
        )


def check_query(query: Query) -> None:
    table = TABLES.get(query.table)
    if table is None or not table.has_sort_key:
        raise InvalidStoreRequest(f"{query.table!r} is no table with a sort key, so there is nothing to query")
    _check_key_part("partition key", query.pk, contract.MAX_PARTITION_KEY_BYTES)
    for bound in _list_bounds(query):
        _check_key_part("bound of a sort key", bound, contract.MAX_SORT_KEY_BYTES)
    if query.limit is not None and query.limit < 1:
        raise InvalidStoreRequest("a query's limit is at least 1")
    if not _is_within(query):
        raise InvalidStoreRequest("a query's range begins before it ends, and its cursor lies within it")


def _list_bounds(query: Query) -> Sequence[str]:
    match query.sort:
        case Prefix(text):
            bounds: Sequence[str | None] = (text, query.after)
        case Between(low, high):
            bounds = (low, high, query.after)
        case None:
            bounds = (query.after,)
    return [bound for bound in bounds if bound is not None]


def _is_within(query: Query) -> bool:
    """Whether the range and the cursor are in order. Comparison by code points equals that of UTF-8 bytes."""
    after = query.after
    match query.sort:
        case Prefix(text):
            return after is None or after.startswith(text)
        case Between(low, high):
            points = [point for point in (low, after, high) if point is not None]
            return points == sorted(points)
    return True


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def evaluate_condition(condition: Condition | None, item: Item | None) -> bool:
    """Whether the condition holds for the item; `item` is None when it does not exist."""
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
    """The item after the update; the given item is not changed."""
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
