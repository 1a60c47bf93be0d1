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
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService

from tests.support.caller_connections import CallerConnection, Http1Connection, OpenConnection
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
MAX_TEXT, MAX_OUTPUT = 1200, 220
MAX_INPUT_TOKENS = 1000 + MAX_TEXT + 400  # of input: what is set aside for any call, and a body around the text
PICO = 10**6  # of a dollar for a million tokens, for one token

CLIENTS_EACH = 5  # connections to one sidecar
ABANDONED_SHARE = 0.04  # the share of calls whose client goes before it has its answer
CALL_SECONDS = 30.0
PAUSE_AFTER_REFUSAL_SECONDS = 0.2  # until the next call
UNSERVED_SECONDS = 1.5  # without one call that is served, though all kinds are asked for: it refuses
EXHAUSTED_TIMEOUT_SECONDS = 150.0

ZONE_HOURS = 12


def max_call_pico(label: str) -> int:
    """No call of the load may cost more."""
    prices = PRICES[label]
    dearest = max(price for kind, price in prices.items() if kind != "output")
    return round(MAX_INPUT_TOKENS * dearest * PICO + MAX_OUTPUT * prices["output"] * PICO)


def noon_time_zone() -> str:
    """In which it is about noon, so that no day ends during the test."""
    ahead = ZONE_HOURS - time.gmtime().tm_hour
    return f"Etc/GMT{-ahead:+d}" if ahead else "UTC"  # those zones count westwards


