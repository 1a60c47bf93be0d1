"""What we set out to reach, each goal held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.speed.figures import Figures, ratio
from bench.speed.plots import number

MEGABYTE, KILOBYTE = 1e6, 1e3
_UNKNOWN = "not measured"


@dataclass(frozen=True)
class Goal:
    goal: str
    wanted: str
    reached: str
    is_reached: bool | None  # None: not measured


def reached(figures: Figures) -> list[Goal]:
    return [*_compared(figures), *_absolute(figures)]


def added(figures: Figures, where: tuple[object, ...], contender: str) -> float | None:
    """Microseconds that a contender adds to the median."""
    own, bare = (figures.middle(*where, name, "median_us") for name in (contender, "direct"))
    return None if own is None or bare is None else own - bare


def _compared(figures: Figures) -> Iterator[Goal]:
    def requests(name: str) -> float | None:
        return figures.middle("http1", 64, name, "per_second")

    def frames(name: str) -> float | None:
        return figures.middle("fast", name, "per_second")

    def lone(name: str) -> float | None:
        return figures.middle("alone", name, "per_second")

    def delay(name: str) -> float | None:
        return added(figures, ("http1", 1), name)

    def cost(name: str) -> float | None:
        return figures.middle("workers", name, "cpu_us")

    builds = [("compiled", ", compiled"), ("keeper", ", as it comes")]
    for ours, build in builds if requests("compiled") is not None else [("keeper", "")]:
        told = f"requests a second, 64 connections, beside nginx{build}"
        yield _times(told, requests, ours, "nginx", least=0.40)
        yield _times(f"the same beside LiteLLM{build}", requests, ours, "litellm", least=100)
        told = f"added median latency, 1 connection, beside nginx{build}"
        yield _times(told, delay, ours, "nginx", most=2.0, unit=" µs")
    yield _times("frames a second, 16 streams, beside nginx", frames, "keeper", "nginx", least=0.25)
    yield _times("the same, each frame alone", lone, "keeper", "nginx", least=0.25)
    yield _times("CPU of a request with `--workers 2`, beside one", cost, "2", "1", most=1.1, unit=" µs")


def _times(
    goal: str,
    figure: Callable[[str], float | None],
    own: str,
    other: str,
    *,
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
) -> Goal:
    wanted = f"at least {least:.2f} times" if least is not None and least < 10 else f"at least {least or 0:g} times"
    if most is not None:
        wanted = f"at most {most:g} times"
    ours, theirs = figure(own), figure(other)
    times = ratio(ours, theirs)
    if ours is None or theirs is None or times is None:
        return Goal(goal, wanted, _UNKNOWN, None)
    is_reached = times >= least if least is not None else times <= (most or 0)
    return Goal(goal, wanted, f"{number(times)} times ({number(ours)}{unit} to {number(theirs)}{unit})", is_reached)


def _absolute(figures: Figures) -> Iterator[Goal]:
    for store, limit in (("sqlite", 0.5), ("dynamodb", 1.2)):
        name = {"sqlite": "SQLite", "dynamodb": "DynamoDB"}[store]
        value = figures.middle("start", store, "seconds")
        yield _most(f"start to first answer, {name}", limit, value, "s")
    lasting = figures.middle("memory", "keeper", "bytes") or figures.middle("memory", "keeper-sqlite", "bytes")
    yield _most("memory after load, SQLite", 70, _part(lasting, MEGABYTE), "MB")
    yield _most(
        "memory after load, DynamoDB", 110, _part(figures.middle("memory", "keeper-dynamodb", "bytes"), MEGABYTE), "MB"
    )
    yield _most("memory of a silent stream", 64, _part(figures.middle("idle", "keeper", "bytes"), KILOBYTE), "kB")


def _part(value: float | None, size: float) -> float | None:
    return None if value is None else value / size


def _most(goal: str, limit: float, value: float | None, unit: str) -> Goal:
    wanted = f"at most {limit:g} {unit}"
    if value is None:
        return Goal(goal, wanted, _UNKNOWN, None)
    return Goal(goal, wanted, f"{number(value)} {unit} ({value / limit:.2f} of that)", value <= limit)
