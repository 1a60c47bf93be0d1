"""The parts of the page: what is said, and the tables and plots of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.speed import prose
from bench.speed.figures import Figures, Spread, percentile, ratio
from bench.speed.goals import KILOBYTE, MEGABYTE, added
from bench.speed.plots import Bar, Group, bars, number
from bench.speed.upstream import ANSWER, QUESTION

CONNECTIONS = (1, 16, 64)
NAMES = {
    "direct": "nobody between",
    "nginx": "nginx",
    "aiohttp": "plain aiohttp proxy",
    "litellm": "LiteLLM",
    "keeper": "**Price Keeper**",
    "compiled": "**Price Keeper, compiled**",
}
COLOURS = {"keeper": 0, "compiled": 1, "nginx": 2, "aiohttp": 4, "litellm": 3, "direct": 5}
_OTHERS = re.compile(r"http1/.*/others")
Rows = list[list[str]]


@dataclass
class Section:
    title: str
    text: str
    plots: list[tuple[str, str, str]] = field(default_factory=list)  # the file, what it shows, the drawing
    tables: list[tuple[Sequence[str], Rows]] = field(default_factory=list)


def opening(figures: Figures) -> str:
    return prose.OPENING + "\n\n" + _summary(figures)


def closing(figures: Figures, folder: str) -> str:
    about = figures.about
    told = [f"{name}: {about[name]}" for name in ("date", "machine", "versions", "run") if name in about]
    parts = [prose.METHOD.format(folder=folder), "\n".join(f"- {line}" for line in told)]
    others = [each for name, values in figures.values.items() if _OTHERS.fullmatch(name) for each in values]
    if others:
        share = f"{percentile(others, 0.5):.0%} in the middle, {max(others):.0%} at most"
        parts[-1] += f"\n- of the core of what was measured, others took meanwhile (HTTP/1.1): {share}"
    if figures.left_out:
        parts.append("Not measured:\n\n" + "\n".join(f"- {line}" for line in figures.left_out))
    return "\n\n".join(part for part in parts if part)


def against_python(figures: Figures) -> str:
    def per_second(name: str) -> float | None:
        return figures.middle("http1", 64, name, "per_second")

    plain = per_second("aiohttp")
    found = [ratio(plain, per_second("nginx")), *(ratio(per_second(name), plain) for name in ("keeper", "compiled"))]
    if None in found:
        return ""
    return prose.AGAINST_PYTHON.format(plain=found[0], ours=found[1], compiled=found[2])


def all_of(figures: Figures) -> list[Section]:
    makers = (_http1, _http2, _delay, _streams, _memory, _starts, _workers)
    return [section for make in makers for section in make(figures)]


def _summary(figures: Figures) -> str:
    """The few figures for who reads no further."""
    per_second = figures.middle("http1", 64, "keeper", "per_second")
    delay = added(figures, ("http1", 1), "keeper")
    frame = figures.middle("paced", "keeper", "cpu_us")
    memory = figures.middle("memory", "keeper", "bytes")
    said = [
        f"serves **{number(per_second)} requests a second**" if per_second else "",
        f"adds **{number(delay / 1000)} ms** to a call" if delay else "",
        f"spends {number(frame)} µs of CPU on a frame of a stream" if frame else "",
        f"needs {number(memory / MEGABYTE)} MB" if memory else "",
    ]
    said = [each for each in said if each]
    return f"On one core of the machine below it {', '.join(said)}." if said else ""


def _known(figures: Figures, *path: object) -> list[str]:
    return [name for name in NAMES if figures.is_known(*path, name)]


def _spread(spread: Spread | None, part: float = 1.0) -> str:
    if spread is None:
        return ""
    middle, low, high = (number(value / part) for value in (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} - {high})"


def _plain(value: float | None, part: float = 1.0) -> str:
    return "" if value is None else number(value / part)


def _group(title: str, figures: Figures, path: Sequence[object], figure: str, part: float = 1.0) -> list[Group]:
    drawn = []
    for name in NAMES:
        spread = figures.spread(*path, name, figure)
        if spread is not None and name != "direct":  # a table's matter: beside it the others could not be compared
            scaled = Spread(spread.middle / part, spread.low / part, spread.high / part)
            drawn.append(Bar(NAMES[name].strip("*"), scaled, COLOURS[name]))
    return [Group(title, drawn)] if drawn else []


# ---------------------------------------------------------------- requests


def _connections(number_: int) -> str:
    return "1 connection" if number_ == 1 else f"{number_} connections"


def _requests(figures: Figures, protocol: str) -> Rows:
    rows = []
    for connections in CONNECTIONS:
        for name in _known(figures, protocol, connections):
            path = (protocol, connections, name)
            cpu, rate = figures.middle(*path, "cpu_us"), figures.middle(*path, "per_second")
            rows.append(
                [
                    str(connections),
                    NAMES[name],
                    _spread(figures.spread(*path, "per_second")),
                    _plain(figures.middle(*path, "median_us"), 1000),
                    _plain(figures.middle(*path, "p99_us"), 1000),
                    _spread(figures.spread(*path, "cpu_us")),
                    f"{cpu * rate / 1e4:.0f}%" if cpu and rate else "",
                ]
            )
    return rows


_REQUESTS = ["connections", "", "requests/s", "median, ms", "p99, ms", "CPU, µs a request", "of its core"]


def _http1(figures: Figures) -> Iterator[Section]:
    groups = [g for c in CONNECTIONS for g in _group(_connections(c), figures, ("http1", c), "per_second")]
    costs = [g for c in CONNECTIONS for g in _group(_connections(c), figures, ("http1", c), "cpu_us")]
    if not groups:
        return
    section = Section("Requests, HTTP/1.1", _told() + _limited(figures))
    section.plots.append(_bars("http1", "Requests a second, HTTP/1.1", "requests/s; median, lowest, highest", groups))
    if costs:
        section.plots.append(_bars("cpu", "CPU of a request, HTTP/1.1", "µs; median, lowest, highest", costs))
    section.tables.append((_REQUESTS, _requests(figures, "http1")))
    yield section


def _told() -> str:
    return prose.REQUESTS.format(question=f"{len(QUESTION) / 1e3:.1f}", answer=f"{len(ANSWER) / 1e3:.1f}")


def _bars(name: str, title: str, unit: str, groups: list[Group]) -> tuple[str, str, str]:
    return f"{name}.svg", title, bars(title, unit, groups)


def _limited(figures: Figures) -> str:
    """Who leaves a part of the core idle is not what limits the figure."""
    idle = []
    for name in ("nginx", "keeper"):
        cpu, rate = (figures.middle("http1", 64, name, each) for each in ("cpu_us", "per_second"))
        if cpu and rate and cpu * rate < 0.9e6:
            idle.append(f"{NAMES[name].strip('*')} {cpu * rate / 1e4:.0f}%")
    used = " and ".join(idle)
    return (
        f" With 64 connections {used} of its core was used; the rest of the time it waited for the load."
        if used
        else ""
    )


def _http2(figures: Figures) -> Iterator[Section]:
    groups = [g for c in CONNECTIONS for g in _group(_connections(c), figures, ("http2", c), "per_second")]
    if groups:
        section = Section("Requests, HTTP/2", prose.HTTP2)
        plot = _bars("http2", "Requests a second, HTTP/2", "requests/s; median, lowest, highest", groups)
        section.plots.append(plot)
        section.tables.append((_REQUESTS, _requests(figures, "http2")))
        yield section


def _delay(figures: Figures) -> Iterator[Section]:
    rows = [
        [
            NAMES[name],
            _spread(figures.spread("quiet", name, "median_us")),
            _plain(figures.middle("quiet", name, "p99_us")),
            _plain(added(figures, ("quiet",), name)) if name != "direct" else "",
            _plain(added(figures, ("http1", 1), name)) if name != "direct" else "",
        ]
        for name in _known(figures, "quiet")
    ]
    if rows:
        columns = ["", "median, µs", "p99, µs", "added at a quiet pace, µs", "added one after the other, µs"]
        section = Section("Added latency", prose.DELAY, tables=[(columns, rows)])
        groups = [
            *_added("50 requests/s", figures, ("quiet",)),
            *_added("one after the other", figures, ("http1", 1)),
        ]
        if groups:
            title = "Latency added to the median, one connection"
            section.plots.append(_bars("latency", title, "µs", groups))
        yield section


def _added(title: str, figures: Figures, where: tuple[object, ...]) -> list[Group]:
    found = {name: added(figures, where, name) for name in NAMES if name != "direct"}
    drawn = [
        Bar(NAMES[name].strip("*"), Spread(value, value, value), COLOURS[name])
        for name, value in found.items()
        if value is not None
    ]
    return [Group(title, drawn)] if drawn else []


# ---------------------------------------------------------------- streams


def _streams(figures: Figures) -> Iterator[Section]:
    names = [name for name in NAMES if any(figures.is_known(how, name) for how in ("fast", "alone", "paced"))]
    if not names:
        return
    rows = [
        [
            NAMES[name],
            _spread(figures.spread("fast", name, "per_second")),
            _plain(figures.middle("fast", name, "cpu_us")),
            _spread(figures.spread("alone", name, "per_second")),
            _spread(figures.spread("paced", name, "cpu_us")),
            _plain(figures.middle("paced", name, "median_us")),
            _plain(added(figures, ("paced",), name)) if name != "direct" else "",
            _plain(figures.middle("paced", name, "p99_us")),
        ]
        for name in names
    ]
    together, alone, paced = "frames/s together", "frames/s, each alone", "CPU at 4,000/s, µs"
    columns = ["", together, "CPU of one, µs", alone, paced, "median, µs", "added, µs", "p99, µs"]
    section = Section("Event streams", prose.STREAMS + _driven(figures), tables=[(columns, rows)])
    fast = [
        *_group("as fast as there is room", figures, ("fast",), "per_second"),
        *_group("each when the one before has come", figures, ("alone",), "per_second"),
    ]
    lone = _group("each frame alone", figures, ("paced",), "cpu_us")
    if fast:
        unit = "frames/s; median, lowest, highest"
        section.plots.append(_bars("frames", "Frames a second, 16 streams", unit, fast))
    if lone:
        unit = "µs; median, lowest, highest"
        section.plots.append(_bars("frame-cpu", "CPU of a frame at 4,000 frames a second", unit, lone))
    yield section


def _driven(figures: Figures) -> str:
    """Whether what sends and takes the frames was the limit."""
    bare = figures.middle("fast", "direct", "per_second")
    near = [
        NAMES[name].strip("*")
        for name in NAMES
        if name != "direct" and (ratio(figures.middle("fast", name, "per_second"), bare) or 0) > 0.6
    ]
    if bare is None or not near:
        return ""
    who = " and ".join(each for each in (", ".join(near[:-1]), near[-1]) if each)
    return (
        f" When frames come together and nobody is between, the program that sends and takes them comes to"
        f" {number(bare)} a second; for {who} it is the limit, or nearly so, and frames that go alone tell more."
    )


# ---------------------------------------------------------------- memory, starts, workers


def _memory(figures: Figures) -> Iterator[Section]:
    known = {
        **{name: NAMES[name] for name in NAMES},
        "keeper-sqlite": "**Price Keeper**, SQLite, shorter load",
        "keeper-dynamodb": "**Price Keeper**, DynamoDB, shorter load",
    }
    rows = []
    for name, title in known.items():
        whole = figures.middle("memory", name, "bytes")
        if whole is not None:
            idle = figures.middle("idle", name, "bytes")
            rows.append([title, _plain(whole, MEGABYTE), _plain(idle, KILOBYTE)])
    if rows:
        section = Section("Memory", prose.MEMORY)
        section.tables.append((["", "after load, MB", "a silent stream, kB"], rows))
        groups = _group("after load", figures, ("memory",), "bytes", MEGABYTE)
        if groups:
            section.plots.append(_bars("memory", "Memory after load", "MB", groups))
        yield section


def _starts(figures: Figures) -> Iterator[Section]:
    stores = {"sqlite": "SQLite", "dynamodb": "DynamoDB"}
    rows = [
        [title, _spread(spread)]
        for store, title in stores.items()
        if (spread := figures.spread("start", store, "seconds")) is not None
    ]
    if rows:
        yield Section("Start", prose.STARTS, tables=[(["store", "seconds to the first answer"], rows)])


def _workers(figures: Figures) -> Iterator[Section]:
    rows = [
        [
            str(count),
            _spread(figures.spread("workers", count, "cpu_us")),
            _spread(figures.spread("workers", count, "per_second")),
        ]
        for count in (1, 2)
        if figures.is_known("workers", count)
    ]
    if rows:
        columns = ["`--workers`", "CPU, µs a request", "requests/s"]
        yield Section("Workers", prose.WORKERS, tables=[(columns, rows)])
