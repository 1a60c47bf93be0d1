"""What a command printed on a terminal, as a picture: text with colours becomes SVG. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from price_keeper.reports.terminal_text import measure_width

CELL, LINE, MARGIN, BAR = 8.4, 19, 18, 34  # pixels: a letter's width, a line's height, around all, the title's bar
BACKGROUND, TITLE_BAR, TEXT, FAINT = "#16181d", "#22252c", "#d8dce3", "#8b93a1"
_COLORS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 36: "#56c8d8"}
_BLOCKS = "▏▎▍▌▋▊▉█"
_SIGN = re.compile("\x1b\\[([0-9;]*)m")
_FONT = "ui-monospace, 'DejaVu Sans Mono', 'SF Mono', Menlo, Consolas, monospace"


class Run(NamedTuple):
    """Letters that look alike, from a column on."""

    column: int
    text: str
    color: str
    is_bold: bool


def picture(typed: Sequence[tuple[str, str]]) -> str:
    """Of a terminal in which these commands were typed, and what each printed."""
    lines: list[str] = []
    for command, printed in typed:
        lines += [f"\x1b[32m$\x1b[0m {command}", *printed.rstrip("\n").split("\n"), ""]
    lines.pop()
    columns = max(measure_width(_SIGN.sub("", line)) for line in lines)
    width, height = round(columns * CELL + 2 * MARGIN), BAR + len(lines) * LINE + 2 * MARGIN
    text = "\n".join(
        _element(run, BAR + MARGIN + (number + 0.75) * LINE)
        for number, line in enumerate(lines)
        for run in runs(line)
        if run.text.strip()
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">
<title>{escape(", ".join(command for command, _ in typed))}</title>
<rect width="{width}" height="{height}" rx="9" fill="{BACKGROUND}"/>
<path d="M0 {BAR}V9a9 9 0 0 1 9-9H{width - 9}a9 9 0 0 1 9 9V{BAR}Z" fill="{TITLE_BAR}"/>
{_buttons()}
<g font-family="{_FONT}" font-size="14">
{text}
</g>
</svg>
"""


def runs(line: str) -> Iterator[Run]:
    """The parts of a line between signs of colour."""
    column, color, is_bold = 0, TEXT, False
    for number, part in enumerate(_SIGN.split(line)):
        if number % 2:
            color, is_bold = _looks(part, color, is_bold)
        elif part:
            yield Run(column, part, color, is_bold)
            column += measure_width(part)


def _looks(sign: str, color: str, is_bold: bool) -> tuple[str, bool]:
    for code in map(int, sign.split(";") if sign else ["0"]):
        if code == 0:
            color, is_bold = TEXT, False
        elif code == 1:
            is_bold = True
        elif code == 2:
            color = FAINT
        else:
            color = _COLORS.get(code, color)
    return color, is_bold


def _element(run: Run, y: float) -> str:
    """Each run has the width of its cells, whatever font there is, so that columns stay columns."""
    lead = len(run.text) - len(run.text.lstrip(" "))
    text = run.text.strip(" ").replace(" ", "\u00a0")  # of plain ones SVG keeps one alone
    x, wide = MARGIN + (run.column + lead) * CELL, measure_width(text) * CELL
    if set(text) <= set(_BLOCKS):  # without the seams that letters have between them
        wide = sum(_BLOCKS.index(block) + 1 for block in text) / len(_BLOCKS) * CELL
        return (
            f'<rect x="{x:.1f}" y="{y - 0.75 * LINE:.1f}" width="{wide:.1f}" height="{LINE - 3}" fill="{run.color}"/>'
        )
    weight = ' font-weight="bold"' if run.is_bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs" '
        f'fill="{run.color}"{weight}>{escape(text)}</text>'
    )


def _buttons(at: Sequence[tuple[int, str]] = ((20, "#ff5f57"), (40, "#febc2e"), (60, "#28c840"))) -> str:
    return "".join(f'<circle cx="{x}" cy="{BAR // 2}" r="6" fill="{color}"/>' for x, color in at)
