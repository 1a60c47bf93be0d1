"""Plays seeds: `python -m tests.sim.run --seconds 60` on all cores, or `--seed 7 --trace`: one, and shows all of it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

from tests.sim.mutations import MISTAKES, seeds_until_found
from tests.sim.play import Outcome, played, stage

CHUNK = 25  # seeds, after which a process ends: dropping it with all it holds is quicker than tidying up
SHOWN = 5  # failures


def play_some(seeds: list[int], focus: str | None, over: float) -> list[Outcome]:
    with stage() as folder:
        in_time = takewhile(lambda _: time.monotonic() < over, seeds)
        found = [played(seed, folder, focus, is_collected=False) for seed in in_time]
    for outcome in found:
        outcome.recent = outcome.recent if outcome.failure else []
    return found


def play_many(chunks: Iterator[list[int]], focus: str | None, seconds: float, cores: int) -> Iterator[Outcome]:
    """Until the seeds or the time are used up."""
    over, under_way = time.monotonic() + seconds, deque[Any]()
    with multiprocessing.get_context("fork").Pool(cores, maxtasksperchild=1) as pool:
        while True:
            while len(under_way) < 2 * cores and time.monotonic() < over:
                chunk = next(chunks, None)
                if chunk is None:
                    break
                under_way.append(pool.apply_async(play_some, (chunk, focus, over)))
            if not under_way:
                return
            yield from under_way.popleft().get()


class Report:
    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.seeds = self.turns = 0
        self.simulated = 0.0
        self.began = time.monotonic()
        self.events: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        self.failures: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.turns += outcome.turns
        self.simulated += outcome.simulated_seconds
        for mine, its in (
            (self.events, outcome.events),
            (self.calls, outcome.calls),
            (self.faults, outcome.faults),
            (self.checks, outcome.checks),
        ):
            mine.update(its)
        if outcome.failure:
            self.failures.append(outcome)
            if len(self.failures) <= SHOWN:
                tell_failure(outcome)

    def tell(self) -> None:
        took, used = time.monotonic() - self.began, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor, cores = used.ru_utime + used.ru_stime, self.cores
        print(f"{self.seeds} seeds in {took:.1f} s: {self.seeds / took * 60:.0f} a minute, ", end="")
        print(f"{self.seeds / processor * 60 * cores:.0f} if nothing else ran on these {cores} cores")
        hours, events = self.simulated / 3600, sum(self.events.values())
        print(f"{hours:.1f} hours of simulated time, {self.turns} turns, {events} events")
        for what, counts in (("calls", self.calls), ("faults", self.faults), ("checks", self.checks)):
            print(f"{sum(counts.values())} {what}")
            for name, number in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
                print(f"  {number:>9} {name}")
        print(f"{len(self.failures)} failures: {[outcome.seed for outcome in self.failures]}")


def tell_failure(outcome: Outcome) -> None:
    print(f"seed {outcome.seed} ({outcome.focus}): {outcome.failure}")
    print("\n".join(f"    {line}" for line in outcome.recent))
    print(f"again: python -m tests.sim.run --seed {outcome.seed} --focus {outcome.focus} --trace", flush=True)


def some(seeds: list[int], focus: str | None, *, is_traced: bool) -> int:
    failures = 0
    with stage() as folder:
        for seed in seeds:
            outcome = played(seed, folder, focus, keeps_trace=is_traced)
            if is_traced:
                print("\n".join(outcome.recent))
            if outcome.failure:
                tell_failure(outcome)
                failures += 1
            print(f"seed {seed} ({outcome.focus}): {outcome.trace_hash}")
    return 1 if failures else 0


def hashes(seeds: range) -> int:
    with stage() as folder:
        for seed in seeds:
            print(played(seed, folder).trace_hash)
    return 0


def mistakes(most: int) -> int:
    """Whether each is found."""
    missed = 0
    with stage() as folder:
        for name, mistake in MISTAKES.items():
            seeds, outcome = seeds_until_found(mistake, folder, most)
            missed += outcome is None
            outcome_text = "not found" if outcome is None else outcome.failure[:100]
            print(f"{seeds:>4} {name}: {outcome_text}", flush=True)
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="play this one alone, or these")
    parser.add_argument("--trace", action="store_true", help="show all that happens in them")
    parser.add_argument("--focus", help="of all worlds: soft, hard, limits, journal, calm or mixed")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed of many (%(default)s)")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for how long (%(default)s), unless a number is given"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, default=cores, help="how many processes play (%(default)s)")
    parser.add_argument("--hashes", action="store_true", help="show the hash of each trace, and nothing else")
    parser.add_argument("--mistakes", type=int, metavar="SEEDS", help="look for each of those in mutations.py instead")
    given = parser.parse_args()
    if given.mistakes is not None:
        return mistakes(given.mistakes)
    if given.seed is not None:
        return some(given.seed, given.focus, is_traced=given.trace)
    if given.hashes:
        return hashes(range(given.first, given.first + given.seeds))
    last = None if given.seeds is None else given.first + given.seeds
    report = Report(given.cores)
    seconds = given.seconds if given.seeds is None else float("inf")
    for outcome in play_many(_chunks(given.first, last), given.focus, seconds, given.cores):
        report.add(outcome)
    report.tell()
    return 1 if report.failures else 0


def _chunks(first: int, last: int | None) -> Iterator[list[int]]:
    for start in count(first, CHUNK):
        if last is not None and start >= last:
            return
        yield list(range(start, start + CHUNK if last is None else min(last, start + CHUNK)))


if __name__ == "__main__":
    sys.exit(main())
