"""The types a configuration's fields may have, and how one leaf is read as each of them."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, Union, get_args, get_origin

from price_keeper.config.problems import did_you_mean, listed
from price_keeper.config.tree import Leaf

# No leading zeros, since 010 is eight to YAML; bounded, since int() and Decimal() are slow on a megabyte of digits.
_WHOLE = r"[-+]?(0|[1-9](_?[0-9]){0,30})"
_INTEGER = re.compile(_WHOLE)
_NUMBER = re.compile(rf"({_WHOLE}(\.[0-9]{{0,30}})?|[-+]?\.[0-9]{{1,30}})([eE][-+]?[0-9]{{1,2}})?")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def without_none(kind: Any) -> tuple[Any, bool]:
    """X and whether None may stand for it, from X | None."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return inner, True


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def is_mapping(kind: Any) -> bool:
    return get_origin(kind) in (Mapping, dict)


def is_branching(kind: Any) -> bool:
    kind, _ = without_none(kind)
    return is_list(kind) or is_mapping(kind) or (dataclasses.is_dataclass(kind) and not hasattr(kind, "from_text"))


def is_text(kind: Any) -> bool:
    return kind is str or get_origin(kind) is Literal or hasattr(kind, "from_text")


def item_kind(kind: Any) -> Any:
    return get_args(kind)[0 if is_list(kind) else 1]


def read_leaf(kind: Any, leaf: Leaf) -> Any:
    """Raises ValueError with what was expected."""
    if get_origin(kind) is Literal:
        return _option(get_args(kind), leaf)
    if hasattr(kind, "from_text"):
        return kind.from_text(_text(leaf))
    return _READERS[kind](leaf)


def _option(options: tuple[Any, ...], leaf: Leaf) -> Any:
    for option in options:
        if leaf.text == str(option):
            return option
    hint = did_you_mean(leaf.text, map(str, options))
    raise ValueError(f"expected one of {listed(options)}{f' ({hint})' if hint else ''}")


def _text(leaf: Leaf) -> str:
    if leaf.tag == "str":
        return leaf.text
    raise ValueError("expected text" if leaf.is_null else "expected text (put it in quotes)")


def _whole_number(leaf: Leaf) -> int:
    if leaf.is_plain and _INTEGER.fullmatch(leaf.text):
        return int(leaf.text)
    raise ValueError("expected a whole number")


def _decimal(leaf: Leaf) -> Decimal:
    if leaf.is_plain and _NUMBER.fullmatch(leaf.text):
        return Decimal(leaf.text)
    raise ValueError("expected a number")


def _truth(leaf: Leaf) -> bool:
    if leaf.tag == "bool":
        return _TRUTH[leaf.text.lower()]
    raise ValueError("expected true or false")


_READERS: Mapping[Any, Callable[[Leaf], Any]] = {
    str: _text,
    int: _whole_number,
    float: lambda leaf: float(_decimal(leaf)),  # always finite: the pattern has no inf, and bounds the exponent
    Decimal: _decimal,
    bool: _truth,
}
