"""Org days in every zone, against a slow model that only ever asks for the local time of an instant."""

from __future__ import annotations

import math
import zoneinfo
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.org_calendar import (
    Period,
    PeriodSpan,
    find_day_span,
    find_org_date,
    find_span,
    format_day,
    format_org_day,
    iterate_day_spans,
    load_zone,
    parse_day,
    parse_span_key,
)

from tests.support.effort import tries

HOUR, DAY = 3600, 86_400
ZONES = sorted(zoneinfo.available_timezones())
ONE_DAY = timedelta(days=1)


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> int:
    return int(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp())


# ---------------------------------------------------------------- the model


def lead(at: int, zone: ZoneInfo) -> int:
    """How many seconds the zone's clocks are ahead of UTC."""
    return int(datetime.fromtimestamp(at, zone).utcoffset().total_seconds())


def changes(zone: ZoneInfo, start: int, end: int, step: int) -> list[int]:
    """Every instant in the range at which the clocks change, found by looking once a step."""
    found = []
    for low, high in pairwise([*range(start, end, step), end]):
        before = lead(low, zone)
        if before == lead(high, zone):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if lead(middle, zone) == before else (low, middle)
        found.append(high)
    return found


class Model:
    """A few days of one zone as stretches of steady clocks."""

    def __init__(self, zone: ZoneInfo, around: int, step: int = HOUR) -> None:
        start, end = around - 4 * DAY, around + 4 * DAY
        edges = [start, *changes(zone, start, end, step), end]
        self._stretches = [(low, high, lead(low, zone)) for low, high in pairwise(edges)]

    def first_instant(self, day: date) -> int:
        """The first instant at which the local clock shows the day or a later one."""
        midnight = utc(day.year, day.month, day.day)
        return next(max(low, midnight - ahead) for low, high, ahead in self._stretches if midnight < high + ahead)

    def day_at(self, at: int) -> date:
        """The latest local date shown up to and including this instant."""
        shown = [min(high - 1, at) + ahead for low, high, ahead in self._stretches if low <= at]
        return datetime.fromtimestamp(max(shown), UTC).date()


def key_of(period: Period, day: date) -> str:
    return day.strftime({"day": "DAY#%Y%m%d", "week": "WEEK#%G-W%V", "month": "MONTH#%Y%m"}[period.value])


def model_span(period: Period, at: int, zone: ZoneInfo) -> PeriodSpan:
    first = Model(zone, at).day_at(at)
    key = key_of(period, first)
    following = first
    while key_of(period, first - ONE_DAY) == key:
        first -= ONE_DAY
    while key_of(period, following) == key:
        following += ONE_DAY
    start, end = (Model(zone, utc(d.year, d.month, d.day)).first_instant(d) for d in (first, following))
    return PeriodSpan(key, start, end)


def test_model_agrees_with_walk_over_every_second():
    """St. John's falls back over midnight: the local date goes forward, back, and forward again."""
    zone = ZoneInfo("America/St_Johns")
    around = utc(2010, 11, 7, 2, 30)
    model = Model(zone, around)
    latest, begins = date.min, {}
    for at in range(around - 8 * HOUR, around + 8 * HOUR):
        latest = max(latest, datetime.fromtimestamp(at, zone).date())
        begins.setdefault(latest, at)
        if at % 60 in (0, 59):
            assert model.day_at(at) == latest
    assert begins[date(2010, 11, 7)] == model.first_instant(date(2010, 11, 7))


# ---------------------------------------------------------------- every zone


@st.composite
def instants(draw: st.DrawFn) -> tuple[ZoneInfo, int]:
    """An instant within twenty years back and forth; half of them in the days around a change of the clocks."""
    zone = ZoneInfo(draw(st.sampled_from(ZONES)))
    at = draw(st.integers(utc(2006, 1, 1), utc(2046, 12, 31)))
    if draw(st.booleans()):
        nearby = changes(zone, at, at + 200 * DAY, step=5 * DAY)
        at = draw(st.sampled_from(nearby or [at])) + draw(st.integers(-2 * DAY, 2 * DAY))
    return zone, at


@settings(max_examples=tries(300), deadline=None)
@given(where=instants(), period=st.sampled_from(Period), fraction=st.sampled_from([0, 0.5, 0.999_999_7]))
def test_span_matches_model(where, period, fraction):
    zone, at = where
    found = find_span(period, at + fraction, zone)
    assert found == model_span(period, at, zone)
    assert found.covers(at + fraction)
    assert parse_span_key(found.key, zone) == found
    assert find_span(period, found.end, zone).start == found.end
    assert find_span(period, found.start - 1, zone).end == found.start


@settings(max_examples=tries(250), deadline=None)
@given(where=instants(), later=st.one_of(st.integers(0, 2 * HOUR), st.integers(0, 400 * DAY)))
def test_days_and_keys_never_go_back(where, later):
    zone, at = where
    for period in Period:
        assert find_span(period, at, zone).key <= find_span(period, at + later, zone).key
    assert format_org_day(at, zone) <= format_org_day(at + later, zone)


