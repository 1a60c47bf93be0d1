"""The days that a report covers: parsed, checked, and split into weeks for an export. Pure.

"today" depends on each org's time zone, so a period is resolved to dates for each zone. `find_listing_days` returns the
UTC days on which the counters of a period may be listed, including late flushes.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from price_keeper.ledger.counter_writes import DAY_SECONDS, MARKER_TTL_SECONDS, TOTAL_TTL_SECONDS

PERIOD_FORMS = (
    "today, yesterday, a day (2026-11-18), a month (2026-11), "
    "or a range of these (2026-11-01..2026-11-18, 2026-11-01..today)"
)

# A journal may be flushed up to this long after its calls, and lists them on the day of the flush. Only
# `replay --force` can flush later.
MAX_LATE_DAYS = MARKER_TTL_SECONDS // DAY_SECONDS
# The retention counts from the time of writing; differences of zones and clocks take less than two days of it.
MAX_AGE_DAYS = TOTAL_TTL_SECONDS // DAY_SECONDS - 2

_ONE_DAY = timedelta(days=1)
_DAYS_BACK = {"today": 0, "yesterday": 1}
_DAY_PATTERN = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_MONTH_PATTERN = re.compile(r"(\d{4})-(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ReportPeriod:
    """A range of days, both ends inclusive. An int stands for that many days before the org's today."""

    text: str
    first: date | int
    last: date | int

    def resolve(self, today: date) -> tuple[date, date]:
        return _resolve_day(self.first, today), _resolve_day(self.last, today)


def parse_report_period(text: str) -> ReportPeriod:
    """Raises ValueError that lists the valid forms."""
    first_text, separator, last_text = text.partition("..")
    first, last = _parse_part(first_text, text)[0], _parse_part(last_text if separator else first_text, text)[1]
    if isinstance(first, date) and isinstance(last, date) and first > last:
        raise ValueError(f"{text} ends before it begins")
    return ReportPeriod(text, first, last)


def check_report_period(period: ReportPeriod, now: float) -> None:
    """Raises ValueError for days in the future, or before the retention of counters."""
    today = find_utc_date(now)
    first, last = period.resolve(today)
    if first > last:
        raise ValueError(f"{period.text} ends before it begins")
    if first > today + _ONE_DAY:  # in some time zones it is tomorrow already
        raise ValueError(f"{first} is still to come; today is {today} in UTC")
    earliest = today - timedelta(days=MAX_AGE_DAYS)
    if first < earliest:
        retention_days = TOTAL_TTL_SECONDS // DAY_SECONDS
        raise ValueError(f"spend is kept for {retention_days} days: the first that can be asked for now is {earliest}")


def find_listing_days(period: ReportPeriod, now: float) -> list[date]:
    """The UTC days on which counters of these days may be listed.

    A day of an org begins up to 14 hours before the UTC day of the same date and ends up to 12 hours after it, so the
    range includes the adjacent days; MAX_LATE_DAYS more cover late flushes of journals. No listing day is after
    tomorrow, which only a wrong clock writes. The range also covers an org whose today differs from that of UTC.
    """
    today = find_utc_date(now)
    first, last = period.resolve(today)
    start = first - _ONE_DAY
    end = min(last, today) + _ONE_DAY + timedelta(days=MAX_LATE_DAYS)
    return [start + timedelta(days=number) for number in range((min(end, today + _ONE_DAY) - start).days + 1)]


def find_utc_date(now: float) -> date:
    return datetime.fromtimestamp(now, UTC).date()


def _resolve_day(day: date | int, today: date) -> date:
    return today - timedelta(days=day) if isinstance(day, int) else day


def _parse_part(text: str, period_text: str) -> tuple[date | int, date | int]:
    if text in _DAYS_BACK:
        return _DAYS_BACK[text], _DAYS_BACK[text]
    try:
        if match := _DAY_PATTERN.fullmatch(text):
            day = date(*map(int, match.groups()))
            return day, day
        if match := _MONTH_PATTERN.fullmatch(text):
            year, month = map(int, match.groups())
            return date(year, month, 1), date(year, month, monthrange(year, month)[1])
    except ValueError:
        raise ValueError(f"there is no {text}") from None
    raise ValueError(f"not a day or a range of days: {period_text!r}; it is {PERIOD_FORMS}")


# Each part also reads the listings of MAX_LATE_DAYS after it, so shorter parts would read those more often.
DAYS_PER_PART = 7
_UNFINISHED_DAYS = timedelta(days=3)  # earlier days are over in every zone, and precede every org's "yesterday"


def split_period(period: ReportPeriod, now: float) -> Iterator[ReportPeriod]:
    """Split a period into consecutive parts, none of which is empty in any zone."""
    part_first = period.first
    if isinstance(part_first, date):
        past_day = find_utc_date(now) - _UNFINISHED_DAYS
        latest = min(period.last, past_day) if isinstance(period.last, date) else past_day
        while part_first + timedelta(days=DAYS_PER_PART) <= latest:
            part_last = part_first + timedelta(days=DAYS_PER_PART - 1)
            yield ReportPeriod(f"{part_first}..{part_last}", part_first, part_last)
            part_first = part_last + timedelta(days=1)
    yield ReportPeriod(period.text, part_first, period.last)
