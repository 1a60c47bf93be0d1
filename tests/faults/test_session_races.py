"""Sessions on every engine, with many who log in, refresh and revoke at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from price_keeper.auth.refresh_sessions import TokenPair, _hash_token
from price_keeper.clock import SystemClock
from price_keeper.domain import Scope
from price_keeper.errors import AccessDenied, Busy, SessionLimitRace
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, ConditionCheck, ItemExists, Key, Store, Update, Write

from tests.support.token_service_instances import TokenServiceInstance, open_instances, read_session_rows

MOST = 5
CLOCK = SystemClock()


@pytest.fixture
def scope() -> Scope:
    """A client of the test's own, the servers' tables being shared by all tests."""
    return Scope(str(uuid4()), "web")


async def logged_in(instance: TokenServiceInstance, scope: Scope) -> TokenPair:
    """Like a client that is asked to try again."""
    while True:
        try:
            return await instance.sessions.login(scope)
        except SessionLimitRace:
            await asyncio.sleep(0.2)


async def all_is_well(store: Store, instance: TokenServiceInstance, scope: Scope, issued: list[TokenPair]) -> None:
    """Exactly so many live, each with the token that was handed out last, and every other token is refused."""
    kept = await read_session_rows(store, scope)
    assert len(kept) == MOST
    assert kept.keys() <= {each.sid for each in issued}
    for each in issued:
        refused = await store.get(schema.refused_refresh_token_key(_hash_token(each.refresh.token)), consistent=True)
        assert (refused is None) == (each.sid in kept)
        if refused is not None:
            assert refused["expires_at_epoch"] == each.refresh.expires
            with pytest.raises(AccessDenied):
                await instance.sessions.refresh(each.refresh.token)
    for each in issued:
        if each.sid in kept:
            await instance.sessions.refresh(each.refresh.token)


async def test_hundred_concurrent_logins_of_one_instance_keep_limit(store: Store, scope: Scope) -> None:
    async with open_instances(store, CLOCK, 1, MOST) as (one,):
        issued = await asyncio.gather(*(logged_in(one, scope) for _ in range(100)))
        await all_is_well(store, one, scope, issued)


async def test_hundred_concurrent_logins_of_ten_instances_keep_limit(exact_store: Store, scope: Scope) -> None:
    """Not on moto, which promises nothing for transactions that meet."""
    async with open_instances(exact_store, CLOCK, 10, MOST) as fleet:
        issued = await asyncio.gather(*(logged_in(fleet[number % 10], scope) for number in range(100)))
        await all_is_well(exact_store, fleet[0], scope, issued)


async def test_concurrent_refresh_and_eviction_have_one_winner(exact_store: Store, scope: Scope) -> None:
    async with open_instances(exact_store, CLOCK, 2, 1) as (one, other):
        for _ in range(20):
            issued = await one.sessions.login(scope)
            work = (one.sessions.refresh(issued.refresh.token), other.sessions.login(scope))
            refreshed, new = await asyncio.gather(*work, return_exceptions=True)
            assert isinstance(new, TokenPair)
            assert list(await read_session_rows(exact_store, scope)) == [new.sid]
            for each in (issued, refreshed):
                if isinstance(each, TokenPair):
                    with pytest.raises(AccessDenied):
                        await one.sessions.refresh(each.refresh.token)
                else:
                    assert isinstance(each, AccessDenied)
            await one.sessions.refresh(new.refresh.token)


async def test_concurrent_refreshes_have_one_winner(exact_store: Store, scope: Scope) -> None:
    async with open_instances(exact_store, CLOCK, 5, MOST) as fleet:
        issued = await fleet[0].sessions.login(scope)
        found: list[Any] = await asyncio.gather(
            *(each.sessions.refresh(issued.refresh.token) for each in fleet), return_exceptions=True
        )
        assert sum(isinstance(each, TokenPair) for each in found) == 1
        assert all(isinstance(each, (TokenPair, AccessDenied, Busy)) for each in found)


async def test_concurrent_logins_and_revocations_keep_limit(exact_store: Store, scope: Scope) -> None:
    async with open_instances(exact_store, CLOCK, 4, MOST) as fleet:
        first = [await fleet[0].sessions.login(scope) for _ in range(MOST)]
        revoked = [fleet[1].sessions.revoke(scope, each.sid) for each in first[:3]]
        more = [logged_in(fleet[2 + number % 2], scope) for number in range(12)]
        await asyncio.gather(*revoked, *more)
        kept = await read_session_rows(exact_store, scope)
        assert len(kept) <= MOST
        assert not kept.keys() & {each.sid for each in first[:3]}
        for each in first[:3]:
            assert not await fleet[3].accepts(each.access.token)


@pytest.mark.parametrize("failing", range(4))
async def test_failed_login_evicts_nothing(
    store: Store, scope: Scope, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head, the session that goes, its refresh token, the new session."""
    monkeypatch.setattr("price_keeper.auth.refresh_sessions.MAX_ATTEMPTS", 2)
    async with open_instances(store, CLOCK, 2, MOST) as (one, other):
        oldest, *_ = [await one.sessions.login(scope) for _ in range(MOST)]
        before, write_counts = await read_session_rows(store, scope), []

        async def spoil(writes: Sequence[Write]) -> Sequence[Write]:
            write_counts.append(len(writes))
            never = ConditionCheck(Key("config", f"TEST#{uuid4()}", "nowhere"), ItemExists())
            return [*writes[:failing], never, *writes[failing + 1 :]]

        one.link.before_transact = spoil
        with pytest.raises((SessionLimitRace, Busy)):
            await one.sessions.login(scope)
        assert set(write_counts) == {4}
        assert await read_session_rows(store, scope) == before
        assert (
            await store.get(schema.refused_refresh_token_key(_hash_token(oldest.refresh.token)), consistent=True)
            is None
        )
        await other.sessions.refresh(oldest.refresh.token)


async def test_expired_row_not_yet_deleted_does_not_count(store: Store, scope: Scope) -> None:
    async with open_instances(store, CLOCK, 1, MOST) as (one,):
        issued = [await one.sessions.login(scope) for _ in range(MOST)]
        key = schema.session_key(f"org-{scope.org}-app-web", issued[2].sid)
        await store.update(Update(key, set={EXPIRY_ATTRIBUTE: int(CLOCK.now())}))
        issued.append(await one.sessions.login(scope))
        assert [each.sid for each in await one.sessions.list_live(scope)] == [
            each.sid for each in issued if each is not issued[2]
        ]
        with pytest.raises(AccessDenied):
            await one.sessions.refresh(issued[2].refresh.token)


async def test_login_losing_every_race_fails_with_store_reasons(
    store: Store, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("price_keeper.auth.refresh_sessions.MAX_ATTEMPTS", 2)
    async with open_instances(store, CLOCK, 2, MOST) as (one, other):
        for _ in range(MOST):
            await one.sessions.login(scope)

        async def cut_in(writes: Any) -> Any:
            await other.sessions.login(scope)
            return writes

        one.link.before_transact = cut_in
        with pytest.raises(SessionLimitRace) as lost:
            await one.sessions.login(scope)
        assert len(lost.value.reasons) == 4
        assert len(await read_session_rows(store, scope)) == MOST
