"""Many days in pieces, so that of a year no more is held than of one piece. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

from price_keeper.reporting.days import Asked, utc_date

# Of each piece, what was written up to LATE_DAYS after it is looked through: shorter ones would read that more often.
DAYS = 7
_BEFORE_NOW = timedelta(days=3)  # by any org's zone these days are over, and "yesterday" is later


def stretches(asked: Asked, now: float) -> Iterator[Asked]:
    """One behind the other, from the first day to the last; none of them is empty in any zone."""
    begins = asked.first
    if isinstance(begins, date):
        over = utc_date(now) - _BEFORE_NOW
        latest = min(asked.last, over) if isinstance(asked.last, date) else over
        while begins + timedelta(days=DAYS) <= latest:
            ends = begins + timedelta(days=DAYS - 1)
            yield Asked(f"{begins}..{ends}", begins, ends)
            begins = ends + timedelta(days=1)
    yield Asked(asked.text, begins, asked.last)
