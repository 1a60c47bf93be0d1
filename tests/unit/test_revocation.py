"""Revoked tokens: refused at once here, within a minute everywhere, and for how long signatures alone count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from price_keeper.auth import revocation as module
from price_keeper.auth.authenticate import TokenAuthenticator
from price_keeper.auth.client_secrets import SESSIONS_GENERATION
from price_keeper.auth.revocation import PROBE_SECONDS, REVOCATION_CACHE_SECONDS, STORE_RETRY_SECONDS
from price_keeper.errors import AccessDenied, Busy, StoreUnavailable, TokenRejected
from price_keeper.exchange import Request
from price_keeper.stores import schema
from price_keeper.stores.contract import Put
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.clock import ManualClock, settle
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import ORG, TokenServiceInstance, open_instances

CLIENT = f"org-{ORG}-app-web"
AWAY = StoreUnavailable("it is away")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def two(store: MemoryStore, clock: ManualClock) -> AsyncIterator[list[TokenServiceInstance]]:
    async with open_instances(store, clock, 2) as made:
        yield made


def minted(instance: TokenServiceInstance, sid: str | None = None, seconds: int = 3600) -> str:
    return instance.tokens.mint_access(ORG, "web", seconds, sid).token


async def test_cached_token_makes_no_store_call(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here, "s1"))
    assert not here.revocation.is_known_valid(claims)
    await here.revocation.check_store(claims)
    assert here.link.calls == ["get_many"]
    for _ in range(100):
        assert here.revocation.is_known_valid(claims)
    await clock.advance(29)
    assert here.revocation.is_known_valid(claims)
    await settle()
    assert here.link.calls == ["get_many"]


async def test_steady_traffic_is_checked_in_background(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here, seconds=90_000))
    await here.revocation.check_store(claims)
    for _ in range(600):
        await clock.advance(1)
        assert here.revocation.is_known_valid(claims)  # no call ever waits
    await settle()
    assert 15 <= len(here.link.calls) <= 21


async def test_check_older_than_a_minute_is_awaited(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here))
    await here.revocation.check_store(claims)
    await clock.advance(REVOCATION_CACHE_SECONDS)
    assert not here.revocation.is_known_valid(claims)


async def test_concurrent_checks_of_token_share_one_read(two: list[TokenServiceInstance]) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here))
    await asyncio.gather(*(here.revocation.check_store(claims) for _ in range(50)))
    assert here.link.calls == ["get_many"]


@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("step", [1, 7, 31, 59])
async def test_revocation_applies_here_at_once_and_elsewhere_within_a_minute(
    two: list[TokenServiceInstance], clock: ManualClock, by_session: bool, step: int
) -> None:
    here, there = two
    token, other = minted(here, "s1"), minted(here, "s2")
    for each in two:
        assert await each.accepts(token)
    await clock.advance(5)
    if by_session:
        await here.revocation.revoke_session(CLIENT, "s1", int(clock.now()) + 3600)
    else:
        await here.revocation.revoke_token(here.tokens.verify_access(token))
    assert not await here.accepts(token)
    with pytest.raises(AccessDenied):
        here.revocation.is_known_valid(here.tokens.verify_access(token))
    passed = 0
    while passed < 60:  # calls all the while, however often
        await there.accepts(token)
        await clock.advance(step)
        passed += step
    assert not await there.accepts(token)
    for each in two:
        assert await each.accepts(other)


async def test_read_in_flight_does_not_undo_revocation(two: list[TokenServiceInstance]) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here, "s1"))
    here.link.gate = asyncio.Event()
    waiting = asyncio.ensure_future(here.revocation.check_store(claims))
    await settle()
    here.revocation.note_revoked(schema.revoked_session_key("s1").pk)
    here.link.gate.set()
    with pytest.raises(AccessDenied):
        await waiting
    with pytest.raises(AccessDenied):
        here.revocation.is_known_valid(claims)


async def test_late_answer_is_as_old_as_its_request(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here))
    here.link.gate = asyncio.Event()
    waiting = asyncio.ensure_future(here.revocation.check_store(claims))
    await clock.advance(20)
    here.link.gate.set()
    await waiting
    await clock.advance(REVOCATION_CACHE_SECONDS - 21)
    assert here.revocation.is_known_valid(claims)
    here.link.gate = asyncio.Event()
    await clock.advance(1)
    assert not here.revocation.is_known_valid(claims)


async def test_expired_revocation_row_counts_as_absent(
    store: MemoryStore, two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    now = int(clock.now())
    token = minted(two[0], "s1")
    await store.put(Put(schema.revoked_session_key("s1"), {"expires_at_epoch": now}))
    assert await two[0].accepts(token)
    await store.put(Put(schema.revoked_session_key("s1"), {"expires_at_epoch": now + 1}))
    assert not await two[1].accepts(token)


async def test_revocation_row_lives_as_long_as_token(
    store: MemoryStore, two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    claims = two[0].tokens.verify_access(minted(two[0], seconds=1234))
    await two[0].revocation.revoke_token(claims)
    now = int(clock.now())
    assert store.items[schema.revoked_token_key(claims.jti)] == {
        "token_type": "access",
        "client_id": CLIENT,
        "revoked_at_epoch": now,
        "original_expiry_epoch": now + 1234,
        "expires_at_epoch": now + 1234,
    }
    until = int(clock.now()) + 100
    for each in (until, until - 50):
        await two[0].revocation.revoke_session(CLIENT, "s1", each)
    assert store.items[schema.revoked_session_key("s1")] == {
        "token_type": "refresh",
        "client_id": CLIENT,
        "revoked_at_epoch": now,
        "original_expiry_epoch": until,
        "expires_at_epoch": until,
    }


async def test_repeated_revocation_is_not_written_again(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here, there = two
    claims = here.tokens.verify_access(minted(here, "s1"))
    for _ in range(50):
        await here.revocation.revoke_token(claims)
        await there.revocation.revoke_token(claims)
        await clock.advance(1)
    assert (here.link.calls, there.link.calls) == (["put"], ["put"])


async def test_revocation_of_unknown_outcome_is_written_again(
    store: MemoryStore, two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here))
    here.link.failure = StoreUnavailable("no answer", maybe_applied=True)
    with pytest.raises(Busy):
        await here.revocation.revoke_token(claims)
    here.link.failure = None
    await here.revocation.revoke_token(claims)
    assert store.items[schema.revoked_token_key(claims.jti)]["expires_at_epoch"] == claims.expires


# While the store is away.


async def test_store_outage_accepts_valid_signatures_during_grace_only(store: MemoryStore, clock: ManualClock) -> None:
    async with open_instances(store, clock, 1, grace_seconds=600) as (here,):
        token = minted(here)
        here.link.failure = AWAY
        began = clock.monotonic()
        while clock.monotonic() < began + 599:
            assert await here.accepts(token)
            assert await here.accepts(minted(here))
            assert here.revocation.is_in_grace
            await clock.advance(10)
        assert here.revocation.accepted_unchecked > 50
        assert here.revocation.away_seconds == pytest.approx(600, abs=11)
        await clock.advance(10)
        with pytest.raises(Busy, match="has not said for") as refused:
            await here.accepts(token)
        assert refused.value.retry_after
        with pytest.raises(Busy):
            await here.revocation.check()
        here.link.failure = None
        await clock.advance(10)
        assert here.revocation.away_seconds == 0
        assert await here.accepts(token)
        await here.revocation.check()


async def test_store_outage_with_refuse_policy_refuses_after_a_minute(store: MemoryStore, clock: ManualClock) -> None:
    async with open_instances(store, clock, 1, on_store_down="refuse") as (here,):
        token = minted(here)
        assert await here.accepts(token)
        here.link.failure = AWAY
        with pytest.raises(Busy):
            await here.accepts(minted(here))
        await clock.advance(59)
        assert await here.accepts(token)
        await clock.advance(1)
        with pytest.raises(Busy):
            await here.accepts(token)
        assert here.revocation.accepted_unchecked == 0


async def test_known_revocation_holds_during_grace(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here, there = two
    token = minted(here)
    await here.revocation.revoke_token(here.tokens.verify_access(token))
    assert not await there.accepts(token)
    there.link.failure = AWAY
    for _ in range(20):
        await clock.advance(31)
        assert not await there.accepts(token)


async def test_token_accepted_in_grace_is_checked_when_store_returns(
    two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    """Accepted during the grace, then idle; the store has come back since and the token was revoked."""
    here, there = two
    token = minted(here)
    there.link.failure = AWAY
    assert await there.accepts(token)
    await clock.advance(60)
    there.link.failure = None
    await here.revocation.revoke_token(here.tokens.verify_access(token))
    await clock.advance(60)
    assert not await there.accepts(token)


async def test_store_outage_backs_off_checks(store: MemoryStore, clock: ManualClock) -> None:
    async with open_instances(store, clock, 1, on_store_down="refuse") as (here,):
        here.link.failure = AWAY
        for _ in range(60):
            await asyncio.gather(*(here.accepts(minted(here)) for _ in range(20)), return_exceptions=True)
            await clock.advance(1)
        by_calls, by_itself = 60 / STORE_RETRY_SECONDS, 60 / PROBE_SECONDS
        assert len(here.link.calls) == pytest.approx(20 + by_calls + by_itself, abs=4)


async def test_hanging_store_delays_call_briefly(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOKUP_TIMEOUT_SECONDS", 0.01)
    async with open_instances(store, clock) as (here,):
        here.link.gate = asyncio.Event()
        token = minted(here)
        assert await here.accepts(token)
        assert here.revocation.accepted_unchecked == 1
        assert here.revocation.is_known_valid(here.tokens.verify_access(token))
        here.link.gate.set()
        await settle()
        assert not here.revocation.away_seconds


@pytest.mark.parametrize("maybe_applied", [False, True])
async def test_revocation_with_lost_answer_holds_here_and_is_reported(
    two: list[TokenServiceInstance], maybe_applied: bool
) -> None:
    here = two[0]
    token = minted(here)
    assert await here.accepts(token)
    here.link.failure = StoreUnavailable("no answer", maybe_applied=maybe_applied)
    with pytest.raises(Busy):
        await here.revocation.revoke_token(here.tokens.verify_access(token))
    here.link.failure = None
    assert await here.accepts(token) is not maybe_applied


async def test_cache_is_bounded_and_never_accepts_revoked_token(
    two: list[TokenServiceInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = two[0]
    monkeypatch.setattr(module, "MAX_CACHED_VERDICTS", 10)
    here.revocation.clear_cache()
    tokens = [minted(here) for _ in range(60)]
    for token in tokens:
        assert await here.accepts(token)
    assert len(here.revocation._verdicts) <= 10
    monkeypatch.setattr(module, "MAX_CACHED_VERDICTS", 1000)
    here.revocation.clear_cache()
    monkeypatch.setattr(module, "MAX_REVOKED_NAMES", 10)
    for token in tokens:
        assert await here.accepts(token)
    for token in tokens:
        await here.revocation.revoke_token(here.tokens.verify_access(token))
    assert len(here.revocation._revoked_until) <= 10
    assert not any([await here.accepts(token) for token in tokens])


async def test_identify_is_synchronous_when_cached_and_checks_both_tokens(two: list[TokenServiceInstance]) -> None:
    here = two[0]
    first, second = minted(here), minted(here)
    by_token = TokenAuthenticator(here.tokens, here.revocation)
    headers = {b"x-amz-security-token": first.encode(), b"authorization": b"Bearer " + second.encode()}
    request = Request(b"POST", b"/model/premium/converse", headers, frozenset())
    assert by_token.cached(request) is None
    assert (await by_token.load(request)).app == "web"
    asked = list(here.link.calls)
    caller = by_token.cached(request)
    assert caller is not None
    assert caller.app == "web"
    assert here.link.calls == asked
    await here.revocation.revoke_token(here.tokens.verify_access(second))
    with pytest.raises(AccessDenied):
        by_token.cached(request)
    with pytest.raises(AccessDenied):
        await by_token.load(request)


# All of a client's at once.


async def move_on(store: MemoryStore, generation: int) -> None:
    await store.put(Put(schema.app_config_key(ORG, "web"), {SESSIONS_GENERATION: generation}))


async def test_tokens_of_earlier_generation_are_refused_everywhere_within_a_minute(
    store: MemoryStore, two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    here, there = two
    earlier, later = (here.tokens.mint_access(ORG, "web", generation=number).token for number in (0, 1))
    silent = here.tokens.mint_access(ORG, "web").token  # of no generation, as made for a demonstration
    for each in two:
        assert await each.accepts(earlier)
    await move_on(store, 1)
    here.revocation.clear_cache()
    assert not await here.accepts(earlier)
    await clock.advance(60)
    assert not await there.accepts(earlier)
    for each in two:
        assert await each.accepts(later)
        assert await each.accepts(silent)


async def test_generation_check_needs_no_extra_read(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here = two[0]
    claims = here.tokens.verify_access(here.tokens.mint_access(ORG, "web", 90_000, "s1", 3).token)
    await here.revocation.check_store(claims)
    assert here.link.calls == ["get_many"]
    for _ in range(600):
        await clock.advance(1)
        assert here.revocation.is_known_valid(claims)
    await settle()
    assert 15 <= len(here.link.calls) <= 21
    assert set(here.link.calls) == {"get_many"}


async def test_check_from_before_generation_change_accepts_nobody_after_it(
    store: MemoryStore, two: list[TokenServiceInstance]
) -> None:
    here = two[0]
    claims = here.tokens.verify_access(here.tokens.mint_access(ORG, "web", generation=0).token)
    here.link.gate = asyncio.Event()
    early = asyncio.ensure_future(here.revocation.check_store(claims))
    await settle()
    here.revocation.clear_cache()
    late = asyncio.ensure_future(here.revocation.check_store(claims))
    await settle()
    assert here.link.calls == ["get_many"] * 2
    await move_on(store, 1)
    here.link.gate.set()
    assert {type(each) for each in await asyncio.gather(early, late, return_exceptions=True)} == {TokenRejected}
    assert len(here.revocation._lookups._running) == 0


async def test_lookup_that_has_not_begun_when_all_were_ended_is_answered(two: list[TokenServiceInstance]) -> None:
    here = two[0]
    claims = here.tokens.verify_access(minted(here))
    asking = asyncio.ensure_future(here.revocation.check_store(claims))
    await asyncio.sleep(0)  # it has started its lookup, which takes its first turn later
    here.revocation.clear_cache()
    await asyncio.wait_for(asking, module.LOOKUP_TIMEOUT_SECONDS / 2)
    assert here.revocation.away_seconds == here.revocation.accepted_unchecked == 0
    assert len(here.revocation._lookups._running) == 0


async def test_revocation_is_checked_before_token_is_issued_again(
    two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    here, there = two
    claims = here.tokens.verify_access(minted(here))
    for _ in range(100):
        assert not await there.revocation.is_revoked(claims)
    assert there.link.calls == ["get_many"]
    await here.revocation.revoke_token(claims)
    await clock.advance(60)
    there.link.failure = AWAY
    assert not await there.revocation.is_revoked(claims)  # as far as is known
    there.link.failure = None
    await clock.advance(PROBE_SECONDS)
    assert await there.revocation.is_revoked(claims)


async def test_outage_seconds_are_reported_as_metric(store: MemoryStore, clock: ManualClock) -> None:
    telemetry = MetricsRegistry()
    async with open_instances(store, clock) as (here,):
        here.revocation.register_metrics(telemetry)
        assert "price_keeper_revocation_away_seconds 0\n" in telemetry.render_own()
        here.link.failure = AWAY
        await here.accepts(minted(here))
        await clock.advance(42)
        assert "price_keeper_revocation_away_seconds 42\n" in telemetry.render_own()
        assert "price_keeper_tokens_unchecked_total 1\n" in telemetry.render_own()
