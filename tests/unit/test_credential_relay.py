"""Credentials that a control service makes: kept until half their life, and never for who shows something else."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from price_keeper.auth import credential_relay as module
from price_keeper.auth.credential_relay import (
    CONTROL_RETRY_SECONDS,
    RELAY_RATE_PER_ADDRESS,
    ControlReply,
    ControlServiceFailed,
    CredentialRelay,
    WaiterLimit,
)
from price_keeper.auth.throttles import FAILURE_BURST, FAILURE_INTERVAL_SECONDS
from price_keeper.errors import AccessDenied, Busy, TooManyRequests

from tests.support.clock import ManualClock
from tests.support.fake_control_service import (
    CREDENTIAL,
    ORG,
    UNAUTHORIZED,
    WEB,
    FakeControlService,
    new_relay,
    revocation_check,
)


@pytest.fixture
def control(clock: ManualClock) -> FakeControlService:
    return FakeControlService(clock)


@pytest.fixture
def revoked() -> set[str]:
    return set()


@pytest.fixture
def relayed(control: FakeControlService, clock: ManualClock, revoked: set[str]) -> CredentialRelay:
    return new_relay(control, clock, revoked)


async def test_credentials_are_fetched_again_after_half_their_life(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    first = await relayed.issue(CREDENTIAL)
    await clock.advance(1790)
    assert await relayed.issue(CREDENTIAL) == first
    assert control.requests[CREDENTIAL] == 1
    await clock.advance(11)
    assert await relayed.issue(CREDENTIAL) != first
    assert control.requests[CREDENTIAL] == 2


async def test_half_life_counts_from_token_issue(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    control.answer = control.issue("web")
    await clock.advance(1500)
    await relayed.issue(CREDENTIAL)
    await clock.advance(301)
    await relayed.issue(CREDENTIAL)
    assert control.requests[CREDENTIAL] == 2


async def test_concurrent_requests_share_one_fetch(relayed: CredentialRelay, control: FakeControlService) -> None:
    found = await asyncio.gather(*(relayed.issue(CREDENTIAL) for _ in range(200)))
    assert control.requests[CREDENTIAL] == 1
    assert all(each == found[0] for each in found)
    assert len(relayed._single_flight._running) == 0


async def test_other_secret_of_same_client_gets_no_cached_token(
    relayed: CredentialRelay, control: FakeControlService
) -> None:
    await relayed.issue(CREDENTIAL)
    control.answer = UNAUTHORIZED
    with pytest.raises(AccessDenied):
        await relayed.issue(f"{WEB}:another")
    assert CREDENTIAL not in repr(relayed.__dict__)
    assert "the-secret-of-web" not in repr(relayed.__dict__)


async def test_refusal_evicts_cached_credentials(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    await relayed.issue(CREDENTIAL)
    await clock.advance(1801)
    control.answer = UNAUTHORIZED
    with pytest.raises(AccessDenied, match="the client id or its secret is wrong"):
        await relayed.issue(CREDENTIAL)
    await clock.advance(CONTROL_RETRY_SECONDS)
    control.answer = ControlServiceFailed("away")
    with pytest.raises(Busy):  # though the token has not expired
        await relayed.issue(CREDENTIAL)


@pytest.mark.parametrize(
    "trouble", [ControlServiceFailed("away"), ControlReply(503, b""), ControlReply(302, b""), ControlReply(404, b"{}")]
)
async def test_control_service_outage_keeps_cached_credentials_until_expiry(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock, trouble: Any
) -> None:
    first = await relayed.issue(CREDENTIAL)
    control.answer = trouble
    await clock.advance(1801)
    assert await relayed.issue(CREDENTIAL) == first
    await clock.advance(1798)
    assert await relayed.issue(CREDENTIAL) == first
    await clock.advance(2)
    with pytest.raises(Busy) as caught:
        await relayed.issue(CREDENTIAL)
    assert caught.value.retry_after == CONTROL_RETRY_SECONDS


async def test_slow_control_service_delays_nobody_with_valid_credentials(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT_SECONDS", 0.01)
    first = await relayed.issue(CREDENTIAL)
    control.hangs = True
    await clock.advance(1801)
    assert await asyncio.gather(*(relayed.issue(CREDENTIAL) for _ in range(50))) == [first] * 50
    assert control.requests[CREDENTIAL] == 2


async def test_failed_fetch_is_not_repeated_at_once(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    control.answer = ControlServiceFailed("away", is_away=True)
    with caplog.at_level(logging.INFO, "price_keeper.auth"):
        for _ in range(50):
            with pytest.raises(Busy):
                await relayed.issue(CREDENTIAL)
        assert control.requests[CREDENTIAL] == 1
        await clock.advance(CONTROL_RETRY_SECONDS)
        control.answer = None
        await relayed.issue(CREDENTIAL)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot fetch credentials from the control service: away; cached ones are used until they expire",
        "the control service issues credentials again",
    ]


async def test_revoked_token_is_not_issued_again(
    relayed: CredentialRelay, control: FakeControlService, revoked: set[str]
) -> None:
    first = await relayed.issue(CREDENTIAL)
    revoked.add(control.tokens.verify_access(first["Token"]).jti)
    assert await relayed.issue(CREDENTIAL) != first
    assert control.requests[CREDENTIAL] == 2


async def test_retry_after_is_passed_on(relayed: CredentialRelay, control: FakeControlService) -> None:
    control.answer = ControlReply(429, b"{}", 6.0)
    with pytest.raises(TooManyRequests) as caught:
        await relayed.issue(CREDENTIAL)
    assert caught.value.retry_after == 6.0


async def test_malformed_response_is_not_issued(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = FakeControlService(clock, "x" * 40).issue("web")
    answers = [
        foreign,
        control.issue("bot"),
        control.issue("web", Token=7),
        ControlReply(200, b"[" * 99_999),
        ControlReply(200, b"{}"),
    ]
    for answer in answers:
        control.answer = answer
        with pytest.raises(Busy):
            await relayed.issue(CREDENTIAL)
        await clock.advance(CONTROL_RETRY_SECONDS)
    assert len(relayed._cached) == 0
    assert "eyJ" not in caplog.text
    assert "compare auth.keys" in caplog.text


@pytest.mark.parametrize("shown", ["", "nonsense", f"{WEB}:", f"{WEB}:a b", f"{WEB}:a\r\nX: y", "x:y", f"{WEB}:\xff"])
async def test_malformed_secret_is_not_forwarded(
    relayed: CredentialRelay, control: FakeControlService, shown: str
) -> None:
    with pytest.raises(AccessDenied):
        await relayed.issue(shown)
    assert not control.requests


async def test_cache_and_waiters_are_bounded(
    control: FakeControlService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_CALLERS", 10)
    relayed = new_relay(control, clock, set())
    relayed._waiters = WaiterLimit(20, 20)
    for number in range(100):
        await relayed.issue(f"org-{ORG}-app-a{number}:secret", f"192.0.2.{number}")
        await clock.advance(1)
        assert len(relayed._cached) <= 10
    control.answer = ControlServiceFailed("away")
    found = await asyncio.gather(*(relayed.issue(f"{WEB}:s{n}") for n in range(50)), return_exceptions=True)
    assert Counter(str(each) for each in found)["too many callers wait for credentials"] == 30
    assert (relayed._waiters.waiting, len(relayed._single_flight._running)) == (0, 0)
    assert len(relayed._recent_refusals) <= 10


async def test_missing_control_url_refuses_credentials(clock: ManualClock, control: FakeControlService) -> None:
    with pytest.raises(AccessDenied, match=r"auth\.control_url"):
        await CredentialRelay(None, control.tokens, clock, revocation_check(set())).issue(CREDENTIAL)


async def test_missing_control_url_counts_no_failed_login(clock: ManualClock, control: FakeControlService) -> None:
    nowhere = CredentialRelay(None, control.tokens, clock, revocation_check(set()))
    for _ in range(FAILURE_BURST + 5):
        with pytest.raises(AccessDenied, match=r"auth\.control_url"):
            await nowhere.issue_throttled("127.0.0.1", CREDENTIAL)


async def test_rate_limited_relay_issues_cached_token_and_retries_later(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    first = await relayed.issue(CREDENTIAL)
    await clock.advance(1801)
    control.answer = ControlReply(429, b"{}", 6.0)
    for _ in range(20):
        assert await relayed.issue(CREDENTIAL) == first
    assert control.requests[CREDENTIAL] == 2
    control.answer = None
    await clock.advance(6)
    assert await relayed.issue(CREDENTIAL) != first


async def test_revoked_token_from_control_service_is_not_cached(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock, revoked: set[str]
) -> None:
    control.answer = control.issue("web")
    revoked.add(control.tokens.verify_access((await relayed.issue(CREDENTIAL))["Token"]).jti)
    for _ in range(3):
        with pytest.raises(Busy, match="revoked token") as refused:
            await relayed.issue(CREDENTIAL)
        assert refused.value.retry_after
    assert len(relayed._cached) == 0
    control.answer = None  # by now it knows, and makes another
    assert control.tokens.verify_access((await relayed.issue(CREDENTIAL))["Token"]).jti not in revoked


async def test_wrong_secrets_are_counted_by_address(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    right = await relayed.issue_throttled("127.0.0.1", CREDENTIAL)
    control.answer = UNAUTHORIZED
    found = Counter[type[Exception]]()
    for number in range(FAILURE_BURST + 5):
        with pytest.raises((AccessDenied, TooManyRequests)) as refused:
            await relayed.issue_throttled("127.0.0.1", f"org-{ORG}-app-a{number}:guess")
        found[refused.type] += 1
    assert found == {AccessDenied: FAILURE_BURST, TooManyRequests: 5}
    assert refused.value.retry_after == FAILURE_INTERVAL_SECONDS
    assert await relayed.issue_throttled("127.0.0.1", CREDENTIAL) == right
    control.answer = None  # who is right is served, and be he new here and a neighbour of the guesser
    assert await relayed.issue_throttled("127.0.0.1", f"org-{ORG}-app-job:secret")
    with pytest.raises(AccessDenied):
        await relayed.issue_throttled("127.0.0.1", "no pair")


async def test_flood_of_guesses_reaches_control_service_rate_limited(
    relayed: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    control.answer = UNAUTHORIZED
    guesses = [relayed.issue_throttled("127.0.0.1", f"{WEB}:guess{number}") for number in range(200)]
    flood = asyncio.gather(*guesses, return_exceptions=True)
    await clock.advance(1)
    assert control.requests.total() <= RELAY_RATE_PER_ADDRESS.burst + RELAY_RATE_PER_ADDRESS.per_second + 1
    await clock.advance(10)
    assert {type(each) for each in await flood} == {AccessDenied, TooManyRequests, Busy}
