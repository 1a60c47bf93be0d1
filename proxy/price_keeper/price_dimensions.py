"""What Bedrock charges for, one row for each price dimension, and the counters that add it up. Pure.

START HERE for a new price dimension: a row of `TOKENS`, or a field at the end of `UsageCounts` with its row in
`COUNTED_UNITS`. The names in prices, metrics, the journal, the store, reports and exports follow from these rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class UsageCounts(NamedTuple):
    """What is counted. All fields but `pico` are named like the attributes in the store.

    The journal has the values by position. So a field may be added at the end, but none may be inserted, moved or
    removed without a new JOURNAL_FORMAT.
    """

    requests: int = 0
    estimated_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    guardrail_units: int = 0
    pico: int = 0

    def plus(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__add__, self, other))

    def less(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__sub__, self, other))

    def by_name(self) -> dict[str, int]:
        """All counts but the money."""
        return {name: number for name, number in zip(self._fields, self, strict=True) if name != "pico"}


COUNT_FIELDS: Final = tuple(name for name in UsageCounts._fields if name != "pico")


class CountedUnit(NamedTuple):
    """How a counter is shown."""

    counter: str  # its field of `UsageCounts`
    focus_column: str


COUNTED_UNITS: Final = (
    CountedUnit("requests", "x_Requests"),
    CountedUnit("estimated_requests", "x_EstimatedRequests"),
    CountedUnit("input_tokens", "x_InputTokens"),
    CountedUnit("output_tokens", "x_OutputTokens"),
    CountedUnit("cache_read_tokens", "x_CacheReadTokens"),
    CountedUnit("cache_write_5m_tokens", "x_CacheWriteFiveMinuteTokens"),
    CountedUnit("cache_write_1h_tokens", "x_CacheWriteOneHourTokens"),
    CountedUnit("guardrail_units", "x_GuardrailUnits"),
)


class TokenDimension(NamedTuple):
    """Tokens that have a price of their own. `Usage`, `PicoPrices` and `TierPrices` have these fields in this order."""

    name: str  # of its price in the configuration and the price cache, and its type in metrics
    counter: str  # its field of `UsageCounts`
    is_required: bool = False  # whether a model without this price has no prices at all


TOKENS: Final = (
    TokenDimension("input", "input_tokens", is_required=True),
    TokenDimension("output", "output_tokens", is_required=True),
    TokenDimension("cache_read", "cache_read_tokens"),
    TokenDimension("cache_write_5m", "cache_write_5m_tokens"),
    TokenDimension("cache_write_1h", "cache_write_1h_tokens"),
)
TOKEN_NAMES: Final = tuple(each.name for each in TOKENS)
CACHE_NAMES: Final = tuple(each.name for each in TOKENS if not each.is_required)
TOKEN_COUNTERS: Final = tuple(each.counter for each in TOKENS)


def sum_token_counts(counts: UsageCounts) -> int:
    return sum(getattr(counts, name) for name in TOKEN_COUNTERS)
