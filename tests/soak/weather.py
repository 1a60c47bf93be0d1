"""What goes wrong in a soak, and when, by a seed: in two rows side by side, one of the net and one of processes."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tests.soak.fleet import Member
from tests.soak.links import Link
from tests.support.simulated import BedrockProcess
from tests.support.wire_faults import BEDROCK_RATES, STORE_RATES, Break, FaultKind, FaultPoint, dynamodb_error

T = TypeVar("T")

ROLLS_AFTER = 0.05  # of the time
ROLLING_SECONDS = 120.0  # are too short for one
_EVERY_REQUEST = b" HTTP/1.1\r\n"
_PLANNED = (
    {"fault": "throttle"},
    {"fault": "model-not-ready"},
    {"fault": "5xx"},
    {"fault": "cut"},
    {"fault": "cut", "after-frames": 3},
    {"fault": "reset", "after-bytes": 200},
    {"fault": "half-head"},
    {"fault": "bad-crc", "after-frames": 2},
    {"fault": "exception-frame", "after-frames": 2},
    {"fault": "slow-first-byte", "delay-ms": 800},
    {"fault": "stall", "after-frames": 1, "delay-ms": 1500},
)


@dataclass
class Weather:
    """`seconds` is how long all of it takes, which says how long one fault may last."""

    seed: str
    seconds: float
    members: list[Member]
    bedrocks: list[Link]  # of each member
    stores: list[Link]
    bedrock: BedrockProcess
    befell: Counter[str] = field(default_factory=Counter)
    has_rolled: asyncio.Event = field(default_factory=asyncio.Event)  # the first restart of all, one after the other
    troubles: list[str] = field(default_factory=list)  # what a sidecar did not do as it should

    async def blow(self, until: float) -> None:
        """Each kind once before any comes again."""
        at_bedrock = (self._bedrock_socket, self._bedrock_away, self._bedrock_trouble)
        at_store = (self._store_socket, self._store_away, self._store_throttles, self._store_silent, self._answers_lost)
        ending = (self._kill, self._kill_worker, self._restart, self._begin_without_store)
        net = self._row("net", (*at_bedrock, *at_store))
        processes = self._row("processes", (self._reload, self._reload_malformed, self._pause, *ending))
        await asyncio.gather(self._turn(net, until), self._rolled_then_turn(processes, until))

    async def _rolled_then_turn(self, row: Iterator[tuple[object, ...]], until: float) -> None:
        await asyncio.sleep(self.seconds * ROLLS_AFTER)
        if self.seconds > ROLLING_SECONDS:
            for member in self.members:
                await restarted(member)
            self.befell["rolling restart"] += 1
        self.has_rolled.set()
        await self._turn(row, until)

    def _row(self, name: str, kinds: tuple[Callable[..., Awaitable[None]], ...]) -> Iterator[tuple[object, ...]]:
        chance = random.Random(f"{self.seed} {name}")
        most = max(1.0, min(60.0, self.seconds / 60))
        while True:
            for kind in chance.sample(kinds, len(kinds)):
                seconds = min(most, chance.choice([1, 2, 5, 60]) * chance.uniform(0.3, 1))
                yield kind, chance.random(), seconds, chance.uniform(0.2, 1.0) * min(8.0, self.seconds / 60)

    async def _turn(self, row: Iterator[tuple[object, ...]], until: float) -> None:
        for kind, point, seconds, pause in row:
            if time.monotonic() + seconds + pause > until:
                return
            await asyncio.sleep(pause)
            name = kind.__name__.strip("_").replace("_", " ")
            try:
                await kind(point, seconds)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as failure:  # the rest of the time tells more
                self.troubles.append(f"{name}: {failure}")
            self.befell[name] += 1

    # The net.

    async def _bedrock_socket(self, point: float, seconds: float) -> None:
        link = _one_of(self.bedrocks, point)
        link.random(f"{self.seed} {point}", {kind: 4 * rate for kind, rate in BEDROCK_RATES.items()})
        await asyncio.sleep(seconds)
        link.stop_faults()

    async def _bedrock_away(self, point: float, seconds: float) -> None:
        await self._away(self.bedrocks if point < 0.3 else [_one_of(self.bedrocks, point)], min(seconds, 10))

    async def _bedrock_trouble(self, point: float, seconds: float) -> None:
        chance = random.Random(point)
        planned = [dict(chance.choice(_PLANNED)) if chance.random() < 0.3 else {} for _ in range(40)]
        await asyncio.to_thread(self.bedrock.plan, *planned)
        await asyncio.sleep(seconds)

    async def _store_socket(self, point: float, seconds: float) -> None:
        link = _one_of(self.stores, point)
        link.random(f"{self.seed} {point}", {kind: 3 * rate for kind, rate in STORE_RATES.items()})
        await asyncio.sleep(seconds)
        link.stop_faults()

    async def _store_away(self, point: float, seconds: float) -> None:
        await self._away(self.stores if point < 0.5 else [_one_of(self.stores, point)], seconds)

    async def _store_throttles(self, point: float, seconds: float) -> None:
        link = _one_of(self.stores, point)
        link.always[_EVERY_REQUEST] = dynamodb_error("ThrottlingException")
        await asyncio.sleep(min(seconds, 20))
        link.always.clear()

    async def _store_silent(self, point: float, seconds: float) -> None:
        link = _one_of(self.stores, point)
        link.always[_EVERY_REQUEST] = Break(FaultPoint.REQUEST, FaultKind.STALL, seconds)
        await asyncio.sleep(seconds)
        link.always.clear()

    async def _answers_lost(self, point: float, seconds: float) -> None:
        """A store request is carried out, and its answer lost."""
        link = _one_of(self.stores, point)
        link.always[_EVERY_REQUEST] = Break(FaultPoint.ANSWER, FaultKind.RESET)
        await asyncio.sleep(min(seconds, 5))
        link.always.clear()

    async def _away(self, links: list[Link], seconds: float) -> None:
        for link in links:
            link.cut_off()
        await asyncio.sleep(seconds)
        for link in links:
            link.accept()

    # Processes. The first member and the second one's first worker live on; else their memory could not be watched.

    async def _reload(self, point: float, _: float) -> None:
        member = _one_of(self.members, point)
        await member.reload(member.version + 1)

    async def _reload_malformed(self, point: float, _: float) -> None:
        await _one_of(self.members, point).reload_malformed()

    async def _pause(self, point: float, seconds: float) -> None:
        member = _one_of(self.members, point)
        pids = member.pids
        member.signal(signal.SIGSTOP, pids)
        await asyncio.sleep(min(seconds, 8))
        member.signal(signal.SIGCONT, pids)

    async def _kill(self, point: float, seconds: float) -> None:
        member = self.members[-1]
        await member.kill()
        await asyncio.sleep(point * min(seconds, 3))
        await member.start()

    async def _kill_worker(self, point: float, seconds: float) -> None:
        await self.members[1].kill_worker(1)
        await asyncio.sleep(1 + point * min(seconds, 2))

    async def _begin_without_store(self, point: float, seconds: float) -> None:
        """It has to go by what is noted on its disk."""
        member, store = self.members[-1], self.stores[-1]
        await member.kill()
        store.cut_off()
        try:
            await member.start()
            await asyncio.sleep(1 + point * min(seconds, 8))
        finally:
            store.accept()

    async def _restart(self, _: float, __: float) -> None:
        await restarted(self.members[-1])


async def restarted(member: Member) -> None:
    status = await member.stop()
    await member.start()
    assert status == 0, f"{member.name} ended with {status} when it was asked to stop"


def _one_of(these: list[T], point: float) -> T:
    return these[int(point * 997) % len(these)]