def test_every_clock_change_in_twenty_years_matches_model():
    """No zone changes its clocks twice within two days, so looking every other day misses none."""
    looked_at = set()  # what zones have in common need not be looked at in each of them
    for name in ZONES:
        zone = ZoneInfo(name)
        for change in changes(zone, utc(2006, 1, 1), utc(2027, 1, 1), step=2 * DAY):
            around = (change, *(lead(change + days * DAY, zone) for days in range(-4, 5)))
            if around not in looked_at:
                looked_at.add(around)
                check_around(zone, change)


def check_around(zone: ZoneInfo, change: int) -> None:
    model = Model(zone, change, step=12 * HOUR)
    middle = datetime.fromtimestamp(change + lead(change, zone), UTC).date()
    days = [find_day_span(middle + n * ONE_DAY, zone) for n in range(-2, 3)]
    for n, day in enumerate(days, start=-2):
        assert day.start == model.first_instant(middle + n * ONE_DAY), (zone, day)
    for day, following in pairwise(days):
        assert day.end == following.start, (zone, day)
    edges = [moment for day in days for moment in (day.start - 1, day.start)]
    moments = sorted({change - 1, change, change + HOUR, *edges})
    for at in moments:
        day = model.day_at(at)
        assert find_org_date(at, zone) == day, (zone, at)
        for period in Period:
            found = find_span(period, at, zone)
            assert found.covers(at), (zone, at)
            assert found.key == key_of(period, day), (zone, at)
            assert find_span(period, found.end, zone).start == found.end, (zone, at)


# ---------------------------------------------------------------- worked out by hand

# Zone, day, first instant, first instant after it; the comments give both in UTC.
# Clock changes all lie in the past: no government can still move them.
BY_HAND = {
    "an ordinary day": ("UTC", "20261118", 1_794_960_000, 1_795_046_400),
    "23 hours": ("America/New_York", "20240310", 1_710_046_800, 1_710_129_600),  # 10th 05:00, 11th 04:00
    "25 hours": ("America/New_York", "20241103", 1_730_606_400, 1_730_696_400),  # 3rd 04:00, 4th 05:00
    "23.5 hours": ("Australia/Lord_Howe", "20241006", 1_728_135_000, 1_728_219_600),  # 5th 13:30, 6th 13:00
    "24.5 hours": ("Australia/Lord_Howe", "20240407", 1_712_408_400, 1_712_496_600),  # 6th 13:00, 7th 13:30
    # Midnight is skipped: the day begins at 01:00.
    "Beirut, spring": ("Asia/Beirut", "20240331", 1_711_836_000, 1_711_918_800),  # 30th 22:00, 31st 21:00
    "Cairo, spring": ("Africa/Cairo", "20230428", 1_682_632_800, 1_682_715_600),  # 27th 22:00, 28th 21:00
    "Havana, spring": ("America/Havana", "20240310", 1_710_046_800, 1_710_129_600),  # 10th 05:00, 11th 04:00
    "Asuncion": ("America/Asuncion", "20231001", 1_696_132_800, 1_696_215_600),  # 1st 04:00, 2nd 03:00
    "Sao Paulo": ("America/Sao_Paulo", "20181104", 1_541_300_400, 1_541_383_200),  # 4th 03:00, 5th 02:00
    # 23:30 to 00:30 was skipped, so that midnight lies within the gap and not at its edge.
    "Toronto": ("America/Toronto", "19190331", -1_601_753_400, -1_601_668_800),  # 31st 04:30, 1st 04:00
    # From 01:00 back to 00:00: the first midnight counts.
    "Havana, autumn": ("America/Havana", "20241103", 1_730_606_400, 1_730_696_400),  # 3rd 04:00, 4th 05:00
    # From 24:00 back to 23:00: the day before is the longer one.
    "Beirut, autumn": ("Asia/Beirut", "20241026", 1_729_890_000, 1_729_980_000),  # 25th 21:00, 26th 22:00
    # From 00:01 back to 23:01: the new day has begun and continues.
    "St. John's, before": ("America/St_Johns", "20101106", 1_289_010_600, 1_289_097_000),  # 02:30, 02:30
    "St. John's, after": ("America/St_Johns", "20101107", 1_289_097_000, 1_289_187_000),  # 02:30, 8th 03:30
    # A day was left out to move across the date line.
    "Apia, before": ("Pacific/Apia", "20111229", 1_325_152_800, 1_325_239_200),  # 29th 10:00, 30th 10:00
    "Apia, never": ("Pacific/Apia", "20111230", 1_325_239_200, 1_325_239_200),
    "Apia, after": ("Pacific/Apia", "20111231", 1_325_239_200, 1_325_325_600),  # 30th 10:00, 31st 10:00
    "Kwajalein, never": ("Pacific/Kwajalein", "19930821", 745_934_400, 745_934_400),  # 21st 12:00
}


