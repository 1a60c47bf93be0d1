"""What one call used, as values. Pure.

`ReportedCounts` is what one place of a response states, where None means that it is not stated. Several places are
merged with `merge_counts`; `build_usage` makes a `Usage` of the result: tokens by price dimension, the service tier,
the latency mode, a guardrail's units, and quantities of what else is sold by the piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_NO_UNITS: Mapping[str, int] = MappingProxyType({})


class Usage(NamedTuple):
    """Tokens by price dimension. `input` has none that were read from or written to a cache."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    tier: str = ""  # the service tier of the response; empty if it states none
    latency: str = ""  # its performance mode; empty if it states none
    units: Mapping[str, int] = _NO_UNITS  # of a guardrail, by policy
    quantities: Mapping[str, int] = _NO_UNITS  # of what else is sold by the piece, by price dimension


def make_plain_usage(input: int, output: int, cache_read: int) -> Usage:
    """The usage of most calls, made in half the time."""
    return tuple.__new__(Usage, (input, output, cache_read, 0, 0, "", "", _NO_UNITS, _NO_UNITS))


def sum_tokens(usage: Usage | None) -> int:
    """Return all tokens; -1 for no usage, which is less than a usage of zero."""
    return (
        -1
        if usage is None
        else usage.input + usage.output + usage.cache_read + usage.cache_write_5m + usage.cache_write_1h
    )


class ReportedCounts(NamedTuple):
    """`input` is without what a cache read or wrote, and `cache_write_1h` is a part of `cache_write`."""

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    cache_write_1h: int | None = None
    web_searches: int | None = None


NO_COUNTS: Final = ReportedCounts()


def merge_counts(one: ReportedCounts, other: ReportedCounts) -> ReportedCounts:
    """Merge what two places state about one response. Of two different numbers the larger one counts.

    A count that is too small loses money unnoticed, and one place is known to leave out what another counts
    (compactions, wrapped tokens).
    """
    if other is NO_COUNTS:
        return one
    one, other = _exclude_cached(one, other), _exclude_cached(other, one)
    return ReportedCounts(
        _larger(one.input, other.input),
        _larger(one.output, other.output),
        _larger(one.cache_read, other.cache_read),
        _larger(one.cache_write, other.cache_write),
        _larger(one.cache_write_1h, other.cache_write_1h),
        _larger(one.web_searches, other.web_searches),
    )


def _exclude_cached(counts: ReportedCounts, other: ReportedCounts) -> ReportedCounts:
    """Correct counts whose input includes what `other` states as read from or written to a cache."""
    is_whole = counts.input is not None and counts.input == sum_input(other)
    return counts._replace(input=other.input) if is_whole else counts


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def sum_input(counts: ReportedCounts) -> int | None:
    return None if counts.input is None else counts.input + (counts.cache_read or 0) + (counts.cache_write or 0)


def build_usage(counts: ReportedCounts, tier: str = "", latency: str = "") -> Usage:
    """Build a usage. Cache writes without a stated lifetime are for five minutes, which is Bedrock's default."""
    written = counts.cache_write or 0
    written_1h = min(counts.cache_write_1h or 0, written)
    return Usage(
        counts.input or 0,
        counts.output or 0,
        counts.cache_read or 0,
        written - written_1h,
        written_1h,
        tier,
        latency,
        quantities={"web_search": counts.web_searches} if counts.web_searches else _NO_UNITS,
    )
