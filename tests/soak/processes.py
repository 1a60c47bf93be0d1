"""The state of a soak's processes: memory, descriptors, threads, tasks, and calls in flight."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from bench.speed.machine import descriptors, own_bytes, threads
from tests.soak.fleet import Member
from tests.soak.verdict import Verdict
from tests.soak.watched import tasks_file

SAMPLE_SECONDS = 5.0
MOST_GROWTH = 0.05  # of memory, from when caches are full to the end
LEAST_SECONDS = 600.0  # long enough to show leaks: caches fill first, and connections are kept for a while
MORE_DESCRIPTORS, MORE_THREADS = 4, 2  # than before the load
TELLING_SECONDS = 10.0

# Gauges of work in progress, which are zero at rest.
UNDER_WAY = (
    "price_keeper_http2_streams",
    "price_keeper_requests_under_way",
    "price_keeper_calls_open",
    "price_keeper_requests_held_bytes",
    "price_keeper_journal_segments_waiting",
)


@dataclass(frozen=True)
class Sample:
    at: float
    memory_mb: float
    descriptors: int
    threads: int


@dataclass
class Watched:
    """One process, that is to live from the moment it is watched to the end."""

    name: str
    pid: int
    member: Member
    samples: list[Sample] = field(default_factory=list)

    def sample(self, at: float) -> None:
        with suppress(OSError):  # it has exited: that shows at the end
            found = own_bytes(self.pid) / 2**20, descriptors(self.pid), threads(self.pid)
            self.samples.append(Sample(at, *found))

    async def tasks(self) -> Counter[str]:
        file = tasks_file(self.member.kept, self.pid)
        file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + TELLING_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline, f"{self.name} does not tell its tasks"
            await asyncio.sleep(0.05)
        return Counter(json.loads(file.read_text()))


@dataclass(frozen=True)
class AtRest:
    descriptors: int
    threads: int
    tasks: Counter[str]


def watched_of(members: Sequence[Member]) -> list[Watched]:
    """The first member's process, and the first worker of the second."""
    return [Watched(member.name, member.pids[0], member) for member in members[:2]]


async def sampled(processes: Sequence[Watched], began: float, until: float) -> None:
    while True:
        now = time.monotonic()
        for each in processes:
            each.sample(now - began)
        if now >= until:
            return
        await asyncio.sleep(min(SAMPLE_SECONDS, max(0.1, until - now)))


async def at_rest(process: Watched) -> AtRest:
    return AtRest(descriptors(process.pid), threads(process.pid), await process.tasks())


async def rested(process: Watched, before: AtRest, patience: float) -> AtRest:
    """As soon as it is as it was, or when that takes too long."""
    until = time.monotonic() + patience
    while True:
        now = await at_rest(process)
        is_back = (
            now.descriptors <= before.descriptors + MORE_DESCRIPTORS
            and now.threads <= before.threads + MORE_THREADS
            and now.tasks.total() <= before.tasks.total()
        )
        if is_back or time.monotonic() > until:
            return now
        await asyncio.sleep(2)


async def metrics(member: Member) -> dict[str, float]:
    """Each summed over its labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{member.api}/metrics") as answer:
        text = await answer.text()
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        sums[name] += float(value)
    for kind in re.findall(r'^price_keeper_refusals_total\{.*kind="our_fault".*\} (\S+)$', text, re.MULTILINE):
        sums["our_fault"] += float(kind)
    return dict(sums)


async def under_way(members: Sequence[Member], seconds: float) -> dict[str, float]:
    """What still is when that takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        left: Counter[str] = Counter()
        for member in members:
            samples = await metrics(member)
            left.update({name: int(samples.get(name, -1)) for name in UNDER_WAY})
            left["our_fault"] += int(samples.get("our_fault", 0))
            left["joined"] += int(samples["price_keeper_joined_retries_total"])
        if not any(left[name] for name in UNDER_WAY) or time.monotonic() > deadline:
            return dict(left)
        await asyncio.sleep(1)


def check_processes(
    processes: Sequence[Watched], before: Sequence[AtRest], after: Sequence[AtRest], settled: float, verdict: Verdict
) -> None:
    """By the medians of the first and the last third of what was seen since `settled`."""
    for each, first, last in zip(processes, before, after, strict=True):
        seen = [sample for sample in each.samples if sample.at >= settled] or each.samples
        third = max(1, len(seen) // 3)
        then, now = (median(sample.memory_mb for sample in part) for part in (seen[:third], seen[-third:]))
        verdict.figures |= {
            f"{each.name}: MB of its own when settled": round(then, 1),
            f"{each.name}: MB of its own at the end": round(now, 1),
            f"{each.name}: descriptors under load, most": max(sample.descriptors for sample in seen),
            f"{each.name}: descriptors before and after": f"{first.descriptors}, {last.descriptors}",
            f"{each.name}: threads before and after": f"{first.threads}, {last.threads}",
            f"{each.name}: tasks before and after": f"{first.tasks.total()}, {last.tasks.total()}",
        }
        growth, more = now / then - 1, last.tasks - first.tasks
        is_flat = growth <= MOST_GROWTH or each.samples[-1].at < LEAST_SECONDS
        verdict.holds(f"{each.name}: memory", f"at most {MOST_GROWTH:.0%} more", f"{growth:+.1%}", is_so=is_flat)
        for what, most in (("descriptors", MORE_DESCRIPTORS), ("threads", MORE_THREADS)):
            grown = getattr(last, what) - getattr(first, what)
            is_so = grown <= most or each.samples[-1].at < LEAST_SECONDS
            verdict.holds(f"{each.name}: {what}", f"at most {most} more", f"{grown:+}", is_so=is_so)
        if each.samples[-1].at >= LEAST_SECONDS:
            verdict.none(f"{each.name}: tasks more than before", [f"{count} {name}" for name, count in more.items()])
