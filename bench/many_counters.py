"""Totals of many counters: two processes that add to all of them, once in `--pause` seconds; computed for more.

    memory      in simulated time, each request takes DELAY_SECONDS: what the schedule alone does, on any machine
    sqlite      on a real engine in real time: both processes record and flush with the product's own parts
    ministack   the same, each request over HTTP

Both bring totals up to date as a sidecar does. Requests and items are counted where they leave for the engine.

Run as: python -m bench.many_counters --engine memory
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from price_keeper.clock import Clock, SystemClock
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import EARLIEST_LOOK, LATEST_LOOK, Aggregator, build_total_key, sum_counters
from price_keeper.ledger.counter_writes import build_addition
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.recording import AGGREGATE_JITTER
from price_keeper.stores.contract import Item, Key, Put, Store
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock
from tests.support.engines import TEST_CREDENTIALS, Engines
from tests.support.memory_store import MemoryStore
from tests.support.recording_harness import open_recording_harness
from tests.support.servers import ministack_server

COUNTERS, PROCESSES, SHARDS = 5000, 2, 8
INTERVAL = 60.0
DELAY_SECONDS = 0.008
MAX_WAIT_SECONDS = 900
ORG = "550e8400-e29b-41d4-a716-446655440000"
FLEET_COUNTERS, FLEET_PROCESSES = 100_000, 10


def build_counters(number: int) -> list[Counter]:
    day = time.strftime("DAY#%Y%m%d", time.gmtime())
    return [Counter(Scope(ORG, f"app-{place}").key, "premium", day, SHARDS) for place in range(number)]


class CountedStore:
    """Counts what the aggregator asks of the engine. Each request takes `delay` seconds of the clock longer."""

    def __init__(self, store: Store, clock: Clock | None = None, delay: float = 0.0) -> None:
        self._store = store
        self._clock, self._delay = clock or SystemClock(), delay
        self.counts = Tally[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.counts[f"read of {keys[0].table}"] += len(keys)
        await self._count_requests(-(-len(keys) // 100))
        return await self._store.get_many(keys, consistent=consistent)

    async def put(self, put: Put) -> None:
        self.counts[f"write of {put.key.table}"] += 1
        await self._count_requests(1)
        await self._store.put(put)

    async def _count_requests(self, requests: int) -> None:
        self.counts["requests"] += requests
        if self._delay:
            await self._clock.sleep(self._delay * requests)


def describe(store: CountedStore, aggregator: Aggregator, minutes: float) -> dict[str, Any]:
    """What one process asked for in a minute, and how late its totals were."""
    assert not aggregator._pending, f"{len(aggregator._pending)} totals are still behind"
    counts, lag = {name: value / minutes for name, value in store.counts.items()}, aggregator.lag
    slow = sum(lag.counts[lag.bounds.index(60) + 1 :])
    return {"minute": counts, "lags": sum(lag.counts), "above 60 s": slow, "mean lag": lag.total / sum(lag.counts)}


async def simulate(number: int, seconds: float, pause: float, delay: float) -> tuple[list[dict[str, Any]], int]:
    """Two processes on a store in memory, in simulated time; each request takes `delay` seconds. Returns what each of
    them asked for, and how many totals are wrong in the end."""
    clock, memory, counters = ManualClock(), MemoryStore(), build_counters(number)
    stores = [CountedStore(cast(Store, memory), clock, delay) for _ in range(PROCESSES)]
    aggregators = [Aggregator(cast(Store, store), clock, INTERVAL) for store in stores]
    async with Tasks(clock) as tasks:
        for aggregator in aggregators:
            tasks.run_every("totals", aggregator.tick_seconds, aggregator.run, jitter=AGGREGATE_JITTER)
        for turn in range(int(seconds / pause)):
            for place, aggregator in enumerate(aggregators):
                for counter in counters:
                    name, counts = f"{turn}-{place}", UsageCounts(1, pico=10**6)
                    await memory.update(build_addition(name, counter, counts, clock.now()))
                    aggregator.note_written(counter)
                await clock.advance(pause / PROCESSES)
        await clock.advance(2 * INTERVAL)
    minutes = (seconds + 2 * INTERVAL) / 60
    told = [describe(store, each, minutes) for store, each in zip(stores, aggregators, strict=True)]
    return told, await count_wrong(cast(Store, memory), counters)


async def work(engine: str, endpoint: str, folder: Path, number: int, seconds: float, pause: float) -> dict[str, Any]:
    """One process, for so long after its first flush."""
    clock = SystemClock()
    async with Engines({engine: endpoint}).open(engine, folder) as store:
        counted = CountedStore(store)
        aggregator = Aggregator(cast(Store, counted), clock, INTERVAL)
        async with (
            open_recording_harness(folder / f"journal-{os.getpid()}", store, clock, max_usd=10**6) as rec,
            Tasks(clock) as tasks,
        ):
            rec.flusher.sender.subscribe_written(aggregator.note_written)
            counters = build_counters(number)
            tasks.run_every("totals", aggregator.tick_seconds, aggregator.run, jitter=0.2)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                flushed_at = time.monotonic()
                for counter in counters:
                    rec.spend(10**6, counter)
                assert await rec.flusher.flush()
                await asyncio.sleep(max(0.0, pause - (time.monotonic() - flushed_at)))
            await wait_for_totals(aggregator)
        return describe(counted, aggregator, (time.monotonic() - began) / 60)


async def wait_for_totals(aggregator: Aggregator) -> None:
    """Return when no total is behind, or after MAX_WAIT_SECONDS: a busy engine needs more than an interval."""
    until, none_since = time.monotonic() + MAX_WAIT_SECONDS, float("inf")
    while time.monotonic() < until and aggregator.completed_at <= none_since:
        await asyncio.sleep(1)
        none_since = float("inf") if aggregator._pending else min(none_since, time.monotonic())


async def run(engine: str, number: int, seconds: float, pause: float) -> None:
    folder = Path(tempfile.mkdtemp())
    if engine == "memory":
        report(engine, number, pause, *await simulate(number, seconds, pause, DELAY_SECONDS))
        return
    if engine == "sqlite":
        await measure(engine, "", folder, number, seconds, pause)
        return
    with ministack_server(folder) as endpoint:
        await measure(engine, endpoint, folder, number, seconds, pause)


async def measure(engine: str, endpoint: str, folder: Path, number: int, seconds: float, pause: float) -> None:
    async with Engines({engine: endpoint}).open(engine, folder) as store:
        arguments = ["--work", engine, endpoint, str(folder), str(number), str(seconds), str(pause)]
        command = [sys.executable, "-m", "bench.many_counters", *arguments]
        children = [
            await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(PROCESSES)
        ]
        told = [json.loads(out) for out, _ in await asyncio.gather(*(child.communicate() for child in children))]
        wrong = await count_wrong(store, build_counters(number))
    report(engine, number, pause, told, wrong)


def report(engine: str, number: int, pause: float, told: list[dict[str, Any]], wrong: int) -> None:
    print(f"{engine}: {number:,} counters, {PROCESSES} processes, each adding to all of them once in {pause:.0f} s")
    fleet = Tally[str]()
    for each in told:
        fleet.update(each["minute"])
    for name, value in sorted(fleet.items()):
        print(f"  {name}: {value:,.0f} a minute, {value / number:.2f} for each counter")
    print(f"  lag from flush to total: {sum(each['mean lag'] for each in told) / len(told):.1f} s on average,", end=" ")
    print(f"{sum(each['above 60 s'] for each in told):,} of {sum(each['lags'] for each in told):,} above 60 s")
    print(f"  totals that are not the sum of their shards: {wrong}")


async def count_wrong(store: Store, counters: Sequence[Counter]) -> int:
    sums = await sum_counters(store, counters)
    totals = await store.get_many([build_total_key(counter) for counter in counters])
    return sum(
        total is None or any(total[name] != value for name, value in each.items())
        for each, total in zip(sums, totals, strict=True)
    )


def compute(counters: int, processes: int, writers: int) -> str:
    """What a fleet asks for in a minute, if each counter is added to by so many of its processes without a pause."""
    a_minute = 60 / (INTERVAL * (EARLIEST_LOOK + LATEST_LOOK) / 2)
    looks, sums = counters * writers * a_minute, counters * a_minute
    units = looks / 2 + sums * SHARDS
    requests = (looks / 12 + sums / 12 + sums) / processes / 60
    return (
        f"{counters:,} counters, {processes} processes, {writers} add to each: {looks:,.0f} totals and "
        f"{sums * SHARDS:,.0f} shards read, {sums:,.0f} totals written a minute; {units / 60:,.0f} read units and "
        f"{sums / 60:,.0f} write units a second; {requests:,.0f} requests a second of each process"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("memory", "sqlite", "ministack"), default="memory")
    parser.add_argument("--counters", type=int, default=COUNTERS)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--pause", type=float, default=30, help="between two additions to a counter by one process")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.update(TEST_CREDENTIALS)
    if given.work:
        engine, endpoint, folder, *numbers = given.work
        number, seconds, pause = map(float, numbers)
        print(json.dumps(asyncio.run(work(engine, endpoint, Path(folder), int(number), seconds, pause))))
        return
    asyncio.run(run(given.engine, given.counters, given.seconds, given.pause))
    for writers in (1, PROCESSES):
        print(compute(FLEET_COUNTERS, FLEET_PROCESSES, writers))


if __name__ == "__main__":
    main()
