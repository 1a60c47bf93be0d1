"""What a sidecar costs as it grows: with more orgs and apps that call, and with more streams that stay open.

python -m bench.speed.scaling [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.speed import streams
from bench.speed.contenders import ROOT, UNARY, question
from bench.speed.control_asking import Asked, Seen, connected, flat_out, paced
from bench.speed.machine import OTHER_CORE, memory_bytes, processor_seconds
from bench.speed.scaling_counted import Asked as Stored
from bench.speed.scaling_results import Goal, Plot, Results, Series, Table, rounded
from bench.speed.scaling_sidecar import Sidecar, sidecar
from bench.speed.upstream import bedrock

SCOPES, FEW_SCOPES = (1, 10, 100, 1000), (1, 20)
STREAMS, FEW_STREAMS = (10, 100, 1000, 5000), (10, 50)
CONNECTIONS = 32
STEADY_PER_SECOND = 200.0  # requests, for what the store is asked in a minute
BESIDE_PER_SECOND = 200.0  # beside streams that rest
MOST_GROWTH = 1.5  # of the processor time of a request, from the fewest to the most


@dataclass(frozen=True)
class Lengths:
    """Seconds of each measurement; `steady` lasts longer than the longest wait before spend goes to the store."""

    flat_out: float
    steady: float
    beside: float


FULL, QUICK = Lengths(8.0, 40.0, 8.0), Lengths(1.0, 2.0, 1.0)


@dataclass(frozen=True)
class ByScopes:
    scopes: int
    per_second: float
    cpu_us: float
    p99_ms: float
    memory_mb: float
    stored: Stored  # at a steady pace
    seconds: float

    def a_minute(self, count: int) -> float:
        return rounded(count / self.seconds * 60)

    @property
    def row(self) -> list[float]:
        what = self.stored
        counts = (what.transactions, what.writes, what.items, what.reads)
        figures = [round(self.per_second), rounded(self.cpu_us), rounded(self.p99_ms), rounded(self.memory_mb)]
        return [self.scopes, *figures, *(self.a_minute(each) for each in counts)]


async def _asked_of_scopes(running: Sidecar, lengths: Lengths) -> tuple[Seen, float, Stored, float]:
    """First at a steady pace: what is held of limits is for the demand that there is, and outlasts it for a while."""
    connections = await connected(running.port, CONNECTIONS)
    each = running.questions()
    await flat_out(connections, iter(each), 30.0)  # so that all are known
    turns = itertools.islice(itertools.cycle(each), int(lengths.steady * STEADY_PER_SECOND))
    stored = running.counted.told()
    steady = await paced(connections, list(turns), STEADY_PER_SECOND)
    stored = running.counted.told().since(stored)
    await flat_out(connections, itertools.cycle(each), lengths.flat_out / 4)
    before = processor_seconds(running.pid)
    seen = await flat_out(connections, itertools.cycle(each), lengths.flat_out)
    cpu = (processor_seconds(running.pid) - before) / len(seen.took) * 1e6
    return seen, cpu, stored, steady.elapsed


def by_scopes(folder: Path, counts: Sequence[int], lengths: Lengths) -> list[ByScopes]:
    found = []
    with bedrock(folder / "upstream") as (upstream, _):
        for count in counts:
            with sidecar(folder / str(count), upstream, count) as running:
                seen, cpu, stored, seconds = uvloop.run(_asked_of_scopes(running, lengths))
                memory, p99 = memory_bytes(running.pid) / 2**20, seen.percentile(99) * 1e3
                rate = len(seen.took) / seen.elapsed
                found.append(ByScopes(count, rate, cpu, p99, memory, stored, seconds))
    return found


@dataclass(frozen=True)
class ByStreams:
    streams: int
    each_kb: float
    memory_mb: float
    median_ms: float
    p99_ms: float
    cpu_us: float  # of a request beside them, with all that the streams cost meanwhile

    @property
    def row(self) -> list[float]:
        figures = (self.each_kb, self.memory_mb, self.median_ms, self.p99_ms, self.cpu_us)
        return [self.streams, *(rounded(each) for each in figures)]


async def _beside(running: Sidecar, seconds: float) -> tuple[Seen, float]:
    connections = await connected(running.port, 4)
    asked = Asked(question(running.running, UNARY), frozenset({200}))
    await paced(connections, [asked] * 50, BESIDE_PER_SECOND)
    before = processor_seconds(running.pid)
    seen = await paced(connections, [asked] * int(seconds * BESIDE_PER_SECOND), BESIDE_PER_SECOND)
    cpu = (processor_seconds(running.pid) - before) / len(seen.took) * 1e6
    for each in connections:
        each.close()
    return seen, cpu


def by_streams(folder: Path, counts: Sequence[int], lengths: Lengths) -> list[ByStreams]:
    """One sidecar for each count, as memory that was given back by others would hide what streams take."""
    found = []
    for count in (0, *counts):
        with streams.bedrock() as upstream, sidecar(folder / str(count), upstream.port, 1) as running:
            uvloop.run(_beside(running, 0.5))
            before = memory_bytes(running.pid)
            if count:
                upstream.told("hold", running.running, streams=count)
            after = memory_bytes(running.pid)
            seen, cpu = uvloop.run(_beside(running, lengths.beside))
            upstream.told("release")
            each = (after - before) / 1024 / count if count else 0.0
            times = (seen.percentile(50) * 1e3, seen.percentile(99) * 1e3)
            found.append(ByStreams(count, each, after / 2**20, *times, cpu))
    return found


def told_of_scopes(found: Sequence[ByScopes], results: Results) -> None:
    columns = ["apps", "requests/s", "CPU us each", "99 of 100 ms", "memory MB"]
    columns += ["transactions/min", "writes/min", "items/min", "reads/min"]
    note = (
        "Each app has quotas and limits, under an org that has them too, and the load goes to all by turns. The first"
        f" four as fast as {CONNECTIONS} connections ask; what the store is asked at {STEADY_PER_SECOND:g} requests/s."
        " The load is one and the same, so with more apps each calls less often: what is held of its limits lasts for"
        " fewer calls, and a flush has fewer to add up. That, and not looking things up, is what a request costs more."
    )
    results.tables.append(Table("Apps that call", note, columns, [each.row for each in found]))
    results.plots.append(
        _plot("Processor time of a request", "apps", "us", [(each.scopes, each.cpu_us) for each in found])
    )
    results.plots.append(
        _plot("Memory by apps that call", "apps", "MB", [(each.scopes, each.memory_mb) for each in found])
    )
    items = [(each.scopes, each.a_minute(each.stored.items)) for each in found]
    results.plots.append(_plot("Items written to the store", "apps", "a minute", items))


def told_of_streams(found: Sequence[ByStreams], results: Results) -> None:
    columns = ["open streams", "KB each", "memory MB", "median ms beside", "99 of 100 ms beside", "CPU us beside"]
    note = (
        f"Streams that have begun and on which nothing comes; beside them {BESIDE_PER_SECOND:g} requests/s that are"
        " answered at once. The driver is upstream and callers both, on the other core."
    )
    results.tables.append(Table("Streams that stay open", note, columns, [each.row for each in found]))
    some = [each for each in found if each.streams]
    results.plots.append(
        _plot("Memory by open streams", "streams", "MB", [(each.streams, each.memory_mb) for each in some])
    )
    results.plots.append(
        _plot("Median beside open streams", "streams", "ms", [(each.streams, each.median_ms) for each in some])
    )
    growth = found[-1].cpu_us / found[0].cpu_us
    name = f"processor time of a request beside {found[-1].streams} open streams, to none"
    results.goals.append(Goal(name, f"at most {MOST_GROWTH:g} times", f"{growth:.2f} times", growth <= MOST_GROWTH))


def _plot(title: str, x: str, y: str, points: list[tuple[float, float]]) -> Plot:
    return Plot(title, x, y, [Series("sidecar", [(at, rounded(value)) for at, value in points])], log=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few of each, only to see that it works")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance" / "scaling.json")
    asked = parser.parse_args(arguments)
    os.sched_setaffinity(0, {OTHER_CORE})
    results, began, lengths = Results(), time.monotonic(), QUICK if asked.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        scopes, held = (FEW_SCOPES, FEW_STREAMS) if asked.quick else (SCOPES, STREAMS)
        told_of_scopes(by_scopes(Path(folder) / "scopes", scopes, lengths), results)
        told_of_streams(by_streams(Path(folder) / "streams", held, lengths), results)
    results.write(asked.output)
    results.print()
    print(f"\n{time.monotonic() - began:.0f} s; written to {asked.output}")


if __name__ == "__main__":
    main()