@pytest.mark.parametrize(("name", "day", "start", "end"), BY_HAND.values(), ids=BY_HAND.keys())
def test_hand_computed_days_match(name, day, start, end):
    zone = ZoneInfo(name)
    assert find_day_span(parse_day(day), zone) == PeriodSpan(f"DAY#{day}", start, end)
    if start < end:
        assert (
            format_org_day(start, zone)
            == format_org_day(end - 1, zone)
            == format_org_day(math.nextafter(end, -math.inf), zone)
            == day
        )
    assert format_org_day(start - 1, zone) < day < format_org_day(end, zone)


def test_org_day_stays_when_local_date_goes_back():
    zone = ZoneInfo("America/St_Johns")
    at = 1_289_097_060 + 10  # ten seconds after 00:01 became 23:01 again
    assert datetime.fromtimestamp(at, zone).date() == date(2010, 11, 6)
    assert find_org_date(at, zone) == date(2010, 11, 7)


@pytest.mark.parametrize(
    ("period", "day", "key", "first", "following"),
    [
        (Period.WEEK, "20261118", "WEEK#2026-W47", "20261116", "20261123"),
        (Period.WEEK, "20261231", "WEEK#2026-W53", "20261228", "20270104"),
        (Period.WEEK, "20270101", "WEEK#2026-W53", "20261228", "20270104"),
        (Period.WEEK, "20210103", "WEEK#2020-W53", "20201228", "20210104"),
        (Period.WEEK, "20210104", "WEEK#2021-W01", "20210104", "20210111"),
        (Period.WEEK, "20241230", "WEEK#2025-W01", "20241230", "20250106"),
        (Period.MONTH, "20261118", "MONTH#202611", "20261101", "20261201"),
        (Period.MONTH, "20261231", "MONTH#202612", "20261201", "20270101"),
        (Period.MONTH, "20240229", "MONTH#202402", "20240201", "20240301"),
        (Period.MONTH, "20260228", "MONTH#202602", "20260201", "20260301"),
        (Period.DAY, "20240229", "DAY#20240229", "20240229", "20240301"),
    ],
)
@pytest.mark.parametrize("name", ["UTC", "America/New_York", "Pacific/Kiritimati"])
def test_weeks_and_months_match(name, period, day, key, first, following):
    zone = ZoneInfo(name)
    edges = [find_day_span(parse_day(edge), zone).start for edge in (first, following)]
    assert find_span(period, find_day_span(parse_day(day), zone).start, zone) == PeriodSpan(key, *edges)
    assert parse_span_key(key, zone) == PeriodSpan(key, *edges)


def test_days_of_range_skip_missing_date():
    days = list(iterate_day_spans(date(2011, 12, 28), date(2012, 1, 1), ZoneInfo("Pacific/Apia")))
    assert [day.key[-2:] for day in days] == ["28", "29", "31", "01"]
    assert all(day.end == following.start for day, following in pairwise(days))
    assert list(iterate_day_spans(date(2026, 1, 2), date(2026, 1, 1), ZoneInfo("UTC"))) == []


@pytest.mark.parametrize(
    "key",
    [
        "DAY#20260230",
        "DAY#2026111",
        "DAY#202611180",
        "DAY#20261118\n",
        "day#20261118",
        "20261118",
        "DAY#٢٠٢٦١١١٨",
        "DAY#99991231",
        "WEEK#2026-W54",
        "WEEK#2025-W53",
        "WEEK#2026-W00",
        "WEEK#2026W47",
        "WEEK#9999-W52",
        "MONTH#202613",
        "MONTH#202600",
        "MONTH#2026-11",
        "MONTH#999912",
        "YEAR#2026",
        "",
    ],
)
def test_impossible_span_key_is_refused(key):
    with pytest.raises(ValueError, match=r"day, week or month"):
        parse_span_key(key, ZoneInfo("UTC"))


@pytest.mark.parametrize("text", ["2026-11-18", "20261118 ", "20260229", "٢٠٢٦١١١٨", ""])
def test_day_is_eight_digits_of_a_real_date(text):
    with pytest.raises(ValueError, match="day"):
        parse_day(text)


@given(st.dates())
def test_day_round_trips_through_text(day):
    assert parse_day(format_day(day)) == day


def test_every_zone_loads_by_name():
    for name in set(ZONES) - {"localtime", "Factory"}:
        assert load_zone(name).key == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Europe/Berln", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("Berlin", "Europe/Berlin"),
        ("New York", "America/New_York"),
        ("US/Easterm", "US/Eastern"),
        ("../../usr/share/zoneinfo/Europe/Paris", "Europe/Paris"),
        ("/usr/share/zoneinfo/UTC", ""),
        ("posix/Europe/Paris", "Europe/Paris"),
        ("Europe/Paris\0", "Europe/Paris"),
        ("localtime", ""),
        ("Factory", ""),
        ("Europe", ""),
        ("", ""),
        ("x" * 1_000_000, ""),
    ],
)
def test_unknown_zone_is_refused_with_nearest_name(name, nearest):
    with pytest.raises(ValueError, match=f"the nearest known one is '{nearest}") as refused:
        load_zone(name)
    assert len(str(refused.value)) < 200
