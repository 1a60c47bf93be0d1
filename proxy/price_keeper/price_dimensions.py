"""What Bedrock charges for, one row for each price dimension, and the counters that add it up. Pure.

START HERE for a new price dimension: a row of `UNITS`, and in `usage.unit_usage` a reader that knows how requests or
answers state it. If it is not added up with another one, it also needs a field at the end of `UsageCounts` and its row
in `COUNTED_UNITS`. The names in prices, metrics, the journal, the store, reports and exports follow from these rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class UsageCounts(NamedTuple):
    """What is counted. All fields but `pico` are named like the attributes in the store.

    The journal has the values by position. So a field may be added at the end, but none may be inserted, moved or
    removed without a new JOURNAL_FORMAT. Older versions know the fields up to `pico`.
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
    search_units: int = 0
    images: int = 0
    video_seconds: int = 0
    tool_calls: int = 0
    routed_requests: int = 0

    def plus(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__add__, self, other))

    def less(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts._make(map(int.__sub__, self, other))

    def by_name(self) -> dict[str, int]:
        """All counts but the money."""
        return {name: number for name, number in zip(self._fields, self, strict=True) if name != "pico"}

    def to_values(self) -> tuple[int, ...]:
        """The values for the journal. Older versions can read them if there are none that these have no field for."""
        return self.up_to_pico() if self[_OLD_FIELDS:] == NO_NEW_COUNTS else self[:]

    def up_to_pico(self) -> tuple[int, ...]:
        """The values that all versions write."""
        return self[:_OLD_FIELDS]


_OLD_FIELDS: Final = UsageCounts._fields.index("pico") + 1
NO_NEW_COUNTS: Final = UsageCounts()[_OLD_FIELDS:]  # of the fields that older versions do not know
COUNT_FIELDS: Final = tuple(name for name in UsageCounts._fields if name != "pico")


class CountedUnit(NamedTuple):
    """How a counter is shown."""

    counter: str  # its field of `UsageCounts`
    focus_column: str
    title: str = ""  # in tables, and as a meter of FOCUS; empty for what has a column of its own
    focus_unit: str = ""


COUNTED_UNITS: Final = (
    CountedUnit("requests", "x_Requests"),
    CountedUnit("estimated_requests", "x_EstimatedRequests"),
    CountedUnit("input_tokens", "x_InputTokens"),
    CountedUnit("output_tokens", "x_OutputTokens"),
    CountedUnit("cache_read_tokens", "x_CacheReadTokens"),
    CountedUnit("cache_write_5m_tokens", "x_CacheWriteFiveMinuteTokens"),
    CountedUnit("cache_write_1h_tokens", "x_CacheWriteOneHourTokens"),
    CountedUnit("guardrail_units", "x_GuardrailUnits"),
    CountedUnit("search_units", "x_SearchUnits", "Searches", "Searches"),
    CountedUnit("images", "x_Images", "Images", "Images"),
    CountedUnit("video_seconds", "x_VideoSeconds", "Seconds", "Seconds"),
    CountedUnit("tool_calls", "x_ToolCalls", "Calls", "Calls"),
    CountedUnit("routed_requests", "x_RoutedRequests", "Routed", "Requests"),
)
PIECES: Final = tuple(unit for unit in COUNTED_UNITS if unit.title)  # what is sold by the piece


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


class UnitDimension(NamedTuple):
    """Something other than tokens that is sold by the piece."""

    name: str  # of its price in the configuration, and its type in metrics
    counter: str  # its field of `UsageCounts`
    general: str = ""  # the dimension whose price holds if this one has none


UNITS: Final = (
    UnitDimension("search_unit", "search_units"),  # a query of a rerank model, with up to 100 documents
    UnitDimension("image", "images"),
    UnitDimension("image_512_standard", "images", "image"),  # up to 512 by 512 pixels
    UnitDimension("image_512_premium", "images", "image"),
    UnitDimension("image_1024_standard", "images", "image"),
    UnitDimension("image_1024_premium", "images", "image"),
    UnitDimension("image_2048_standard", "images", "image"),
    UnitDimension("image_2048_premium", "images", "image"),
    UnitDimension("video_second", "video_seconds"),
    UnitDimension("video_second_540p", "video_seconds", "video_second"),
    UnitDimension("video_second_720p", "video_seconds", "video_second"),
    UnitDimension("web_search", "tool_calls"),  # by a tool that the model's side runs
    UnitDimension("routed_request", "routed_requests"),  # a prompt router's fee
)
UNITS_BY_NAME: Final = {each.name: each for each in UNITS}
