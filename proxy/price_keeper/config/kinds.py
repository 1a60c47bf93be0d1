"""The types a configuration's fields may have, and how one leaf is read as each of them."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, Union, get_args, get_origin

from price_keeper.config.problems import did_you_mean, join_names
from price_keeper.config.tree import Leaf

# No leading zeros, since 010 is eight to YAML; bounded, since int() and Decimal() are slow on a megabyte of digits.
_INTEGER_PATTERN = r"[-+]?(0|[1-9](_?[0-9]){0,30})"
_INTEGER = re.compile(_INTEGER_PATTERN)
_NUMBER = re.compile(rf"({_INTEGER_PATTERN}(\.[0-9]{{0,30}})?|[-+]?\.[0-9]{{1,30}})([eE][-+]?[0-9]{{1,2}})?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """X and whether None may stand for it, from X | None."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return inner, True


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def is_mapping(kind: Any) -> bool:
    return get_origin(kind) in (Mapping, dict)


def has_children(kind: Any) -> bool:
    kind, _ = strip_optional(kind)
    return is_list(kind) or is_mapping(kind) or (dataclasses.is_dataclass(kind) and not hasattr(kind, "from_text"))


def is_text(kind: Any) -> bool:
    return kind is str or get_origin(kind) is Literal or hasattr(kind, "from_text")


def get_item_type(kind: Any) -> Any:
    return get_args(kind)[0 if is_list(kind) else 1]


def read_leaf(kind: Any, leaf: Leaf) -> Any:
    """Raises ValueError with what was expected."""
    if get_origin(kind) is Literal:
        return _read_literal(get_args(kind), leaf)
    if hasattr(kind, "from_text"):
        return kind.from_text(_read_str(leaf))
    return _READERS[kind](leaf)


def _read_literal(options: tuple[Any, ...], leaf: Leaf) -> Any:
    for option in options:
        if leaf.text == str(option):
            return option
    hint = did_you_mean(leaf.text, map(str, options))
    raise ValueError(f"expected one of {join_names(options)}{f' ({hint})' if hint else ''}")


def _read_str(leaf: Leaf) -> str:
    if leaf.tag == "str":
        return leaf.text
    raise ValueError("expected text" if leaf.is_null else "expected text (put it in quotes)")


def _read_int(leaf: Leaf) -> int:
    if leaf.is_plain and _INTEGER.fullmatch(leaf.text):
        return int(leaf.text)
    raise ValueError("expected a whole number")


def _read_decimal(leaf: Leaf) -> Decimal:
    if leaf.is_plain and _NUMBER.fullmatch(leaf.text):
        return Decimal(leaf.text)
    raise ValueError("expected a number")


def _read_bool(leaf: Leaf) -> bool:
    if leaf.tag == "bool":
        return _BOOLEANS[leaf.text.lower()]
    raise ValueError("expected true or false")


_READERS: Mapping[Any, Callable[[Leaf], Any]] = {
    str: _read_str,
    int: _read_int,
    float: lambda leaf: float(_read_decimal(leaf)),  # always finite: the pattern has no inf, and bounds the exponent
    Decimal: _read_decimal,
    bool: _read_bool,
}
