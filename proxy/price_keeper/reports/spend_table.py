"""Formats report rows as a table for a terminal: aligned columns, a bar for each row's share, a total line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter

from price_keeper.price_dimensions import PIECES, CountedUnit, UsageCounts, sum_token_counts
from price_keeper.reports import money
from price_keeper.reports.report_rows import NO_APP, ReportRow, sum_counts
from price_keeper.reports.terminal_text import make_printable, measure_width, pad_to_width, truncate

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 6, 40
_GAP = 2
_SHARE_WIDTH = 4
_HEADERS = {"org": "Org", "app": "App", "label": "Label", "day": "Day"}


@dataclass(frozen=True, slots=True)
class TableStyle:
    """What the terminal can show."""

    width: int = 80
    is_colored: bool = False
    is_unicode: bool = True

    @property
    def bar_characters(self) -> str:
        """The characters for a partly filled cell up to a full one."""
        return "▏▎▍▌▋▊▉█" if self.is_unicode else "#"

    @property
    def rule_character(self) -> str:
        return "─" if self.is_unicode else "-"

    @property
    def ellipsis(self) -> str:
        return "…" if self.is_unicode else "~"

    def make_bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.is_colored else text

    def make_bar(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.is_colored else text


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    format_cell: Callable[[UsageCounts], str]
    is_needed: Callable[[UsageCounts], bool] = lambda _: True


def _format_short(number: int) -> str:
    """At most four digits, such as 12.3M; exact below ten thousand."""
    if number < 10_000:
        return f"{number:,}"
    for unit in "kMBT":
        scaled = number / 1000
        if scaled < 999.5 or unit == "T":
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f}{unit}"
        number //= 1000
    raise AssertionError


_REQUESTS = _Column("Requests", lambda counts: f"{counts.requests:,}")
_ESTIMATED = _Column(
    "est.", lambda counts: f"{counts.estimated_requests:,}", lambda whole: whole.estimated_requests > 0
)
_INPUT = _Column("Input", lambda counts: _format_short(counts.input_tokens))
_CACHED = _Column(
    "Cached", lambda counts: _format_short(_sum_cached_tokens(counts)), lambda whole: _sum_cached_tokens(whole) > 0
)
_OUTPUT = _Column("Output", lambda counts: _format_short(counts.output_tokens))
_TOKENS = _Column("Tokens", lambda counts: _format_short(sum_token_counts(counts)))
_UNITS = _Column("Units", lambda counts: _format_short(counts.guardrail_units), lambda whole: whole.guardrail_units > 0)


def _build_piece_column(unit: CountedUnit) -> _Column:
    get_count: Callable[[UsageCounts], int] = attrgetter(unit.counter)
    return _Column(unit.title, lambda counts: _format_short(get_count(counts)), lambda whole: get_count(whole) > 0)


_PIECES = tuple(map(_build_piece_column, PIECES))
_COST = _Column("Cost", lambda counts: money.format_usd(counts.pico))

# Column sets with the minimum width of names: the first one that leaves room for bars is used. Columns for cached
# tokens, units and estimates are omitted where all are zero; the formats for programs have all columns.
_LAYOUTS = (
    ((_REQUESTS, _ESTIMATED, _INPUT, _CACHED, _OUTPUT, _UNITS, *_PIECES, _COST), 16),
    ((_REQUESTS, _ESTIMATED, _TOKENS, _UNITS, *_PIECES, _COST), 16),
    ((_REQUESTS, _ESTIMATED, _TOKENS, _COST), 12),
    ((_REQUESTS, _ESTIMATED, _COST), 10),
)


def _sum_cached_tokens(counts: UsageCounts) -> int:
    return sum_token_counts(counts) - counts.input_tokens - counts.output_tokens


def format_table(
    rows: Sequence[ReportRow], by: Sequence[str], names: Mapping[tuple[str, str], str], style: TableStyle
) -> list[str]:
    """The lines of the table. `names` maps (dimension, key) to the text that is shown in place of the key."""
    keys = [[_format_key(name, key, names) for name, key in zip(by, row.keys, strict=True)] for row in rows]
    total_counts = sum_counts(row.counts for row in rows)
    for columns, min_name_width in _LAYOUTS:
        needed_columns = [column for column in columns if column.is_needed(total_counts)]
        layout = _TableLayout(
            [_HEADERS[name] for name in by], keys, needed_columns, [row.counts for row in rows], total_counts, style
        )
        if layout.make_room_for_bars(min_name_width):
            break
    return layout.format_lines()


class _TableLayout:
    """The cells of a table and the widths of its columns."""

    def __init__(
        self,
        headers: Sequence[str],
        keys: Sequence[Sequence[str]],
        columns: Sequence[_Column],
        counts: Sequence[UsageCounts],
        total_counts: UsageCounts,
        style: TableStyle,
    ) -> None:
        self._headers, self._keys, self._counts, self._total_counts, self._style = (
            headers,
            keys,
            counts,
            total_counts,
            style,
        )
        self._titles = [column.header for column in columns]
        self._numbers = [[column.format_cell(each) for column in columns] for each in (*counts, total_counts)]
        self._total_keys = ["Total", *repeat("", len(headers) - 1)]
        self._key_widths = _measure_columns([headers, *keys, self._total_keys])
        self._number_widths = _measure_columns([self._titles, *self._numbers])
        self._bar_width = 0

    def make_room_for_bars(self, min_name_width: int) -> bool:
        """Truncate names, the widest column first. False if that does not make enough room."""
        gaps = _GAP * (len(self._titles) + len(self._headers) + 1)
        available_width = self._style.width - sum(self._number_widths) - gaps - _SHARE_WIDTH
        widths = self._key_widths
        while sum(widths) > available_width - MIN_BAR_WIDTH and max(widths) > min_name_width:
            widths[widths.index(max(widths))] -= 1
        self._bar_width = min(MAX_BAR_WIDTH, available_width - sum(widths))
        return self._bar_width >= MIN_BAR_WIDTH

    def format_lines(self) -> list[str]:
        style = self._style
        max_pico = max(counts.pico for counts in self._counts)
        row_lines = [
            self._format_line(keys, numbers) + self._format_share(counts.pico, max_pico)
            for keys, numbers, counts in zip(self._keys, self._numbers, self._counts, strict=False)
        ]
        return [
            style.make_bold(self._format_line(self._headers, self._titles)),
            *row_lines,
            style.rule_character * len(self._format_line(self._total_keys, self._numbers[-1])),
            style.make_bold(self._format_line(self._total_keys, self._numbers[-1])),
        ]

    def _format_line(self, keys: Sequence[str], numbers: Sequence[str]) -> str:
        key_cells = (
            pad_to_width(truncate(key, width, self._style.ellipsis), width)
            for key, width in zip(keys, self._key_widths, strict=True)
        )
        number_cells = (number.rjust(width) for number, width in zip(numbers, self._number_widths, strict=True))
        return (" " * _GAP).join([*key_cells, *number_cells])

    def _format_share(self, pico: int, max_pico: int) -> str:
        text = " " * _GAP + _format_percent(pico, self._total_counts.pico).rjust(_SHARE_WIDTH)
        if self._bar_width < MIN_BAR_WIDTH or not pico:
            return text
        return (
            text
            + " " * _GAP
            + self._style.make_bar(_format_bar(pico, max_pico, self._bar_width, self._style.bar_characters))
        )


def _format_percent(pico: int, total_pico: int) -> str:
    if not total_pico:
        return ""
    percent = (200 * pico + total_pico) // (2 * total_pico)
    return "<1%" if pico and not percent else f"{percent}%"


def _format_bar(pico: int, max_pico: int, width: int, glyphs: str) -> str:
    """The most expensive row fills the width; a cost above zero has at least the smallest bar."""
    steps = max(1, (2 * pico * width * len(glyphs) + max_pico) // (2 * max_pico))
    full, part = divmod(steps, len(glyphs))
    return glyphs[-1] * full + (glyphs[part - 1] if part else "")


def _format_key(name: str, key: object, names: Mapping[tuple[str, str], str]) -> str:
    text = NO_APP if key is None else str(key)
    return make_printable(names.get((name, text), text))


def _measure_columns(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(measure_width(cell) for cell in cells) for cells in zip(*lines, strict=True)]
