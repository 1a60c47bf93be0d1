"""Plots as SVG, drawn here so that they need nothing: bars with whiskers; lines on linear or logarithmic axes. Pure.

They bring their own ground, light or dark as the reader has it. Colours are told apart by the colour-blind, and no plot
tells by colour alone: bars have their name beside them, lines a mark of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from bench.speed.figures import Spread

WIDTH = 760
_LEFT, _RIGHT = 190, 120
_ROW, _BAR = 24, 15
_PLOT_HEIGHT = 300
# After Okabe and Ito, with the dark ones made lighter on dark ground.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#767676", "#8a6d00", "#5e4fa2")
_DARK = ("#56b4e9", "#ff8a3d", "#2fc79a", "#e59fc6", "#f0c040", "#9a9a9a", "#c8b560", "#a99bf0")
_FEW_TICKS = 6
_FAR_BEYOND, _CUT_AT = 3.0, 1.3  # times the next highest


@dataclass(frozen=True)
class Bar:
    name: str
    spread: Spread
    colour: int


@dataclass(frozen=True)
class Group:
    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


def number(value: float) -> str:
    """With as many digits as anybody wants to read."""
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    for digits, least in ((0, 100), (1, 10), (2, 0)):
        if abs(round(value, digits)) >= least:
            return f"{value:,.{digits}f}"
    raise AssertionError(value)


def bars(title: str, unit: str, groups: Sequence[Group]) -> str:
    most = _reach([bar for group in groups for bar in group.bars])
    ticks = linear_ticks(0, most)
    top = 58
    rows = sum(len(group.bars) for group in groups) * _ROW + len(groups) * 30
    scale = (WIDTH - _LEFT - _RIGHT) / most
    body = []
    for tick in ticks:
        x = _LEFT + tick * scale
        body.append(_text(x, top + rows + 18, _short(tick), anchor="middle", kind="small"))
    body.append(_text((_LEFT + WIDTH - _RIGHT) / 2, top + rows + 38, unit, anchor="middle", kind="small"))
    y = float(top)
    for group in groups:
        body.append(_text(16, y + 19, group.title, kind="group"))
        y += 28
        high = y + _ROW * len(group.bars)
        body += [_stroke("grid", _LEFT + tick * scale, y, _LEFT + tick * scale, high) for tick in ticks]
        for bar in group.bars:
            body.extend(_bar(bar, y, scale))
            y += _ROW
        y += 2
    return _page(title, top + rows + 52, body)


def _reach(drawn: Sequence[Bar]) -> float:
    """How far the axis goes: not to one contender who is so far beyond all others that these would be seen no more."""
    highest: dict[str, float] = {}
    for bar in drawn:
        highest[bar.name] = max(highest.get(bar.name, 0.0), bar.spread.high)
    *others, most = sorted(highest.values())
    return others[-1] * _CUT_AT if others and most > _FAR_BEYOND * others[-1] else most


def _bar(bar: Bar, y: float, scale: float) -> list[str]:
    spread = bar.spread
    middle = y + _ROW / 2
    end = float(WIDTH - _RIGHT)
    if _LEFT + spread.middle * scale > end + 1:
        return _cut_bar(bar, middle, end)
    low, high = (min(_LEFT + value * scale, end) for value in (spread.low, spread.high))
    drawn = [
        _text(_LEFT - 8, middle + 4, bar.name, anchor="end"),
        f'<rect class="f{bar.colour}" x="{_LEFT}" y="{middle - _BAR / 2:.1f}" '
        f'width="{max(1.0, spread.middle * scale):.1f}" height="{_BAR}"/>',
    ]
    if high - low >= 2:
        drawn.append(_stroke("whisker", low, middle, high, middle))
        drawn += [_stroke("whisker", x, middle - 4, x, middle + 4) for x in (low, high)]
    end = max(high, _LEFT + spread.middle * scale)
    return [*drawn, _text(end + 7, middle + 4, number(spread.middle))]


def _cut_bar(bar: Bar, middle: float, end: float) -> list[str]:
    """To the edge, with a gap that says that it goes on."""
    gap = end - 26
    slant = f"M{gap:.1f} {middle + 12:.1f}l8 -24h7l-8 24z"
    return [
        _text(_LEFT - 8, middle + 4, bar.name, anchor="end"),
        f'<rect class="f{bar.colour}" x="{_LEFT}" y="{middle - _BAR / 2:.1f}" '
        f'width="{end - _LEFT:.1f}" height="{_BAR}"/>',
        f'<path class="ground" d="{slant}"/>',
        _text(end + 7, middle + 4, number(bar.spread.middle)),
    ]


def lines(title: str, x: str, y: str, series: Sequence[Line], *, log_x: bool = False, log_y: bool = False) -> str:
    points = [point for line in series for point in line.points]
    across = _Axis([point[0] for point in points], 76, WIDTH - 40, log_x)
    legend = 20 * ((len(series) + 1) // 2)
    top = 58 + legend
    up = _Axis([point[1] for point in points], top + _PLOT_HEIGHT, top, log_y)
    body = []
    for tick in up.ticks:
        body.append(_stroke("grid", across.start, up.at(tick), across.end, up.at(tick)))
        body.append(_text(across.start - 8, up.at(tick) + 4, _short(tick), anchor="end", kind="small"))
    for tick in across.ticks:
        body.append(_stroke("grid", across.at(tick), up.start, across.at(tick), up.end))
        body.append(_text(across.at(tick), up.start + 18, _short(tick), anchor="middle", kind="small"))
    body.append(_text((across.start + across.end) / 2, up.start + 40, x, anchor="middle", kind="small"))
    turned = f'transform="translate(18 {(up.start + up.end) / 2:.1f}) rotate(-90)"'
    body.append(f'<text class="small" text-anchor="middle" {turned}>{escape(y)}</text>')
    for place, line in enumerate(series):
        body.extend(_line(line, place, across, up))
        body.extend(_legend(line, place))
    return _page(title, top + _PLOT_HEIGHT + 56, body)


class _Axis:
    def __init__(self, values: Sequence[float], start: float, end: float, is_log: bool) -> None:
        self.start, self.end = start, end
        self._is_log = is_log and min(values) > 0
        ticks = log_ticks if self._is_log else linear_ticks
        low = min(values) if self._is_log else min(0.0, *values)
        self.ticks = ticks(low, max(values))
        self._low, self._high = (self._scaled(each) for each in (self.ticks[0], max(self.ticks[-1], max(values))))

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def at(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self.start + share * (self.end - self.start)


def _line(line: Line, place: int, across: _Axis, up: _Axis) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    colour = place % len(_LIGHT)
    return [
        f'<polyline class="s{colour}" fill="none" points="{path}"/>',
        *(_mark(place, x, y) for x, y in places),
    ]


def _legend(line: Line, place: int) -> list[str]:
    x, y = 80 + 340 * (place % 2), 56 + 20 * (place // 2)
    stroke = f'<line class="s{place % len(_LIGHT)}" x1="{x}" y1="{y}" x2="{x + 28}" y2="{y}"/>'
    return [stroke, _mark(place, x + 14, y), _text(x + 36, y + 4, line.name)]


def _mark(place: int, x: float, y: float) -> str:
    colour = f'class="f{place % len(_LIGHT)}"'
    shapes = (
        f'<circle {colour} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect {colour} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path {colour} d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
        f'<path {colour} d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>',
        f'<path {colour} d="M{x:.1f} {y + 5:.1f}l5 -9h-10z"/>',
    )
    return shapes[place % len(shapes)]


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to the last that is not above the highest."""
    if high <= low:
        high = low + 1
    rough = (high - low) / _FEW_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.floor(low / step)
    return [round((first + each) * step, 12) for each in range(math.floor(high / step + 1e-9) - first + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or of two where those are too few."""
    base = 10 if high / low >= 100 else 2
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [float(base) ** each for each in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    """On an axis, where all of a number's digits would be in the way."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "label") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _colours(ground: str, ink: str, faint: str, grid: str, colours: Sequence[str]) -> str:
    each = "".join(f".f{place}{{fill:{c}}}.s{place}{{stroke:{c}}}" for place, c in enumerate(colours))
    return (
        f".ground{{fill:{ground}}}text{{fill:{ink}}}.small{{fill:{faint}}}"
        f".grid{{stroke:{grid}}}.whisker{{stroke:{ink}}}{each}"
    )


_STYLE = (
    "text{font-family:system-ui,'Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif;font-size:13px}"
    ".title{font-size:16px;font-weight:600}.group{font-weight:600}.small{font-size:12px}"
    ".whisker{stroke-width:1.5}polyline,line[class^=s]{stroke-width:2}"
    + _colours("#ffffff", "#1f2328", "#59636e", "#e3e7eb", _LIGHT)
    + "@media(prefers-color-scheme:dark){"
    + _colours("#0d1117", "#e6edf3", "#9aa4af", "#2b323b", _DARK)
    + "}"
)


def _page(title: str, height: float, body: Sequence[str]) -> str:
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect class="ground" width="100%" height="100%" rx="6"/>\n{_text(16, 30, title, kind="title")}\n'
        f"{inside}\n</svg>\n"
    )
