"""What one call used, as its answer says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_NO_UNITS: Mapping[str, int] = MappingProxyType({})


class Usage(NamedTuple):
    """Tokens by what they cost. `input` holds none that were read from or written to a cache."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    tier: str = ""  # the service tier of the answer; empty where it says none
    latency: str = ""  # its performance configuration; empty where it says none
    units: Mapping[str, int] = _NO_UNITS  # a guardrail's, by policy


def make_plain_usage(input: int, output: int, cache_read: int) -> Usage:
    """As nearly all is: made in half the time."""
    return tuple.__new__(Usage, (input, output, cache_read, 0, 0, "", "", _NO_UNITS))


def sum_tokens(usage: Usage | None) -> int:
    """Of all kinds together; -1 for no usage, which is less than one of nothing."""
    return (
        -1
        if usage is None
        else usage.input + usage.output + usage.cache_read + usage.cache_write_5m + usage.cache_write_1h
    )
