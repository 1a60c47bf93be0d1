"""What the settings of an org or an app say of its limits, and the bucket that comes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from price_keeper.limits.bucket import MILLI, RateBucket, RateLimit
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Value

REQUESTS, TOKENS = "rpm", "tpm"
RATES = (REQUESTS, TOKENS)
MODES = ("lease", "exact")
MOST = 10**9  # of a rate
MOST_BURST_SECS = 3600
USUAL_BURST_SECS = 60
MINUTE_MS = 60_000
ATTRIBUTE = "limits"

_MOST_OF = {REQUESTS: MOST, TOKENS: MOST, "burst_secs": MOST_BURST_SECS}
_ALLOWED = ", ".join((*_MOST_OF, "mode"))
_MOST_TOLD = 5

_MOST_SHOWN = 64


class Limits(NamedTuple):
    """Of one scope. `rates` a minute, by name."""

    bucket: RateBucket
    rates: Mapping[str, int]
    is_exact: bool


def checked(value: Any) -> dict[str, Value]:
    """As it is to be stored. Raises ValueError with every mistake."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of {_ALLOWED}, found {_shown(value)}")
    given = {str(name): each for name, each in value.items() if each is not None}
    mistakes = [mistake for name, each in given.items() if (mistake := _mistake(name, each))]
    if not any(name in given for name in RATES):
        mistakes.append(f"expected {' or '.join(RATES)}; leave limits out where there is none")
    if mistakes:
        raise ValueError("; ".join(mistakes[:_MOST_TOLD]))
    return given


def _mistake(name: str, value: Any) -> str:
    if name == "mode":
        return "" if value in MODES else f"mode: expected one of {', '.join(MODES)}, found {_shown(value)}"
    most = _MOST_OF.get(name)
    if most is None:
        return f"unknown: {_shown(name)}; allowed are {_ALLOWED}"
    is_good = type(value) is int and 1 <= value <= most
    return "" if is_good else f"{name}: expected a whole number from 1 to {most}, found {_shown(value)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def limits_of(scope: Scope, item: Item | None) -> Limits | None:
    """None where there are no limits. Raises ValueError for what was written by hand and cannot be used."""
    if item is None or item.get(ATTRIBUTE) is None:
        return None
    given: Mapping[str, Any] = checked(item[ATTRIBUTE])
    version, burst_secs = item.get("version"), given.get("burst_secs", USUAL_BURST_SECS)
    rates = {name: given[name] for name in RATES if name in given}
    limits = tuple(RateLimit(name, _capacity(rate, burst_secs), rate * MILLI, MINUTE_MS) for name, rate in rates.items())
    bucket = RateBucket(schema.rate_bucket_key(scope, "RATE"), limits, version if type(version) is int else 0)
    return Limits(bucket, rates, given.get("mode") == "exact")


def _capacity(rate: int, burst_secs: int) -> int:
    """One call at least, or none would ever be let through."""
    return max(MILLI, rate * MILLI * burst_secs // 60)
