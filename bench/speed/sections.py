"""The parts of the page: their words, and the tables and plots of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.speed.figures import Figures, Spread, percentile, ratio
from bench.speed.goals import BUSY, KILOBYTE, MEGABYTE, added, core_share
from bench.speed.plots import Bar, Group, bars, number
from bench.speed.upstream import ANSWER, QUESTION

NAMES = {
    "direct": "no proxy",
    "nginx": "nginx",
    "envoy": "Envoy with SigV4",
    "aiohttp": "plain aiohttp proxy",
    "portkey": "Portkey",
    "litellm": "LiteLLM",
    "keeper": "**Price Keeper**, pure Python",
    "compiled": "**Price Keeper**, compiled",
    "older": "Price Keeper with `h2`, pure Python",
    "older-compiled": "Price Keeper with `h2`, compiled",
}
COLOURS = {"keeper": 0, "compiled": 1, "nginx": 2, "aiohttp": 4, "litellm": 3, "direct": 5, "envoy": 6, "portkey": 7}
OLDER_COLOUR = 5
Rows = list[list[str]]

OPENING = """\
# Performance

What this sidecar costs on the way to Bedrock, beside what one might use instead: nginx, which only passes bytes on;
Envoy, which signs for AWS; a proxy of thirty lines on aiohttp; the gateways Portkey and LiteLLM; and no proxy at
all. All of it ran in one go on one machine.

**Everything is on:** the caller's token is verified, quotas choose the label, rate limits for requests and tokens are
kept, the call is signed for AWS, its spend goes to the journal before and after, and the answer is metered. Of the
others, Envoy, Portkey and LiteLLM sign, and LiteLLM checks one key; none keeps spend. LiteLLM runs without a database
and passes Bedrock's own API through. Portkey is called by OpenAI's chat completions, which it translates: its release
here fails on Bedrock's own paths. Price Keeper is measured in both builds: pure Python, and with its hot path compiled
from the same sources (`make compiled`).

**SDK headers** are those that AWS's SDKs send with each call, among them `amz-sdk-invocation-id`, new for each call:
a caller's retries carry the same one, and the sidecar joins them. Figures are with them unless it says bare headers.

Bedrock takes from some hundred milliseconds to a minute for an answer, which is in no figure: what stands in its
place answers at once."""

CALLS = """\
A call carries {question} kB of question and {answer} kB of answer. The load is closed-loop: a connection calls again
when it is answered. With new connections each call opens its own, 20 at a time, and the connection ends with the
answer. The proxy has one core to itself; the load and what stands in Bedrock's place share the other."""

HTTP2 = """\
The same over HTTP/2 without TLS, one call at a time on each connection. A new connection for each call, 20 at a time,
is how the AWS SDK for JavaScript works. To Bedrock it is HTTP/1.1. The others do not speak HTTP/2 here."""

PACED = """\
The load is open-loop: 1,000 calls a second, over 16 connections that stay open, each at its time whether or not those
before it are answered; waiting for a free connection counts. Who answers less than 2,000 a second gets 50 a second
instead."""

DELAY = """\
What each adds to the median time of a call without a proxy, over one connection, one call after the other."""

STREAMS = """\
Together: 16 connections, streams of `ConverseStream` of 60 frames of 192 bytes, which come as fast as they can. One by
one: 16 streams, 4,000 frames a second over all of them, each sent by itself, as a model sends them; then a frame's
time on the way counts. Portkey translates each frame, so only the first is measured."""

MEMORY = """\
Proportional set size of a process with its children: shared pages count in parts. What the kernel holds for sockets is
not in it. Bare headers: after a load over both protocols (HTTP/1.1 alone for who has no HTTP/2). SDK headers: after all
that is measured here; a sidecar keeps answers for SDKs' retries. A silent stream is one that has begun and on which
nothing more comes."""

STARTS = """\
From the start of the process to its first answered call, when its files have been read before. The default
configuration asks AWS's price list, which refuses here at once, so the configured prices serve. Others start once.
DynamoDB is a stand-in on the other core: a network is not in the figure."""

FLAME = """\
## Where the time goes

By function, on a sidecar in pure Python that answers calls over HTTP/1.1; the wider, the more time. Only the time in
which Python runs is in it, not what the kernel and the event loop take. Open the picture by itself to look closer."""

STEPS = """\
What each step takes of that, without the steps that it calls."""

