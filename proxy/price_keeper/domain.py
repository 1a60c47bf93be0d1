"""The types that all packages share: the caller, the scope of a quota, the resolved label and the cost ceiling. Pure.

Money is whole pico-dollars inside the product, and micro-dollars in output; `parse_micros` reads an amount that a
person wrote. Ids are validated here, so that each org or app has exactly one spelling. This module imports nothing of
the product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_NAME_LENGTH = 128  # of an org or app
PICO_PER_MICRO = 10**6  # pico-dollars per micro-dollar
MICRO_PER_USD = 10**6
PICO_PER_USD = PICO_PER_MICRO * MICRO_PER_USD

_ORG_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_APP_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")  # HTTP clients remove `.` and `..` from paths
_LABEL = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a label is used as a model id in paths


def is_org_id(text: str) -> bool:
    """A UUID in its one canonical form, so that no org can be spelled in two ways."""
    return _ORG_ID.fullmatch(text) is not None


def is_app_id(text: str) -> bool:
    return _APP_ID.fullmatch(text) is not None


def is_label(text: str) -> bool:
    return _LABEL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Scope:
    """What a quota applies to: an org, or one of its apps."""

    org: str
    app: str | None = None

    def __post_init__(self) -> None:
        if not is_org_id(self.org):
            raise ValueError(f"an org id is a UUID in lower case, not {self.org!r}")
        if self.app is not None and not is_app_id(self.app):
            allowed = "1 to 64 of letters, digits, '.', '_' and '-', and neither '.' nor '..'"
            raise ValueError(f"an app id is {allowed}, not {self.app!r}")

    @classmethod
    def from_key(cls, key: str) -> Scope:
        org, separator, app = key.removeprefix("ORG#").partition("#APP#")
        return cls(org, app if separator else None)

    @property
    def key(self) -> str:
        return f"ORG#{self.org}" if self.app is None else f"ORG#{self.org}#APP#{self.app}"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, according to a verified token or to the identity that the configuration fixes."""

    org: str
    app: str | None
    client_id: str


@dataclass(frozen=True, slots=True)
class ResolvedLabel:
    """The label and model that serve a request for `requested`. `label` is empty for a model id that belongs to no
    label, if the configuration allows such ids."""

    requested: str
    label: str
    model: str


# An amount of money with its unit, in text; a whole number without a unit is in micro-dollars, and is no text. Bounded,
# since int() is slow on a megabyte of digits. No leading zeros: 010 is eight for some readers.
_WHOLE_PATTERN = r"(?:0|[1-9](?:_?[0-9]){0,17})"
_USD_PATTERN = rf"{_WHOLE_PATTERN}(?:\.[0-9]{{1,6}})?"
AMOUNT_PATTERN = rf"\${_USD_PATTERN}|{_USD_PATTERN} ?USD|{_WHOLE_PATTERN} ?(?:micro-USD|[\u00b5\u03bc]USD)"
AMOUNT_FORMS = "5 USD, $5, 0.50 USD, 5000000 micro-USD, or 5000000 without quotes, which is in micro-USD too"
_AMOUNT = re.compile(AMOUNT_PATTERN)
_MICRO_UNITS = ("micro-USD", "\u00b5USD", "\u03bcUSD")  # the micro sign, and the Greek letter that looks like it


def parse_micros(text: str) -> int:
    """The micro-dollars of an amount that names its unit. Exact. Raises ValueError."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError(f"expected an amount such as {AMOUNT_FORMS}")
    digits = text.replace("_", "")
    for unit in _MICRO_UNITS:
        if digits.endswith(unit):
            return int(digits.removesuffix(unit))
    whole, _, part = digits.removeprefix("$").removesuffix("USD").strip().partition(".")
    return int(whole) * MICRO_PER_USD + int(f"{part:0<6}")


def format_decimal(number: int, unit: int) -> str:
    """How many units: an exact decimal without an exponent and without trailing zeros."""
    whole, part = divmod(number, unit)
    if not part:
        return str(whole)
    return f"{whole}.{part:0{len(str(unit)) - 1}}".rstrip("0")


def format_dollars(pico: int) -> str:
    """Dollars for a message, such as $5.00 or $0.000144: rounded to a micro-dollar, with at least two decimals."""
    whole, _, part = format_decimal((pico + PICO_PER_MICRO // 2) // PICO_PER_MICRO, MICRO_PER_USD).partition(".")
    return f"${whole}.{part:0<2}"


def build_money_record(name: str, pico: int | None) -> dict[str, int | str | None]:
    """An amount in JSON: whole micro-dollars, rounded down, with the exact figure beside it."""
    if pico is None:
        return {name: None, f"{name}_exact": None}
    return {name: pico // PICO_PER_MICRO, f"{name}_exact": format_decimal(pico, PICO_PER_MICRO)}


def find_name(item: Mapping[str, object] | None, attribute: str) -> str | None:
    """The name of an org or app for messages; None if it has none that can be shown, as when it was written by hand."""
    name = None if item is None else item.get(attribute)
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_LENGTH else None


def describe_scope(scope: Scope, org_name: str | None, app_name: str | None) -> str:
    """An org or app for a message: by its name, or by its id if the name is not known."""
    org = f"org {scope.org}" if org_name is None else f"'{org_name}'"
    if scope.app is None:
        return org if org_name is None else f"org {org}"
    return f"app {scope.app} of {org}" if app_name is None else f"app '{app_name}' of {org}"


def build_client_id(org: str, app: str | None) -> str:
    return f"org-{org}" if app is None else f"org-{org}-app-{app}"


def parse_client_id(client_id: str) -> Scope | None:
    """The org or app that a client id names; None if it names none."""
    if not client_id.startswith("org-"):
        return None
    # An org id has a fixed length, so no app id can be mistaken for a part of it.
    org, rest = client_id[4:40], client_id[40:]
    if not is_org_id(org):
        return None
    if not rest:
        return Scope(org)
    app = rest.removeprefix("-app-")
    return Scope(org, app) if app != rest and is_app_id(app) else None


class CostCeiling(NamedTuple):
    """The most that a request can cost, and the body that has to be sent for that bound to hold.

    With `needs_count` there is no bound yet: CountTokens must be called first (`apply_count`).
    """

    pico: int
    input_tokens: int
    output_tokens: int
    body: bytes
    needs_count: bool = False
    piece_pico: int = 0  # the part of `pico` that is for what is sold by the piece, which no count of tokens changes
