"""Values of the store: kept alike by both engines and read back as they were, or refused; and the plans in them."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from typing import Any

from price_keeper.budgets.effective_settings import DEFAULT_ALERT_THRESHOLDS, resolve_settings
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.errors import InvalidStoreRequest
from price_keeper.stores.contract import Item
from price_keeper.stores.dynamodb_expressions import from_wire, item_from_wire, item_to_wire
from price_keeper.stores.item_codec import decode_item, encode_item
from price_keeper.stores.item_values import SIGNIFICANT_DIGITS, add_exactly, check_attributes, normalize_number

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

NAMES = ("model_ordering", "quotas", "period", "timezone", "quota_scope", "enforcement", "settled",
         "settled_until_epoch", "version", "agg_shard_count", "alert_thresholds_pct", "refresh_interval_normal_secs",
         "limits", "N", "M", "B", "L", "S", "refresh_interval_tight_secs", "premium", "PK", "a", "NULL", "SS",
         "NS")  # fmt: skip
TEXTS = ("premium", "standard", "UTC", "month", "ORG", "hard", "aGk=", "5", "1e999", "-0", "")
WORDS = tuple(b'"%b":' % name.encode() for name in NAMES)
NOW = 1_795_003_200.0


def one(data: bytes) -> None:
    reader = Reader(data)
    how = reader.byte()
    try:
        item = json.loads(document(reader, NAMES, TEXTS), parse_float=Decimal, parse_constant=lambda _: 0.5)
    except (ValueError, RecursionError, ArithmeticError):
        return
    if not isinstance(item, dict):
        return
    if how % 2:
        _by_hand(item)
        return
    item = {name: value for name, value in item.items() if value is not None}
    try:
        check_attributes(item)
    except InvalidStoreRequest:
        return
    expected = _in_one_form(item)
    same(decode_item(encode_item(item)), expected, "read back from SQLite")
    same(item_from_wire(item_to_wire(item)), expected, "read back from DynamoDB")
    same(decode_item(encode_item(expected)), expected, "written once more")
    _added(_numbers(item))
    _planned(expected)


def _in_one_form(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_one_form(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_in_one_form(each) for each in value]
    return normalize_number(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else value


def _numbers(value: Any) -> list[int | Decimal]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else []
    return own + [each for part in inner for each in _numbers(part)]


def _added(numbers: list[int | Decimal]) -> None:
    """Exactly, or not at all."""
    for left, right in itertools.pairwise(numbers):
        try:
            found = add_exactly(left, right)
        except InvalidStoreRequest:
            continue
        digits = Decimal(found).normalize().as_tuple().digits
        holds(len(digits) <= SIGNIFICANT_DIGITS, f"{found} has too many digits")
        if type(left) is type(right) is int:
            same(found, left + right, f"{left} and {right}")


def _planned(item: Item) -> None:
    """Whatever was written by hand there is a plan. A label has no limit only if readable quotas leave it out."""
    plan = resolve_settings(item, None, DefaultsConfig(), DEFAULT_ALERT_THRESHOLDS, NOW)
    unlimited, quotas = set(plan.ordering) - plan.quotas.keys(), item.get("quotas")
    holds(
        not unlimited or (isinstance(quotas, dict) and not unlimited & quotas.keys()), f"labels without a quota: {plan}"
    )
    holds(all(type(quota) is int and quota >= 0 for quota in plan.quotas.values()), f"quotas: {plan.quotas}")
    holds(item.get("model_ordering") is None or plan.ordering, "an ordering that means no budget")
    holds(0 < plan.tight_secs <= plan.normal_secs, f"intervals: {plan}")


def _by_hand(wire: dict[str, Any]) -> None:
    """In DynamoDB's own form, as a person may have put it there; what that would refuse is nothing we could read."""
    good = {name: value for name, value in wire.items() if _could_be(value)}
    found = item_from_wire(good)
    holds(found.keys() <= good.keys(), "attributes that were not written")
    for name, value in found.items():
        same(value, from_wire(good[name]), "an attribute")
    _planned(found)


def _could_be(value: Any, depth: int = 0) -> bool:
    if not isinstance(value, dict) or len(value) != 1 or depth > 30:
        return False
    ((kind, content),) = value.items()
    if kind in ("S", "SS"):
        return (
            isinstance(content, str)
            if kind == "S"
            else isinstance(content, list) and all(isinstance(each, str) for each in content)
        )
    if kind in ("N", "NS"):
        texts = content if kind == "NS" else [content]
        return isinstance(texts, list) and all(_is_number(each) for each in texts)
    if kind in ("NULL", "BOOL"):
        return isinstance(content, bool)
    if kind == "L":
        return isinstance(content, list) and all(_could_be(each, depth + 1) for each in content)
    return kind == "M" and isinstance(content, dict) and all(_could_be(each, depth + 1) for each in content.values())


def _is_number(text: Any) -> bool:
    try:
        normalize_number(Decimal(text))
    except (InvalidStoreRequest, ArithmeticError, TypeError, ValueError):
        return False
    return isinstance(text, str)
