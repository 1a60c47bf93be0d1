"""Callers at a pace: like SDKs, with retries under the same invocation id; and some who leave, or read slowly."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2.exceptions import H2Error
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService

from tests.soak.fleet import SECRET, Member
from tests.soak.tenants import APPS, FLIPPING, HARD, MOST_OUTPUT, App
from tests.support.raw_clients import ConnectionCut, Http2TestClient, RawConnection, WireResponse
from tests.support.simulated import CLAUDE_BODY

MARKER = "the-words-of-a-prompt"  # in every one, so that no log and no journal may have it
TRIES = 3
MOST_PAUSE_SECONDS = 1.0  # between two tries
MOST_UNDER_WAY = 400
CALLS_A_CONNECTION = 200
TOKEN_SECONDS = 4 * 3600

_BROKEN = (OSError, EOFError, TimeoutError, ConnectionCut, H2Error)


class Histogram:
    """A histogram of times, in steps of a twentieth: an hour of them takes as much memory as a minute."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._steps[math.ceil(math.log(max(seconds, 1e-4)) * 20)] += 1

    def share(self, share: float) -> float:
        """Seconds, below which this share of them is."""
        left = share * self._steps.total()
        for step, count in sorted(self._steps.items()):
            left -= count
            if left <= 0:
                return math.exp(step / 20)
        return 0.0


@dataclass
class LoadCounts:
    """What callers asked and heard."""

    asked: Counter[str] = field(default_factory=Counter)  # by kind
    heard: Counter[str] = field(default_factory=Counter)  # by status, and by the type of an error
    served: Counter[str] = field(default_factory=Counter)  # by app and label
    broken: int = 0  # tries that had no whole answer
    given_up: int = 0  # calls without a successful try
    retried: int = 0
    left: int = 0
    odd: Counter[str] = field(default_factory=Counter)  # what a client could make nothing of
    too_many: int = 0  # that were not begun, as so many were under way
    took: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True)
class Question:
    app: App
    path: bytes
    body: bytes
    is_stream: bool
    invocation: str


