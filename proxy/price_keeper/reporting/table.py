"""A report for a terminal: aligned columns, a bar for each row's share, a line with the total. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from price_keeper.recording.entries import UsageCounts
from price_keeper.reporting import money
from price_keeper.reporting.letters import truncate, pad_to_width, make_printable, measure_width
from price_keeper.reporting.totals import NO_APP, ReportRow, sum_token_counts, sum_counts

LEAST_BAR, MOST_BAR = 6, 40
_GAP = 2
_SHARE_WIDTH = 4
_HEADERS = {"org": "Org", "app": "App", "label": "Label", "day": "Day"}


@dataclass(frozen=True, slots=True)
class Style:
    """What the terminal can show."""

    width: int = 80
    is_colored: bool = False
    is_unicode: bool = True

    @property
    def bars(self) -> str:
        """From a part of a character to a whole one."""
        return "▏▎▍▌▋▊▉█" if self.is_unicode else "#"

    @property
    def rule(self) -> str:
        return "─" if self.is_unicode else "-"

    @property
    def cut(self) -> str:
        return "…" if self.is_unicode else "~"

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.is_colored else text

    def bar(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.is_colored else text


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    of: Callable[[UsageCounts], str]
    is_needed: Callable[[UsageCounts], bool] = lambda _: True


def _few(number: int) -> str:
    """Four digits at most, as 12.3M, below ten thousand exact."""
    if number < 10_000:
        return f"{number:,}"
    for unit in "kMBT":
        number_of = number / 1000
        if number_of < 999.5 or unit == "T":
            return f"{number_of:.{0 if number_of >= 99.95 else 1 if number_of >= 9.995 else 2}f}{unit}"
        number //= 1000
    raise AssertionError


_REQUESTS = _Column("Requests", lambda counts: f"{counts.requests:,}")
_ESTIMATED = _Column(
    "est.", lambda counts: f"{counts.estimated_requests:,}", lambda whole: whole.estimated_requests > 0
)
_INPUT = _Column("Input", lambda counts: _few(counts.input_tokens))
_CACHED = _Column("Cached", lambda counts: _few(_cached(counts)), lambda whole: _cached(whole) > 0)
_OUTPUT = _Column("Output", lambda counts: _few(counts.output_tokens))
_TOKENS = _Column("Tokens", lambda counts: _few(sum_token_counts(counts)))
_UNITS = _Column("Units", lambda counts: _few(counts.guardrail_units), lambda whole: whole.guardrail_units > 0)
_COST = _Column("Cost", lambda counts: money.format_usd(counts.pico))

# Which columns, and how short a name may be cut: the first of these that leaves room for bars. Cached tokens, guardrail
# units and estimates are left out where there are none; the programs' formats have all of them.
_LAYOUTS = (
    ((_REQUESTS, _ESTIMATED, _INPUT, _CACHED, _OUTPUT, _UNITS, _COST), 16),
    ((_REQUESTS, _ESTIMATED, _TOKENS, _UNITS, _COST), 16),
    ((_REQUESTS, _ESTIMATED, _TOKENS, _COST), 12),
    ((_REQUESTS, _ESTIMATED, _COST), 10),
)


def _cached(counts: UsageCounts) -> int:
    return sum_token_counts(counts) - counts.input_tokens - counts.output_tokens


def table(rows: Sequence[ReportRow], by: Sequence[str], names: Mapping[tuple[str, str], str], style: Style) -> list[str]:
    """`names` has what is shown for a key that is not to be shown as it is."""
    keys = [[_told(name, key, names) for name, key in zip(by, row.keys, strict=True)] for row in rows]
    whole = sum_counts(row.counts for row in rows)
    for columns, least_name in _LAYOUTS:
        needed = [column for column in columns if column.is_needed(whole)]
        sheet = _Sheet([_HEADERS[name] for name in by], keys, needed, [row.counts for row in rows], whole, style)
        if sheet.makes_room_for_bars(least_name):
            break
    return sheet.lines()


class _Sheet:
    """A table's cells, and how wide its columns are."""

    def __init__(
        self,
        headers: Sequence[str],
        keys: Sequence[Sequence[str]],
        columns: Sequence[_Column],
        counts: Sequence[UsageCounts],
        whole: UsageCounts,
        style: Style,
    ) -> None:
        self._headers, self._keys, self._counts, self._whole, self._style = headers, keys, counts, whole, style
        self._titles = [column.header for column in columns]
        self._numbers = [[column.of(each) for column in columns] for each in (*counts, whole)]
        self._last = ["Total", *repeat("", len(headers) - 1)]
        self._key_widths = _widths([headers, *keys, self._last])
        self._number_widths = _widths([self._titles, *self._numbers])
        self._bar_width = 0

    def makes_room_for_bars(self, least_name: int) -> bool:
        """By cutting names, the widest first."""
        gaps = _GAP * (len(self._titles) + len(self._headers) + 1)
        room = self._style.width - sum(self._number_widths) - gaps - _SHARE_WIDTH
        widths = self._key_widths
        while sum(widths) > room - LEAST_BAR and max(widths) > least_name:
            widths[widths.index(max(widths))] -= 1
        self._bar_width = min(MOST_BAR, room - sum(widths))
        return self._bar_width >= LEAST_BAR

    def lines(self) -> list[str]:
        style = self._style
        most = max(counts.pico for counts in self._counts)
        told = [
            self._line(keys, numbers) + self._share(counts.pico, most)
            for keys, numbers, counts in zip(self._keys, self._numbers, self._counts, strict=False)
        ]
        return [
            style.bold(self._line(self._headers, self._titles)),
            *told,
            style.rule * len(self._line(self._last, self._numbers[-1])),
            style.bold(self._line(self._last, self._numbers[-1])),
        ]

    def _line(self, keys: Sequence[str], numbers: Sequence[str]) -> str:
        named = (
            pad_to_width(truncate(key, width, self._style.cut), width) for key, width in zip(keys, self._key_widths, strict=True)
        )
        counted = (number.rjust(width) for number, width in zip(numbers, self._number_widths, strict=True))
        return (" " * _GAP).join([*named, *counted])

    def _share(self, pico: int, most: int) -> str:
        told = " " * _GAP + _percent(pico, self._whole.pico).rjust(_SHARE_WIDTH)
        if self._bar_width < LEAST_BAR or not pico:
            return told
        return told + " " * _GAP + self._style.bar(_bar(pico, most, self._bar_width, self._style.bars))


def _percent(pico: int, whole: int) -> str:
    if not whole:
        return ""
    percent = (200 * pico + whole) // (2 * whole)
    return "<1%" if pico and not percent else f"{percent}%"


def _bar(pico: int, most: int, width: int, glyphs: str) -> str:
    """The dearest row fills the width; what costs anything has at least a trace."""
    steps = max(1, (2 * pico * width * len(glyphs) + most) // (2 * most))
    full, part = divmod(steps, len(glyphs))
    return glyphs[-1] * full + (glyphs[part - 1] if part else "")


def _told(name: str, key: object, names: Mapping[tuple[str, str], str]) -> str:
    text = NO_APP if key is None else str(key)
    return make_printable(names.get((name, text), text))


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(measure_width(cell) for cell in cells) for cells in zip(*lines, strict=True)]
