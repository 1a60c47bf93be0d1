"""Items as JSON text in a SQLite row, readable with any SQLite tool. Pure.

Plain values stand for themselves. What JSON cannot hold exactly is wrapped: {"N": "0.1"} a number, {"B": "aGk="} bytes,
{"M": {...}} a map.
"""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import orjson

from price_keeper.stores.contract import Item, Value
from price_keeper.stores.values import number

_JSON_INTEGER = 2**63


def encode(item: Item) -> bytes:
    return orjson.dumps({name: _wrapped(value) for name, value in item.items()})


def decode(text: bytes | str) -> dict[str, Value]:
    found = orjson.loads(text)
    for name, value in found.items():
        kind = type(value)
        if kind is dict or kind is list:
            found[name] = _plain(value)
    return found  # type: ignore[no-any-return]


def _wrapped(value: Value) -> Any:
    kind = type(value)
    if kind is str or kind is bool:
        return value
    if isinstance(value, (int, Decimal)):
        exact = number(value)
        is_plain = type(exact) is int and -_JSON_INTEGER <= exact < _JSON_INTEGER
        return exact if is_plain else {"N": str(exact)}
    if isinstance(value, bytes):
        return {"B": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_wrapped(part) for part in value]
    assert isinstance(value, dict)
    return {"M": {name: _wrapped(part) for name, part in value.items()}}


def _plain(value: Any) -> Value:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    ((mark, content),) = value.items()
    if mark == "N":
        return number(Decimal(content))
    if mark == "B":
        return base64.b64decode(content)
    return {name: _plain(part) for name, part in content.items()}
