"""When the endpoints of a label fail in different ways: what is sent, what is not, and what the caller gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from price_keeper.telemetry.incident import REPEAT_SECONDS
from price_keeper.upstream.connection_pool import UpstreamEndpoint

from tests.support.connection_interception import Connect, intercept_connections
from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    build_response,
    closed_endpoint,
    on_both_loops,
    open_forwarding_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import WireResponse, ask, eventually, read_error_message

OK = build_response(b"all is well")
THROTTLED = build_response(b'{"message": "slow down"}', 429, b"x-amzn-errortype: ThrottlingException\r\n")


async def asked(rig: PortHarness, protocol: str = "h1") -> WireResponse:
    if protocol == "h2":
        return await (await rig.connect_http2()).call(body=b"hello")
    wire = await rig.connect()
    await wire.send(ask(b"hello"))
    return await wire.answer()


def log_lines(rig: PortHarness) -> list[str]:
    """What the log says, which is then forgotten."""
    lines = list(rig.log.lines)
    rig.log.lines.clear()
    return lines


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_throttled_and_unreachable_endpoints_report_throttling(protocol: str) -> None:
    async with upstream(reply_with(THROTTLED)) as first:
        through = ForwardingHandler(first.endpoint, closed_endpoint())
        async with open_forwarding_port(through) as rig:
            heard = await asked(rig, protocol)
            assert read_error_message(heard, 429, "ThrottlingException").startswith("Bedrock throttles this model")
            assert (heard[b"retry-after"], heard[b"x-amz-retry-after"]) == (b"1", b"1000")
            assert b"x-should-retry" not in heard
            assert len(first.calls) == 1
            assert len(log_lines(rig)) == 1


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_endpoint_addresses_stay_in_log(protocol: str) -> None:
    gone = closed_endpoint()
    through = ForwardingHandler(gone)
    async with open_forwarding_port(through) as rig:
        heard = await asked(rig, protocol)
        assert read_error_message(heard, 503, "ServiceUnavailableException") == "Bedrock cannot be reached"
        assert heard[b"retry-after"] == b"1"
        assert f"cannot connect to {gone.host}:{gone.port}: " in log_lines(rig)[0]
        await asked(rig, protocol)
        assert log_lines(rig) == []  # once in a while is enough
        await rig.pass_time(REPEAT_SECONDS)
        await asked(rig, protocol)
        assert len(log_lines(rig)) == 1


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
@on_both_loops
async def test_unresolvable_endpoint_fails_over(host: str) -> None:
    async with upstream(reply_with(OK)) as server:
        through = ForwardingHandler(UpstreamEndpoint(host, 80, False), server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await asked(rig)).body == b"all is well"
            assert len(log_lines(rig)) == 1


@pytest.mark.parametrize("joins", [True, False])
@on_both_loops
async def test_nothing_is_sent_for_disconnected_caller(joins: bool) -> None:
    through = ForwardingHandler(joins_retries=joins)
    async with upstream(reply_with(OK)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            with SlowToConnect(server.endpoint.port) as slow:
                wire = await rig.connect()
                await wire.send(ask(b"b", b"caller: me\r\ninvocation: 1\r\n"))
                await eventually(lambda: slow.begun)
                wire.reset()
                await eventually(lambda: rig.open_connections == 0)
                slow.go_on.set()
                await eventually(lambda: rig.running_requests == 0)
            assert server.calls == []
            assert len(through.idle_connections) == 1
            again = await rig.connect()
            await again.send(ask(b"b", b"caller: me\r\ninvocation: 1\r\n"))
            assert (await again.answer()).body == b"all is well"
            assert len(server.calls) == 1


@on_both_loops
async def test_call_is_sent_if_caller_returned_in_time() -> None:
    through = ForwardingHandler(joins_retries=True)
    async with upstream(reply_with(OK)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            with SlowToConnect(server.endpoint.port) as slow:
                wire = await rig.connect()
                await wire.send(ask(b"b", b"caller: me\r\ninvocation: 1\r\n"))
                await eventually(lambda: slow.begun)
                wire.reset()
                await eventually(lambda: rig.open_connections == 0)
                again = await rig.connect()
                await again.send(ask(b"b", b"caller: me\r\ninvocation: 1\r\n"))
                await eventually(lambda: through.retry_joiner and through.retry_joiner.joined)
                slow.go_on.set()
                assert (await again.answer()).body == b"all is well"
            assert len(server.calls) == 1


class SlowToConnect:
    """Connections to Bedrock are made when they may be."""

    def __init__(self, port: int) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()
        self._connecting = intercept_connections(port, self._connect)

    def __enter__(self) -> SlowToConnect:
        self._connecting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    async def _connect(self, make: Connect) -> Any:
        self.begun += 1
        await self.go_on.wait()
        return await make()
