"""Sessions: at most so many per client, evicted whole or not at all; refreshed once with each token; ended whole."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

import pytest
from price_keeper.auth import refresh_sessions
from price_keeper.auth.client_secrets import SESSIONS_GENERATION
from price_keeper.auth.refresh_sessions import EXPIRY_DOUBT_SECONDS, MAX_ATTEMPTS, REUSE_GRACE_SECONDS, StaleGeneration
from price_keeper.auth.tokens import SKEW_SECONDS
from price_keeper.domain import Scope
from price_keeper.errors import (
    AccessDenied,
    Busy,
    CancellationReason,
    InvalidStoreRequest,
    ReasonCode,
    SessionLimitRace,
    StoreThrottled,
    StoreUnavailable,
    TokenExpired,
    TokenRejected,
    TransactionFailed,
)
from price_keeper.stores import schema
from price_keeper.stores.contract import ConditionCheck, ItemExists, Key, Put, Write

from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.token_service_instances import (
    ORG,
    WEB,
    TokenServiceInstance,
    login_repeatedly,
    open_instances,
    read_refused_token,
    read_session_rows,
    restart_with_limit,
    run_with_time,
)

CLIENT = f"org-{ORG}-app-web"
REFRESH_LIFETIME = 30 * 86_400


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def two(store: MemoryStore, clock: ManualClock) -> AsyncIterator[list[TokenServiceInstance]]:
    async with open_instances(store, clock, 2, max_sessions=3) as made:
        yield made


@pytest.fixture
def here(two: list[TokenServiceInstance]) -> TokenServiceInstance:
    return two[0]


# Logging in.


async def test_login_issues_token_pair_and_one_row(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    issued = await here.sessions.login(WEB)
    now = int(clock.now())
    assert here.tokens.verify_access(issued.access.token).sid == issued.sid
    assert here.tokens.verify_refresh(issued.refresh.token).sid == issued.sid
    assert (issued.access.expires, issued.refresh.expires) == (now + 3600, now + REFRESH_LIFETIME)
    (row,) = (await read_session_rows(store)).values()
    assert row["expires_at_epoch"] == issued.refresh.expires
    assert issued.refresh.token not in repr(store.items)
    assert store.items[Key("sessions", CLIENT, "HEAD")] == {"version": 1}


async def test_login_above_limit_evicts_oldest_session(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    issued = await login_repeatedly(here, clock, 5)
    assert [session.sid for session in await here.sessions.list_live(WEB)] == [each.sid for each in issued[2:]]
    for evicted in issued[:2]:
        assert read_refused_token(store, evicted.refresh.token)["expires_at_epoch"] == evicted.refresh.expires
        with pytest.raises(AccessDenied):
            await here.sessions.refresh(evicted.refresh.token)
        assert await here.accepts(evicted.access.token)  # it lives out its hour
    for kept in issued[2:]:
        await here.sessions.refresh(kept.refresh.token)


async def test_last_login_is_newest_by_any_clock(
    two: list[TokenServiceInstance], store: MemoryStore, clock: ManualClock
) -> None:
    here, there = two
    for _ in range(3):
        await there.sessions.login(WEB)  # all in one moment
    clock.set_wall(clock.now() - 3)
    late = await here.sessions.login(WEB)
    clock.set_wall(clock.now() + 3)
    for _ in range(2):
        await there.sessions.login(WEB)
    assert (await here.sessions.list_live(WEB))[0].sid == late.sid


async def test_clients_do_not_share_sessions(here: TokenServiceInstance, clock: ManualClock) -> None:
    await login_repeatedly(here, clock, 3)
    for scope in (Scope(ORG), Scope(ORG, "job")):
        await here.sessions.login(scope)
        assert len(await here.sessions.list_live(scope)) == 1
    assert len(await here.sessions.list_live(WEB)) == 3


async def test_expired_row_not_yet_deleted_does_not_count(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    first = await here.sessions.login(WEB)
    await clock.advance(EXPIRY_DOUBT_SECONDS + 1)
    await login_repeatedly(here, clock, 2)
    await clock.leap(first.refresh.expires + EXPIRY_DOUBT_SECONDS - clock.now())  # over by every clock
    await here.sessions.login(WEB)
    assert len(await read_session_rows(store)) == 4
    assert len(await here.sessions.list_live(WEB)) == 3


@pytest.mark.parametrize("left", [0.5, 3.0, 4.9])
async def test_clock_skew_between_instances_keeps_session_limit(store: MemoryStore, left: float) -> None:
    """One that is over by the clock of the login is refreshed where it is still a few seconds earlier."""
    late = ManualClock()
    early = ManualClock(late.now() + SKEW_SECONDS)
    async with (
        open_instances(store, late, 1, max_sessions=3) as (slow,),
        open_instances(store, early, 1, max_sessions=3) as (fast,),
    ):

        async def both(seconds: float) -> None:
            await late.leap(seconds)
            await early.leap(seconds)

        first = await slow.sessions.login(WEB)
        for _ in range(2):
            await both(60)
            await slow.sessions.login(WEB)
        await both(first.refresh.expires - left - late.now())
        new = await fast.sessions.login(WEB)
        with pytest.raises(TokenRejected):
            await slow.sessions.refresh(first.refresh.token)
        assert len(await slow.sessions.list_live(WEB)) == 3  # no other session was evicted
        assert read_refused_token(store, first.refresh.token)["why"] == "evicted"
        await slow.sessions.refresh(new.refresh.token)


# Generations.


async def move_on(store: MemoryStore, generation: int) -> None:
    await store.put(Put(schema.app_config_key(ORG, "web"), {SESSIONS_GENERATION: generation}))


@pytest.mark.parametrize("most", [0, 3])
async def test_login_with_stale_generation_is_refused(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock, most: int
) -> None:
    at = restart_with_limit(here, clock, most)
    await move_on(store, 1)
    with pytest.raises(StaleGeneration):
        await at.sessions.login(WEB, 0)
    assert await read_session_rows(store) == {}
    issued = await at.sessions.login(WEB, 1)
    assert at.tokens.verify_access(issued.access.token).generation == 1
    again = await at.sessions.refresh(issued.refresh.token)
    assert at.tokens.verify_access(again.access.token).generation == 1


async def test_sessions_of_earlier_generation_neither_count_nor_are_listed(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    for _ in range(3):
        await here.sessions.login(WEB, 0)
    await move_on(store, 1)
    assert await here.sessions.list_live(WEB) == []
    new = [await here.sessions.login(WEB, 1) for _ in range(3)]
    assert [session.sid for session in await here.sessions.list_live(WEB)] == [each.sid for each in new]
    assert len(await read_session_rows(store)) == 6  # none had to be evicted for them


async def test_unlimited_sessions_cause_no_eviction_and_no_conflict(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    unlimited = restart_with_limit(here, clock, 0)
    await asyncio.gather(*(unlimited.sessions.login(WEB) for _ in range(200)))
    assert len(await here.sessions.list_live(WEB)) == 200
    assert Counter(here.link.calls[:400]) == {"get": 200, "transact": 200}


@pytest.mark.parametrize("before", [4, 50, 100, 250])
async def test_lower_limit_applies_after_next_login(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock, before: int
) -> None:
    issued = await login_repeatedly(restart_with_limit(here, clock, 0), clock, before)
    new = await run_with_time(clock, here.sessions.login(WEB))
    kept = [session.sid for session in await here.sessions.list_live(WEB)]
    assert kept == [*(each.sid for each in issued[-2:]), new.sid]
    assert all(read_refused_token(store, each.refresh.token)["why"] == "evicted" for each in issued[:-2])


# Races.


class _Meddling:
    """Before each transaction another instance logs the client in."""

    def __init__(self, other: TokenServiceInstance, times: int) -> None:
        self.other = other
        self.times = times

    async def __call__(self, writes: Sequence[Write]) -> Sequence[Write]:
        if self.times:
            self.times -= 1
            await self.other.sessions.login(WEB)
        return writes


@pytest.mark.parametrize("before", [0, 2, 3])
async def test_login_losing_race_is_retried(two: list[TokenServiceInstance], clock: ManualClock, before: int) -> None:
    here, there = two
    await login_repeatedly(here, clock, before)
    here.link.before_transact = _Meddling(there, MAX_ATTEMPTS - 1)
    new = await run_with_time(clock, here.sessions.login(WEB))
    sids = [session.sid for session in await there.sessions.list_live(WEB)]
    assert new.sid in sids
    assert len(sids) == 3


async def test_slot_freed_during_login_prevents_eviction(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here, there = two
    oldest, middle, newest = await login_repeatedly(here, clock, 3)

    async def cut_in(writes: Sequence[Write]) -> Sequence[Write]:
        await there.sessions.revoke(WEB, middle.sid)
        here.link.before_transact = None
        return writes

    here.link.before_transact = cut_in
    new = await run_with_time(clock, here.sessions.login(WEB))
    assert [session.sid for session in await here.sessions.list_live(WEB)] == [oldest.sid, newest.sid, new.sid]


async def test_login_between_two_reads_is_not_overlooked(
    two: list[TokenServiceInstance], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two
    await login_repeatedly(here, clock, 2)
    here.link.calls.clear()
    passed = here.link._enter

    async def cut_in(verb: str) -> None:
        await passed(verb)
        if len(here.link.calls) == 2:
            await there.sessions.login(WEB)

    monkeypatch.setattr(here.link, "_enter", cut_in)
    await run_with_time(clock, here.sessions.login(WEB))
    assert len(await there.sessions.list_live(WEB)) == 3


async def test_login_losing_every_race_fails_with_reasons(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    here, there = two
    here.link.before_transact = _Meddling(there, 1000)
    began = clock.monotonic()
    with pytest.raises(SessionLimitRace) as lost:
        await run_with_time(clock, here.sessions.login(WEB))
    assert lost.value.status == 503
    assert lost.value.retry_after
    assert ReasonCode.CONDITION_FAILED in {reason.code for reason in lost.value.reasons}
    assert 0.3 < clock.monotonic() - began < 10  # with waits between, so that the others get out of the way
    assert len(await there.sessions.list_live(WEB)) == 3


@pytest.mark.parametrize(
    "trouble",
    [
        TransactionFailed([CancellationReason(ReasonCode.THROTTLED), CancellationReason(ReasonCode.NONE)]),
        TransactionFailed([CancellationReason(ReasonCode.CONFLICT), CancellationReason(ReasonCode.THROTTLED)]),
        TransactionFailed([CancellationReason(ReasonCode.NONE), CancellationReason(ReasonCode.CONDITION_FAILED)]),
        StoreThrottled("slow down"),
        InvalidStoreRequest("no such thing"),
        StoreUnavailable("away"),
    ],
    ids=str,
)
async def test_other_failures_are_not_reported_as_race(
    here: TokenServiceInstance, clock: ManualClock, trouble: Exception
) -> None:
    async def fail(_: Sequence[Write]) -> Sequence[Write]:
        raise trouble

    here.link.before_transact = fail
    with pytest.raises(Busy):
        await run_with_time(clock, here.sessions.login(WEB))


# All or nothing.


@pytest.mark.parametrize("failing", range(4))
async def test_failed_login_evicts_nothing(
    two: list[TokenServiceInstance], store: MemoryStore, clock: ManualClock, failing: int
) -> None:
    here, there = two
    issued = await login_repeatedly(there, clock, 3)
    before, write_counts = dict(store.items), []

    async def spoil(writes: Sequence[Write]) -> Sequence[Write]:
        write_counts.append(len(writes))
        never = ConditionCheck(Key("config", "nobody", "nowhere"), ItemExists())
        return [*writes[:failing], never, *writes[failing + 1 :]]

    here.link.before_transact = spoil
    with pytest.raises((SessionLimitRace, Busy)):
        await run_with_time(clock, here.sessions.login(WEB))
    assert set(write_counts) == {4}  # the head, the session that goes and its token, the new one
    assert store.items == before
    await there.sessions.refresh(issued[0].refresh.token)


async def test_store_outage_issues_no_tokens(here: TokenServiceInstance, clock: ManualClock) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    here.link.failure = StoreUnavailable("away")
    for work in (
        here.sessions.login(WEB),
        restart_with_limit(here, clock, 0).sessions.login(WEB),
        here.sessions.refresh(issued.refresh.token),
        here.sessions.revoke(WEB, issued.sid),
        here.sessions.revoke_by_token(issued.access.token),
        here.sessions.list_live(WEB),
    ):
        with pytest.raises(Busy) as refused:
            await run_with_time(clock, work)
        assert refused.value.retry_after
    here.link.failure = None
    await here.sessions.refresh(issued.refresh.token)


async def test_lost_login_answer_is_resolved(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    here.link.lost_answers = 1
    issued = await run_with_time(clock, here.sessions.login(WEB))
    assert list(await read_session_rows(store)) == [issued.sid]
    here.link.lost_answers = 2
    second = await run_with_time(clock, here.sessions.refresh(issued.refresh.token))
    for most in (3, 0):
        here.link.lost_answers = 3  # all of them: then the row itself tells
        another = await run_with_time(clock, restart_with_limit(here, clock, most).sessions.login(WEB))
        assert another.sid in await read_session_rows(store)
    here.link.lost_answers = 1
    await run_with_time(clock, here.sessions.revoke(WEB, second.sid))
    assert second.sid not in await read_session_rows(store)


async def test_excess_concurrent_logins_are_refused(
    here: TokenServiceInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh_sessions, "MAX_WAITING_LOGINS", 10)
    found = await asyncio.gather(*(here.sessions.login(WEB) for _ in range(30)), return_exceptions=True)
    assert [type(each) for each in found].count(Busy) == 20
    assert here.sessions._locks._locks == {}


# Refreshing.


async def test_refresh_rotates_token_and_keeps_session(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    first, *others = await login_repeatedly(here, clock, 3)
    second = await here.sessions.refresh(first.refresh.token)
    assert second.sid == first.sid
    assert second.refresh.token != first.refresh.token
    assert read_refused_token(store, first.refresh.token) == {
        "expires_at_epoch": first.refresh.expires,
        "why": "rotated",
        "at_epoch": int(clock.now()),
        "client_id": CLIENT,
        "sid": first.sid,
    }
    assert [session.sid for session in await here.sessions.list_live(WEB)] == [
        first.sid,
        *(each.sid for each in others),
    ]
    await here.sessions.refresh(second.refresh.token)


async def test_refresh_token_reuse_ends_session_everywhere(
    two: list[TokenServiceInstance], clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = two
    (first,) = await login_repeatedly(here, clock, 1)
    second = await here.sessions.refresh(first.refresh.token)
    await clock.advance(REUSE_GRACE_SECONDS)
    with caplog.at_level(logging.DEBUG), pytest.raises(AccessDenied, match="used before"):
        await there.sessions.refresh(first.refresh.token)
    for each in (second, first):
        with pytest.raises(AccessDenied):
            await here.sessions.refresh(each.refresh.token)
        assert not await there.accepts(each.access.token)
    assert await here.sessions.list_live(WEB) == []
    assert first.sid in caplog.text
    assert first.refresh.token[-20:] not in caplog.text


@pytest.mark.parametrize("wait", [0, 1, REUSE_GRACE_SECONDS - 1])
async def test_concurrent_second_refresh_is_refused_without_ending_session(
    two: list[TokenServiceInstance], clock: ManualClock, wait: float
) -> None:
    """Two threads of a client that refresh at once, or a request that was sent twice on its way."""
    here, there = two
    (first,) = await login_repeatedly(here, clock, 1)
    second = await here.sessions.refresh(first.refresh.token)
    await clock.advance(wait)
    with pytest.raises(TokenRejected, match="a moment ago"):
        await there.sessions.refresh(first.refresh.token)
    assert await there.accepts(second.access.token)
    await here.sessions.refresh(second.refresh.token)


async def test_token_from_before_last_refresh_counts_as_stolen(here: TokenServiceInstance, clock: ManualClock) -> None:
    (first,) = await login_repeatedly(here, clock, 1)
    second = await here.sessions.refresh(first.refresh.token)
    await clock.advance(REUSE_GRACE_SECONDS)
    third = await here.sessions.refresh(second.refresh.token)
    with pytest.raises(TokenRejected, match="used before"):
        await here.sessions.refresh(first.refresh.token)
    with pytest.raises(TokenRejected):
        await here.sessions.refresh(third.refresh.token)


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_lost_refresh_answers_are_resolved_by_row(
    here: TokenServiceInstance, clock: ManualClock, lost: int
) -> None:
    (first,) = await login_repeatedly(here, clock, 1)
    here.link.lost_answers = lost
    second = await run_with_time(clock, here.sessions.refresh(first.refresh.token))
    await clock.advance(REUSE_GRACE_SECONDS)
    await here.sessions.refresh(second.refresh.token)


async def test_refresh_not_applied_can_be_repeated(here: TokenServiceInstance, clock: ManualClock) -> None:
    (first,) = await login_repeatedly(here, clock, 1)

    async def lost_on_the_way(_: Sequence[Write]) -> Sequence[Write]:
        raise StoreUnavailable("no answer", maybe_applied=True)

    here.link.before_transact = lost_on_the_way
    with pytest.raises(Busy):
        await run_with_time(clock, here.sessions.refresh(first.refresh.token))
    here.link.before_transact = None
    await clock.advance(REUSE_GRACE_SECONDS)
    await here.sessions.refresh(first.refresh.token)


async def test_refresh_of_unknown_outcome_requires_login(here: TokenServiceInstance, clock: ManualClock) -> None:
    (first,) = await login_repeatedly(here, clock, 1)

    async def gone(writes: Sequence[Write]) -> Sequence[Write]:
        here.link.failure = StoreUnavailable("away")
        return writes

    here.link.before_transact, here.link.lost_answers = gone, 1
    with pytest.raises(TokenRejected, match="log in again"):
        await run_with_time(clock, here.sessions.refresh(first.refresh.token))


async def test_expired_session_is_not_refreshed(here: TokenServiceInstance, clock: ManualClock) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    await clock.leap(REFRESH_LIFETIME)
    with pytest.raises(TokenExpired):
        await here.sessions.refresh(issued.refresh.token)


async def test_expired_session_row_is_not_refreshed(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    key = schema.session_key(CLIENT, issued.sid)
    store.items[key] = {**store.items[key], "expires_at_epoch": int(clock.now())}
    with pytest.raises(AccessDenied):
        await here.sessions.refresh(issued.refresh.token)
    assert here.link.calls[-1] == "get_many"  # nothing was tried


async def test_session_row_expiring_before_write_is_not_refreshed(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    key = schema.session_key(CLIENT, issued.sid)

    async def cut_in(writes: Sequence[Write]) -> Sequence[Write]:
        store.items[key] = {**store.items[key], "expires_at_epoch": int(clock.now())}
        return writes

    here.link.before_transact = cut_in
    with pytest.raises(AccessDenied):
        await here.sessions.refresh(issued.refresh.token)


async def test_refusal_writes_nothing(here: TokenServiceInstance, store: MemoryStore, clock: ManualClock) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    stranger = here.tokens.mint_refresh(ORG, "web", issued.sid).token
    store.items[schema.refused_refresh_token_key(sha256(issued.refresh.token.encode()).hexdigest())] = {
        "why": "revoked"
    }
    here.link.calls.clear()
    for token in (issued.refresh.token, stranger):
        with pytest.raises(AccessDenied):
            await here.sessions.refresh(token)
    assert set(here.link.calls) == {"get_many"}


async def test_only_current_refresh_token_refreshes(here: TokenServiceInstance, clock: ManualClock) -> None:
    (issued,) = await login_repeatedly(here, clock, 1)
    for access in (issued.access.token, here.tokens.mint_access(ORG, "web").token):
        with pytest.raises(AccessDenied):
            await here.sessions.refresh(access)
    with pytest.raises(AccessDenied):
        here.tokens.verify_access(issued.refresh.token)
    stranger = here.tokens.mint_refresh(ORG, "web", issued.sid).token  # signed by us, and not the session's
    with pytest.raises(AccessDenied):
        await here.sessions.refresh(stranger)
    other = here.tokens.mint_refresh(ORG, "job", issued.sid).token
    with pytest.raises(AccessDenied):
        await here.sessions.refresh(other)
    await here.sessions.refresh(issued.refresh.token)


async def test_concurrent_refreshes_have_one_winner(two: list[TokenServiceInstance], clock: ManualClock) -> None:
    (issued,) = await login_repeatedly(two[0], clock, 1)
    found = await asyncio.gather(*(each.sessions.refresh(issued.refresh.token) for each in two), return_exceptions=True)
    won = [each for each in found if not isinstance(each, BaseException)]
    assert [type(each) for each in found if isinstance(each, BaseException)] == [TokenRejected]
    await two[0].sessions.refresh(won[0].refresh.token)


@pytest.mark.parametrize("first", ["refresh", "login"])
async def test_concurrent_refresh_and_eviction_have_one_winner(
    two: list[TokenServiceInstance], store: MemoryStore, clock: ManualClock, first: str
) -> None:
    here, there = two
    oldest, *_ = await login_repeatedly(here, clock, 3)
    won: list[Any] = []

    async def cut_in(writes: Sequence[Write]) -> Sequence[Write]:
        if not won:
            won.append(await (there.sessions.refresh(oldest.refresh.token) if first == "refresh" else logged_in()))
        return writes

    async def logged_in() -> Any:
        return await there.sessions.login(WEB)

    here.link.before_transact = cut_in
    if first == "refresh":
        await run_with_time(
            clock, here.sessions.login(WEB)
        )  # it evicts what was refreshed just now, with its new token
        assert read_refused_token(store, won[0].refresh.token)["why"] == "evicted"
        with pytest.raises(AccessDenied):
            await there.sessions.refresh(won[0].refresh.token)
    else:
        with pytest.raises(AccessDenied):
            await run_with_time(clock, here.sessions.refresh(oldest.refresh.token))
    assert oldest.sid not in await read_session_rows(store)
    assert len(await read_session_rows(store)) == 3


# Ending.


async def test_revocation_ends_session_and_its_tokens_everywhere(
    two: list[TokenServiceInstance], store: MemoryStore, clock: ManualClock
) -> None:
    here, there = two
    first, other = await login_repeatedly(here, clock, 2)
    second = await here.sessions.refresh(first.refresh.token)
    for each in two:
        assert await each.accepts(first.access.token)
        assert await each.accepts(second.access.token)
    await here.sessions.revoke(WEB, first.sid)
    assert list(await read_session_rows(store)) == [other.sid]
    for issued in (first, second):
        assert not await here.accepts(issued.access.token)
        with pytest.raises(AccessDenied):
            await there.sessions.refresh(issued.refresh.token)
    await clock.advance(60)
    assert not await there.accepts(second.access.token)
    assert await there.accepts(other.access.token)
    row = store.items[schema.revoked_session_key(first.sid)]
    assert row["expires_at_epoch"] == row["original_expiry_epoch"] == second.refresh.expires
    assert (row["token_type"], row["client_id"], row["revoked_at_epoch"]) == ("refresh", CLIENT, int(clock.now()) - 60)


async def test_blocklist_and_revocation_rows_live_as_long_as_the_longest_token(
    here: TokenServiceInstance, store: MemoryStore, clock: ManualClock
) -> None:
    here.tokens.refresh_seconds = 45 * 86_400
    evicted, *_ = await login_repeatedly(here, clock, 4)
    assert read_refused_token(store, evicted.refresh.token)["expires_at_epoch"] == evicted.refresh.expires
    await here.sessions.revoke(WEB, evicted.sid)
    row = store.items[schema.revoked_session_key(evicted.sid)]
    assert row["expires_at_epoch"] == int(clock.now()) + 45 * 86_400


async def test_access_token_of_evicted_session_can_be_revoked(here: TokenServiceInstance, clock: ManualClock) -> None:
    evicted, *_ = await login_repeatedly(here, clock, 4)
    assert await here.accepts(evicted.access.token)
    await here.sessions.revoke(WEB, evicted.sid)
    assert not await here.accepts(evicted.access.token)


async def test_session_refreshed_during_revocation_is_revoked(
    two: list[TokenServiceInstance], clock: ManualClock
) -> None:
    here, there = two
    (issued,) = await login_repeatedly(here, clock, 1)
    refreshed: list[Any] = []

    async def cut_in(writes: Sequence[Write]) -> Sequence[Write]:
        if not refreshed:
            refreshed.append(await there.sessions.refresh(issued.refresh.token))
        return writes

    here.link.before_transact = cut_in
    await run_with_time(clock, here.sessions.revoke(WEB, issued.sid))
    with pytest.raises(AccessDenied):
        await there.sessions.refresh(refreshed[0].refresh.token)
    assert not await there.accepts(refreshed[0].access.token)


async def test_revoked_token_is_refused(here: TokenServiceInstance, clock: ManualClock) -> None:
    first, second = await login_repeatedly(here, clock, 2)
    await here.sessions.revoke_by_token(first.access.token)
    assert not await here.accepts(first.access.token)
    first = await here.sessions.refresh(first.refresh.token)
    await here.sessions.revoke_by_token(first.refresh.token)
    assert not await here.accepts(first.access.token)
    assert [session.sid for session in await here.sessions.list_live(WEB)] == [second.sid]


async def test_repeated_revocation_of_ended_session_writes_nothing(
    two: list[TokenServiceInstance], store: MemoryStore, clock: ManualClock
) -> None:
    """Be it here or elsewhere, and however often."""
    here, there = two
    first, *_ = await login_repeatedly(here, clock, 4)  # evicted
    await here.sessions.revoke_by_token(first.refresh.token)
    row = store.items[schema.revoked_session_key(first.sid)]
    here.link.calls.clear()
    for _ in range(20):
        await clock.advance(1)
        await here.sessions.revoke_by_token(first.refresh.token)
        await there.sessions.revoke_by_token(first.refresh.token)
    assert store.items[schema.revoked_session_key(first.sid)] == row
    assert here.link.calls == []
    assert len(there.link.calls) == 2


async def test_repeated_revocation_of_live_session_reads_store_once(
    here: TokenServiceInstance, clock: ManualClock
) -> None:
    (first,) = await login_repeatedly(here, clock, 1)
    await here.sessions.revoke_by_token(first.refresh.token)
    here.link.calls.clear()
    for _ in range(20):
        await here.sessions.revoke_by_token(first.refresh.token)
    assert here.link.calls == []


async def test_reuse_of_spent_token_is_looked_up_rarely(here: TokenServiceInstance, clock: ManualClock) -> None:
    (first,) = await login_repeatedly(here, clock, 1)
    second = await here.sessions.refresh(first.refresh.token)
    here.link.calls.clear()
    for _ in range(100):
        with pytest.raises(TokenRejected, match="a moment ago"):
            await here.sessions.refresh(first.refresh.token)
    assert len(here.link.calls) == 1
    await clock.advance(REUSE_GRACE_SECONDS)
    with pytest.raises(TokenRejected, match="used before"):
        await here.sessions.refresh(first.refresh.token)
    with pytest.raises(TokenRejected, match="is over"):
        await here.sessions.refresh(second.refresh.token)
    here.link.calls.clear()
    for token in [first.refresh.token, second.refresh.token] * 50:
        with pytest.raises(TokenRejected):
            await here.sessions.refresh(token)
    assert here.link.calls == []


async def test_cache_of_refused_tokens_is_bounded(
    here: TokenServiceInstance, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh_sessions, "MAX_CACHED_REFUSALS", 10)
    here.sessions._refusals = refresh_sessions.RefusalCache(clock)
    (first,) = await login_repeatedly(here, clock, 1)
    for _ in range(50):
        stranger = here.tokens.mint_refresh(ORG, "web", first.sid).token
        with pytest.raises(TokenRejected):
            await here.sessions.refresh(stranger)
        assert len(here.sessions._refusals._entries) <= 10
    await here.sessions.refresh(first.refresh.token)
