"""Days as they are asked for, in any zone, and where their counters are looked for."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.ledger.counter_writes import DAY_SECONDS, MARKER_TTL_SECONDS, TOTAL_TTL_SECONDS
from price_keeper.org_calendar import find_day_span, find_org_date
from price_keeper.reports.report_period import ReportPeriod, check_report_period, find_listing_days, parse_report_period

from tests.support.effort import tries

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()
TODAY = date(2026, 11, 18)
ZONES = sorted(available_timezones() - {"localtime", "Factory"})


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("today", TODAY, TODAY),
        ("yesterday", date(2026, 11, 17), date(2026, 11, 17)),
        ("2026-11-03", date(2026, 11, 3), date(2026, 11, 3)),
        ("2026-11-03..2026-11-05", date(2026, 11, 3), date(2026, 11, 5)),
        ("2026-11-03..today", date(2026, 11, 3), TODAY),
        ("2026-11-03..yesterday", date(2026, 11, 3), date(2026, 11, 17)),
        ("yesterday..today", date(2026, 11, 17), TODAY),
        ("2026-11", date(2026, 11, 1), date(2026, 11, 30)),
        ("2026-02", date(2026, 2, 1), date(2026, 2, 28)),
        ("2026-09..2026-10", date(2026, 9, 1), date(2026, 10, 31)),
        ("2026-09..2026-10-15", date(2026, 9, 1), date(2026, 10, 15)),
    ],
)
def test_period_is_parsed(text: str, first: date, last: date) -> None:
    asked = parse_report_period(text)
    check_report_period(asked, NOON)
    assert asked.resolve(TODAY) == (first, last)
    assert asked.text == text


@pytest.mark.parametrize(
    "text",
    ["", "tomorrow", "20261118", "2026-W47-3", "18.11.2026", "2026-11-18..", "..2026-11-18", "..", "2026-11-1", "-1",
     "2026-11-18...2026-11-19", "2026-11-18..2026-11-19..2026-11-20", "٢٠٢٦-١١-١٨", " today"],
)  # fmt: skip
def test_malformed_period_lists_valid_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"today, yesterday, a day \(2026-11-18\), a month \(2026-11\), or a range"):
        parse_report_period(text)


@pytest.mark.parametrize("text", ["2026-02-30", "2026-13", "0000-01-01", "2026-11-18..2026-11-31"])
def test_nonexistent_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="there is no "):
        parse_report_period(text)


def test_reversed_range_is_refused() -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_report_period("2026-11-18..2026-11-17")
    with pytest.raises(ValueError, match="ends before it begins"):
        check_report_period(parse_report_period("today..yesterday"), NOON)
    with pytest.raises(ValueError, match="ends before it begins"):
        check_report_period(parse_report_period("2026-11-19..today"), NOON)


def test_future_day_is_refused() -> None:
    check_report_period(parse_report_period("2026-11-19"), NOON)  # in Kiritimati it is that day
    check_report_period(parse_report_period("2026-11-01..9999-12-31"), NOON)
    assert find_listing_days(parse_report_period("2026-11-01..9999-12-31"), NOON)[-1] == TODAY + timedelta(days=1)
    with pytest.raises(ValueError, match="2026-11-20 is still to come; today is 2026-11-18 in UTC"):
        check_report_period(parse_report_period("2026-11-20"), NOON)


def test_day_beyond_retention_is_refused() -> None:
    earliest = date(2025, 10, 16)
    check_report_period(parse_report_period(f"{earliest}..today"), NOON)
    with pytest.raises(ValueError, match=rf"kept for 400 days: .* {earliest}$"):
        check_report_period(parse_report_period("2025-10-15..today"), NOON)
    with pytest.raises(ValueError, match="kept for 400 days"):
        check_report_period(parse_report_period("0001-01-01..today"), NOON)


LATEST = MARKER_TTL_SECONDS - DAY_SECONDS  # after a call's start, of a flush without force
moments = st.floats(min_value=datetime(2020, 1, 1, tzinfo=UTC).timestamp(), max_value=NOON)


@given(moments, st.sampled_from(ZONES))
@settings(max_examples=tries(200))
def test_earliest_day_is_wholly_retained(now: float, zone_name: str) -> None:
    zone = ZoneInfo(zone_name)
    earliest = next(day for back in range(400, 390, -1) if _is_allowed(day := _utc(now) - timedelta(days=back), now))
    begins = find_day_span(earliest, zone).start
    assert begins + TOTAL_TTL_SECONDS > now


def _is_allowed(day: date, now: float) -> bool:
    try:
        check_report_period(ReportPeriod(str(day), day, day), now)
    except ValueError:
        return False
    return True


@given(
    moments,
    st.sampled_from(ZONES),
    st.integers(0, 300),
    st.integers(0, 60),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, LATEST) | st.just(LATEST),
)
@settings(max_examples=tries(500))
def test_late_flush_in_any_zone_is_within_listing_days(
    now: float, zone_name: str, ago: int, length: int, at: float, late: float
) -> None:
    """A call is listed on the UTC day of its flush, which is up to 34 days after its start."""
    zone = ZoneInfo(zone_name)
    today = find_org_date(now, zone)
    first, last = today - timedelta(days=ago + length), today - timedelta(days=ago)
    days = range(length + 1)
    day = first + timedelta(days=days[int(at * len(days))])
    span = find_day_span(day, zone)
    started = span.start + at * (span.end - span.start)
    flushed = started + late
    if started > now or flushed > now:
        return
    for asked in (ReportPeriod("", first, last), ReportPeriod("", ago + length, ago)):
        assert _utc(flushed) in find_listing_days(asked, now)


def _utc(at: float) -> date:
    return datetime.fromtimestamp(at, UTC).date()
