"""Token counts as one place of an answer states them, and how several places are merged into one usage. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from price_keeper.metering.usage import Usage


class ReportedCounts(NamedTuple):
    """`input` is without what a cache read or wrote, and `cache_write_1h` a part of `cache_write`."""

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    cache_write_1h: int | None = None


NO_COUNTS: Final = ReportedCounts()


def merge_counts(one: ReportedCounts, other: ReportedCounts) -> ReportedCounts:
    """Two places that tell of the same answer. Of two different numbers the larger stands: a count that is too small
    loses money unseen, and one place is known to leave out what another counts (compactions, wrapped tokens)."""
    if other is NO_COUNTS:
        return one
    one, other = _exclude_cached(one, other), _exclude_cached(other, one)
    return ReportedCounts(
        _larger(one.input, other.input),
        _larger(one.output, other.output),
        _larger(one.cache_read, other.cache_read),
        _larger(one.cache_write, other.cache_write),
        _larger(one.cache_write_1h, other.cache_write_1h),
    )


def _exclude_cached(counts: ReportedCounts, other: ReportedCounts) -> ReportedCounts:
    """Where one place counts as plain input what the other says was read from a cache or written to it."""
    is_whole = counts.input is not None and counts.input == sum_input(other)
    return counts._replace(input=other.input) if is_whole else counts


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def sum_input(counts: ReportedCounts) -> int | None:
    return None if counts.input is None else counts.input + (counts.cache_read or 0) + (counts.cache_write or 0)


def build_usage(counts: ReportedCounts, tier: str = "", latency: str = "") -> Usage:
    """Writes to a cache that are not said to be for an hour are for five minutes, as they are if nobody asks more."""
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
    )
