"""Container credentials: one token for half its life, issued again when it is no longer valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from price_keeper.auth.client_secrets import SESSIONS_GENERATION, ClientVerifier
from price_keeper.auth.container_credentials import LocalCredentialIssuer
from price_keeper.auth.throttles import FAILURE_BURST, LoginThrottle
from price_keeper.domain import build_client_id
from price_keeper.errors import AccessDenied, TooManyRequests
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Update

from tests.support.client_secrets import first_secret, use_cheap_hashes
from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import ORG, WEB, TokenServiceInstance, open_instances

CLIENT = build_client_id(WEB.org, WEB.app)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class Served:
    """One instance that hands out credentials."""

    def __init__(self, instance: TokenServiceInstance, clock: ManualClock) -> None:
        self.instance = instance
        self.clients = ClientVerifier(instance.link, clock.now)  # type: ignore[arg-type]
        wrong = LoginThrottle(clock.monotonic)
        self._made = LocalCredentialIssuer(
            self.clients, instance.tokens, clock.now, instance.revocation.is_revoked, wrong
        )

    async def token(self, secret: str) -> str:
        return (await self._made.issue_throttled("127.0.0.1", f"{CLIENT}:{secret}"))["Token"]

    async def is_welcome(self, token: str) -> bool:
        return await self.instance.accepts(token)


@pytest.fixture
async def two(store: MemoryStore, clock: ManualClock) -> AsyncIterator[list[Served]]:
    async with open_instances(store, clock, 2) as made:
        yield [Served(each, clock) for each in made]


@pytest.fixture
async def secret(store: MemoryStore, clock: ManualClock) -> str:
    return await first_secret(store, clock, WEB)


async def end_all(store: MemoryStore) -> None:
    await store.update(Update(schema.app_config_key(ORG, "web"), add={SESSIONS_GENERATION: 1}))


async def test_revoked_token_is_reissued_here_at_once_and_elsewhere_within_a_minute(
    two: list[Served], clock: ManualClock, secret: str
) -> None:
    here, there = two
    first, other = await here.token(secret), await there.token(secret)
    assert await here.token(secret) == first
    await here.instance.revocation.revoke_token(here.instance.tokens.verify_access(first))
    await here.instance.revocation.revoke_token(here.instance.tokens.verify_access(other))
    for each, revoked, wait in ((here, first, 0), (there, other, 60)):
        await clock.advance(wait)
        new = await each.token(secret)
        assert new != revoked
        assert await each.is_welcome(new)
        assert await each.token(secret) == new


async def test_fetch_on_every_call_costs_one_or_two_reads_a_minute(
    two: list[Served], clock: ManualClock, secret: str
) -> None:
    here, _ = two
    await here.token(secret)
    here.instance.link.calls.clear()
    for _ in range(6000):
        await here.token(secret)
        await clock.advance(0.1)
    assert here.instance.link.calls.count("get_many") <= 21
    assert here.instance.link.calls.count("get") <= 11


async def test_token_of_ended_generation_is_not_issued(
    two: list[Served], store: MemoryStore, clock: ManualClock, secret: str
) -> None:
    """What is known here of the client is up to a minute old, and nothing was handed out yet."""
    here, _ = two
    await here.clients.verify_with_generation(CLIENT, secret)
    await end_all(store)
    token = await here.token(secret)
    assert await here.is_welcome(token)
    assert here.instance.tokens.verify_access(token).generation == 1
    await clock.advance(60)
    assert await here.is_welcome(token)


async def test_concurrent_requests_share_one_token(two: list[Served], store: MemoryStore, secret: str) -> None:
    here, _ = two
    assert len(set(await asyncio.gather(*(here.token(secret) for _ in range(50))))) == 1
    await end_all(store)
    here.instance.revocation.clear_cache()
    found = set(await asyncio.gather(*(here.token(secret) for _ in range(50))))
    assert len(found) == 1
    assert await here.is_welcome(found.pop())


@pytest.mark.parametrize("back", [1, 5, 8, 86_400])
async def test_clock_set_back_locks_nobody_out(two: list[Served], clock: ManualClock, secret: str, back: float) -> None:
    here, _ = two
    first = await here.token(secret)
    clock.set_wall(clock.now() - back)
    here.instance.tokens._cached_claims.clear()  # as of a process that has not seen the token
    for _ in range(FAILURE_BURST + 5):
        token = await here.token(secret)
        assert await here.is_welcome(token)
    assert (token == first) == (back <= 5)


async def test_only_wrong_secrets_are_counted(two: list[Served], store: MemoryStore, secret: str) -> None:
    here, _ = two
    found: list[Any] = []
    for _ in range(FAILURE_BURST + 1):
        with pytest.raises((AccessDenied, TooManyRequests)) as refused:
            await here.token(secret[::-1])
        found.append(refused.type)
    assert found == [AccessDenied] * FAILURE_BURST + [TooManyRequests]
    await store.put(Put(schema.revoked_token_key("of another"), {}))
    assert await here.token(secret)
