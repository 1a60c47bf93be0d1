"""Rate limits in the settings of an org or app: validate them, and build the bucket that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from price_keeper.domain import Scope
from price_keeper.rates.token_bucket import MILLI, RateBucket, RateLimit
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Value

REQUESTS, TOKENS = "rpm", "tpm"
RATES = (REQUESTS, TOKENS)
MODES = ("lease", "exact")
MAX_RATE = 10**9  # per minute, of requests or tokens
MAX_BURST_SECS = 3600
DEFAULT_BURST_SECS = 60
MINUTE_MS = 60_000
LIMITS_ATTRIBUTE = "limits"

_MAX_VALUES = {REQUESTS: MAX_RATE, TOKENS: MAX_RATE, "burst_secs": MAX_BURST_SECS}
_ALLOWED = ", ".join((*_MAX_VALUES, "mode"))
_MAX_ERRORS = 5

_MAX_SHOWN_CHARS = 64


class ScopeRateLimits(NamedTuple):
    """The limits of one scope. `rates` are per minute, by name."""

    bucket: RateBucket
    rates: Mapping[str, int]
    is_exact: bool


def validate_rate_limits(value: Any) -> dict[str, Value]:
    """Return the limits as they are stored. Raises ValueError with every mistake."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of {_ALLOWED}, found {_shorten(value)}")
    given = {str(name): entry for name, entry in value.items() if entry is not None}
    errors = [mistake for name, entry in given.items() if (mistake := _find_error(name, entry))]
    if not any(name in given for name in RATES):
        errors.append(f"expected {' or '.join(RATES)}; leave limits out where there is none")
    if errors:
        raise ValueError("; ".join(errors[:_MAX_ERRORS]))
    return given


def _find_error(name: str, value: Any) -> str:
    if name == "mode":
        return "" if value in MODES else f"mode: expected one of {', '.join(MODES)}, found {_shorten(value)}"
    maximum = _MAX_VALUES.get(name)
    if maximum is None:
        return f"unknown: {_shorten(name)}; allowed are {_ALLOWED}"
    is_good = type(value) is int and 1 <= value <= maximum
    return "" if is_good else f"{name}: expected a whole number from 1 to {maximum}, found {_shorten(value)}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def parse_rate_limits(scope: Scope, item: Item | None) -> ScopeRateLimits | None:
    """Parse the limits of an item; None if it has none. Raises ValueError for unusable limits (written by hand)."""
    if item is None or item.get(LIMITS_ATTRIBUTE) is None:
        return None
    given: Mapping[str, Any] = validate_rate_limits(item[LIMITS_ATTRIBUTE])
    version, burst_secs = item.get("version"), given.get("burst_secs", DEFAULT_BURST_SECS)
    rates = {name: given[name] for name in RATES if name in given}
    limits = tuple(
        RateLimit(name, _capacity(rate, burst_secs), rate * MILLI, MINUTE_MS) for name, rate in rates.items()
    )
    bucket = RateBucket(schema.rate_bucket_key(scope, "RATE"), limits, version if type(version) is int else 0)
    return ScopeRateLimits(bucket, rates, given.get("mode") == "exact")


def _capacity(rate: int, burst_secs: int) -> int:
    """At least one call, or none would ever be admitted."""
    return max(MILLI, rate * MILLI * burst_secs // 60)
