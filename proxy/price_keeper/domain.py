"""The types that all packages share: the caller, the scope of a quota, the resolved label and the cost ceiling. Pure.

Money is whole pico-dollars inside the product, and micro-dollars in output. Ids are validated here, so that each org or
app has exactly one spelling. This module imports nothing of the product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

PICO_PER_MICRO = 10**6  # pico-dollars per micro-dollar
PICO_PER_USD = PICO_PER_MICRO * 10**6

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


def format_decimal(number: int, unit: int) -> str:
    """How many units: an exact decimal without an exponent and without trailing zeros."""
    whole, part = divmod(number, unit)
    if not part:
        return str(whole)
    return f"{whole}.{part:0{len(str(unit)) - 1}}".rstrip("0")


def build_money_record(name: str, pico: int | None) -> dict[str, int | str | None]:
    """An amount in JSON: whole micro-dollars, rounded down, with the exact figure beside it."""
    if pico is None:
        return {name: None, f"{name}_exact": None}
    return {name: pico // PICO_PER_MICRO, f"{name}_exact": format_decimal(pico, PICO_PER_MICRO)}


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
