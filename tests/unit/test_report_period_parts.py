"""Many days in pieces: each day in one piece, whatever org's zone it is."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from price_keeper.reports.report_period import DAYS_PER_PART, ReportPeriod, split_period

NOW = datetime(2026, 11, 19, 2, 30, tzinfo=UTC).timestamp()
TODAY = date(2026, 11, 19)
ENDS = st.one_of(st.integers(0, 1), st.integers(-400, 30).map(lambda ago: TODAY + timedelta(days=ago)))
BEGINS = st.one_of(st.integers(0, 1), st.integers(0, 400).map(lambda ago: TODAY - timedelta(days=ago)))


@given(BEGINS, ENDS, st.integers(-1, 1))
def test_each_day_is_in_one_piece(first: date | int, last: date | int, ahead: int) -> None:
    """`ahead` is the difference between an org's today and UTC's."""
    asked, today = ReportPeriod("", first, last), TODAY + timedelta(days=ahead)
    whole = asked.resolve(today)
    if whole[0] > whole[1]:
        return
    pieces = [each.resolve(today) for each in split_period(asked, NOW)]
    assert (pieces[0][0], pieces[-1][1]) == whole
    assert all(begin <= end for begin, end in pieces)
    assert all(end + timedelta(days=1) == begin for (_, end), (begin, _) in pairwise(pieces))
    over = min(whole[1], today)  # of days to come there is nothing
    assert all((min(end, over) - begin).days < 2 * DAYS_PER_PART for begin, end in pieces)