LIMIT = """\
What was tried, kept and left is written down: [a short way for most calls, and writes that go
together](decisions/0018-a-short-way-for-most-calls.md), [an optional compiled
build](decisions/0017-an-optional-compiled-build.md), [HTTP/2 frames of its
own](decisions/0049-http2-frames-are-our-own.md)."""

AGAINST_PYTHON = """\
**How much of nginx Python can be** depends on the machine: nginx is mostly the kernel's work. The plain aiohttp proxy
does nothing but pass on, and comes to {plain:.2f} of nginx here. Price Keeper, with everything on, comes to {ours}
times the plain proxy."""

METHOD = """\
## How it was measured

`make bench` does all of it again in 25 minutes and writes this page; it needs Linux, nginx, wrk, two cores, and node
for Portkey. `python -m bench.speed --quick` shows in a few minutes whether it works. The figures are in
[results.json]({folder}/results.json). Before it begins, it waits some minutes for other programs to end, and records
whether they did.

Rounds go over all contenders in turn, in another order each time, so that a slow minute of the machine hits them all.
A figure is the median over the rounds, in brackets the lowest and the highest. CPU is what the system counts for the
process and its children, the kernel's part included. Access logs are off everywhere. wrk is the load over
kept HTTP/1.1 connections, with a script for SDK headers; all other calls come from `bench/speed/client.py`, frames from
`bench/speed/driver.py`, which compares the first stream of each caller with what was sent, byte by byte. "With `h2`" is
the version before HTTP/2 frames were our own; it is measured where `make bench-older` has installed it."""


@dataclass
class Section:
    title: str
    text: str
    plots: list[tuple[str, str, str]] = field(default_factory=list)  # the file, what it shows, the drawing
    tables: list[tuple[Sequence[str], Rows]] = field(default_factory=list)


def opening(figures: Figures) -> str:
    quiet = figures.about.get("quiet machine")
    noted = f"**Was the machine quiet?** {quiet}." if quiet else ""
    return "\n\n".join(part for part in (OPENING, _summary(figures), noted) if part)


def closing(figures: Figures, folder: str) -> str:
    lines = [f"{name}: {value}" for name, value in figures.about.items()]
    shares = [share for name, values in figures.values.items() if name.endswith("/others") for share in values]
    if shares:
        share = f"{percentile(shares, 0.5):.0%} at the median, {max(shares):.0%} at most"
        lines.append(f"of the core of what was measured, others took during the measurements: {share}")
    parts = [METHOD.format(folder=folder), "\n".join(f"- {line}" for line in lines)]
    if figures.left_out:
        parts.append("Not measured:\n\n" + "\n".join(f"- {line}" for line in figures.left_out))
    return "\n\n".join(part for part in parts if part)


def against_python(figures: Figures) -> str:
    def per_second(name: str) -> float | None:
        return figures.middle("http1", "sdk", "64", name, "per_second")

    plain, nginx = per_second("aiohttp"), per_second("nginx")
    found = {"in pure Python": ratio(per_second("keeper"), plain), "compiled": ratio(per_second("compiled"), plain)}
    ours = " and ".join(f"{times:.1f} ({title})" for title, times in found.items() if times is not None)
    if plain is None or not nginx or not ours:
        return ""
    return AGAINST_PYTHON.format(plain=plain / nginx, ours=ours)


def all_of(figures: Figures) -> list[Section]:
    makers = (_http1, _http2, _delay, _paced, _streams, _memory, _starts)
    return [section for make in makers for section in make(figures)]


def _summary(figures: Figures) -> str:
    """The most important figures."""
    lines = []
    for name in ("compiled", "keeper"):
        per_second = figures.middle("http1", "sdk", "64", name, "per_second")
        http2 = figures.middle("http2", "sdk", "64", name, "per_second")
        delay = added(figures, ("http1", "sdk", "1"), name)
        memory = figures.middle("memory", "sdk", name, "bytes")
        parts = [
            f"**{number(per_second)} requests/s** over HTTP/1.1" if per_second else "",
            f"{number(http2)} over HTTP/2" if http2 else "",
            f"{number(delay)} µs added to a call" if delay else "",
            f"{number(memory / MEGABYTE)} MB" if memory else "",
        ]
        if any(parts):
            lines.append(f"- {NAMES[name]}: {', '.join(part for part in parts if part)}")
    return "On one core of the machine below, with SDK headers:\n\n" + "\n".join(lines) if lines else ""


