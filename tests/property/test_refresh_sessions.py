"""Sessions against a plain list: whatever clients do and however time passes, the same tokens are good.

The oracle knows nothing of rows, versions or blocklists. To it a client has a list of sessions, oldest first; each has
one refresh token, a time until which that is good, and the access tokens made from it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.auth.refresh_sessions import REUSE_GRACE_SECONDS, TokenPair
from price_keeper.errors import AccessDenied, TokenExpired

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import (
    WEB,
    TokenServiceInstance,
    open_instances,
    read_session_rows,
    restart_with_limit,
)

HOUR, REFRESH_LIFETIME = 3600, 30 * 86_400


@dataclass
class Known:
    """One session of the plain model."""

    sid: str
    refresh: str
    until: float
    access: list[tuple[str, float]] = field(default_factory=list)
    used: list[tuple[str, float]] = field(default_factory=list)
    is_over: bool = False
    is_revoked: bool = False

    def take(self, issued: TokenPair) -> None:
        self.refresh, self.until = issued.refresh.token, issued.refresh.expires
        self.access.append((issued.access.token, issued.access.expires))

    def end(self) -> None:
        self.is_over = self.is_revoked = True


class Oracle:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.all: list[Known] = []

    def live(self) -> list[Known]:
        return [each for each in self.all if not each.is_over and self.clock.now() < each.until]

    def login(self, issued: TokenPair, most: int) -> None:
        live = self.live()
        for each in live[: max(0, len(live) - most + 1)] if most else []:
            each.is_over = True
        self.all.append(Known(issued.sid, "", 0))
        self.all[-1].take(issued)


class World:
    def __init__(self, fleet: list[TokenServiceInstance], clock: ManualClock) -> None:
        self.fleet = fleet
        self.clock = clock
        self.oracle = Oracle(clock)
        self.most = 3

    def limit(self, most: int) -> None:
        self.most = most
        self.fleet = [restart_with_limit(each, self.clock, most) for each in self.fleet]

    async def login(self, at: TokenServiceInstance) -> None:
        self.oracle.login(await at.sessions.login(WEB), self.most)
        await self.clock.advance(0.01)  # so that one is older than the other

    async def refresh(self, at: TokenServiceInstance, which: int) -> None:
        if not self.oracle.all:
            return
        known = self.oracle.all[which % len(self.oracle.all)]
        is_good = not known.is_over and self.clock.now() < known.until
        try:
            issued = await at.sessions.refresh(known.refresh)
        except (AccessDenied, TokenExpired):
            assert not is_good
            return
        assert is_good
        known.used.append((known.refresh, known.until))
        known.take(issued)

    async def reuse(self, at: TokenServiceInstance, which: int) -> None:
        known = self.oracle.all[which % len(self.oracle.all)] if self.oracle.all else None
        if known is None or not known.used:
            return
        token, until = known.used[which % len(known.used)]
        await self.clock.advance(REUSE_GRACE_SECONDS)  # before that it only came second
        is_known_as_used = self.clock.now() < until
        try:
            await at.sessions.refresh(token)
            raise AssertionError("a token was good twice")
        except (AccessDenied, TokenExpired):
            if known in self.oracle.live() and is_known_as_used:
                known.end()

    async def revoke(self, at: TokenServiceInstance, which: int) -> None:
        if self.oracle.all:
            known = self.oracle.all[which % len(self.oracle.all)]
            await at.sessions.revoke(WEB, known.sid)
            known.end()

    async def compare(self, at: TokenServiceInstance) -> None:
        """A minute later everybody knows all of it."""
        assert [each.sid for each in await at.sessions.list_live(WEB)] == [each.sid for each in self.oracle.live()]
        for known in self.oracle.all:
            for token, until in known.access:
                is_good = not known.is_revoked and self.clock.now() < until
                try:
                    assert await at.accepts(token) == is_good
                except TokenExpired:
                    assert self.clock.now() >= until


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["login", "login", "login", "refresh", "refresh", "reuse", "revoke", "limit", "pass", "compare"]
        ),
        st.integers(0, 1),
        st.integers(0, 20),
    ),
    min_size=4,
    max_size=30,
)


@settings(max_examples=tries(250))
@given(STEPS)
def test_sessions_match_plain_model(steps: list[tuple[str, int, int]]) -> None:
    with mock.patch("price_keeper.auth.revocation.PROBE_SECONDS", 10.0**9):  # weeks are made of many
        asyncio.run(_played(steps))


async def _played(steps: list[tuple[str, int, int]]) -> None:
    clock = ManualClock()
    async with open_instances(MemoryStore(), clock, 2, max_sessions=3) as fleet:
        world = World(fleet, clock)
        for what, where, number in steps:
            at = world.fleet[where]
            match what:
                case "login":
                    await world.login(at)
                case "limit":
                    world.limit(number % 5)
                case "pass":
                    await clock.advance([1, 61, HOUR, REFRESH_LIFETIME / 2, REFRESH_LIFETIME][number % 5])
                case "compare":
                    await clock.advance(60)
                    await world.compare(at)
                case _:
                    await getattr(world, what)(at, number)
        await clock.advance(60)
        for at in world.fleet:
            await world.compare(at)


MANY = st.lists(st.sampled_from(["login", "login", "refresh", "revoke"]), min_size=2, max_size=12)


@settings(max_examples=tries(250))
@given(MANY, st.integers(1, 4))
def test_concurrent_logins_keep_limit_and_one_token_per_session(whats: list[str], most: int) -> None:
    asyncio.run(_played_at_once(whats, most))


async def _played_at_once(whats: list[str], most: int) -> None:
    clock = ManualClock()
    async with open_instances(MemoryStore(), clock, 3, max_sessions=most) as fleet:
        first = [await fleet[0].sessions.login(WEB) for _ in range(most)]
        work: list[asyncio.Future[TokenPair | None]] = []
        for number, what in enumerate(whats):
            at, each = fleet[number % 3].sessions, first[number % most]
            match what:
                case "login":
                    work.append(asyncio.ensure_future(at.login(WEB)))
                case "refresh":
                    work.append(asyncio.ensure_future(at.refresh(each.refresh.token)))
                case "revoke":
                    work.append(asyncio.ensure_future(at.revoke(WEB, each.sid)))
        while not all(task.done() for task in work):
            await clock.advance(0.1)
        failures = [task.exception() for task in work if task.exception()]
        assert all(isinstance(each, AccessDenied) for each in failures)
        issued = [*first, *(task.result() for task in work if not task.exception())]
        live = {each.sid for each in await fleet[0].sessions.list_live(WEB)}
        assert len(live) <= most
        if set(whats) == {"login"}:
            assert len(live) == most
        tokens = [each.refresh.token for each in issued if each is not None and each.sid in live]
        good = [token for token in tokens if await _is_current(fleet[0], token)]
        assert len(good) == len(live)


async def _is_current(at: TokenServiceInstance, token: str) -> bool:
    row = (await read_session_rows(at.link.store)).get(at.tokens.verify_refresh(token).sid or "")
    return row is not None and row["refresh_hash"] == sha256(token.encode()).hexdigest()
