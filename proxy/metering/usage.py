"""What one call used, as its answer says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_UNITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by what they cost. `input` holds none that were read from or written to a cache."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    tier: str = ""  # the service tier of the answer; empty where it says none
    latency: str = ""  # its performance configuration; empty where it says none
    units: Mapping[str, int] = field(default_factory=lambda: _NO_UNITS)  # a guardrail's, by policy