def _known(figures: Figures, *path: object) -> list[str]:
    return [name for name in NAMES if figures.is_known(*path, name)]


def _spread(spread: Spread | None, part: float = 1.0) -> str:
    if spread is None:
        return ""
    middle, low, high = (number(value / part) for value in (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} - {high})"


def _plain(value: float | None, part: float = 1.0) -> str:
    return "" if value is None else number(value / part)


def _bar(name: str, spread: Spread) -> Bar:
    return Bar(NAMES[name].replace("*", "").replace("`", ""), spread, COLOURS.get(name, OLDER_COLOUR))


def _group(title: str, figures: Figures, path: Sequence[object], figure: str, part: float = 1.0) -> list[Group]:
    """Without "no proxy", which is in the table: its bar would make the others too short to compare."""
    drawn = []
    for name in NAMES:
        spread = figures.spread(*path, name, figure)
        if spread is not None and name != "direct":
            drawn.append(_bar(name, Spread(spread.middle / part, spread.low / part, spread.high / part)))
    return [Group(title, drawn)] if drawn else []


def _plot(name: str, title: str, unit: str, groups: Iterable[list[Group]]) -> list[tuple[str, str, str]]:
    """Nothing if there is nothing to draw."""
    drawn = [group for each in groups for group in each]
    return [(f"{name}.svg", title, bars(title, unit, drawn))] if drawn else []


# ---------------------------------------------------------------- calls

_HOW = {
    ("sdk", "1"): "1 connection",
    ("sdk", "64"): "64 connections",
    ("bare", "64"): "64 connections, bare headers",
    ("sdk", "new"): "a new connection per call, 20 at a time",
}
_CALLS = ["connections", "", "requests/s", "p50, ms", "p99, ms", "p99.9, ms", "CPU, µs a request", "of its core"]


def _closed_loop(figures: Figures, protocol: str) -> Rows:
    rows = []
    for how, title in _HOW.items():
        for name in _known(figures, protocol, *how):
            path = (protocol, *how, name)
            share = core_share(figures, *path)
            rows.append(
                [
                    title,
                    NAMES[name],
                    _spread(figures.spread(*path, "per_second")),
                    *(_plain(figures.middle(*path, each), 1000) for each in ("median_us", "p99_us", "p999_us")),
                    _spread(figures.spread(*path, "cpu_us")),
                    "" if share is None else f"{share:.0%}",
                ]
            )
    return rows


def _drawn_calls(figures: Figures, protocol: str, title: str) -> list[tuple[str, str, str]]:
    kinds = [how for how in _HOW if how != ("sdk", "1")]
    return [
        *_plot(
            protocol,
            f"Requests a second, {title}",
            "requests/s; median, lowest, highest",
            (_group(_HOW[how], figures, (protocol, *how), "per_second") for how in kinds),
        ),
        *_plot(
            f"{protocol}-cpu",
            f"CPU of a request, {title}",
            "µs; median, lowest, highest",
            (_group(_HOW[how], figures, (protocol, *how), "cpu_us") for how in kinds),
        ),
    ]


def _http1(figures: Figures) -> Iterator[Section]:
    rows = _closed_loop(figures, "http1")
    if rows:
        sizes = CALLS.format(question=f"{len(QUESTION) / 1e3:.1f}", answer=f"{len(ANSWER) / 1e3:.1f}")
        text = sizes + _limited(figures, "http1")
        yield Section("Calls over HTTP/1.1", text, _drawn_calls(figures, "http1", "HTTP/1.1"), [(_CALLS, rows)])


def _http2(figures: Figures) -> Iterator[Section]:
    rows = _closed_loop(figures, "http2")
    if rows:
        text = HTTP2 + _limited(figures, "http2")
        yield Section("Calls over HTTP/2", text, _drawn_calls(figures, "http2", "HTTP/2"), [(_CALLS, rows)])


def _limited(figures: Figures, protocol: str) -> str:
    """Names the contenders whose core was partly idle: they were not the limit of their figure."""
    idle = []
    for name in NAMES:
        share = core_share(figures, protocol, "sdk", "64", name)
        if share is not None and share < BUSY:
            idle.append(f"{NAMES[name].replace('*', '')} used {share:.0%}")
    if not idle:
        return ""
    return f" With 64 connections {', '.join(idle)} of its core: the load, or another program, was the limit."


