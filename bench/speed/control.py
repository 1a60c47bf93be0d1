"""The control API on one core: how long it takes at a quiet pace, on both engines, and how much it can do.

    python -m bench.speed.control [--quick] [--output FILE]

What is measured is a control service alone on its core. The load, and what stands for DynamoDB, run on the other one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvloop
from price_keeper.domain import Scope

from bench.speed.contenders import ROOT
from bench.speed.control_asking import Asked, Seen, connected, flat_out, paced
from bench.speed.control_service import DYNAMODB_ENGINE, RECORDS, SQLITE_ENGINE, Service, service
from bench.speed.machine import OTHER_CORE, processor_seconds
from bench.speed.scaling_results import Goal, Plot, Results, Series, Table, rounded

PER_SECOND = 20.0
SLOWER = 10  # times, where what stands for DynamoDB could not keep up
CONNECTIONS = 16
ADDRESSES = 16  # of loopback: secrets can be fetched so often from each
DAYS = 28  # of usage that aggregates are asked of
BUSY_APPS, SELECTING_APPS = 25, 500  # none of which may ask more than 20 times a second
RECORDS_WANTED, SELECTIONS_WANTED = 5000, 4000
STAND_IN = "On a stand-in for DynamoDB, on the other core; what it could not keep up with a tenth as often."
COUNT = {SQLITE_ENGINE: 160, DYNAMODB_ENGINE: 120}  # of each kind
WARM_UP = 25  # of each kind, before it is timed


@dataclass(frozen=True)
class Kind:
    """`most_ms` is to hold for 99 of 100 on DynamoDB, and a fifth of it on SQLite."""

    title: str
    most_ms: float | None
    questions: Callable[[Service, int], list[Asked]]
    is_slow: bool = False  # on what stands for DynamoDB, which could not keep up with it

    def goal_ms(self, engine: str) -> float | None:
        return self.most_ms if self.most_ms is None or engine == DYNAMODB_ENGINE else self.most_ms / 5


def _turns(service: Service, count: int) -> list[tuple[int, dict[str, str]]]:
    """Apps by turns, each with its token."""
    bearers = [service.bearer(scope) for scope in service.apps]
    return [(number % len(bearers), bearers[number % len(bearers)]) for number in range(count)]


def _new_tokens(service: Service, count: int) -> list[Asked]:
    """At the door of another app, so that nothing is done but the check."""
    apps = service.apps
    return [
        service.read(apps[(number + 1) % len(apps)], "model-selection", service.bearer(apps[number % len(apps)]), 403)
        for number in range(count)
    ]


def _known_tokens(service: Service, count: int) -> list[Asked]:
    apps = service.apps
    return [
        service.read(apps[(place + 1) % len(apps)], "model-selection", bearer, 403)
        for place, bearer in _turns(service, count)
    ]


def _reads(below: str) -> Callable[[Service, int], list[Asked]]:
    return lambda service, count: [
        service.read(service.apps[place], below, bearer) for place, bearer in _turns(service, count)
    ]


def _org(service: Service, count: int) -> list[Asked]:
    whole = Scope(service.apps[0].org)
    return [service.read(whole, "aggregates/today", service.bearer(whole))] * count


def _submissions(service: Service, count: int) -> list[Asked]:
    return [service.submission(service.apps[place], bearer) for place, bearer in _turns(service, count)]


def _days(service: Service, count: int) -> list[Asked]:
    today = datetime.now(UTC).date()
    return _reads(f"aggregates?from={today - timedelta(DAYS - 1)}&to={today}")(service, count)


def _secrets(service: Service, count: int) -> list[Asked]:
    return [
        service.read(scope, "credentials/secret", {"X-Retrieval-Token": token})
        for scope, token in service.retrievals[:count]
    ]


KINDS = (
    Kind("check of a new token", 20.0, _new_tokens),
    Kind("check of a token seen before", None, _known_tokens),
    Kind("model selection", 120.0, _reads("model-selection")),
    Kind("model selection, store asked first", None, _reads("model-selection?force_check=true")),
    Kind("usage submission", 75.0, _submissions),
    Kind("aggregates of a day, of an app", 220.0, _reads("aggregates/today")),
    Kind("aggregates of a day, of an org with all its apps", None, _org, is_slow=True),
    Kind(f"aggregates of {DAYS} days, of an app", None, _days, is_slow=True),
    Kind("secret retrieval", 100.0, _secrets),
)


async def _history(running: Service) -> None:
    """Usage of each app on each day, so that there is something to add up."""
    now = datetime.now(UTC)
    told = [(now - timedelta(days)).strftime("%Y-%m-%dT%H:%M:%SZ") for days in range(DAYS)]
    connections = await connected(running.port, 4)
    batches = [running.batch(scope, running.bearer(scope), told) for scope in running.apps]
    await flat_out(connections, iter(batches), 60.0)
    for each in connections:
        each.close()


async def _latencies(running: Service, engine: str, count: int) -> list[Seen]:
    await _history(running)
    connections = await connected(running.port, CONNECTIONS, ADDRESSES)
    found = []
    for kind in KINDS:
        slower = SLOWER if kind.is_slow and engine == DYNAMODB_ENGINE else 1
        few, many = min(WARM_UP, count) // slower, count // slower
        questions = kind.questions(running, few + many)
        await paced(connections, questions[:few], PER_SECOND / slower * 2)
        found.append(await paced(connections, questions[few:], PER_SECOND / slower))
    return found


def latencies(folder: Path, engine: str, apps: int, count: int, results: Results) -> None:
    with service(folder, engine, apps, count + WARM_UP) as running:
        found = uvloop.run(_latencies(running, engine, count))
    rows = []
    for kind, seen in zip(KINDS, found, strict=True):
        p99, most = seen.percentile(99) * 1e3, kind.goal_ms(engine)
        rows.append([kind.title, rounded(seen.percentile(50) * 1e3), rounded(p99), rounded(max(seen.took) * 1e3), most])
        if most is not None:
            reached = f"{rounded(p99)} ms"
            results.goals.append(Goal(f"{kind.title}, {engine}, 99 of 100", f"{most:g} ms", reached, p99 <= most))
    note = (
        f"{PER_SECOND:g} requests a second of each kind by itself, {count} of each, of {apps} apps by turns; over"
        f" connections that stay open. {STAND_IN * (engine == DYNAMODB_ENGINE)}"
    )
    columns = ["request", "median ms", "99 of 100 ms", "slowest ms", "wanted ms"]
    results.tables.append(Table(f"Control API, {engine}: time to answer", note.strip(), columns, rows))
    points = [Series(kind.title, _curve(seen)) for kind, seen in zip(KINDS, found, strict=True)]
    results.plots.append(Plot(f"Control API, {engine}: time to answer", "percentile", "ms", points, log=True))


def _curve(seen: Seen) -> list[tuple[float, float]]:
    return [(percent, rounded(seen.percentile(percent) * 1e3)) for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99)]


@dataclass(frozen=True)
class Throughput:
    title: str
    apps: int
    connections: int
    each: int  # of what is counted, in a request
    wanted: int
    of: Callable[[Service, float], Iterator[Asked]]


def _batches(running: Service, seconds: float) -> Iterator[Asked]:
    """Made before, since making one takes as long as reading it."""
    bearers = [(scope, running.bearer(scope)) for scope in running.apps]
    enough = int(seconds * RECORDS_WANTED * 4 / RECORDS)
    return iter([running.batch(*bearers[number % len(bearers)]) for number in range(enough)])


def _selections(running: Service, _: float) -> Iterator[Asked]:
    return itertools.cycle(_reads("model-selection")(running, len(running.apps)))


THROUGHPUTS = (
    Throughput("usage records in batches of 100", BUSY_APPS, 8, RECORDS, RECORDS_WANTED, _batches),
    Throughput("model selections", SELECTING_APPS, CONNECTIONS, 1, SELECTIONS_WANTED, _selections),
)


async def _flat_out(running: Service, what: Throughput, seconds: float) -> tuple[Seen, float]:
    """And the processor time of the service, by which it is known what noise on its core took from it."""
    connections = await connected(running.port, what.connections)
    warm = list(itertools.islice(what.of(running, seconds), what.apps))
    await flat_out(connections, iter(warm), 30.0)
    questions, before = what.of(running, seconds), processor_seconds(running.pid)
    seen = await flat_out(connections, questions, seconds)
    return seen, processor_seconds(running.pid) - before


def throughput(folder: Path, seconds: float, results: Results) -> None:
    rows = []
    for number, what in enumerate(THROUGHPUTS):
        with service(folder / str(number), SQLITE_ENGINE, what.apps, 0) as running:
            seen, cpu = uvloop.run(_flat_out(running, what, seconds))
        done = len(seen.took) * what.each
        rate = done / seen.elapsed
        rows.append(
            [what.title, round(rate), rounded(cpu / done * 1e6), rounded(seen.percentile(50) * 1e3), what.wanted]
        )
        wanted = f"{what.wanted} a second"
        results.goals.append(Goal(f"{what.title}, one core, sqlite", wanted, f"{rate:.0f}", rate >= what.wanted))
    columns = ["what", "a second", "CPU us of each", "median ms of a request", "wanted a second"]
    note = "As fast as they are answered, of apps enough to stay below the limit of each. On SQLite."
    results.tables.append(Table("Control API: throughput of one core", note, columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests, only to see that it works")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance" / "control.json")
    asked = parser.parse_args(arguments)
    os.sched_setaffinity(0, {OTHER_CORE})
    results, began = Results(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for engine in (SQLITE_ENGINE, DYNAMODB_ENGINE):
            count = 20 if asked.quick else COUNT[engine]
            latencies(Path(folder) / engine, engine, BUSY_APPS, count, results)
        throughput(Path(folder) / "throughput", 1.0 if asked.quick else 10.0, results)
    results.write(asked.output)
    results.print()
    print(f"\n{time.monotonic() - began:.0f} s; written to {asked.output}")


if __name__ == "__main__":
    main()
