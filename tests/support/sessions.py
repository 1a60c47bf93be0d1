"""Instances of the token service side by side on one store, each with what tests put between it and that store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from price_keeper.auth.keys import SigningKey
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.sessions import RefreshSessions
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock
from price_keeper.errors import AccessDenied, StoreError, StoreUnavailable
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Page, Put, Query, Store, Write
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

T = TypeVar("T")

ORG = "550e8400-e29b-41d4-a716-446655440000"
WEB = Scope(ORG, "web")
SECRET = b"a secret that is long enough for HS256"


class Line:
    """One instance's way to the store: it may fail, it may be slow, and something may happen just before a write."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.trouble: StoreError | None = None
        self.lost_answers = 0  # of transactions yet to come
        self.held: asyncio.Event | None = None
        self.before_transact: Callable[[Sequence[Write]], Awaitable[Sequence[Write]]] | None = None
        self.asked: list[str] = []

    async def _pass(self, verb: str) -> None:
        self.asked.append(verb)
        await asyncio.sleep(0)
        if self.held is not None:
            await self.held.wait()
        if self.trouble is not None:
            raise self.trouble

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        await self._pass("get")
        assert consistent, "what is known of sessions is never old"
        return await self.store.get(key, consistent=consistent)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        await self._pass("get_many")
        assert consistent
        return await self.store.get_many(keys, consistent=consistent)

    async def query(self, query: Query) -> Page:
        await self._pass("query")
        assert query.consistent
        return await self.store.query(query)

    async def put(self, put: Put) -> None:
        await self._pass("put")
        await self.store.put(put)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        await self._pass("transact")
        if self.before_transact is not None:
            writes = await self.before_transact(writes)
        await self.store.transact(writes, token=token)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("the answer was lost", maybe_applied=True)


@dataclass
class Instance:
    line: Line
    tokens: TokenService
    revocation: RevocationList
    sessions: RefreshSessions

    async def is_welcome(self, token: str) -> bool:
        """As `identify` asks: without waiting where that can be."""
        claims = self.tokens.verify_access(token)
        try:
            if not self.revocation.is_known_valid(claims):
                await self.revocation.check_store(claims)
        except AccessDenied:
            return False
        return True


@asynccontextmanager
async def instances(
    store: Any, clock: Clock, number: int = 1, most: int = 5, **revocation: Any
) -> AsyncIterator[list[Instance]]:
    """So many of them; `most` is how many sessions a client may have."""
    async with Tasks(clock) as tasks:
        made = []
        for _ in range(number):
            line = Line(store)
            tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
            revoked = RevocationList(line, clock, tasks, **revocation)  # type: ignore[arg-type]
            made.append(Instance(line, tokens, revoked, RefreshSessions(line, tokens, revoked, clock, most)))  # type: ignore[arg-type]
        yield made


def with_limit(instance: Instance, clock: Clock, most: int) -> Instance:
    """The same, started again with another limit."""
    sessions = RefreshSessions(instance.line, instance.tokens, instance.revocation, clock, most)  # type: ignore[arg-type]
    return Instance(instance.line, instance.tokens, instance.revocation, sessions)


async def rows(store: Store, scope: Scope = WEB) -> dict[str, Item]:
    """All session rows of a client, expired ones too, by sid."""
    client = f"org-{scope.org}" if scope.app is None else f"org-{scope.org}-app-{scope.app}"
    page = await store.query(Query("sessions", client, consistent=True))
    return {
        row.key.sk.removeprefix(schema.SESSIONS_PREFIX): row.item
        for row in page.rows
        if row.key.sk.startswith(schema.SESSIONS_PREFIX)
    }


async def passing(clock: ManualClock, work: Coroutine[Any, Any, T]) -> T:
    """Its outcome, however much simulated time it takes."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(0.1)
    return task.result()


async def logins(here: Instance, clock: ManualClock, number: int) -> list[Any]:
    issued = []
    for _ in range(number):
        issued.append(await here.sessions.login(WEB))
        await clock.advance(1)
    return issued


def blocked(store: MemoryStore, token: str) -> Any:
    return store.items.get(schema.refused_refresh_token_key(sha256(token.encode()).hexdigest()))
