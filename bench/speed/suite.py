"""What is measured, in which order: each round goes over all contenders, so a slow minute hits them all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.speed import contenders, flame, load, paced, starts, streams
from bench.speed.contenders import UNARY, Contender, Running, keeper, serving
from bench.speed.figures import Figures
from bench.speed.machine import CORES, CannotMeasure, found, memory_bytes, needed
from bench.speed.upstream import bedrock

CONNECTIONS = (1, 16, 64)
H2LOAD = "h2load"
_SETTLED = 16  # connections of a load that is there to warm up
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Plan:
    rounds: int
    seconds: float  # of one measurement
    starts: int  # of a process, each timed
    idle: int  # streams
    flame_seconds: float


QUICK = Plan(rounds=1, seconds=1, starts=2, idle=500, flame_seconds=3)
FULL = Plan(rounds=7, seconds=3, starts=9, idle=streams.IDLE, flame_seconds=20)

T = TypeVar("T")
Runnings = list[tuple[Contender, Running]]


class Suite:
    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self.plan, self.folder, self.say = plan, folder, say
        self.figures = Figures()
        self.flame: str | None = None

    def run(self) -> None:
        for part in (self.unary, self.streaming, self.starting, self.workers):
            self.say(f"{part.__name__}: {(part.__doc__ or '').partition(':')[2].strip()}")
            with self.attempt(part.__name__):
                part()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What cannot be measured is told, and the rest is measured."""
        try:
            yield
        except (CannotMeasure, OSError, subprocess.SubprocessError) as failed:
            line = f"{what}: {' '.join(str(failed).split())[:_LONGEST_REASON]}"
            if line not in self.figures.left_out:
                self.figures.left_out.append(line)
                self.say(f"left out: {line}")

    # ------------------------------------------------------------ whole answers

    def unary(self) -> None:
        """Requests: each contender warmed up, then all in turn, round for round."""
        with ExitStack() as running, bedrock(self.folder / "bedrock") as upstream:
            started = self._started(running, upstream, "requests")
            for _, each in started:
                with suppress(CannotMeasure):  # the first second of some is longer than that
                    load.http1(each, UNARY, _SETTLED, max(2.0, self.plan.seconds), self.folder)
            for number in range(self.plan.rounds):
                self.say(f"  round {number + 1} of {self.plan.rounds}")
                self._round_of_requests(turned(started, number))
            self._memory(started)
            self._flame(started)
        with self.attempt("HTTP/2"):
            needed(H2LOAD, "nghttp2-client")

    def _started(self, running: ExitStack, upstream: int, purpose: str) -> Runnings:
        started: Runnings = []
        for contender in contenders.ALL:
            with self.attempt(f"{contender.title}, {purpose}"):
                folder = self.folder / purpose / contender.name
                started.append((contender, running.enter_context(contender.start(folder, upstream))))
        return started

    def _round_of_requests(self, started: Runnings) -> None:
        seconds = self.plan.seconds
        for connections in CONNECTIONS:
            for contender, each in started:
                with self.attempt(f"{contender.title}, HTTP/1.1, {connections} connections"):
                    speed = load.http1(each, UNARY, connections, seconds, self.folder)
                    self.figures.add("http1", connections, contender.name, **speed.figures())
            for contender, each in started:
                if each.http2_port is not None and found(H2LOAD):
                    with self.attempt(f"{contender.title}, HTTP/2, {connections} connections"):
                        speed = load.http2(each, UNARY, connections, seconds, self.folder)
                        self.figures.add("http2", connections, contender.name, **speed.figures())
        for contender, each in started:
            with self.attempt(f"{contender.title}, at a quiet pace"):
                quiet = paced.quiet(each, UNARY, seconds)
                self.figures.add("quiet", contender.name, median_us=quiet.median_us, p99_us=quiet.p99_us)

    def _memory(self, started: Runnings) -> None:
        for contender, each in started:
            if each.pid is not None:
                self.figures.add("memory", contender.name, bytes=memory_bytes(each.pid))

    def _flame(self, started: Runnings) -> None:
        for contender, each in started:
            if contender is contenders.KEEPER_ON and self.plan.flame_seconds:
                with self.attempt("flame graph"):
                    self.flame = flame.drawn(each, self.plan.flame_seconds, self.folder)

    # ------------------------------------------------------------ event streams

    def streaming(self) -> None:
        """Event streams: as fast as they are taken, at a pace, and silent ones."""
        with ExitStack() as running, streams.bedrock() as driver:
            started = self._started(running, driver.port, "streams")
            for number in range(self.plan.rounds):
                self.say(f"  round {number + 1} of {self.plan.rounds}")
                for how in ("fast", "alone", "paced"):
                    for contender, each in turned(started, number):
                        with self.attempt(f"{contender.title}, frames, {how}"):
                            told = streams.flowing(driver, each, self.plan.seconds, how)
                            self.figures.add(how, contender.name, **told)
            for contender, each in started:
                if contender in (contenders.NGINX, contenders.KEEPER_ON):
                    with self.attempt(f"{contender.title}, silent streams"):
                        self.figures.add("idle", contender.name, bytes=streams.idle(driver, each, self.plan.idle))

    # ------------------------------------------------------------ starts

    def starting(self) -> None:
        """Starts: to the first answer, with either store, and what memory they then need."""
        with bedrock(self.folder / "bedrock-of-starts") as upstream:
            folder = self.folder / "start-sqlite"
            self._starts("sqlite", folder, starts.with_sqlite(folder, upstream))
            with self.attempt("DynamoDB"), starts.dynamodb(self.folder / "dynamodb") as endpoint:
                folder = self.folder / "start-dynamodb"
                self._starts("dynamodb", folder, starts.with_dynamodb(folder, upstream, endpoint))

    def _starts(self, store: str, folder: Path, running: Running) -> None:
        starts.seconds_to_answer(folder, running)  # the first one finds nothing in memory, of files and of the store
        for _ in range(self.plan.starts):
            self.figures.add("start", store, seconds=starts.seconds_to_answer(folder, running))
        with serving(folder, running) as served:
            for connections in (_SETTLED, CONNECTIONS[-1]):
                load.http1(served, UNARY, connections, self.plan.seconds, folder)
            assert served.pid is not None
            self.figures.add("memory", f"keeper-{store}", bytes=memory_bytes(served.pid))

    # ------------------------------------------------------------ workers

    def workers(self) -> None:
        """Workers: what a request costs with two of them, both cores being shared with the load."""
        if not has_workers():
            raise CannotMeasure("this version of serve has no --workers")
        with ExitStack() as running, bedrock(self.folder / "bedrock-of-workers") as upstream:
            started = {
                count: running.enter_context(
                    keeper(self.folder / f"workers-{count}", upstream, "--workers", str(count), core=CORES)
                )
                for count in (1, 2)
            }
            for each in started.values():
                load.http1(each, UNARY, CONNECTIONS[-1], self.plan.seconds, self.folder)
            for number in range(self.plan.rounds):
                for count, each in turned(list(started.items()), number):
                    speed = load.http1(each, UNARY, CONNECTIONS[-1], self.plan.seconds, self.folder)
                    self.figures.add("workers", count, **speed.figures())


def turned(of: Sequence[T], by: int) -> list[T]:
    """In another order each round, so that nobody always follows the same one."""
    by %= max(1, len(of))
    return [*of[by:], *of[:by]]


def has_workers() -> bool:
    command = [sys.executable, "-m", "price_keeper.cli", "serve", "--help"]
    told = subprocess.run(command, cwd=contenders.ROOT, capture_output=True, text=True, check=False)
    return "--workers" in told.stdout
