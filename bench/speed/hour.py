"""Whether a sidecar stays as it is through an hour of load: memory, descriptors, journal.

    python -m bench.speed.hour [--seconds SECONDS] [--quick] [--output FILE]

Requests at a steady pace, streams beside them, and callers who leave in the middle. One process is Bedrock and the
callers both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.speed.contenders import ROOT
from bench.speed.machine import OTHER_CORE, bytes_in, descriptors, memory_bytes, own_bytes, processor_seconds, threads
from bench.speed.scaling_load import FRAME_SECONDS, FRAMES, Bedrock, Callers, Load
from bench.speed.scaling_results import Goal, Plot, Results, Series, Table, rounded
from bench.speed.scaling_sidecar import Sidecar, sidecar
from bench.speed.upstream import free_port

SECONDS, QUICK_SECONDS = 3600.0, 20.0
APPS = 50
PER_SECOND = 250.0
STREAMS_PER_SECOND = 10.0
SAMPLE_SECONDS = 10.0
SETTLED = 0.25  # of the time: until then caches fill
MOST_GROWTH = 0.05  # of memory that is in no file, from then to the end
REST_SECONDS = 90.0  # at most, after the load: connections upstream are kept for a while
MOST_DESCRIPTORS = 4  # more than before the load


@dataclass(frozen=True)
class Sample:
    at: float
    memory_mb: float
    own_memory_mb: float
    descriptors: int
    threads: int
    journal_mb: float
    store_mb: float
    cpu_percent: float
    median_ms: float


async def _at_a_pace(per_second: float, until: float, act: Callable[[int], object]) -> None:
    began = time.monotonic()
    for number in itertools.count():
        due = began + number / per_second
        if due >= until:
            return
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        act(number)


async def _samples(running: Sidecar, callers: Callers, until: float) -> list[Sample]:
    began, found, spent, moment = time.monotonic(), [], processor_seconds(running.pid), time.monotonic()
    while time.monotonic() < until:
        await asyncio.sleep(min(SAMPLE_SECONDS, max(0.1, until - time.monotonic())))
        now, cpu = time.monotonic(), processor_seconds(running.pid)
        took, callers.load.took = callers.load.took, []
        store = sum(file.stat().st_size for file in running.folder.glob("store.db*"))
        found.append(
            Sample(
                now - began,
                memory_bytes(running.pid) / 2**20,
                own_bytes(running.pid) / 2**20,
                descriptors(running.pid),
                threads(running.pid),
                bytes_in(running.journal) / 2**20,
                store / 2**20,
                (cpu - spent) / (now - moment) * 100,
                median(took) * 1e3 if took else 0.0,
            )
        )
        spent, moment = cpu, now
    return found


async def _hour(running: Sidecar, port: int, seconds: float) -> tuple[list[Sample], Load, int]:
    """And how many descriptors more than before it are open when all callers are gone."""
    loop, before = asyncio.get_running_loop(), descriptors(running.pid)
    server = await loop.create_server(Bedrock, "127.0.0.1", port)
    callers, until = Callers(running), time.monotonic() + seconds
    pending: set[asyncio.Task[None]] = set()

    def begun(act: Callable[[int], object]) -> Callable[[int], None]:
        def begin(number: int) -> None:
            task = loop.create_task(act(number))  # type: ignore[arg-type]
            pending.add(task)
            task.add_done_callback(pending.discard)

        return begin

    found, *_ = await asyncio.gather(
        _samples(running, callers, until),
        _at_a_pace(PER_SECOND, until, begun(callers.ask)),
        _at_a_pace(STREAMS_PER_SECOND, until, begun(callers.stream)),
        _at_a_pace(1.0, until, begun(callers.leave)),
    )
    if pending:
        await asyncio.wait(pending, timeout=FRAMES * FRAME_SECONDS + 10)
    callers.close()
    more = await _more_at_rest(running, before)
    server.close()
    return found, callers.load, more


async def _more_at_rest(running: Sidecar, before: int) -> int:
    until = time.monotonic() + REST_SECONDS
    # What is closed over there, nothing tells us of.
    while (more := descriptors(running.pid) - before) > MOST_DESCRIPTORS and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(1.0)
    return more


def told(found: Sequence[Sample], load: Load, more: int, seconds: float, results: Results) -> None:
    settled = [each for each in found if each.at >= seconds * SETTLED] or list(found)
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]
    each_takes = FRAMES * FRAME_SECONDS
    note = (
        f"{seconds:.0f} s: {PER_SECOND:g} requests/s and {STREAMS_PER_SECOND:g} streams/s of {each_takes:g} s each, of"
        f" {APPS} apps; every third stream and one request a second are left by who asked. {load.answered}"
        f" answers, {load.streamed} streams to their end, {load.left} left, {load.failed} failed."
    )
    if load.why:
        note += f" Those that failed were answered: {', '.join(f'{why!r} {count}' for why, count in load.why.items())}."
    columns = ["what", "when settled", "at the end", "least", "most"]
    kinds = (
        "memory_mb",
        "own_memory_mb",
        "descriptors",
        "threads",
        "journal_mb",
        "store_mb",
        "cpu_percent",
        "median_ms",
    )
    title = f"{seconds / 60:.0f} minutes of load"
    results.tables.append(Table(title, note, columns, [_row(each, settled, first, last) for each in kinds]))
    for kind, unit in (
        ("memory_mb", "MB"),
        ("own_memory_mb", "MB"),
        ("descriptors", "descriptors"),
        ("journal_mb", "MB"),
    ):
        points = [(rounded(each.at / 60), rounded(getattr(each, kind), 4)) for each in found]
        results.plots.append(Plot(f"{title}: {_name(kind)}", "minutes", unit, [Series("sidecar", points)]))
    growth = _middle("own_memory_mb", last) / _middle("own_memory_mb", first) - 1
    results.goals += [
        Goal(
            "memory of its own stays flat", f"at most {MOST_GROWTH:.0%} more", f"{growth:+.1%}", growth <= MOST_GROWTH
        ),
        Goal("descriptors are given back", f"at most {MOST_DESCRIPTORS} more", f"{more:+}", more <= MOST_DESCRIPTORS),
        Goal("every call is answered", "none fails", f"{load.failed} failed", not load.failed),
    ]


def _row(kind: str, settled: Sequence[Sample], first: Sequence[Sample], last: Sequence[Sample]) -> list[str | float]:
    values = [getattr(each, kind) for each in settled]
    figures = (_middle(kind, first), _middle(kind, last), min(values), max(values))
    return [_name(kind), *(rounded(each) for each in figures)]


def _middle(kind: str, samples: Sequence[Sample]) -> float:
    return float(median(getattr(each, kind) for each in samples))


def _name(kind: str) -> str:
    return (
        kind.replace("own_memory", "memory of its own")
        .replace("_mb", ", MB")
        .replace("_percent", ", % of a core")
        .replace("_ms", " time to answer, ms")
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance" / "hour.json")
    asked = parser.parse_args(arguments)
    seconds = QUICK_SECONDS if asked.quick else asked.seconds
    os.sched_setaffinity(0, {OTHER_CORE})
    results, port = Results(), free_port()
    with tempfile.TemporaryDirectory() as folder, sidecar(Path(folder), port, APPS) as running:
        found, load, more = uvloop.run(_hour(running, port, seconds))
    told(found, load, more, seconds, results)
    results.write(asked.output)
    results.print()


if __name__ == "__main__":
    main()