def _delay(figures: Figures) -> Iterator[Section]:
    proxies = [name for name in NAMES if name != "direct"]
    found = {
        title: {name: value for name in proxies if (value := added(figures, (protocol, "sdk", "1"), name)) is not None}
        for title, protocol in (("HTTP/1.1", "http1"), ("HTTP/2", "http2"))
    }
    names = [name for name in NAMES if any(name in by_name for by_name in found.values())]
    if names:
        rows = [[NAMES[name], *(_plain(by_name.get(name)) for by_name in found.values())] for name in names]
        groups = [
            [Group(title, [_bar(name, Spread(value, value, value)) for name, value in by_name.items()])]
            for title, by_name in found.items()
            if by_name
        ]
        plots = _plot("latency", "Added to the median, one connection", "µs", groups)
        yield Section("Added latency", DELAY, plots, [(["", "HTTP/1.1, µs", "HTTP/2, µs"], rows)])


def _paced(figures: Figures) -> Iterator[Section]:
    rows = []
    for protocol, title in (("http1", "HTTP/1.1"), ("http2", "HTTP/2")):
        for name in _known(figures, "pace", protocol):
            times = ("median_us", "p99_us", "p999_us", "cpu_us")
            values = [figures.spread("pace", protocol, name, each) for each in times]
            pace = _plain(figures.middle("pace", protocol, name, "pace"))
            rows.append([title, NAMES[name], pace, *(_spread(value) for value in values)])
    if rows:
        columns = ["", "", "calls/s", "p50, µs", "p99, µs", "p99.9, µs", "CPU, µs a request"]
        yield Section("Calls at a pace", PACED, tables=[(columns, rows)])


# ---------------------------------------------------------------- streams


def _streams(figures: Figures) -> Iterator[Section]:
    names = [name for name in NAMES if any(figures.is_known(how, name) for how in ("streams", "frames"))]
    if not names:
        return
    rows = [
        [
            NAMES[name],
            _spread(figures.spread("streams", name, "per_second")),
            _plain(figures.middle("streams", name, "cpu_us")),
            _spread(figures.spread("frames", name, "cpu_us")),
            *(_plain(figures.middle("frames", name, each)) for each in ("median_us", "p99_us", "p999_us")),
        ]
        for name in names
    ]
    together, alone = "together: frames/s", "one by one: CPU of one, µs"
    columns = ["", together, "CPU of one, µs", alone, "p50, µs", "p99, µs", "p99.9, µs"]
    rates = _group("60 frames each", figures, ("streams",), "per_second")
    costs = _group("4,000 frames a second", figures, ("frames",), "cpu_us")
    plots = [
        *_plot("frames", "Frames a second", "frames/s; median, lowest, highest", [rates]),
        *_plot("frame-cpu", "CPU of a frame, one by one", "µs; median, lowest, highest", [costs]),
    ]
    yield Section("Event streams", STREAMS, plots, [(columns, rows)])


# ---------------------------------------------------------------- memory, starts


def _memory(figures: Figures) -> Iterator[Section]:
    titles = {**NAMES, "keeper-dynamodb": "**Price Keeper**, pure Python, DynamoDB, HTTP/1.1 alone"}
    rows = []
    for name, title in titles.items():
        held = [figures.middle("memory", kind, name, "bytes") for kind in ("bare", "sdk")]
        if any(held):
            silent = figures.middle("idle", name, "bytes")
            rows.append([title, *(_plain(each, MEGABYTE) for each in held), _plain(silent, KILOBYTE)])
    if rows:
        groups = [
            _group(title, figures, ("memory", kind), "bytes", MEGABYTE)
            for kind, title in (("bare", "bare headers"), ("sdk", "SDK headers"))
        ]
        columns = ["", "bare headers, MB", "SDK headers, MB", "a silent stream, kB"]
        yield Section("Memory", MEMORY, _plot("memory", "Memory after load", "MB", groups), [(columns, rows)])


def _starts(figures: Figures) -> Iterator[Section]:
    ours = "**Price Keeper**, pure Python, configured prices"
    titles = {**NAMES, "sqlite": f"{ours}, SQLite", "dynamodb": f"{ours}, DynamoDB"}
    rows = [
        [title, _spread(spread)]
        for name, title in titles.items()
        if (spread := figures.spread("start", name, "seconds")) is not None
    ]
    if rows:
        yield Section("Start", STARTS, tables=[(["", "seconds to the first answer"], rows)])
