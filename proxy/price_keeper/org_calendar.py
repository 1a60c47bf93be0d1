"""Days, weeks and months in an org's own time zone. Pure.

An org's day begins at the first instant at which the local date of its zone is that day or a later one. This rule
covers days of 23 and 25 hours, days that begin after midnight because a clock change skipped midnight, clocks that fall
back into the day before (the new day continues), and skipped dates, which are days of no length.

Start with `find_span`: the spans of one period and zone leave no gap and never overlap. Keys such as `DAY#20261118`
are stored, so their form must not change.
"""

from __future__ import annotations

import math
import re
import zoneinfo
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from difflib import get_close_matches
from enum import Enum
from functools import cache, lru_cache
from zoneinfo import ZoneInfo

_ONE_DAY = timedelta(days=1)
_ONE_WEEK = timedelta(weeks=1)
# Names that the zone database lists but that are no places: the host's own setting, and "not set yet".
_PLACELESS = frozenset({"localtime", "Factory"})
_MAX_NAME_LENGTH = 64  # limits the work on a name from outside, and how much of it appears in messages
_DAY_TEXT = re.compile(r"(\d{4})(\d\d)(\d\d)", re.ASCII)
_SPAN_KEY = re.compile(r"DAY#(?P<day>\d{8})|WEEK#(?P<year>\d{4})-W(?P<week>\d\d)|MONTH#(?P<month>\d{6})", re.ASCII)


class Period(Enum):
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class PeriodSpan:
    """One period of one zone, from `start` up to but not including `end`, in whole epoch seconds."""

    key: str
    start: int
    end: int

    def covers(self, at_epoch: float) -> bool:
        return self.start <= at_epoch < self.end


def find_span(period: Period, at_epoch: float, zone: ZoneInfo) -> PeriodSpan:
    """The day, week or month of the zone, by `period`, in which this instant lies. There is always exactly one."""
    return _find_span_containing(period, find_org_date(at_epoch, zone), zone)


def find_day_span(day: date, zone: ZoneInfo) -> PeriodSpan:
    return _find_span_containing(Period.DAY, day, zone)


def parse_span_key(key: str, zone: ZoneInfo) -> PeriodSpan:
    """The span with this key, or ValueError if no span can have it."""
    match = _SPAN_KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"not the key of a day, week or month: {key[:_MAX_NAME_LENGTH]!r}")
    try:
        if match["day"]:
            return find_day_span(parse_day(match["day"]), zone)
        if match["week"]:
            monday = date.fromisocalendar(int(match["year"]), int(match["week"]), 1)
            return _find_span_containing(Period.WEEK, monday, zone)
        return _find_span_containing(Period.MONTH, parse_day(match["month"] + "01"), zone)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"no such day, week or month: {key!r}") from error


def iterate_day_spans(first: date, last: date, zone: ZoneInfo) -> Iterator[PeriodSpan]:
    """The days from first to last, both included, without skipped dates, which have no length."""
    for ordinal in range(first.toordinal(), last.toordinal() + 1):
        day = find_day_span(date.fromordinal(ordinal), zone)
        if day.start < day.end:
            yield day


def find_org_date(at_epoch: float, zone: ZoneInfo) -> date:
    """The org's day at this instant: never earlier than at any instant before."""
    day = _compute_local_date(math.floor(at_epoch), zone)
    # The clocks may have fallen back into the day before, but a day that has begun continues.
    while _find_day_start(day + _ONE_DAY, zone) <= at_epoch:
        day += _ONE_DAY
    return day


def format_org_day(at_epoch: float, zone: ZoneInfo) -> str:
    return format_day(find_org_date(at_epoch, zone))


def format_day(day: date) -> str:
    return f"{day.year:04}{day.month:02}{day.day:02}"


def parse_day(text: str) -> date:
    match = _DAY_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a day as YYYYMMDD: {text[:_MAX_NAME_LENGTH]!r}")
    return date(int(match[1]), int(match[2]), int(match[3]))


def load_zone(name: str) -> ZoneInfo:
    """The zone of exactly this name. Only a known name is looked up, so no name can act as a file path. Raises
    ValueError."""
    if name not in _list_zone_names():
        shown_name, nearest_name = name[:_MAX_NAME_LENGTH], _find_nearest_zone(name)
        raise ValueError(f"unknown time zone {shown_name!r}; the nearest known one is {nearest_name!r}")
    return ZoneInfo(name)


def _find_span_containing(period: Period, day: date, zone: ZoneInfo) -> PeriodSpan:
    key, first, following = _find_period_bounds(period, day)
    return PeriodSpan(key, _find_day_start(first, zone), _find_day_start(following, zone))


def _find_period_bounds(period: Period, day: date) -> tuple[str, date, date]:
    """The key of the period that holds the day, its first day, and the first day after it."""
    if period is Period.DAY:
        return f"DAY#{format_day(day)}", day, day + _ONE_DAY
    if period is Period.WEEK:
        year, week, weekday = day.isocalendar()
        monday = day - (weekday - 1) * _ONE_DAY
        return f"WEEK#{year:04}-W{week:02}", monday, monday + _ONE_WEEK
    first = day.replace(day=1)
    following = (first + 31 * _ONE_DAY).replace(day=1)
    return f"MONTH#{format_day(day)[:6]}", first, following


def _find_day_start(day: date, zone: ZoneInfo) -> int:
    """The first instant at which the local date is this day or a later one."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    first = int(midnight.timestamp())
    second = int(midnight.replace(fold=1).timestamp())
    if first <= second:  # midnight occurs once or twice
        return first
    # Midnight is skipped, and the two interpretations lie on either side of the clock change that skips it.
    return second + bisect_left(range(second, first), day, key=lambda at: _compute_local_date(at, zone))


def _compute_local_date(at_epoch: int, zone: ZoneInfo) -> date:
    # Whole seconds only: fromtimestamp rounds, and could round the last instant of a day into the next.
    return datetime.fromtimestamp(at_epoch, zone).date()


@cache
def _list_zone_names() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones()) - _PLACELESS


@lru_cache(256)
def _find_nearest_zone(name: str) -> str:
    """The known name most like this one, whatever its case and with or without the continent."""
    spellings = {known.rpartition("/")[2].casefold(): known for known in sorted(_list_zone_names())}
    spellings |= {known.casefold(): known for known in sorted(_list_zone_names())}
    matches = get_close_matches(name[:_MAX_NAME_LENGTH].casefold(), spellings, n=1, cutoff=0.0)
    return spellings[matches[0]]
