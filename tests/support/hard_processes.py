"""Real sidecars on one hard budget: they are killed, paused and restarted while clients call without rest."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.auth.keys import SigningKey
from price_keeper.auth.tokens import TokenService

from tests.support.calling import Connection, Http1Connection, Opened
from tests.support.commands import Sidecar, price_keeper, sidecar
from tests.support.ports import free_port
from tests.support.simulated import CLAUDE, CLAUDE_BODY, NOVA

APP = "spending"
SECRET = "what the sidecars of this test sign their tokens with"
MODELS = {"premium": CLAUDE, "economy": NOVA}
FORMATS = {"premium": "anthropic", "economy": "nova"}
# Of a cent and less for each call; what a call may cost is then some times what most of them do.
PRICES = {
    "premium": {"input": 0.4, "output": 15, "cache_read": 0.1, "cache_write_5m": 0.5, "cache_write_1h": 0.5},
    "economy": {"input": 0.2, "output": 6, "cache_read": 0.1, "cache_write_5m": 0.2, "cache_write_1h": 0.2},
}
MOST_TEXT, MOST_OUTPUT = 1200, 220
WORST_TOKENS = 1000 + MOST_TEXT + 400  # of input: what is set aside for any call, and a body around the text
PICO = 10**6  # of a dollar for a million tokens, for one token

CLIENTS_EACH = 5  # connections to one sidecar
LEAVING = 0.04  # the share of calls whose client goes before it has its answer
CALL_SECONDS = 30.0
REFUSED_SECONDS = 0.2  # until the next call
QUIET_SECONDS = 1.5  # without one call that is served, though all kinds are asked for: it refuses
DRY_SECONDS = 150.0

ZONE_HOURS = 12


def worst_pico(label: str) -> int:
    """No call of the load may cost more."""
    prices = PRICES[label]
    dearest = max(price for kind, price in prices.items() if kind != "output")
    return round(WORST_TOKENS * dearest * PICO + MOST_OUTPUT * prices["output"] * PICO)


def zone_by_day() -> str:
    """In which it is about noon, so that no day ends meanwhile."""
    ahead = ZONE_HOURS - time.gmtime().tm_hour
    return f"Etc/GMT{-ahead:+d}" if ahead else "UTC"  # those zones count westwards


@dataclass
class Keeper:
    """One sidecar's place: its port and its journal stay when it dies."""

    number: int
    folder: Path
    port: int = field(default_factory=free_port)
    running: Sidecar | None = None
    served: int = 0
    refused: int = 0  # since the last one that was served
    served_at: float = 0.0
    is_busy: bool = False  # something is done to it
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def holders(self) -> set[str]:
        """Runs that took something, and have not given back what is left of it."""
        return {path.name.removeprefix("holds-") for path in self.journal.glob("holds-*")}

    @property
    def is_dry(self) -> bool:
        return self.refused > 4 * CLIENTS_EACH and time.monotonic() - self.served_at > QUIET_SECONDS

    def write_config(self, bedrock: str, store: Mapping[str, Any]) -> None:
        labels = {
            label: {
                "model": model,
                "format": FORMATS[label],
                "prices_usd_per_1m": PRICES[label],
                "price_source": "config",
                "max_output_tokens": MOST_OUTPUT,
            }
            for label, model in MODELS.items()
        }
        config = {
            "listen": {"data": f"127.0.0.1:{self.port}", "control": "127.0.0.1:0"},
            "upstream": {"endpoint": bedrock},
            "store": dict(store),
            "journal": {"dir": "journal", "flush_interval_secs": 0.1, "flush_interval_max_secs": 0.5},
            "labels": labels,
        }
        self.folder.mkdir()
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    async def start(self) -> None:
        keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
        serving = sidecar("serve", folder=self.folder, PRICE_KEEPER_JWT_SECRET=SECRET, **keys)
        self.running = await asyncio.to_thread(self._stack.enter_context, serving)
        self.refused, self.served_at = 0, time.monotonic()

    def signal(self, number: signal.Signals) -> None:
        assert self.running is not None
        self.running.process.send_signal(number)

    async def kill(self) -> None:
        """`kill -9`, also of one that is paused."""
        self.running = None
        await asyncio.to_thread(self._stack.close)

    async def stop(self) -> int:
        """In order; its exit status."""
        assert self.running is not None
        status = await asyncio.to_thread(self.running.stop)
        await self.kill()
        return status

    async def replay(self) -> str:
        """What the command says, run as somebody does who finds the journal of one that is dead."""
        done = await asyncio.to_thread(price_keeper, "replay", str(self.journal), folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout


@dataclass
class Fleet:
    org: str
    keepers: list[Keeper]

    def token(self) -> str:
        return TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time).mint_access(self.org, APP).token

    @property
    def alive(self) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.running is not None]

    @property
    def is_dry(self) -> bool:
        """Every sidecar that lives refuses."""
        return all(keeper.is_dry for keeper in self.alive)

    @property
    def dead(self) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.running is None]

    async def end(self) -> None:
        """The journals of half of the dead are brought in, the others are started again; all stop in order."""
        dead, alive = self.dead, self.alive
        await asyncio.gather(*(keeper.replay() for keeper in dead[::2]), *(keeper.start() for keeper in dead[1::2]))
        statuses = await asyncio.gather(*(keeper.stop() for keeper in (*alive, *dead[1::2])))
        assert set(statuses) <= {0}
        # One that stops soon after its start has not given back yet what former runs held.
        left = [keeper for keeper in self.keepers if keeper.holders]
        await asyncio.gather(*(keeper.replay() for keeper in left))


