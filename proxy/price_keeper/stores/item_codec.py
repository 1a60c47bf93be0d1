"""Items as JSON text, for the rows of SQLite and for snapshot files. Pure.

Values that JSON holds exactly are stored as they are. All others are wrapped: {"N": "0.1"} is a number, {"B": "aGk="}
is bytes, {"M": {...}} is a map.
"""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import orjson

from price_keeper.stores.contract import Item, Value
from price_keeper.stores.item_values import normalize_number

_JSON_INTEGER = 2**63


def encode_item(item: Item) -> bytes:
    return orjson.dumps({name: _wrap(value) for name, value in item.items()})


def decode_item(text: bytes | str) -> dict[str, Value]:
    attributes = orjson.loads(text)
    for name, value in attributes.items():
        kind = type(value)
        if kind is dict or kind is list:
            attributes[name] = _unwrap(value)
    return attributes  # type: ignore[no-any-return]


def _wrap(value: Value) -> Any:
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if isinstance(value, (int, Decimal)):
        exact = normalize_number(value)
        is_plain = type(exact) is int and -_JSON_INTEGER <= exact < _JSON_INTEGER
        return exact if is_plain else {"N": str(exact)}
    if isinstance(value, bytes):
        return {"B": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_wrap(part) for part in value]
    assert isinstance(value, dict)
    return {"M": {name: _wrap(part) for name, part in value.items()}}


def _unwrap(value: Any) -> Value:
    if isinstance(value, list):
        return [_unwrap(part) for part in value]
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    ((mark, content),) = value.items()
    if mark == "N":
        return normalize_number(Decimal(content))
    if mark == "B":
        return base64.b64decode(content)
    return {name: _unwrap(part) for name, part in content.items()}
