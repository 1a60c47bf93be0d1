"""Clocks that jump an hour forwards and back, or are wrong beside one that is right: who is out stays out.

An instance goes by its own wall clock; what all of them keep is in one store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from price_keeper.auth.client_secrets import HASH_CACHE_SECONDS, SECRET_HASH, ClientVerifier, hash_secret, make_secret
from price_keeper.auth.revocation import REVOCATION_CACHE_SECONDS
from price_keeper.domain import build_client_id
from price_keeper.errors import AccessDenied, TokenExpired
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import ORG, WEB, TokenServiceInstance, open_instances

HOUR = 3600.0
MOST = 3  # sessions of the client
SEEDS = 20
STEPS = 60


class Wrong:
    """As late and as early as the clock that is right, and off by something that changes."""

    def __init__(self, right: ManualClock) -> None:
        self._right = right
        self.off = 0.0
        self.monotonic, self.sleep = right.monotonic, right.sleep

    def now(self) -> float:
        return self._right.now() + self.off


@asynccontextmanager
async def pair(
    store: MemoryStore, clock: ManualClock
) -> AsyncIterator[tuple[TokenServiceInstance, TokenServiceInstance, Wrong]]:
    wrong = Wrong(clock)
    async with (
        open_instances(store, clock, max_sessions=MOST) as (right,),
        open_instances(store, wrong, max_sessions=MOST) as (other,),
    ):
        yield right, other, wrong


@pytest.mark.parametrize("by_session", [False, True])
async def test_clock_jump_during_store_read_keeps_token_revoked(by_session: bool) -> None:
    """By the clock that jumped the token has expired, and with it the row that says that it is revoked."""
    store, clock = MemoryStore(), ManualClock()
    async with pair(store, clock) as (right, other, wrong):
        issued = await right.sessions.login(WEB)
        claims = other.tokens.verify_access(issued.access.token)
        if by_session:
            await right.revocation.revoke_session(build_client_id(WEB.org, WEB.app), issued.sid, claims.expires)
        else:
            await right.revocation.revoke_token(claims)
        other.link.gate = asyncio.Event()
        waiting = asyncio.ensure_future(other.accepts(issued.access.token))
        await settle()
        wrong.off = 2 * HOUR
        other.link.gate.set()
        assert not await waiting
        wrong.off = 0.0
        assert not await other.accepts(issued.access.token)


@pytest.mark.parametrize("off", [HOUR, -HOUR])
async def test_login_by_wrong_clock_keeps_session_limit(off: float) -> None:
    """Those that are over by it may be refreshed elsewhere this moment, or once it is right again."""
    store, clock = MemoryStore(), ManualClock()
    async with pair(store, clock) as (right, other, wrong):
        issued = [await right.sessions.login(WEB) for _ in range(MOST)]
        await clock.leap(issued[0].refresh.expires - clock.now() - HOUR / 2)
        wrong.off = off
        issued += [await other.sessions.login(WEB) for _ in range(2)]
        wrong.off = 0.0
        assert await alive(right, [each.refresh.token for each in issued]) <= MOST
        assert len(await right.sessions.list_live(WEB)) <= MOST


@pytest.mark.parametrize("back", [30.0, HOUR])
async def test_clock_set_back_does_not_renew_cached_secret_check(back: float) -> None:
    """It comes to the same time once more, and by it the answer of an hour ago is of this moment."""
    store, clock = MemoryStore(), ManualClock()
    wrong, old, new = Wrong(clock), make_secret(), make_secret()
    clients, client = ClientVerifier(store, wrong.now, None, wrong.monotonic), build_client_id(ORG, "web")  # type: ignore[arg-type]
    await store.put(Put(schema.app_config_key(ORG, "web"), {SECRET_HASH: hash_secret(old).decode()}))
    await clients.verify(client, old)
    await store.put(Put(schema.app_config_key(ORG, "web"), {SECRET_HASH: hash_secret(new).decode()}))
    wrong.off = -back
    await clock.advance(max(back, HASH_CACHE_SECONDS))
    with pytest.raises(AccessDenied):
        await clients.verify(client, old)
    await clients.verify(client, new)


async def alive(instance: TokenServiceInstance, tokens: list[str]) -> int:
    """How many of them get another pair."""
    count = 0
    for token in tokens:
        try:
            await instance.sessions.refresh(token)
        except (AccessDenied, TokenExpired):
            continue
        count += 1
    return count


@dataclass
class Story:
    """Anything in any order, at one instance whose clock is right and one whose clock jumps."""

    dice: random.Random
    clock: ManualClock
    wrong: Wrong
    right: TokenServiceInstance
    other: TokenServiceInstance
    issued: list[Any] = field(default_factory=list)
    revoked: dict[str, float] = field(default_factory=dict)  # tokens, and since when, by the monotonic clock
    known: dict[str, int] = field(default_factory=dict)  # when they expire

    @property
    def anybody(self) -> TokenServiceInstance:
        return self.dice.choice((self.right, self.other))

    async def login(self) -> None:
        issued = await self.anybody.sessions.login(WEB)
        self.issued.append(issued)
        self.known[issued.access.token] = issued.access.expires

    async def refresh(self) -> None:
        if self.issued:
            before = self.dice.choice(self.issued)
            try:
                issued = await self.anybody.sessions.refresh(before.refresh.token)
            except (AccessDenied, TokenExpired):
                return
            self.issued[self.issued.index(before)] = issued
            self.known[issued.access.token] = issued.access.expires

    async def revoke(self) -> None:
        if self.issued:
            one = self.dice.choice(self.issued)
            try:
                await self.anybody.sessions.revoke_by_token(self.dice.choice((one.access.token, one.refresh.token)))
            except (AccessDenied, TokenExpired):
                return
            self.revoked.setdefault(one.access.token, self.clock.monotonic())

    async def jump(self) -> None:
        self.wrong.off = self.dice.choice((-HOUR, 0.0, 0.0, HOUR))

    async def pass_time(self) -> None:
        await self.clock.leap(self.dice.choice((1.0, 20.0, 600.0, 1800.0, 3 * 86_400.0)))

    async def check(self) -> None:
        for instance, now in ((self.right, self.clock.now()), (self.other, self.wrong.now())):
            for token, expires in self.known.items():
                try:
                    is_welcome = await instance.accepts(token)
                except (AccessDenied, TokenExpired):
                    continue
                since = self.revoked.get(token)
                is_known = since is not None and self.clock.monotonic() - since >= REVOCATION_CACHE_SECONDS
                assert not (is_welcome and is_known), "a revoked token gets through"
                assert not (is_welcome and now >= expires), "an expired one gets through"
        assert len(await self.right.sessions.list_live(WEB)) <= MOST


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_clock_jumps_keep_revoked_clients_out(seed: int) -> None:
    store, clock = MemoryStore(), ManualClock()
    async with pair(store, clock) as (right, other, wrong):
        story = Story(random.Random(seed), clock, wrong, right, other)
        for _ in range(STEPS):
            steps = (story.login, story.refresh, story.refresh, story.revoke, story.jump, story.jump, story.pass_time)
            await story.dice.choice(steps)()
            await story.check()