@asynccontextmanager
async def fleet_of(number: int, folder: Path, bedrock: str, store: Mapping[str, Any]) -> AsyncIterator[Fleet]:
    fleet = Fleet(str(uuid4()), [Keeper(each, folder / f"sidecar{each}") for each in range(number)])
    async with AsyncExitStack() as stack:
        for keeper in fleet.keepers:
            keeper.write_config(bedrock, store)
            stack.push_async_callback(keeper.kill)
        await asyncio.gather(*(keeper.start() for keeper in fleet.keepers))
        yield fleet


# ---------------------------------------------------------------- clients

_TAG = "call {}."


def tag_in(body: str) -> int:
    """Of a request that the simulated Bedrock met."""
    return int(body.partition("call ")[2].partition(".")[0])


class Clients:
    """Several connections to each sidecar, each with one call after the other, as fast as it is answered."""

    def __init__(self, fleet: Fleet, labels: list[str], seed: object, opens: Sequence[Opened] | None = None) -> None:
        """Each chooses one of the ways in which connections are opened."""
        self.asked = 0
        self._opens = opens or [Http1Connection.opened]
        self.left = self.broken = 0
        self.whole: set[int] = set()  # the tags of calls that were answered, all of it
        self.refused: set[int] = set()  # the tags of calls that got an error for an answer
        self.errors: dict[int, int] = {}  # by status
        self._fleet, self._labels, self._token = fleet, labels, fleet.token()
        self._tags = count(1)
        self._seed = seed
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def answered(self) -> int:
        return len(self.whole)

    async def __aenter__(self) -> Clients:
        connections = [keeper for keeper in self._fleet.keepers for _ in range(CLIENTS_EACH)]
        self._tasks = [
            asyncio.create_task(self._call_on(keeper, random.Random(f"{self._seed} {number}")))
            for number, keeper in enumerate(connections)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _call_on(self, keeper: Keeper, chance: random.Random) -> None:
        connection: Connection | None = None
        opened = self._opens[chance.randrange(len(self._opens))]
        while not self._over:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    connection = connection or await opened(keeper.port)
                    if not await self._call(keeper, connection, chance):
                        connection = await connection.closed()
            except (OSError, EOFError, TimeoutError):
                self.broken += 1
                connection = await connection.closed() if connection is not None else None
                await asyncio.sleep(REFUSED_SECONDS)
        if connection is not None:
            await connection.closed()

    async def _call(self, keeper: Keeper, connection: Connection, chance: random.Random) -> bool:
        """Whether the connection is of use for another one."""
        tag = next(self._tags)
        self.asked += 1
        await connection.ask(*self._request(tag, chance))
        if chance.random() < LEAVING:
            await asyncio.sleep(chance.uniform(0, 0.1))
            self.left += 1
            return False
        status = await connection.answer()
        if status == 200:
            self.whole.add(tag)
            keeper.served += 1
            keeper.refused, keeper.served_at = 0, time.monotonic()
        else:
            self.refused.add(tag)
            self.errors[status] = self.errors.get(status, 0) + 1
            keeper.refused += 1
            await asyncio.sleep(REFUSED_SECONDS)
        return True

    def _request(self, tag: int, chance: random.Random) -> tuple[str, str, dict[str, Any]]:
        """Path, token and body."""
        text = _TAG.format(tag) + " word" * chance.randrange(MOST_TEXT // 5)
        most = chance.randrange(150, MOST_OUTPUT)
        label = chance.choice(self._labels)
        is_stream = chance.random() < 0.5
        if label == "premium" and chance.random() < 0.3:
            body = CLAUDE_BODY | {"messages": [{"role": "user", "content": text}], "max_tokens": most}
            how = "invoke-with-response-stream" if is_stream else "invoke"
            return f"/model/{label}/{how}", self._token, body
        body = {"messages": [{"role": "user", "content": [{"text": text}]}]}
        if chance.random() < 0.9:  # the others are given the label's own maximum
            body["inferenceConfig"] = {"maxTokens": most}
        return f"/model/{label}/{'converse-stream' if is_stream else 'converse'}", self._token, body


# ---------------------------------------------------------------- what befalls the sidecars


@dataclass
class Mishaps:
    """Each when so many calls have been answered, so that they come while there still is money, on any machine."""

    fleet: Fleet
    clients: Clients
    chance: random.Random
    kills: int
    pauses: int
    stops: int
    lost: int  # of those that are killed, so many stay dead to the end
    told: list[str] = field(default_factory=list)
    killed: int = 0  # of every second the journal is brought in before it starts again

    async def befall(self, calls: int) -> None:
        """`calls` is about how many there will be."""
        kinds = [*["kill"] * (self.kills - self.lost), *["lose"] * self.lost]
        kinds += [*["pause"] * self.pauses, *["stop"] * self.stops]
        self.chance.shuffle(kinds)
        moments = sorted(self.chance.uniform(0.05, 0.9) * calls for _ in kinds)
        async with asyncio.TaskGroup() as under_way:
            for kind, moment in zip(kinds, moments, strict=True):
                await self._until(moment)
                keeper = await self._somebody()
                self.told.append(f"{kind} {keeper.number} at {self.clients.answered}")
                keeper.is_busy = True
                under_way.create_task(getattr(self, f"_{kind}")(keeper))

    async def _until(self, answered: float) -> None:
        """Or until nobody is served any more."""
        await until(lambda: self.clients.answered >= answered or self.fleet.is_dry)

    async def _somebody(self) -> Keeper:
        """To whom nothing is being done."""
        await until(lambda: any(not keeper.is_busy for keeper in self.fleet.alive))
        return self.chance.choice([keeper for keeper in self.fleet.alive if not keeper.is_busy])

    async def _kill(self, keeper: Keeper) -> None:
        self.killed += 1
        is_found = self.killed % 2 == 0
        if self.chance.random() < 0.2:  # in the midst of a pause
            keeper.signal(signal.SIGSTOP)
            await asyncio.sleep(self.chance.uniform(0, 0.5))
        await keeper.kill()
        await asyncio.sleep(self.chance.uniform(0, 1.5))
        if is_found:
            await keeper.replay()
        await keeper.start()
        keeper.is_busy = False

    async def _lose(self, keeper: Keeper) -> None:
        await keeper.kill()

    async def _pause(self, keeper: Keeper) -> None:
        keeper.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.3, 2.5))
        keeper.signal(signal.SIGCONT)
        keeper.served_at = time.monotonic()
        keeper.is_busy = False

    async def _stop(self, keeper: Keeper) -> None:
        assert await keeper.stop() == 0
        await keeper.start()
        keeper.is_busy = False


async def all_dry(fleet: Fleet) -> None:
    async with asyncio.timeout(DRY_SECONDS):
        await until(lambda: fleet.is_dry)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  # of many things that nobody tells of
        await asyncio.sleep(0.005)
