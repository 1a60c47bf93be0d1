"""The table in a terminal: aligned whatever names there are, with bars that fit, in what the terminal can show."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.ledger.ledger_entries import UsageCounts
from price_keeper.reports.report_rows import ReportRow
from price_keeper.reports.spend_table import MAX_BAR_WIDTH, TableStyle, format_table, make_printable

from tests.support.effort import tries

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def counts(pico: int, *, requests: int = 1, estimated: int = 0, units: int = 0, cached: int = 0) -> UsageCounts:
    return UsageCounts(requests, estimated, 1200, 345, cached, 0, 0, units, pico)


def render(rows: list[ReportRow], by: list[str], width: int = 80, **style: bool) -> list[str]:
    return format_table(rows, by, {}, TableStyle(width, **style))


ROWS = [
    ReportRow(("shop", "premium"), counts(9_000_000_000, requests=1234)),
    ReportRow((None, "economy"), counts(1_000_000_000)),
]


def test_small_table_is_formatted() -> None:
    assert render(ROWS, ["app", "label"]) == [
        "App    Label    Requests  Input  Output       Cost",
        "shop   premium     1,234  1,200     345  $0.009000   90%  " + "█" * 22,
        "-      economy         1  1,200     345  $0.001000   10%  ██▌",
        "─" * 50,
        "Total              1,235  2,400     690  $0.010000",
    ]


def test_table_without_unicode_and_colors() -> None:
    lines = render(ROWS, ["app", "label"], is_unicode=False)
    assert all(line.isascii() for line in lines)
    assert lines[1].endswith("90%  " + "#" * 22)
    assert lines[2].endswith("10%  ##")
    assert set(lines[3]) == {"-"}


def test_colors_change_only_color() -> None:
    plain, colored = render(ROWS, ["app", "label"]), render(ROWS, ["app", "label"], is_colored=True)
    assert [ANSI.sub("", line) for line in colored] == plain
    assert sum("\x1b[" in line for line in colored) == 4  # head, bars, total


def test_empty_columns_are_omitted() -> None:
    head = render([ReportRow(("a",), counts(1))], ["app"], 120)[0]
    assert not {"est.", "Cached", "Units"} & set(head.split())
    head = render([ReportRow(("a",), counts(1, estimated=1, units=1, cached=1))], ["app"], 120)[0]
    assert head.split() == ["App", "Requests", "est.", "Input", "Cached", "Output", "Units", "Cost"]


def test_narrow_terminal_drops_columns_before_bars() -> None:
    full = counts(10**12, estimated=1, units=1, cached=1)
    rows = [ReportRow(("an-org-with-a-long-name", "an-app-with-a-long-name", "a-label-with-a-long-name"), full)]
    heads = [render(rows, ["org", "app", "label"], width)[0].split()[3:] for width in (140, 110, 90, 80)]
    assert heads == [
        ["Requests", "est.", "Input", "Cached", "Output", "Units", "Cost"],
        ["Requests", "est.", "Tokens", "Units", "Cost"],
        ["Requests", "est.", "Tokens", "Cost"],
        ["Requests", "est.", "Cost"],
    ]


def test_names_in_any_script_are_aligned() -> None:
    rows = [ReportRow(("株式会社",), counts(3)), ReportRow(("Zoe\u0308",), counts(2)), ReportRow(("plain",), counts(1))]
    lines = render(rows, ["label"], 100)
    assert {_width(line.partition("$")[0].partition("<")[0]) for line in lines[1:4]} == {
        _width(lines[1].partition("<")[0])
    }


def test_name_with_escape_sequence_is_neutralised() -> None:
    lines = format_table(
        [ReportRow(("id",), counts(1))], ["org"], {("org", "id"): "\x1b[2J\nevil\u202e\x07"}, TableStyle()
    )
    assert lines[1].startswith("?[2J?evil??")
    assert make_printable("Bêta 株式会社") == "Bêta 株式会社"


def test_zero_cost_has_no_bar_and_small_cost_a_trace() -> None:
    rows = [ReportRow(("a",), counts(10**15)), ReportRow(("b",), counts(1)), ReportRow(("c",), counts(0))]
    lines = render(rows, ["label"], 100)
    assert lines[1].endswith("100%  " + "█" * MAX_BAR_WIDTH)
    assert lines[2].endswith("<1%  ▏")
    assert lines[3].endswith("0%")


def test_table_of_free_usage_has_no_bars() -> None:
    lines = render([ReportRow(("a",), counts(0))], ["label"])
    assert "█" not in "".join(lines)
    assert "%" not in "".join(lines)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(9_999, "9,999"), (10_000, "10.0k"), (99_949, "99.9k"), (99_950, "100k"), (999_499, "999k"), (999_500, "1.00M"),
     (1_234_567, "1.23M"), (12_345_678, "12.3M"), (999_999_999, "1.00B"), (5 * 10**12, "5.00T"), (5 * 10**15, "5000T")],
)  # fmt: skip
def test_large_token_counts_are_abbreviated(number: int, shown: str) -> None:
    row = ReportRow(("a",), UsageCounts(1, 0, number, 0, pico=1))
    assert shown in render([row], ["label"], 100)[1].split()


names = st.one_of(st.none(), st.text(min_size=1, max_size=40))


@given(
    st.lists(st.tuples(names, names, st.integers(0, 10**16), st.booleans()), min_size=1, max_size=8),
    st.integers(20, 200),
    st.booleans(),
)
@settings(max_examples=tries(200))
def test_bars_fit_into_width(made: list, width: int, is_unicode: bool) -> None:
    rows = [ReportRow((app, label), counts(pico, estimated=int(est))) for app, label, pico, est in made]
    lines = render(rows, ["app", "label"], width, is_unicode=is_unicode)
    assert len(lines) == len(rows) + 3
    assert all("\n" not in line and line.isprintable() for line in lines)
    if width >= 80:
        assert max(map(_width, lines)) <= width


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )
