"""What Bedrock says of the sidecar's own credentials: no caller hears it as if it were about his; all else he does."""

from __future__ import annotations

import asyncio
import socket

import pytest
from price_keeper.control.readiness_checks import CHECK_TIMEOUT_SECONDS
from price_keeper.errors import UpstreamUnavailable
from price_keeper.upstream import upstream_health as module
from price_keeper.upstream.relay import CREDENTIAL_ERRORS

from tests.flow.test_failover import OK, SlowToConnect, asked, log_lines
from tests.support.port_harness import (
    ForwardingHandler,
    build_response,
    closed_endpoint,
    on_both_loops,
    open_forwarding_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import read_error_message

OURS = "Bedrock refuses the sidecar's own AWS credentials, which its operator must correct; the caller's are valid"
MESSAGE = b'{"message": "The security token included in the request is expired"}'


def refusal(kind: str, status: int = 403) -> bytes:
    return build_response(
        MESSAGE, status, b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\nx-amzn-ErrorType: %b\r\n" % kind.encode()
    )


@pytest.mark.parametrize("kind", [*sorted(CREDENTIAL_ERRORS), "ExpiredTokenException:http://internal.amazon.com/"])
@on_both_loops
async def test_refused_sidecar_credentials_become_503(kind: str) -> None:
    async with (
        upstream(reply_with(refusal(kind))) as server,
        open_forwarding_port(ForwardingHandler(server.endpoint)) as rig,
    ):
        for protocol in ("h1", "h2"):
            heard = await asked(rig, protocol)
            assert read_error_message(heard, 503, "ServiceUnavailableException") == OURS
            assert heard[b"retry-after"] == b"5"
            assert b"expired" not in heard.body
        lines = log_lines(rig)
        assert len(lines) == 1
        assert f"refuses the sidecar's own AWS credentials: {kind.partition(':')[0]}, on Thu, 01 Jan 1970" in lines[0]
        assert len(server.calls) == 2


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_next_endpoint_may_accept_credentials(protocol: str) -> None:
    async with (
        upstream(reply_with(refusal("UnrecognizedClientException"))) as first,
        upstream(reply_with(OK)) as second,
        open_forwarding_port(ForwardingHandler(first.endpoint, second.endpoint)) as rig,
    ):
        heard = await asked(rig, protocol)
        assert (heard.status, heard.body) == (200, b"all is well")
        assert len(log_lines(rig)) == 1


@pytest.mark.parametrize(
    ("kind", "status"), [("AccessDeniedException", 403), ("ExpiredTokenException", 400), ("", 403)]
)
@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_other_refusals_of_bedrock_are_unchanged(protocol: str, kind: str, status: int) -> None:
    async with (
        upstream(reply_with(refusal(kind, status))) as server,
        open_forwarding_port(ForwardingHandler(server.endpoint)) as rig,
    ):
        heard = await asked(rig, protocol)
        assert (heard.status, heard.body) == (status, MESSAGE)
        assert heard[b"x-amzn-errortype"] == kind.encode()
        assert log_lines(rig) == []


@on_both_loops
async def test_readiness_detects_returned_endpoint() -> None:
    gone = closed_endpoint()
    async with upstream(reply_with(OK)) as server:
        through = ForwardingHandler(gone)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            reach = through.forwarder.health
            await asked(rig)
            with pytest.raises(UpstreamUnavailable, match="cannot be reached; the log says why"):
                await reach.check()
            through.set_targets(gone, server.endpoint)
            await asked(rig)
            assert await reach.check() == "1 of 2 endpoints of Bedrock cannot be reached; the log says why"
            with socket.create_server((gone.host, gone.port)):
                assert await reach.check() is None
            assert len(log_lines(rig)) == 2  # away, and back


@on_both_loops
async def test_refused_credentials_are_not_ready_until_renewed() -> None:
    async with upstream(reply_with(refusal("ExpiredTokenException"))) as server:
        through = ForwardingHandler(server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            reach = through.forwarder.health
            assert await reach.check() is None
            await asked(rig)
            with pytest.raises(UpstreamUnavailable, match="refuses the sidecar's own"):
                await reach.check()
            await rig.pass_time(module.REFUSAL_TTL_SECONDS)
            assert await reach.check() is None
            await asked(rig)
            assert len(log_lines(rig)) == 2  # it is logged again
            reach.on_credentials_renewed()
            assert "signs with other AWS credentials now" in log_lines(rig)[0]
            assert await reach.check() is None


@on_both_loops
async def test_silent_endpoint_does_not_block_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * module.PROBE_TIMEOUT_SECONDS < CHECK_TIMEOUT_SECONDS
    monkeypatch.setattr(module, "PROBE_TIMEOUT_SECONDS", 0.05)
    gone = closed_endpoint()
    async with upstream(reply_with(OK)) as server:
        through = ForwardingHandler(gone, server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            await asked(rig)
            with SlowToConnect(gone.port) as slow:
                async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                    trouble = await through.forwarder.health.check()
                assert trouble == "1 of 2 endpoints of Bedrock cannot be reached; the log says why"
                assert slow.begun == 1
            assert len(log_lines(rig)) == 1


@on_both_loops
async def test_unreachable_endpoint_does_not_affect_untried_ones() -> None:
    """It may be an app's own endpoint, the first to be called, and a process that is not ready gets no more calls."""
    gone = closed_endpoint()
    async with upstream(reply_with(OK)) as server:
        through = ForwardingHandler(gone)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            reach = through.forwarder.health
            reach.set_expected({server.endpoint})
            await asked(rig)
            assert await reach.check() == "1 of 2 endpoints of Bedrock cannot be reached; the log says why"
            assert server.calls == []
            assert len(log_lines(rig)) == 1


@on_both_loops
async def test_endpoint_refusing_keys_does_not_affect_others() -> None:
    """Such as endpoints in a region that the account has not enabled."""
    async with (
        upstream(reply_with(refusal("UnrecognizedClientException"))) as other,
        upstream(reply_with(OK)) as server,
    ):
        through = ForwardingHandler(other.endpoint)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            reach = through.forwarder.health
            await asked(rig)
            with pytest.raises(UpstreamUnavailable, match="refuses the sidecar's own"):
                await reach.check()
            reach.set_expected({server.endpoint, other.endpoint})
            part = "1 of 2 endpoints of Bedrock do not take the sidecar's own AWS credentials; the log says why"
            assert await reach.check() == part
            assert reach.has_refused_credentials
            reach.on_credentials_renewed()
            assert await reach.check() is None
            assert len(log_lines(rig)) == 2  # refused, and renewed


@on_both_loops
async def test_expired_credentials_are_refused_everywhere() -> None:
    async with upstream(reply_with(refusal("ExpiredTokenException"))) as first, upstream(reply_with(OK)) as second:
        through = ForwardingHandler(second.endpoint)
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            await asked(rig)
            through.set_targets(first.endpoint)
            await asked(rig)
            with pytest.raises(UpstreamUnavailable, match="refuses the sidecar's own"):
                await through.forwarder.health.check()
            assert len(log_lines(rig)) == 1


@on_both_loops
async def test_unused_app_endpoint_is_forgotten() -> None:
    """It may be of no use to any app, and deleted by now."""
    async with upstream(reply_with(OK)) as server:
        through = ForwardingHandler(closed_endpoint())
        async with open_forwarding_port(through) as rig:
            assert through.forwarder is not None
            through.forwarder.set_endpoints({server.endpoint})
            for _ in range(3):
                await asked(rig)
                assert through.forwarder.health.unreachable_count == 1
                await rig.pass_time(1)
                assert through.forwarder.health.unreachable_count == 0
            assert await through.forwarder.health.check() is None
            assert len(log_lines(rig)) == 1
