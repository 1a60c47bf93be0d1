"""A sidecar's callers beside each other: who floods it, who is new and right, and who has something that is good."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from price_keeper.auth import control_service_client, credential_relay, throttles
from price_keeper.auth.credential_relay import (
    CONTROL_RETRY_SECONDS,
    MAX_WAITERS_PER_KEY,
    RELAY_RATE_PER_ADDRESS,
    ControlReply,
    ControlServiceFailed,
    CredentialRelay,
)
from price_keeper.auth.throttles import FAILURE_BURST
from price_keeper.errors import AccessDenied, Busy, TooManyRequests

from tests.support.clock import ManualClock, settle
from tests.support.fake_control_service import CREDENTIAL, ORG, UNAUTHORIZED, FakeControlService, error_reply, new_relay

EVIL = f"org-{ORG}-app-evil:wrong"
HTML = b"<html>403 Forbidden</html>"


def new(number: int) -> str:
    return f"org-{ORG}-app-new{number}:right"


@pytest.fixture
def control(clock: ManualClock) -> FakeControlService:
    return FakeControlService(clock)


@pytest.fixture
def here(control: FakeControlService, clock: ManualClock) -> CredentialRelay:
    return new_relay(control, clock, set())


def flood(here: CredentialRelay, shown: list[str], address: str = "10.9.9.9") -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(here.issue_throttled(address, each)) for each in shown]


async def outcomes(tasks: list[asyncio.Task[Any]]) -> Counter[type[object]]:
    return Counter(type(each) for each in await asyncio.gather(*tasks, return_exceptions=True))


async def test_same_wrong_pair_shares_one_refusal(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    control.answer = UNAUTHORIZED
    found = await outcomes(flood(here, [EVIL] * 200) + flood(here, [EVIL] * 50, "10.8.8.8"))
    assert found.keys() == {AccessDenied, TooManyRequests}
    assert control.requests[EVIL] == 1
    for _ in range(5):  # nor is it asked again a moment later
        with pytest.raises((AccessDenied, TooManyRequests)):
            await here.issue_throttled("10.7.7.7", EVIL)
    assert control.requests[EVIL] == 1
    await clock.advance(CONTROL_RETRY_SECONDS)
    control.answer = None
    await here.issue_throttled("10.7.7.7", EVIL)


@pytest.mark.parametrize("is_one_pair", [True, False])
async def test_flood_from_one_address_does_not_block_valid_client(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock, is_one_pair: bool
) -> None:
    first = await here.issue_throttled("10.0.0.1", CREDENTIAL)
    await clock.advance(1801)
    control.accepted = {CREDENTIAL, *map(new, range(30))}
    guesses = flood(here, [EVIL if is_one_pair else f"{EVIL}{number}" for number in range(1500)])
    await settle()
    assert await here.issue_throttled("10.0.0.1", CREDENTIAL) != first
    for number in range(20):
        await here.issue_throttled("10.0.0.2", new(number))
    await clock.advance(20)
    assert (await outcomes(guesses))[Busy] >= 1500 - MAX_WAITERS_PER_KEY


async def test_holders_of_valid_token_do_not_wait_for_refresh(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    first = await here.issue(CREDENTIAL)
    control.hangs = True
    await clock.advance(1801)
    asking = asyncio.create_task(here.issue(CREDENTIAL))
    await settle()
    for _ in range(300):
        assert await asyncio.wait_for(here.issue(CREDENTIAL), 0.5) == first
    assert not asking.done()
    asking.cancel()


async def test_first_fetch_whose_caller_leaves_is_finished_for_the_others(
    here: CredentialRelay, control: FakeControlService
) -> None:
    control.hangs = True
    asking = flood(here, [CREDENTIAL] * 3)
    await settle()
    asking[0].cancel()
    await settle()
    control.hang_ends.set()
    assert (await outcomes(asking))[dict] == 2
    assert control.requests[CREDENTIAL] == 1


async def test_cancelled_waiter_causes_no_fetch(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    filling = flood(here, [new(n) for n in range(RELAY_RATE_PER_ADDRESS.burst)])
    alone = asyncio.create_task(here.issue_throttled("10.9.9.9", EVIL, lambda: True))  # type: ignore[arg-type]
    gone = asyncio.create_task(here.issue_throttled("10.9.9.9", CREDENTIAL, lambda: True))  # type: ignore[arg-type]
    await settle()
    (stays,) = flood(here, [CREDENTIAL])
    await clock.advance(1)
    assert (await outcomes(filling))[dict] == len(filling)
    assert await outcomes([alone, gone]) == Counter({Busy: 2})
    assert await stays
    assert (control.requests[EVIL], control.requests[CREDENTIAL]) == (0, 1)


async def test_first_fetches_stay_below_rate_of_control_service(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    granted = throttles.LOOKUP_RATE_PER_ADDRESS
    control.answer = UNAUTHORIZED
    tasks = [task for n in range(100) for task in flood(here, [f"{EVIL}{n}x{m}" for m in range(20)], f"10.1.1.{n}")]
    await clock.advance(0.5)
    assert control.requests.total() < granted.burst + granted.per_second * 0.5
    await clock.advance(3.5)
    assert control.requests.total() < granted.burst + granted.per_second * 3.5
    await clock.advance(10)
    assert Busy in await outcomes(tasks)


async def test_first_fetches_leave_connections_for_renewals(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credential_relay, "SLOT_TIMEOUT_SECONDS", 0.01)
    await here.issue(CREDENTIAL)
    control.hangs = True
    tasks = flood(here, [new(n) for n in range(40)], "10.2.2.2")
    await clock.advance(4)
    assert control.requests.total() - 1 == credential_relay.MAX_FIRST_FETCHES < control_service_client.MAX_CONNECTIONS
    control.hangs = False
    await clock.advance(1801)
    first = await here.issue(CREDENTIAL)
    assert control.requests[CREDENTIAL] == 2
    assert first
    for task in tasks:
        task.cancel()


async def test_wrong_secret_is_counted_although_control_service_is_rate_limiting(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    for number in range(FAILURE_BURST):
        control.answer = error_reply(429, "too_many_requests", 6.0)
        with pytest.raises(TooManyRequests, match="asks to slow down"):
            await here.issue_throttled("10.9.9.9", f"{EVIL}{number}")
    control.answer = UNAUTHORIZED
    with pytest.raises(TooManyRequests, match="too many wrong secrets"):
        await here.issue_throttled("10.9.9.9", f"{EVIL}-another")
    control.answer = ControlReply(429, HTML)  # of something before the control service, which knows nothing of secrets
    for number in range(FAILURE_BURST + 1):
        with pytest.raises(TooManyRequests, match="asks to slow down"):
            await here.issue_throttled("10.9.9.8", new(number))


@pytest.mark.parametrize(
    "trouble", [ControlReply(503, b""), ControlReply(403, HTML), ControlServiceFailed("its answer is too large")]
)
async def test_malformed_response_affects_same_credential_only(
    here: CredentialRelay, control: FakeControlService, trouble: Any
) -> None:
    control.answer = trouble
    for _ in range(3):
        with pytest.raises(Busy):
            await here.issue_throttled("10.0.0.1", EVIL)
    assert control.requests[EVIL] == 1
    control.answer = None
    assert await here.issue_throttled("10.0.0.1", CREDENTIAL)


async def test_timed_out_caller_does_not_affect_others(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credential_relay, "REFRESH_TIMEOUT_SECONDS", 0.01)
    first = await here.issue(CREDENTIAL)
    await clock.advance(1801)
    control.hangs = True
    for _ in range(5):
        assert await here.issue(CREDENTIAL) == first
    assert control.requests[CREDENTIAL] == 2
    control.hangs = False
    assert await here.issue(new(1))


async def test_unreachable_control_service_is_unreachable_for_all(
    here: CredentialRelay, control: FakeControlService
) -> None:
    control.answer = ControlServiceFailed("no connection", is_away=True)
    with pytest.raises(Busy):
        await here.issue(CREDENTIAL)
    control.answer = None
    with pytest.raises(Busy):
        await here.issue(new(1))


@pytest.mark.parametrize(
    "page",
    [
        ControlReply(403, HTML),
        ControlReply(401, HTML),
        ControlReply(401, b"{}"),
        ControlReply(401, b"[]"),
        error_reply(403, "forbidden"),
    ],
)
async def test_refusal_of_proxy_in_between_is_not_a_wrong_secret(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock, page: ControlReply
) -> None:
    first = await here.issue_throttled("10.0.0.1", CREDENTIAL)
    await clock.advance(1801)
    control.answer = page
    for _ in range(FAILURE_BURST + 5):
        assert await here.issue_throttled("10.0.0.1", CREDENTIAL) == first
        with pytest.raises(Busy):
            await here.issue_throttled("10.0.0.1", EVIL)
        await clock.advance(CONTROL_RETRY_SECONDS)


async def test_fast_clock_does_not_fetch_constantly(
    here: CredentialRelay, control: FakeControlService, clock: ManualClock
) -> None:
    control.answer = control.issue("web")
    await here.issue(CREDENTIAL)
    await clock.advance(1801)
    for _ in range(120):
        await here.issue(CREDENTIAL)
        await clock.advance(0.5)
    assert 2 < control.requests[CREDENTIAL] <= 7


def test_rate_per_address_is_below_total_rate() -> None:
    assert RELAY_RATE_PER_ADDRESS.per_second <= credential_relay.RELAY_RATE_TOTAL.per_second / 2
    assert RELAY_RATE_PER_ADDRESS.burst <= credential_relay.RELAY_RATE_TOTAL.burst / 2


@pytest.mark.parametrize(("size", "is_away"), [(10**6, False), (None, True)])
async def test_only_connection_failure_counts_as_unreachable(size: int | None, is_away: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size or 0) + b"x" * (size or 0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if size is None:
        server.close()
    async with control_service_client.open_control_service(f"http://127.0.0.1:{port}") as ask:
        with pytest.raises(ControlServiceFailed) as refused:
            await ask(CREDENTIAL)
    assert refused.value.is_away == is_away
    server.close()
