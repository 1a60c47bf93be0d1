"""The keys of what can be seen from outside: traces and the log. Metrics need none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from price_keeper.config import checks as must_be
from price_keeper.config.reader import constraints

_COLLECTOR_URL = re.compile(r"(?P<origin>https?://[^/?#@\\\s]+)(?P<path>(?:/[A-Za-z0-9._~-]+)*)/?", re.ASCII)
_MAX_COLLECTOR_URL = 2048


def _check_collector(text: str) -> str | None:
    match = _COLLECTOR_URL.fullmatch(text) if len(text) <= _MAX_COLLECTOR_URL else None
    if match is None or must_be.url(match["origin"]) is not None:
        return "expected http(s)://host[:port][/path] of an OTLP receiver, without a user, a query or a fragment"
    if match["path"].endswith("/v1/traces"):
        return "expected the address without /v1/traces at its end, which is added to it"
    return None


def _check_ratio(number: float) -> str | None:
    return None if 0 <= number <= 1 else "expected 0 to 1"


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str | None = field(default=None, metadata=constraints(_check_collector, private=True))
    sample_ratio: float = field(default=1.0, metadata=constraints(_check_ratio))
    logs: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
