"""Instances of the token service side by side on one store, each with what tests put between it and that store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from price_keeper.auth.refresh_sessions import RefreshSessions
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import AccessDenied, StoreError, StoreUnavailable
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Page, Put, Query, Store, Write
from price_keeper.tasks import Tasks

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

T = TypeVar("T")

ORG = "550e8400-e29b-41d4-a716-446655440000"
WEB = Scope(ORG, "web")
SECRET = b"a secret that is long enough for HS256"


class FaultyStoreLink:
    """One instance's way to the store: it may fail, it may be slow, and something may happen just before a write."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failure: StoreError | None = None
        self.lost_answers = 0  # of transactions yet to come
        self.gate: asyncio.Event | None = None
        self.before_transact: Callable[[Sequence[Write]], Awaitable[Sequence[Write]]] | None = None
        self.calls: list[str] = []

    async def _enter(self, verb: str) -> None:
        self.calls.append(verb)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        await self._enter("get")
        assert consistent, "what is known of sessions is never old"
        return await self.store.get(key, consistent=consistent)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        await self._enter("get_many")
        assert consistent
        return await self.store.get_many(keys, consistent=consistent)

    async def query(self, query: Query) -> Page:
        await self._enter("query")
        assert query.consistent
        return await self.store.query(query)

    async def put(self, put: Put) -> None:
        await self._enter("put")
        await self.store.put(put)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        await self._enter("transact")
        if self.before_transact is not None:
            writes = await self.before_transact(writes)
        await self.store.transact(writes, token=token)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("the answer was lost", maybe_applied=True)


@dataclass
class TokenServiceInstance:
    link: FaultyStoreLink
    tokens: TokenService
    revocation: RevocationList
    sessions: RefreshSessions

    async def accepts(self, token: str) -> bool:
        """As `identify` asks: without waiting where that can be."""
        claims = self.tokens.verify_access(token)
        try:
            if not self.revocation.is_known_valid(claims):
                await self.revocation.check_store(claims)
        except AccessDenied:
            return False
        return True


@asynccontextmanager
async def open_instances(
    store: Any, clock: Clock, number: int = 1, max_sessions: int = 5, **revocation: Any
) -> AsyncIterator[list[TokenServiceInstance]]:
    """So many of them; `max_sessions` is how many sessions a client may have."""
    async with Tasks(clock) as tasks:
        made = []
        for _ in range(number):
            link = FaultyStoreLink(store)
            tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
            revocation_list = RevocationList(link, clock, tasks, **revocation)  # type: ignore[arg-type]
            made.append(
                TokenServiceInstance(
                    link, tokens, revocation_list, RefreshSessions(link, tokens, revocation_list, clock, max_sessions)
                )
            )  # type: ignore[arg-type]
        yield made


def restart_with_limit(instance: TokenServiceInstance, clock: Clock, max_sessions: int) -> TokenServiceInstance:
    """The same, started again with another limit."""
    sessions = RefreshSessions(instance.link, instance.tokens, instance.revocation, clock, max_sessions)  # type: ignore[arg-type]
    return TokenServiceInstance(instance.link, instance.tokens, instance.revocation, sessions)


async def read_session_rows(store: Store, scope: Scope = WEB) -> dict[str, Item]:
    """All session rows of a client, expired ones too, by sid."""
    client = f"org-{scope.org}" if scope.app is None else f"org-{scope.org}-app-{scope.app}"
    page = await store.query(Query("sessions", client, consistent=True))
    return {
        row.key.sk.removeprefix(schema.SESSIONS_PREFIX): row.item
        for row in page.rows
        if row.key.sk.startswith(schema.SESSIONS_PREFIX)
    }


async def run_with_time(clock: ManualClock, work: Coroutine[Any, Any, T]) -> T:
    """Its outcome, however much simulated time it takes."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(0.1)
    return task.result()


async def login_repeatedly(instance: TokenServiceInstance, clock: ManualClock, number: int) -> list[Any]:
    issued = []
    for _ in range(number):
        issued.append(await instance.sessions.login(WEB))
        await clock.advance(1)
    return issued


def read_refused_token(store: MemoryStore, token: str) -> Any:
    return store.items.get(schema.refused_refresh_token_key(sha256(token.encode()).hexdigest()))
