"""How far long work is: on a terminal one line that moves, elsewhere a plain one now and then."""

from __future__ import annotations

from io import StringIO

import pytest
from price_keeper.cli.output import LOG_LINE_SECONDS, REDRAW_SECONDS, Progress

from tests.support.clock import ManualClock


class Terminal(StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: StringIO) -> StringIO:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    return stream


async def test_terminal_progress_line_is_updated_and_cleared(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    stream = shown(monkeypatch, Terminal())
    with Progress(clock.monotonic) as progress:
        progress.update("first")
        progress.update("too soon")
        await clock.advance(REDRAW_SECONDS)
        progress.update("a line that is longer \x1b[31m than it")
    assert stream.getvalue() == "\rfirst\x1b[K\ra line that is lon~\x1b[K\r\x1b[K"


def test_progress_line_is_cleared_before_output(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    stream = shown(monkeypatch, Terminal())
    with Progress(clock.monotonic) as progress:
        progress.update("one")
        progress.clear()
        progress.update("two")  # at once: what was printed moved it away
    assert stream.getvalue() == "\rone\x1b[K\r\x1b[K\rtwo\x1b[K\r\x1b[K"


def test_failure_clears_progress_line(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    stream = shown(monkeypatch, Terminal())

    def fail() -> None:
        with Progress(clock.monotonic) as progress:
            progress.update("one")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert stream.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("kind", [StringIO, Terminal])
async def test_non_terminal_progress_prints_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, kind: type[StringIO]
) -> None:
    stream = shown(monkeypatch, kind())
    monkeypatch.setenv("TERM", "dumb")
    with Progress(clock.monotonic) as progress:
        progress.update("at once")
        for number in range(3):
            await clock.advance(LOG_LINE_SECONDS)
            progress.update(f"line {number}")
            progress.update("too soon")
    assert stream.getvalue() == "line 0\nline 1\nline 2\n"
