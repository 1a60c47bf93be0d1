"""The express lane and the pipeline alone, side by side: callers and books cannot tell one from the other."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from price_keeper.auth.keys import SigningKey
from price_keeper.auth.tokens import Tokens
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.config.keys import Endpoint, Journal, TierPrices
from price_keeper.config.prices import Guardrails, UnitPrices
from price_keeper.limits.bucket import state_of
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY, Key, Put

from tests.support.data_port import APP, ORG, SECRET
from tests.support.effort import seeds
from tests.support.lanes import Lane, lane
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE, CLAUDE_BODY, NOVA
from tests.support.wire import CutError, Heard, Http2Wire, Wire, ask

ARN = "arn:aws:bedrock:eu-west-1:123456789012:application-inference-profile/abc123"
PATIENCE = 60.0
DUE = 1000.0  # seconds after which nothing holds that was read before
NOON = 1_795_003_200.0  # 2026-11-18 12:00 UTC

# New with each answer, or a matter of moments.
NOT_COMPARED = {
    *(b"x-price-keeper-request-id", b"x-amzn-requestid", b"date", b"retry-after", b"x-amz-retry-after"),
    *(b"x-ratelimit-remaining-requests", b"x-ratelimit-remaining-tokens"),
}
_HOLDER = re.compile(r"(?<=^HOLD#)[^#]+")  # of money, which is each process's own
SENT_NEW = {b"authorization", b"x-amz-date", b"host"}


class Still(SystemClock):
    """So that no limit is refilled, and nothing read again, before a script says so."""

    ahead = 0.0

    def now(self) -> float:
        return NOON + self.ahead

    def monotonic(self) -> float:
        return 1000.0 + self.ahead


def everything() -> dict[str, Any]:
    """A configuration in which whatever a call can come to, it comes to soon."""
    labels = dict(Config.development().labels)
    labels["standard"] = replace(labels["standard"], endpoints=(Endpoint("us-east-1"), Endpoint("us-west-2")))
    labels["economy"] = replace(labels["economy"], max_output_tokens=100)
    prices = TierPrices(*(Decimal(usd) for usd in ("7", "7", "7", "7", "7")))
    units = Guardrails(UnitPrices(*(Decimal(number) for number in (15, 20, 25, 30, 35, 40, 45, 50, 55))))
    return {"labels": labels, "unlabelled": "meter", "default_price": prices, "guardrails": units}


def budget(usd: Mapping[str, float], **more: Any) -> dict[str, Any]:
    return {"model_ordering": list(usd), "quotas": {label: round(each * 10**6) for label, each in usd.items()}, **more}


CHAIN = {"premium": 0.002, "standard": 0.0003, "economy": 0.00001}
LIMITS = {"limits": {"rpm": 25, "tpm": 4000}}
OWN = {"format": "nova", "prices_usd_per_1m": {"input": Decimal(2), "output": Decimal(7)}}

# What the org's item says and then the app's, by the name of what is tried.
WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "limited": ({"limits": {"rpm": 40}}, LIMITS),
    "exactly": ({}, {"limits": {"rpm": 12, "mode": "exact"}}),
    "soft": (budget(CHAIN), {}),
    "of the app": (budget(CHAIN, quota_scope="APP"), LIMITS),
    "shadow": (budget(CHAIN, enforcement="shadow"), {}),
    "hard": (budget({**CHAIN, "premium": 0.02}, enforcement="hard"), {}),
    "own label in the chain": (budget({"premium": 0.0002, "fast": 0.0005, "economy": 1}, quota_scope="APP"), {}),
}


@dataclass(frozen=True)
class Asking:
    who: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    method: bytes = b"POST"

    @property
    def can_be_ahead(self) -> bool:
        """Where a connection is broken off, how much of what was sent behind is heard is a matter of moments."""
        return (b"x-simulate-fault", b"cut") not in self.headers and len(self.body) < 100_000

    def on_wire(self, tokens: Mapping[str, bytes]) -> bytes:
        lines = b"".join(b"%b: %b\r\n" % header for header in self.head(tokens))
        return ask(self.body, lines, path=self.path.encode(), method=self.method)

    def head(self, tokens: Mapping[str, bytes]) -> list[tuple[bytes, bytes]]:
        return [*tokens_of(tokens[self.who]), (b"content-type", b"application/json"), *self.headers]


def tokens_of(token: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + token)] if token else []


class Script:
    """Requests as they come; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._new = 0

    def often(self, usual: Any, *others: Any, share: float = 0.75) -> Any:
        return usual if self.chance.random() < share else self.chance.choice(others)

    def asking(self) -> Asking:
        who = self.often("good", "good too", "other", "whole org", "expired", "revoked", "garbage", "nobody")
        model = self.often("premium", "standard", "economy", "fast", CLAUDE, NOVA, "meta.unknown-v1", share=0.4)
        operation = self.often(
            "converse", "converse-stream", "invoke", "invoke-with-response-stream", "count-tokens", "nothing", share=0.5
        )
        path, body = f"/model/{model}/{operation}", self._body(operation, model)
        if self.chance.random() < 0.05:
            path, body = CHAT_PATH, json.dumps({**CHAT, "model": model}).encode()
        if self.chance.random() < 0.04:
            path += self.chance.choice(["?a=b", "/", "%"])
        return Asking(who, path, tuple(self._headers()), body, self.often(b"POST", b"GET", b"PUT", share=0.97))

    def _body(self, operation: str, model: str) -> bytes:
        words = "x" * self.often(40, 0, 900, 300_000, share=0.9)
        if operation.startswith("invoke"):
            document: dict[str, Any] = {**CLAUDE_BODY, "messages": [{"role": "user", "content": words}]}
            if model in ("economy", "fast", NOVA):
                document = {"messages": [{"role": "user", "content": [{"text": words}]}]}
        else:
            document = {"messages": [{"role": "user", "content": [{"text": words}]}]}
            if self.chance.random() < 0.7:
                document["inferenceConfig"] = {"maxTokens": self.chance.choice([1, 20, 80])}
            if operation.startswith("converse") and self.chance.random() < 0.1:
                document["guardrailConfig"] = {"guardrailIdentifier": "g1", "guardrailVersion": "1"}
        return self.often(json.dumps(document).encode(), b"", b"{", share=0.96)  # type: ignore[no-any-return]

    def _headers(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        if self.chance.random() < 0.25:
            self._new += self.chance.random() < 0.7
            found.append((b"amz-sdk-invocation-id", b"call-%d" % self._new))
        if self.chance.random() < 0.25:
            found += self.chance.choice(FAULTS)
        if self.chance.random() < 0.05:
            found.append((b"accept", b"a\tb" if self.chance.random() < 0.5 else "é".encode()))
        if self.chance.random() < 0.04:
            found.append((b"content-type", b"text/plain"))  # a second one
        return found


def wish(**named: object) -> list[tuple[bytes, bytes]]:
    return [(b"x-simulate-" + name.replace("_", "-").encode(), str(value).encode()) for name, value in named.items()]


FAULTS = [
    wish(fault="throttle"),
    wish(fault="throttle", times=1, key="a"),
    wish(fault="throttle", times=1, key="b"),
    wish(fault="5xx", status=500),
    wish(fault="model-not-ready"),
    wish(fault="cut", after_bytes=30),
    wish(fault="reset"),
    wish(fault="half-head"),
    wish(fault="exception-frame", after_frames=2),
    wish(usage="none"),
    wish(output_tokens=50),
]


@dataclass
class Side:
    """One of the two, and the connections that its clients keep."""

    lane: Lane
    tokens: Mapping[str, bytes]
    _wire: Wire | None = None
    _http2: Http2Wire | None = None
    wires: list[Wire] = field(default_factory=list)

    async def new_wire(self) -> Wire:
        self.wires.append(await Wire.connect(self.lane.number))
        return self.wires[-1]

    async def heard(self, *askings: Asking) -> list[Any]:
        """Sent ahead of their answers, if there are several."""
        if self._wire is None:
            self._wire = await self.new_wire()
        await self._wire.send(b"".join(asking.on_wire(self.tokens) for asking in askings))
        answers = []
        for _ in askings:
            try:
                heard = await self._wire.answer()
            except CutError as cut:
                answers.append(("cut", cut.how))
                break
            answers.append(seen(heard))
            if (b"connection", b"close") in heard.headers:
                break
        else:
            return answers
        self._wire = None
        return answers

    async def heard_by_several(self, asking: Asking, clients: int) -> Counter[Any]:
        async def one() -> Any:
            wire = await self.new_wire()
            await wire.send(asking.on_wire(self.tokens))
            try:
                return repr(seen(await wire.answer()))
            except CutError as cut:
                return cut.how

        return Counter(await asyncio.gather(*(one() for _ in range(clients))))

    async def heard_http2(self, asking: Asking) -> Any:
        if self._http2 is None:
            self._http2 = await Http2Wire.connect(self.lane.number)
            self.wires.append(self._http2.wire)
            self._http2.h2.config.validate_outbound_headers = False
        client = self._http2
        number = client.open(asking.path.encode(), asking.head(self.tokens), ends=False, method=asking.method)
        if asking.body:
            await client.body(number, asking.body)
        else:
            client.h2.end_stream(number)
            await client.flush()
        try:
            return seen(await client.answer(number))
        except CutError as cut:
            return cut.how

    def forget_connections(self) -> None:
        """After so long a time they are closed as idle, sooner or later."""
        self._wire = self._http2 = None

    def hang_up(self) -> None:
        for wire in self.wires:
            wire.close()

    async def books(self) -> Any:
        """All that is left of it: what went upstream, what is recorded, and what the limits still hold."""
        await self.lane.is_quiet()
        sent = [
            (each.method, each.target, each.body, [header for header in each.headers if header[0] not in SENT_NEW])
            for each in self.lane.port.bedrock.ledger
        ]
        store = self.lane.port.store
        await self.lane.pipeline._admitting._leasing.stop()
        limits = []
        for scope in (Scope(ORG), Scope(ORG, APP), Scope(ORG, "other")):
            item = await store.get(schema.bucket(scope, "RATE"), consistent=True)
            limits.append(None if item is None else state_of(item).limits)
        sums = self.lane.journal.tally.sums().items()
        return sent, {name._replace(period=_HOLDER.sub("", name.period)): counts for name, counts in sums}, limits


def seen(heard: Heard) -> Any:
    headers = [header for header in heard.headers if header[0] not in NOT_COMPARED]
    return heard.status, headers, heard.body


@asynccontextmanager
async def both(folder: Path, world: str) -> AsyncIterator[tuple[Side, Side, Still]]:
    clock = Still()
    maker = Tokens([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
    revoked = maker.mint(ORG, APP, 86_400)
    tokens = {
        "good": maker.mint(ORG, APP, 86_400).token,
        "good too": maker.mint(ORG, APP, 86_400).token,
        "other": maker.mint(ORG, "other", 86_400).token,
        "whole org": maker.mint(ORG, None, 86_400).token,
        "expired": maker.mint(ORG, APP, -1).token,
        "revoked": revoked.token,
        "garbage": "x.y.z",
        "nobody": "",
    }
    shown = {who: token.encode() for who, token in tokens.items()}
    sides = []
    ways = {"express": True, "pipeline": False}
    async with asyncio.timeout(PATIENCE):
        first, second = (
            lane(folder / name, is_express=way, clock=clock, journal=_unsealed(folder / name), **everything())
            for name, way in ways.items()
        )
        for name in ways:
            (folder / name).mkdir()
        async with first as one, second as other:
            for each in (one, other):
                await each.port.store.put(
                    Put(schema.revoked_token(revoked.claims.jti), {EXPIRY: revoked.claims.expires})
                )
                await configure(each, *WORLDS[world])
                sides.append(Side(each, shown))
            try:
                yield sides[0], sides[1], clock
            finally:
                for side in sides:
                    side.hang_up()


def _unsealed(folder: Path) -> Journal:
    return Journal(dir=str(folder / "journal"), flush_interval_secs=3600.0, flush_interval_max_secs=3600.0)


async def configure(lane: Lane, org: dict[str, Any], app: dict[str, Any], version: int = 1) -> None:
    store = lane.port.store
    await store.put(Put(schema.org_config(ORG), {"org_name": "Acme", "timezone": "UTC", "version": version, **org}))
    for name, settings in ((APP, app), ("other", {})):
        about = {"app_name": name, "version": version, "profiles_made": 1}
        await store.put(Put(schema.app_config(ORG, name), {**about, **settings}))
        own = Key("config", schema.org_config(ORG).pk, schema.profiles_of(name) + "fast")
        await store.put(Put(own, {**OWN, "label": "fast", "inference_profile_arn": ARN + name}))


async def play(script: Script, one: Side, other: Side, clock: Still, turns: int) -> None:
    for turn in range(turns):
        way, asking = script.chance.random(), script.asking()
        if way < 0.6:
            told, expected = [await side.heard(asking) for side in (one, other)]
        elif way < 0.75:
            ahead = [asking, *(script.asking() for _ in range(script.chance.randint(1, 12)))]
            ahead = [each for each in ahead if each.can_be_ahead]
            told, expected = [await side.heard(*ahead) for side in (one, other)]
        elif way < 0.9:
            told, expected = [await side.heard_http2(asking) for side in (one, other)]
        elif way < 0.96:
            retried = [(b"amz-sdk-invocation-id", b"turn-%d" % turn), *wish(latency_ms=20)]
            late = replace(asking, headers=tuple(dict([*asking.headers, *retried]).items()))
            told, expected = [await side.heard_by_several(late, 4) for side in (one, other)]
        else:  # other settings, which are read again
            clock.ahead += DUE
            world = WORLDS[script.chance.choice(list(WORLDS))]
            for side in (one, other):
                side.forget_connections()
                await configure(side.lane, *world, version=turn + 2)
            continue
        assert told == expected, (turn, asking.who, asking.path, asking.headers)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("world", WORLDS)
async def test_nobody_can_tell_which_way_a_call_went(tmp_path: Path, world: str, seed: int) -> None:
    async with both(tmp_path, world) as (one, other, clock):
        await play(Script(seed), one, other, clock, turns=40)
        for side in (one, other):
            side.hang_up()
        assert await one.books() == await other.books()
        assert other.lane.taken == 0
        assert one.lane.taken > (0 if world == "hard" else 5)
