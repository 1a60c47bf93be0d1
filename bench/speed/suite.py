"""What is measured, in which order: each round goes over all contenders, so a slow minute hits them all."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.speed import contenders, flame, frames, load, starts, streams
from bench.speed.contenders import STREAMING, Contender, Running, serving
from bench.speed.figures import Figures
from bench.speed.load import NEW_AT_ONCE, Pattern, Speed
from bench.speed.machine import CannotMeasure, memory_bytes
from bench.speed.upstream import bedrock

SDK_1, SDK_64, BARE_64, SDK_NEW = (
    Pattern("http1", 1),
    Pattern("http1", 64),
    Pattern("http1", 64, is_sdk=False),
    Pattern("http1", NEW_AT_ONCE, is_new=True),
)
HTTP2_1, HTTP2_64, HTTP2_BARE_64, HTTP2_NEW = (
    Pattern("http2", 1),
    Pattern("http2", 64),
    Pattern("http2", 64, is_sdk=False),
    Pattern("http2", NEW_AT_ONCE, is_new=True),
)
PATTERNS = (SDK_1, SDK_64, BARE_64, SDK_NEW, HTTP2_1, HTTP2_64, HTTP2_BARE_64, HTTP2_NEW)
STREAMS = Pattern("http1", 16)
STREAM_FRAMES = 60  # of one stream, when it comes as fast as it can
PACE, SLOW_PACE = 1000.0, 50.0  # calls a second; the slow one for those who answer less than twice as many
LAST_ROUND_MINUTES = 11.0  # no round of calls begins later: one takes about 4 minutes, what follows about 4
_WARM_CONNECTIONS = 16
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Scale:
    rounds: int
    seconds: float  # of one measurement
    starts: int  # of a process, each timed
    idle: int  # streams
    flame_seconds: float


QUICK = Scale(rounds=1, seconds=1, starts=2, idle=300, flame_seconds=3)
FULL = Scale(rounds=3, seconds=3, starts=7, idle=streams.IDLE, flame_seconds=15)

T = TypeVar("T")
Runnings = list[tuple[Contender, Running]]


class Suite:
    def __init__(
        self, scale: Scale, folder: Path, say: Callable[[str], None], measured: Sequence[Contender] = contenders.ALL
    ) -> None:
        self.scale, self.folder, self.say, self.contenders = scale, folder, say, measured
        self.figures = Figures()
        self.flame: str | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        for part in (self.calls, self.frames_at_a_pace, self.starts):
            self._say(f"{part.__name__}: {part.__doc__}")
            with self.attempt(part.__name__):
                part()

    def _say(self, line: str) -> None:
        self.say(f"{self._minutes():4.1f} min  {line}")

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What cannot be measured is reported, and the rest is measured."""
        try:
            yield
        except (CannotMeasure, OSError, subprocess.SubprocessError) as failed:
            line = f"{what}: {' '.join(str(failed).split())[:_LONGEST_REASON]}"
            if line not in self.figures.left_out:
                self.figures.left_out.append(line)
                self._say(f"left out: {line}")

    def _start(self, stack: ExitStack, purpose: str, ports: tuple[int, int | None]) -> Runnings:
        """All contenders, each with the seconds from its start to its first answer."""
        upstream, http2 = ports
        started: Runnings = []
        for contender in self.contenders:
            with self.attempt(f"{contender.title}, {purpose}"):
                began = time.perf_counter()
                running = stack.enter_context(contender.start(self.folder / purpose / contender.name, upstream))
                if contender is contenders.DIRECT:
                    running = Running(upstream, http2_port=http2)
                elif not contender.is_ours:  # ours is started more often, by `starts`
                    self.figures.add("start", contender.name, seconds=time.perf_counter() - began)
                started.append((contender, running))
        return started

    # ------------------------------------------------------------ calls

    def calls(self) -> None:
        """whole answers and short streams, closed-loop; then calls at a pace"""
        stream = b"".join(frames.answer(STREAM_FRAMES))
        with ExitStack() as stack, bedrock(self.folder / "bedrock", stream) as ports:
            started = self._start(stack, "calls", ports)
            for contender, running in started:
                self._warm(contender, running)
            self._memory(started, "bare")
            for number in range(self.scale.rounds):
                if number and self._minutes() > LAST_ROUND_MINUTES:
                    self.figures.left_out.append(f"calls, round {number + 1} and later: no time was left")
                    break
                self._say(f"  round {number + 1} of {self.scale.rounds}")
                self._round(turned(started, number))
            self._memory(started, "sdk")
            self._flame(started)

    def _warm(self, contender: Contender, running: Running) -> None:
        """Both protocols, without an SDK's headers. The first second of some is longer than that."""
        for protocol in ("http1", "http2"):
            for connections in (_WARM_CONNECTIONS, 64):
                if not _speaks(contender, running, protocol):
                    continue
                with suppress(CannotMeasure):
                    load.calls(running, Pattern(protocol, connections, is_sdk=False), self.scale.seconds, self.folder)

    def _round(self, started: Runnings) -> None:
        for pattern in PATTERNS:
            for contender, running in started:
                if _speaks(contender, running, pattern.protocol):
                    with self.attempt(f"{contender.title}, {'/'.join(pattern.path)}"):
                        speed = load.calls(running, pattern, self.scale.seconds, self.folder)
                        self.figures.add(*pattern.path, contender.name, **speed.figures())
        for contender, running in started:
            if not contender.is_older:
                with self.attempt(f"{contender.title}, streams"):
                    speed = load.calls(running, STREAMS, self.scale.seconds, self.folder, STREAMING)
                    self.figures.add("streams", contender.name, **_by_frame(speed))
        for protocol in ("http1", "http2"):
            for contender, running in started:
                if _speaks(contender, running, protocol) and not contender.is_older:
                    with self.attempt(f"{contender.title}, at a pace, {protocol}"):
                        pace = self._pace(protocol, contender)
                        speed = load.paced(running, protocol, self.scale.seconds, pace)
                        self.figures.add("pace", protocol, contender.name, pace=pace, **speed.figures())

    def _pace(self, protocol: str, contender: Contender) -> float:
        most = self.figures.middle(protocol, "sdk", "64", contender.name, "per_second")
        return PACE if most is not None and most >= 2 * PACE else SLOW_PACE

    def _memory(self, started: Runnings, after: str) -> None:
        for contender, running in started:
            if running.pid is not None and not contender.is_older:
                self.figures.add("memory", after, contender.name, bytes=memory_bytes(running.pid))

    def _flame(self, started: Runnings) -> None:
        for contender, running in started:
            if contender is contenders.KEEPER_ON:
                with self.attempt("flame graph"):
                    self.flame = flame.drawn(running, self.scale.flame_seconds, self.folder)

    # ------------------------------------------------------------ event streams

    def frames_at_a_pace(self) -> None:
        """event streams whose frames come one by one, and silent ones"""
        with ExitStack() as stack, streams.bedrock() as driver:
            started = self._start(stack, "frames", (driver.port, None))
            started = [each for each in started if each[0].keeps_frames and not each[0].is_older]
            for number in range(self.scale.rounds):
                self._say(f"  round {number + 1} of {self.scale.rounds}")
                for contender, running in turned(started, number):
                    with self.attempt(f"{contender.title}, frames"):
                        found = streams.flowing(driver, running, self.scale.seconds)
                        self.figures.add("frames", contender.name, **found)
            for contender, running in started:
                if contender in (contenders.NGINX, contenders.KEEPER_ON):
                    with self.attempt(f"{contender.title}, silent streams"):
                        found_bytes = streams.idle(driver, running, self.scale.idle)
                        self.figures.add("idle", contender.name, bytes=found_bytes)

    # ------------------------------------------------------------ starts

    def starts(self) -> None:
        """to the first answer: the default configuration of either build, and either store with configured prices"""
        with bedrock(self.folder / "bedrock-of-starts") as (upstream, _):
            folder = self.folder / "start"
            default = starts.with_sqlite(folder / "default", upstream, asks_prices=True)
            self._starts("keeper", folder / "default", default, contenders.FROM_SOURCES)
            with self.attempt("Price Keeper, compiled, start"):
                program = contenders.installed(contenders.COMPILED)
                self._starts("compiled", folder / "default", default, program)
            self._starts("sqlite", folder / "sqlite", starts.with_sqlite(folder / "sqlite", upstream))
            with self.attempt("DynamoDB"), starts.dynamodb(self.folder / "dynamodb") as endpoint:
                running = starts.with_dynamodb(folder / "dynamodb", upstream, endpoint)
                self._starts("dynamodb", folder / "dynamodb", running)
                with serving(folder / "dynamodb", running) as served:
                    for connections in (_WARM_CONNECTIONS, 64):
                        load.calls(served, Pattern("http1", connections, is_sdk=False), self.scale.seconds, self.folder)
                    assert served.pid is not None
                    self.figures.add("memory", "bare", "keeper-dynamodb", bytes=memory_bytes(served.pid))

    def _starts(
        self, name: str, folder: Path, running: Running, program: Sequence[str] = contenders.FROM_SOURCES
    ) -> None:
        starts.seconds_to_answer(folder, running, program)  # the first finds no file in the kernel's memory
        for _ in range(self.scale.starts):
            self.figures.add("start", name, seconds=starts.seconds_to_answer(folder, running, program))


def _speaks(contender: Contender, running: Running, protocol: str) -> bool:
    """Whether it is measured over this protocol."""
    return running.http2_port is not None if protocol == "http2" else not contender.is_older


def _by_frame(speed: Speed) -> dict[str, float | None]:
    cpu = None if speed.cpu_us is None else speed.cpu_us / STREAM_FRAMES
    return {"per_second": speed.per_second * STREAM_FRAMES, "cpu_us": cpu, "others": speed.others}


def turned(of: Sequence[T], by: int) -> list[T]:
    """In another order each round, so that nobody always follows the same one."""
    by %= max(1, len(of))
    return [*of[by:], *of[:by]]