class Load:
    def __init__(self, members: list[Member], seed: str, whole: Path) -> None:
        """Into `whole` go Bedrock's ids of the answers that callers had to their end."""
        self.counts = LoadCounts()
        self.apps = [
            app for app in APPS if app.org != HARD
        ]  # no process must see that one before its budget is settled
        self._members = members
        self._chance = random.Random(f"{seed} load")
        self._whole = whole.open("w", buffering=1 << 16)
        self._numbers = itertools.count(1)
        self._seed = seed
        tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time)
        self.bearers = {app: tokens.mint_access(app.org, app.name, TOKEN_SECONDS).token.encode() for app in APPS}
        self._expired = tokens.mint_access(APPS[0].org, APPS[0].name, -60).token.encode()
        self._idle: dict[tuple[int, bool], list[RawConnection | Http2TestClient]] = defaultdict(list)
        self._under_way: set[asyncio.Task[None]] = set()
        self._kinds: dict[Callable[[Member], Awaitable[None]], float] = {
            self._ask: 80,
            self._ask_over_http2: 12,
            self._leave: 5,
            self._read_slowly: 0.5,
            self._ask_with_an_old_token: 0.5,
        }

    # Paces.

    async def at_a_pace(self, per_second: float, until: float) -> None:
        began = time.monotonic()
        for number in itertools.count():
            due = began + number / per_second
            if due >= until:
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._begin()

    async def as_fast_as_it_goes(self, callers: int, seconds: float) -> float:
        """How many calls a second were answered when so many callers did nothing else."""
        until, before, began = time.monotonic() + seconds, self.counts.heard.total(), time.monotonic()

        async def call_on() -> None:
            while time.monotonic() < until:
                await self._call(self._ask)

        await asyncio.gather(*(call_on() for _ in range(callers)))
        return (self.counts.heard.total() - before) / (time.monotonic() - began)

    async def introduce(self) -> None:
        """Each app to each sidecar, so that what it may spend is known there."""
        for app in (each for each in self.apps if each.labels):  # usage of the others is submitted
            for member in self._members:
                self.counts.asked["ask"] += 1
                await self._tried(member, self._question(app), is_http2=False)

    async def settled(self, seconds: float) -> None:
        """All that is under way has ended, and no connection is kept."""
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=seconds)
            assert not late, f"{len(late)} callers still wait after {seconds:g} s"
        for wires in self._idle.values():
            for wire in wires:
                _close(wire)
        self._idle.clear()
        self._whole.flush()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def _begin(self) -> None:
        if len(self._under_way) >= MOST_UNDER_WAY:
            self.counts.too_many += 1
            return
        kind = self._chance.choices(list(self._kinds), list(self._kinds.values()))[0]
        task = asyncio.get_running_loop().create_task(self._call(kind))
        self._under_way.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        failure = task.exception()
        if failure is not None:
            self.counts.odd[f"{type(failure).__name__}: {failure}"[:200]] += 1

    async def _call(self, kind: Callable[[Member], Awaitable[None]]) -> None:
        self.counts.asked[kind.__name__.strip("_")] += 1
        await kind(self._chance.choice(self._members))

    # Kinds of callers.

    async def _ask(self, member: Member) -> None:
        await self._tried(member, self._question(), is_http2=False)

    async def _ask_over_http2(self, member: Member) -> None:
        await self._tried(member, self._question(), is_http2=True)

    async def _leave(self, member: Member) -> None:
        """Before the answer comes, or in the midst of it."""
        question = self._question()
        try:
            wire = await RawConnection.connect(member.data)
            try:
                await wire.send(_head(question, self.bearers[question.app], 1) + question.body)
                if self._chance.random() < 0.6:
                    await wire.read_more(256)
                else:
                    await asyncio.sleep(self._chance.uniform(0, 0.05))
            finally:
                wire.reset() if self._chance.random() < 0.5 else wire.close()
            self.counts.left += 1
        except _BROKEN:
            self.counts.broken += 1

    async def _read_slowly(self, member: Member) -> None:
        question = self._question(is_stream=True)
        try:
            wire = await RawConnection.connect(member.data, receive_buffer=1024)
            try:
                await wire.send(_head(question, self.bearers[question.app], 1) + question.body)
                for _ in range(40):
                    if not await wire.read_more(200) or wire.received.endswith(b"\r\n0\r\n\r\n"):
                        break
                    await asyncio.sleep(0.1)
            finally:
                wire.close()
        except _BROKEN:
            self.counts.broken += 1

    async def _ask_with_an_old_token(self, member: Member) -> None:
        question = self._question()
        try:
            wire = await RawConnection.connect(member.data)
            try:
                await wire.send(_head(question, self._expired, 1) + question.body)
                self._hear(question, await wire.answer())
            finally:
                wire.close()
        except _BROKEN:
            self.counts.broken += 1

    # One call as an SDK makes it.

    def _question(self, app: App | None = None, *, is_stream: bool | None = None) -> Question:
        chance = self._chance
        app = app or chance.choices(self.apps, [each.weight for each in self.apps])[0]
        label = chance.choice(app.labels)
        is_stream = chance.random() < 0.35 if is_stream is None else is_stream
        text = f"{MARKER} {next(self._numbers)}" + " word" * chance.randrange(120)
        most = chance.randrange(40, MOST_OUTPUT)
        if label == "premium" and app is not FLIPPING and chance.random() < 0.4:
            body: dict[str, Any] = CLAUDE_BODY | {"messages": [{"role": "user", "content": text}], "max_tokens": most}
            verb = "invoke-with-response-stream" if is_stream else "invoke"
        else:
            body = {"messages": [{"role": "user", "content": [{"text": text}]}], "inferenceConfig": {"maxTokens": most}}
            verb = "converse-stream" if is_stream else "converse"
        invocation = f"{app.name}.{chance.getrandbits(96):024x}"
        return Question(app, f"/model/{label}/{verb}".encode(), json.dumps(body).encode(), is_stream, invocation)

    async def _tried(self, member: Member, question: Question, *, is_http2: bool) -> None:
        began = time.monotonic()
        for number in range(1, TRIES + 1):
            self.counts.retried += number > 1
            pause = 0.1 * number
            try:
                heard = await self._once(member, question, number, is_http2=is_http2)
            except ConnectionRefusedError:  # a load balancer asks another one then
                self.counts.broken += 1
                member = self._chance.choice(self._members)
            except _BROKEN:
                self.counts.broken += 1
            else:
                self._hear(question, heard)
                if heard.status == 200:
                    self.counts.took.add(time.monotonic() - began)
                if heard.status not in (429, 500, 502, 503, 504):
                    return
                pause = float(dict(heard.headers).get(b"retry-after", b"0.1"))
            await asyncio.sleep(min(pause, MOST_PAUSE_SECONDS))
        self.counts.given_up += 1

    async def _once(self, member: Member, question: Question, number: int, *, is_http2: bool) -> WireResponse:
        idle = self._idle[member.data, is_http2]
        wire: RawConnection | Http2TestClient
        if idle:
            wire = idle.pop()
        else:
            wire = await (Http2TestClient if is_http2 else RawConnection).connect(member.data)  # type: ignore[attr-defined]
        try:
            if isinstance(wire, Http2TestClient):
                wire.streams.clear()
                more = _headers(question, self.bearers[question.app], number)
                heard = await wire.call(question.path, question.body, more)
            else:
                await wire.send(_head(question, self.bearers[question.app], number) + question.body)
                heard = await wire.answer()
        except BaseException:
            _close(wire)
            raise
        if (b"connection", b"close") in heard.headers or self._chance.random() < 1 / CALLS_A_CONNECTION:
            _close(wire)
        else:
            idle.append(wire)
        return heard

    def _hear(self, question: Question, heard: WireResponse) -> None:
        headers = dict(heard.headers)
        kind = headers.get(b"x-amzn-errortype", b"").decode().partition(":")[0]
        self.counts.heard[f"{heard.status} {kind}".strip()] += 1
        if heard.status == 200:
            self.counts.served[f"{question.app.name} {headers.get(b'x-price-keeper-label', b'').decode()}"] += 1
            self._whole.write(headers[b"x-amzn-requestid"].decode() + "\n")


def _headers(question: Question, token: bytes, number: int) -> list[tuple[bytes, bytes]]:
    return [
        (b"authorization", b"Bearer " + token),
        (b"content-type", b"application/json"),
        (b"amz-sdk-invocation-id", question.invocation.encode()),
        (b"amz-sdk-request", b"attempt=%d; max=%d" % (number, TRIES)),
    ]


def _head(question: Question, token: bytes, number: int) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in _headers(question, token, number))
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (
        question.path,
        lines,
        len(question.body),
    )


def _close(wire: RawConnection | Http2TestClient) -> None:
    (wire.connection if isinstance(wire, Http2TestClient) else wire).close()
