"""Builds DynamoDB requests from the contract's values, and reads items from DynamoDB's wire format. Pure.

All names and values go through placeholders, so no reserved word can collide with an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from price_keeper.stores import contract
from price_keeper.stores.item_values import normalize_number
from price_keeper.stores.schema import TABLES

Request = dict[str, Any]


def to_wire(value: contract.Value) -> dict[str, Any]:
    return _TO_WIRE[type(value)](value)


_TO_WIRE: dict[type, Callable[[Any], dict[str, Any]]] = {
    str: lambda value: {"S": value},
    bool: lambda value: {"BOOL": value},
    int: lambda value: {"N": str(value)},
    Decimal: lambda value: {"N": str(normalize_number(value))},
    bytes: lambda value: {"B": value},
    list: lambda value: {"L": [to_wire(part) for part in value]},
    dict: lambda value: {"M": item_to_wire(value)},
}


def item_to_wire(item: contract.Item) -> dict[str, Any]:
    return {name: to_wire(value) for name, value in item.items()}


def from_wire(wire: Mapping[str, Any]) -> contract.Value:
    ((kind, content),) = wire.items()
    return _FROM_WIRE[kind](content)


_FROM_WIRE: dict[str, Callable[[Any], contract.Value]] = {
    "S": lambda content: content,
    "BOOL": lambda content: content,
    "N": lambda content: normalize_number(Decimal(content)),
    "B": bytes,
    "L": lambda content: [from_wire(part) for part in content],
    "M": lambda content: {name: from_wire(part) for name, part in content.items()},
    # This program writes none of these types, but a person may: reading such an item must not fail.
    "NULL": lambda _: "",
    "SS": lambda content: [*content],
    "NS": lambda content: [normalize_number(Decimal(each)) for each in content],
    "BS": lambda content: [bytes(each) for each in content],
}


_KEY_ATTRIBUTES = ("PK", "SK")


def item_from_wire(wire: Mapping[str, Any]) -> dict[str, contract.Value]:
    """The item without its key, which the caller knows, and without attributes that a person has set to null."""
    return {
        name: from_wire(value) for name, value in wire.items() if name not in _KEY_ATTRIBUTES and "NULL" not in value
    }


def key_to_wire(key: contract.Key) -> dict[str, Any]:
    wire = {"PK": {"S": key.pk}}
    if TABLES[key.table].has_sort_key:
        wire["SK"] = {"S": key.sk}
    return wire


def key_from_wire(table: str, wire: Mapping[str, Any]) -> contract.Key:
    return contract.Key(table, wire["PK"]["S"], wire["SK"]["S"] if "SK" in wire else "")


class _Placeholders:
    """Placeholders for a request's names and values, so that no name can collide with a reserved word."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def name(self, attribute: str) -> str:
        return self._names.setdefault(attribute, f"#{len(self._names)}")

    def value(self, value: contract.Value) -> str:
        placeholder = f":{len(self._values)}"
        self._values[placeholder] = to_wire(value)
        return placeholder

    def request(self) -> Request:
        request: Request = {}
        if self._names:
            request["ExpressionAttributeNames"] = {short: name for name, short in self._names.items()}
        if self._values:
            request["ExpressionAttributeValues"] = self._values
        return request


def build_write_request(write: contract.Write, prefix: str) -> Request:
    """The body of a single write, which is also the body of the same entry in a transaction."""
    placeholders = _Placeholders()
    request: Request = {"TableName": prefix + write.key.table}
    if isinstance(write, contract.Put):
        request["Item"] = key_to_wire(write.key) | item_to_wire(write.item)
    else:
        request["Key"] = key_to_wire(write.key)
    if isinstance(write, contract.Update):
        request["UpdateExpression"] = _build_update_expression(write, placeholders)
    if write.condition is not None:
        request["ConditionExpression"] = _build_condition_expression(write.condition, placeholders)
        request["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    return request | placeholders.request()


TRANSACTION_VERBS: dict[type, str] = {
    contract.Put: "Put",
    contract.Update: "Update",
    contract.Delete: "Delete",
    contract.ConditionCheck: "ConditionCheck",
}


def _build_update_expression(update: contract.Update, placeholders: _Placeholders) -> str:
    """In the order of names, so that a transaction resent under its token is identical byte for byte."""
    settings = [
        f"{placeholders.name(name)} = {placeholders.value(value)}" for name, value in sorted(update.set.items())
    ]
    settings += [
        f"{placeholders.name(name)} = if_not_exists({placeholders.name(name)}, {placeholders.value(value)})"
        for name, value in sorted(update.set_if_missing.items())
    ]
    additions = [
        f"{placeholders.name(name)} {placeholders.value(amount)}" for name, amount in sorted(update.add.items())
    ]
    removals = [placeholders.name(name) for name in update.remove]
    clauses = (("SET", settings), ("ADD", additions), ("REMOVE", removals))
    return " ".join(f"{verb} {', '.join(parts)}" for verb, parts in clauses if parts)


def _build_condition_expression(condition: contract.Condition, placeholders: _Placeholders) -> str:
    match condition:
        case contract.Compare(name, operator, value):
            return f"{placeholders.name(name)} {operator} {placeholders.value(value)}"
        case contract.AttributeExists(name):
            return f"attribute_exists({placeholders.name(name)})"
        case contract.AttributeMissing(name):
            return f"attribute_not_exists({placeholders.name(name)})"
        case contract.ItemExists():
            return f"attribute_exists({placeholders.name('PK')})"
        case contract.ItemMissing():
            return f"attribute_not_exists({placeholders.name('PK')})"
        case contract.AllOf((part,)) | contract.AnyOf((part,)):  # DynamoDB rejects redundant parentheses
            return _build_condition_expression(part, placeholders)
        case contract.AllOf(parts):
            return "(" + " AND ".join(_build_condition_expression(part, placeholders) for part in parts) + ")"
        case contract.AnyOf(parts):
            return "(" + " OR ".join(_build_condition_expression(part, placeholders) for part in parts) + ")"


def build_query_request(query: contract.Query, prefix: str) -> Request:
    placeholders = _Placeholders()
    terms = [f"{placeholders.name('PK')} = {placeholders.value(query.pk)}"]
    if query.sort is not None:
        terms += _build_sort_terms(query.sort, placeholders)
    request: Request = {
        "TableName": prefix + query.table,
        "KeyConditionExpression": " AND ".join(terms),
        "ConsistentRead": query.consistent,
        "ScanIndexForward": not query.descending,
    }
    if query.after is not None:
        request["ExclusiveStartKey"] = key_to_wire(contract.Key(query.table, query.pk, query.after))
    return request | placeholders.request()


def _build_sort_terms(sort: contract.Prefix | contract.Between, placeholders: _Placeholders) -> list[str]:
    match sort:
        case contract.Prefix(text):
            return [f"begins_with({placeholders.name('SK')}, {placeholders.value(text)})"]
        case contract.Between(None, None):
            return []
        case contract.Between(low, None) if low is not None:
            return [f"{placeholders.name('SK')} >= {placeholders.value(low)}"]
        case contract.Between(None, high) if high is not None:
            return [f"{placeholders.name('SK')} <= {placeholders.value(high)}"]
        case contract.Between(low, high):
            assert low is not None
            assert high is not None
            return [f"{placeholders.name('SK')} BETWEEN {placeholders.value(low)} AND {placeholders.value(high)}"]
