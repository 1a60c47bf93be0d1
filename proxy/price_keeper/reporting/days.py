"""Which days a report is about: as asked for, and where the counters of such days are listed. Pure."""

from __future__ import annotations

import re
from calendar import monthrange
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from price_keeper.recording.flush import DAY_SECONDS, MARKER_TTL_SECONDS, TOTAL_TTL_SECONDS

FORMS = (
    "today, yesterday, a day (2026-11-18), a month (2026-11), "
    "or a range of these (2026-11-01..2026-11-18, 2026-11-01..today)"
)

# A journal that turns up late is flushed for so long after its calls, and lists them on the day of that flush.
# Only what `replay --force` brings can come later.
LATE_DAYS = MARKER_TTL_SECONDS // DAY_SECONDS
# What is kept counts from the time of writing; zones and clocks take less than two days of it.
KEPT_DAYS = TOTAL_TTL_SECONDS // DAY_SECONDS - 2

_ONE_DAY = timedelta(days=1)
_WORDS = {"today": 0, "yesterday": 1}
_DAY = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_MONTH = re.compile(r"(\d{4})-(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Asked:
    """From one day to another, both included. A number is that many days before today, which is each org's own."""

    text: str
    first: date | int
    last: date | int

    def days(self, today: date) -> tuple[date, date]:
        return _on(self.first, today), _on(self.last, today)


def parse(text: str) -> Asked:
    """Raises ValueError that says what may be asked for."""
    begin, found, end = text.partition("..")
    first, last = _part(begin, text)[0], _part(end if found else begin, text)[1]
    if isinstance(first, date) and isinstance(last, date) and first > last:
        raise ValueError(f"{text} ends before it begins")
    return Asked(text, first, last)


def check(asked: Asked, now: float) -> None:
    """Raises ValueError where nothing can be known of these days."""
    today = utc_date(now)
    first, last = asked.days(today)
    if first > last:
        raise ValueError(f"{asked.text} ends before it begins")
    if first > today + _ONE_DAY:  # somewhere it is tomorrow already
        raise ValueError(f"{first} is still to come; today is {today} in UTC")
    earliest = today - timedelta(days=KEPT_DAYS)
    if first < earliest:
        kept = TOTAL_TTL_SECONDS // DAY_SECONDS
        raise ValueError(f"spend is kept for {kept} days: the first that can be asked for now is {earliest}")


def listing_days(asked: Asked, now: float) -> list[date]:
    """The UTC days on which counters of these days may be listed.

    A day of an org begins up to 14 hours before the UTC day of the same date and ends up to 12 hours after it, so it
    touches the days around; and LATE_DAYS more is how late a journal may be flushed. None lies beyond tomorrow, which
    is somebody's wrong clock. Where an org's today is not that of UTC, its day lies within these all the same.
    """
    today = utc_date(now)
    first, last = asked.days(today)
    start = first - _ONE_DAY
    end = min(last, today) + _ONE_DAY + timedelta(days=LATE_DAYS)
    return [start + timedelta(days=number) for number in range((min(end, today + _ONE_DAY) - start).days + 1)]


def utc_date(now: float) -> date:
    return datetime.fromtimestamp(now, UTC).date()


def utc_end(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + DAY_SECONDS


def _on(day: date | int, today: date) -> date:
    return today - timedelta(days=day) if isinstance(day, int) else day


def _part(text: str, whole: str) -> tuple[date | int, date | int]:
    if text in _WORDS:
        return _WORDS[text], _WORDS[text]
    try:
        if found := _DAY.fullmatch(text):
            day = date(*map(int, found.groups()))
            return day, day
        if found := _MONTH.fullmatch(text):
            year, month = map(int, found.groups())
            return date(year, month, 1), date(year, month, monthrange(year, month)[1])
    except ValueError:
        raise ValueError(f"there is no {text}") from None
    raise ValueError(f"not a day or a range of days: {whole!r}; it is {FORMS}")
