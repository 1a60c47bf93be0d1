"""Many days in pieces, so that of a year no more is held than of one piece. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

from price_keeper.reporting.days import ReportPeriod, find_utc_date

# Of each piece, what was written up to LATE_DAYS after it is looked through: shorter ones would read that more often.
DAYS_PER_PART = 7
_UNFINISHED_DAYS = timedelta(days=3)  # by any org's zone these days are over, and "yesterday" is later


def split_period(period: ReportPeriod, now: float) -> Iterator[ReportPeriod]:
    """One behind the other, from the first day to the last; none of them is empty in any zone."""
    part_first = period.first
    if isinstance(part_first, date):
        past_day = find_utc_date(now) - _UNFINISHED_DAYS
        latest = min(period.last, past_day) if isinstance(period.last, date) else past_day
        while part_first + timedelta(days=DAYS_PER_PART) <= latest:
            part_last = part_first + timedelta(days=DAYS_PER_PART - 1)
            yield ReportPeriod(f"{part_first}..{part_last}", part_first, part_last)
            part_first = part_last + timedelta(days=1)
    yield ReportPeriod(period.text, part_first, period.last)
