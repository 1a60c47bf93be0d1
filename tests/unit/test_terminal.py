"""Who gets colours, what may go to a terminal, and how tables fit it."""

from __future__ import annotations

from io import StringIO

import pytest
from price_keeper.cli.output import format_columns, print_lines
from price_keeper.cli.terminal import BOLD, GREEN, PaintedText, is_colored, paint
from price_keeper.reports.terminal_text import measure_width

from tests.unit.test_progress import Terminal

CASES = [
    # on a terminal?, variables, coloured?
    (True, {}, True),
    (False, {}, False),
    (True, {"TERM": "dumb"}, False),
    (True, {"NO_COLOR": "1"}, False),
    (True, {"NO_COLOR": ""}, True),
    (False, {"FORCE_COLOR": "1"}, True),
    (False, {"FORCE_COLOR": "0"}, False),
    (False, {"CLICOLOR_FORCE": "1"}, True),
    (False, {"CLICOLOR_FORCE": ""}, False),
    (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    (False, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """pytest has its own standard output again when a test begins, so each sets it."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


@pytest.mark.parametrize(("on_terminal", "variables", "expected"), CASES)
def test_colors_follow_terminal_and_environment(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    on_terminal: bool,
    variables: dict[str, str],
    expected: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_colored(terminal if on_terminal else StringIO()) is expected


def test_only_own_escape_sequences_reach_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    evil = "\x1b[2Jx"
    print_lines([paint(evil, GREEN) + evil, evil + paint("ok", BOLD), evil])
    assert terminal.getvalue().splitlines() == [
        "\x1b[32m?[2Jx\x1b[0m?[2Jx",
        "?[2Jx\x1b[1mok\x1b[0m",
        "?[2Jx",
    ]
    assert isinstance(paint("a", GREEN) + "b" + "c", PaintedText)


HEADS = ("Org", "Id", "Zone")
ID = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
ROWS = [("東京の会社とその子会社と孫会社", ID, "Asia/Tokyo"), ("Läbs", ID, "UTC")]


def test_columns_align_with_wide_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", StringIO())
    lines = format_columns(HEADS, ROWS)
    assert {measure_width(line[: line.index(mark)]) for line, mark in zip(lines, ("Id", ID, ID), strict=True)} == {32}
    assert lines[1].startswith(ROWS[0][0])  # in a pipe nothing is cut


def test_table_fits_terminal_and_keeps_ids_whole(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    lines = format_columns(HEADS, ROWS)
    assert lines[0] == "\x1b[1mOrg           Id                                    Zone\x1b[0m"
    assert lines[1] == f"東京の会社…   {ID}  Asia/Tokyo"[:14] + lines[1][14:]
    assert all(ID in line for line in lines[1:])
    assert measure_width(lines[1]) <= 64  # as narrow as cutting makes it
