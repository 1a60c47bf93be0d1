"""Faults while Bedrock counts a call's tokens, for which its caller waits: an error soon, never a made-up number."""

from __future__ import annotations

import asyncio

import pytest
from price_keeper.errors import InvalidRequest, TooManyRequests, UpstreamUnavailable
from price_keeper.operations import Operation
from price_keeper.upstream import token_counter
from price_keeper.upstream.forwarder import BearerAuthorizer, Forwarder, UpstreamTarget, parse_endpoint
from price_keeper.upstream.token_counter import TokenCounter

from tests.support.port_harness import StepClock, build_response, reply_with, upstream
from tests.support.raw_clients import eventually
from tests.support.wire_faults import AtAccept, Break, Fault, FaultKind, FaultPoint, Slow, Surplus, bedrock_error
from tests.support.wire_proxy import wire_proxy

BODY = b'{"messages": []}'


async def asked(*faults: Fault, deaf: bool = False) -> list[int | Exception]:
    """The result with each fault, and of one call without any."""
    async with (
        upstream(reply_with(build_response(b'{"inputTokens": 42}'))) as server,
        wire_proxy(f"http://127.0.0.1:{server.port}") as wire,
    ):
        clock = StepClock()
        forwarder = Forwarder(BearerAuthorizer("k"), clock)
        if deaf:
            wire.at_accept.append(AtAccept.DEAF)
        wire.next(*faults)
        target = UpstreamTarget(parse_endpoint(wire.url), "here", "a-model", "/there")
        found = []
        for _ in range(len(faults) + deaf + 1):
            counted = TokenCounter(forwarder)(target, Operation.CONVERSE, BODY)
            found += await asyncio.gather(counted, return_exceptions=True)
        clock.move(1000)  # abandoned calls are given up
        await forwarder.check_timeouts()
        await eventually(lambda: forwarder.connection_counts[0] == 0)
        forwarder.close()
        await eventually(lambda: wire.open == deaf)
        return found


@pytest.mark.parametrize("how", [FaultKind.CLOSE, FaultKind.RESET, FaultKind.HALF])
async def test_token_count_broken_at_any_point_is_unavailable(how: FaultKind) -> None:
    *broken, well = await asked(*(Break(where, how, 0.05) for where in FaultPoint))
    assert all(isinstance(each, UpstreamUnavailable) for each in broken), broken
    assert well == 42


async def test_token_count_has_its_own_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counter, "TIMEOUT_SECONDS", 0.1)
    *late, well = await asked(*(Break(where, FaultKind.STALL) for where in FaultPoint))
    assert all("in 0.1 s" in str(each) for each in late), late
    assert well == 42
    late_one, well = await asked(deaf=True)
    assert isinstance(late_one, UpstreamUnavailable)
    assert well == 42


async def test_slow_surplus_or_refused_token_count_is_handled() -> None:
    assert await asked(Slow(0.01, 1), Surplus()) == [42, 42, 42]
    throttled, away, wrong, well = await asked(
        bedrock_error("ThrottlingException", 429),
        bedrock_error("ServiceUnavailableException", 503),
        bedrock_error("ValidationException", 400),
    )
    assert isinstance(throttled, TooManyRequests)
    assert isinstance(away, UpstreamUnavailable)
    assert isinstance(wrong, InvalidRequest)
    assert well == 42
