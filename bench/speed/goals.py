"""The goals, each held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.speed.figures import Figures, ratio
from bench.speed.plots import number

MEGABYTE, KILOBYTE = 1e6, 1e3
BUSY = 0.9  # of its core: a contender below that was not the limit of what is said of it
_UNKNOWN = "not measured"


@dataclass(frozen=True)
class Goal:
    goal: str
    wanted: str
    reached: str
    is_reached: bool | None  # None: not measured


@dataclass(frozen=True)
class Build:
    """One of the two builds, and what it is to reach beside others."""

    name: str
    title: str
    older: str  # the same build of an older version
    http1: float
    envoy: float | None
    http2: float
    frames: float


# "Level" with Envoy is within five per cent.
BUILDS = (
    Build("compiled", "compiled", "older-compiled", http1=0.45, envoy=0.95, http2=0.45, frames=0.30),
    Build("keeper", "pure Python", "older", http1=0.27, envoy=None, http2=0.25, frames=0.20),
)
BESIDE_OLDER, ADDED, START_SECONDS, BARE_MB, SDK_MB = 2.5, 1.4, 0.33, 68, 85


def reached(figures: Figures) -> list[Goal]:
    return [goal for build in BUILDS for goal in _of(build, figures)]


def added(figures: Figures, where: tuple[object, ...], contender: str) -> float | None:
    """Microseconds that a contender adds to the median."""
    own, bare = (figures.middle(*where, name, "median_us") for name in (contender, "direct"))
    return None if own is None or bare is None else own - bare


def core_share(figures: Figures, *path: object) -> float | None:
    """Which part of its core a contender used."""
    cpu, rate = (figures.middle(*path, name) for name in ("cpu_us", "per_second"))
    return None if cpu is None or rate is None else cpu * rate / 1e6


def _of(build: Build, figures: Figures) -> Iterator[Goal]:
    def beside(goal: str, where: tuple[str, ...], other: str, least: float) -> Goal:
        ours, theirs = (figures.middle(*where, name, "per_second") for name in (build.name, other))
        share = core_share(figures, *where, other)
        idle = f"; {other} used {share:.0%} of its core" if share is not None and share < BUSY else ""
        return _times(f"{goal}, {build.title}", ours, theirs, least=least, note=idle)

    http1, http2 = ("http1", "sdk", "64"), ("http2", "sdk", "64")
    yield beside("HTTP/1.1 requests/s beside nginx", http1, "nginx", build.http1)
    if build.envoy is not None:
        yield beside("HTTP/1.1 requests/s beside Envoy with SigV4 (level: within 5 %)", http1, "envoy", build.envoy)
    yield beside("HTTP/2 requests/s beside nginx's HTTP/2, kept connections", http2, "nginx", build.http2)
    new = ("http2", "sdk", "new")
    yield beside("HTTP/2, a new connection per call, beside `h2`", new, build.older, BESIDE_OLDER)
    yield beside("frames/s beside nginx", ("streams",), "nginx", build.frames)
    ours, theirs = (added(figures, ("http1", "sdk", "1"), name) for name in (build.name, "nginx"))
    yield _times(f"added median at one connection beside nginx, {build.title}", ours, theirs, most=ADDED, unit=" µs")
    for kind, most, title in (("bare", BARE_MB, "bare headers"), ("sdk", SDK_MB, "SDK headers")):
        held = figures.middle("memory", kind, build.name, "bytes")
        memory = None if held is None else held / MEGABYTE
        yield _most(f"memory after load, SQLite, both protocols, {title}, {build.title}", most, memory, "MB")
    start = figures.middle("start", build.name, "seconds")
    yield _most(f"start to first answer, default configuration, {build.title}", START_SECONDS, start, "s")


def _times(
    goal: str,
    ours: float | None,
    theirs: float | None,
    *,
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
    note: str = "",
) -> Goal:
    wanted = f"at least {least:.2f} x" if least is not None else f"at most {most:.2f} x"
    times = ratio(ours, theirs)
    if ours is None or theirs is None or times is None:
        return Goal(goal, wanted, _UNKNOWN, None)
    is_reached = times >= least if least is not None else times <= (most or 0)
    return Goal(goal, wanted, f"{times:.2f} x ({number(ours)}{unit} to {number(theirs)}{unit}{note})", is_reached)


def _most(goal: str, limit: float, value: float | None, unit: str) -> Goal:
    wanted = f"at most {limit:g} {unit}"
    if value is None:
        return Goal(goal, wanted, _UNKNOWN, None)
    return Goal(goal, wanted, f"{number(value)} {unit}", value <= limit)