@dataclass
class ManagedSidecar:
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
    def open_leases(self) -> set[str]:
        """Runs that took something, and have not given back what is left of it."""
        return {path.name.removeprefix("holds-") for path in self.journal.glob("holds-*")}

    @property
    def is_exhausted(self) -> bool:
        return self.refused > 4 * CLIENTS_EACH and time.monotonic() - self.served_at > UNSERVED_SECONDS

    def write_config(self, bedrock: str, store: Mapping[str, Any]) -> None:
        labels = {
            label: {
                "model": model,
                "format": FORMATS[label],
                "prices_usd_per_1m": PRICES[label],
                "price_source": "config",
                "max_output_tokens": MAX_OUTPUT,
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
        """The command's output, run like an operator who finds the journal of a dead process."""
        done = await asyncio.to_thread(price_keeper, "replay", str(self.journal), folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout


@dataclass
class ProcessFleet:
    org: str
    sidecars: list[ManagedSidecar]

    def token(self) -> str:
        return (
            TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time)
            .mint_access(self.org, APP)
            .token
        )

    @property
    def alive(self) -> list[ManagedSidecar]:
        return [keeper for keeper in self.sidecars if keeper.running is not None]

    @property
    def is_exhausted(self) -> bool:
        """Every sidecar that lives refuses."""
        return all(keeper.is_exhausted for keeper in self.alive)

    @property
    def dead(self) -> list[ManagedSidecar]:
        return [keeper for keeper in self.sidecars if keeper.running is None]

    async def finish(self) -> None:
        """The journals of half of the dead are brought in, the others are started again; all stop in order."""
        dead, alive = self.dead, self.alive
        await asyncio.gather(*(keeper.replay() for keeper in dead[::2]), *(keeper.start() for keeper in dead[1::2]))
        statuses = await asyncio.gather(*(keeper.stop() for keeper in (*alive, *dead[1::2])))
        assert set(statuses) <= {0}
        # One that stops soon after its start has not given back yet what former runs held.
        unfinished = [keeper for keeper in self.sidecars if keeper.open_leases]
        await asyncio.gather(*(keeper.replay() for keeper in unfinished))


@asynccontextmanager
async def run_fleet(number: int, folder: Path, bedrock: str, store: Mapping[str, Any]) -> AsyncIterator[ProcessFleet]:
    fleet = ProcessFleet(str(uuid4()), [ManagedSidecar(each, folder / f"sidecar{each}") for each in range(number)])
    async with AsyncExitStack() as stack:
        for keeper in fleet.sidecars:
            keeper.write_config(bedrock, store)
            stack.push_async_callback(keeper.kill)
        await asyncio.gather(*(keeper.start() for keeper in fleet.sidecars))
        yield fleet


# ---------------------------------------------------------------- clients

_TAG = "call {}."


def parse_tag(body: str) -> int:
    """Of a request that the simulated Bedrock met."""
    return int(body.partition("call ")[2].partition(".")[0])


class LoadClients:
    """Several connections to each sidecar, each with one call after the other, as fast as it is answered."""

    def __init__(
        self, fleet: ProcessFleet, labels: list[str], seed: object, opens: Sequence[OpenConnection] | None = None
    ) -> None:
        """Each chooses one of the ways in which connections are opened."""
        self.sent_calls = 0
        self._opens = opens or [Http1Connection.connect]
        self.abandoned_calls = self.broken_connections = 0
        self.answered_tags: set[int] = set()  # the tags of calls that were answered, all of it
        self.refused_tags: set[int] = set()  # the tags of calls that got an error for an answer
        self.errors: dict[int, int] = {}  # by status
        self._fleet, self._labels, self._token = fleet, labels, fleet.token()
        self._tags = count(1)
        self._seed = seed
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def answered(self) -> int:
        return len(self.answered_tags)

    async def __aenter__(self) -> LoadClients:
        connections = [keeper for keeper in self._fleet.sidecars for _ in range(CLIENTS_EACH)]
        self._tasks = [
            asyncio.create_task(self._call_until_stopped(keeper, random.Random(f"{self._seed} {number}")))
            for number, keeper in enumerate(connections)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def _call_until_stopped(self, keeper: ManagedSidecar, chance: random.Random) -> None:
        connection: CallerConnection | None = None
        opened = self._opens[chance.randrange(len(self._opens))]
        while not self._is_stopping:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    connection = connection or await opened(keeper.port)
                    if not await self._call(keeper, connection, chance):
                        connection = await connection.close()
            except (OSError, EOFError, TimeoutError):
                self.broken_connections += 1
                connection = await connection.close() if connection is not None else None
                await asyncio.sleep(PAUSE_AFTER_REFUSAL_SECONDS)
        if connection is not None:
            await connection.close()

    async def _call(self, keeper: ManagedSidecar, connection: CallerConnection, chance: random.Random) -> bool:
        """Whether the connection is of use for another one."""
        tag = next(self._tags)
        self.sent_calls += 1
        await connection.ask(*self._request(tag, chance))
        if chance.random() < ABANDONED_SHARE:
            await asyncio.sleep(chance.uniform(0, 0.1))
            self.abandoned_calls += 1
            return False
        status = await connection.answer()
        if status == 200:
            self.answered_tags.add(tag)
            keeper.served += 1
            keeper.refused, keeper.served_at = 0, time.monotonic()
        else:
            self.refused_tags.add(tag)
            self.errors[status] = self.errors.get(status, 0) + 1
            keeper.refused += 1
            await asyncio.sleep(PAUSE_AFTER_REFUSAL_SECONDS)
        return True

    def _request(self, tag: int, chance: random.Random) -> tuple[str, str, dict[str, Any]]:
        """Path, token and body."""
        text = _TAG.format(tag) + " word" * chance.randrange(MAX_TEXT // 5)
        max_tokens = chance.randrange(150, MAX_OUTPUT)
        label = chance.choice(self._labels)
        is_stream = chance.random() < 0.5
        if label == "premium" and chance.random() < 0.3:
            body = CLAUDE_BODY | {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
            operation = "invoke-with-response-stream" if is_stream else "invoke"
            return f"/model/{label}/{operation}", self._token, body
        body = {"messages": [{"role": "user", "content": [{"text": text}]}]}
        if chance.random() < 0.9:  # the others are given the label's own maximum
            body["inferenceConfig"] = {"maxTokens": max_tokens}
        return f"/model/{label}/{'converse-stream' if is_stream else 'converse'}", self._token, body


# ---------------------------------------------------------------- what befalls the sidecars


@dataclass
class ProcessFaults:
    """Each when so many calls have been answered, so that they come while there still is money, on any machine."""

    fleet: ProcessFleet
    clients: LoadClients
    chance: random.Random
    kills: int
    pauses: int
    stops: int
    lost: int  # of those that are killed, so many stay dead to the end
    history: list[str] = field(default_factory=list)
    killed: int = 0  # of every second the journal is brought in before it starts again

    async def run(self, calls: int) -> None:
        """`calls` is about how many there will be."""
        kinds = [*["kill"] * (self.kills - self.lost), *["lose"] * self.lost]
        kinds += [*["pause"] * self.pauses, *["stop"] * self.stops]
        self.chance.shuffle(kinds)
        moments = sorted(self.chance.uniform(0.05, 0.9) * calls for _ in kinds)
        async with asyncio.TaskGroup() as under_way:
            for kind, moment in zip(kinds, moments, strict=True):
                await self._wait_for_calls(moment)
                keeper = await self._choose_sidecar()
                self.history.append(f"{kind} {keeper.number} at {self.clients.answered}")
                keeper.is_busy = True
                under_way.create_task(getattr(self, f"_{kind}")(keeper))

    async def _wait_for_calls(self, answered: float) -> None:
        """Or until no call is served any longer."""
        await wait_until(lambda: self.clients.answered >= answered or self.fleet.is_exhausted)

    async def _choose_sidecar(self) -> ManagedSidecar:
        """No fault is being injected here."""
        await wait_until(lambda: any(not keeper.is_busy for keeper in self.fleet.alive))
        return self.chance.choice([keeper for keeper in self.fleet.alive if not keeper.is_busy])

    async def _kill(self, keeper: ManagedSidecar) -> None:
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

    async def _lose(self, keeper: ManagedSidecar) -> None:
        await keeper.kill()

    async def _pause(self, keeper: ManagedSidecar) -> None:
        keeper.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.3, 2.5))
        keeper.signal(signal.SIGCONT)
        keeper.served_at = time.monotonic()
        keeper.is_busy = False

    async def _stop(self, keeper: ManagedSidecar) -> None:
        assert await keeper.stop() == 0
        await keeper.start()
        keeper.is_busy = False


async def wait_until_exhausted(fleet: ProcessFleet) -> None:
    async with asyncio.timeout(EXHAUSTED_TIMEOUT_SECONDS):
        await wait_until(lambda: fleet.is_exhausted)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # of many things without an event
        await asyncio.sleep(0.005)
