"""Draining: nothing new is taken, what is under way ends, what does not is cut, and it takes no longer than told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from h2.errors import ErrorCodes
from price_keeper.exchange import Request, Responder

from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    UpstreamExchange,
    build_response,
    echo,
    on_both_loops,
    open_forwarding_port,
    open_port,
    upstream,
)
from tests.support.raw_clients import ConnectionCut, RawConnection, ask, eventually, wait_quietly

SECONDS = 25.0


class Gated:
    """Begins its answer, and ends it once it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0

    async def __call__(self, request: Request, responder: Responder) -> None:
        self.begun += 1
        responder.start(200, (), None)
        responder.write(b"begun ")
        await self.gate.wait()
        responder.write(b"ended")
        responder.finish()


class Draining:
    """A drain in progress, whose clock advances unless it is held."""

    def __init__(self, rig: PortHarness, give_up: Callable[[], None] | None = None) -> None:
        self._rig = rig
        self._began = rig.clock.now()
        self._task = asyncio.create_task(rig.listener.drain(SECONDS, give_up))

    async def passes(self, seconds: float) -> None:
        await wait_quietly(0.005)
        await self._rig.pass_time(seconds)

    async def is_done(self) -> float:
        """How long it took."""
        await wait_quietly(0.005)
        while not self._task.done():
            self._rig.clock.move(0.05)
            await wait_quietly(0.002)
        return self._rig.clock.now() - self._began


@on_both_loops
async def test_drain_without_work_ends_at_once() -> None:
    async with open_port(echo) as rig:
        idle, silent = [await rig.connect() for _ in range(2)]
        client = await rig.connect_http2()
        await idle.send(ask(b"x"))
        await idle.answer()
        await client.call()
        await silent.send(b"P")
        await eventually(lambda: rig.open_connections == 3)
        assert await Draining(rig).is_done() < 1
        for wire in (idle, silent):
            assert await wire.read_ending() in ("closed", "reset")
        await client.wait_until(lambda: client.goodbye)
        assert not await client.listen()
    async with open_port(echo) as rig:
        assert await Draining(rig).is_done() == 0


@on_both_loops
async def test_new_connection_during_drain_is_refused() -> None:
    handler = Gated()
    async with open_port(handler) as rig:
        wire = await rig.connect()
        await wire.send(ask())
        await eventually(lambda: handler.begun)
        draining = Draining(rig)
        await wait_quietly()
        with pytest.raises(ConnectionRefusedError):
            await RawConnection.connect(rig.port)
        handler.gate.set()
        assert (await wire.answer()).body == b"begun ended"
        assert await draining.is_done() < 1


@on_both_loops
async def test_drain_finishes_http1_response_and_takes_no_other() -> None:
    handler = Gated()
    async with open_port(handler) as rig:
        first, ahead = [await rig.connect() for _ in range(2)]
        await first.send(ask())
        await ahead.send(ask() + ask())
        await eventually(lambda: handler.begun == 2)
        draining = Draining(rig)
        await first.send(ask())
        await wait_quietly()
        handler.gate.set()
        for wire in (first, ahead):
            assert (await wire.answer()).body == b"begun ended"
            assert await wire.read_ending() in ("closed", "reset")
        assert handler.begun == 2
        assert await draining.is_done() < 1


@on_both_loops
async def test_drain_announces_close_on_http1_if_possible() -> None:
    gate = asyncio.Event()

    async def late(request: Request, responder: Responder) -> None:
        await gate.wait()
        await echo(request, responder)

    async with open_port(late) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x"))
        await eventually(lambda: rig.running_requests)
        draining = Draining(rig)
        await wait_quietly(0.01)
        gate.set()
        heard = await wire.answer()
        assert (heard.body, heard[b"connection"]) == (b"x", b"close")
        assert await wire.read_ending() == "closed"
        assert await draining.is_done() < 1


@pytest.mark.parametrize("at", [10, -3])
@on_both_loops
async def test_half_received_request_is_served_during_drain(at: int) -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"a body")[:at])
        await wait_quietly()
        draining = Draining(rig)
        await wait_quietly(0.01)
        await wire.send(ask(b"a body")[at:])
        heard = await wire.answer()
        assert (heard.body, heard[b"connection"]) == (b"a body", b"close")
        assert await draining.is_done() < 1


@on_both_loops
async def test_drain_sends_http2_goaway_and_finishes_streams() -> None:
    handler = Gated()
    async with open_port(handler) as rig:
        client = await rig.connect_http2()
        under_way, coming = client.open(), client.open(ends=False)
        await client.flush()
        await eventually(lambda: handler.begun == 1)
        draining = Draining(rig)
        await client.wait_until(lambda: client.goodbye)
        assert client.goodbye is not None
        assert (client.goodbye.error_code, client.goodbye.last_stream_id) == (ErrorCodes.NO_ERROR, coming)
        late = client.open()
        await client.flush()
        await client.wait_until(lambda: client.streams[late].reset is not None)
        assert client.streams[late].reset == ErrorCodes.REFUSED_STREAM  # so it may go elsewhere
        await client.body(coming, b"the rest")
        await eventually(lambda: handler.begun == 2)
        handler.gate.set()
        for number in (under_way, coming):
            assert (await client.answer(number)).body == b"begun ended"
        assert await draining.is_done() < 1
        assert not await client.listen()


@pytest.mark.parametrize("protocol", ["h1", "h1.0", "h2"])
@on_both_loops
async def test_drain_past_limit_aborts_visibly(protocol: str) -> None:
    handler = Gated()
    async with open_port(handler) as rig:
        if protocol == "h2":
            client = await rig.connect_http2()
            client.open()
            await client.flush()
        else:
            wire = await rig.connect()
            await wire.send(ask() if protocol == "h1" else b"GET / HTTP/1.0\r\n\r\n")
        await eventually(lambda: handler.begun)
        draining = Draining(rig)
        await draining.passes(SECONDS - 1)
        assert rig.open_connections == 1
        assert SECONDS <= await draining.is_done() < SECONDS + 2  # its handler does not end either
        if protocol == "h2":
            with pytest.raises(ConnectionCut):
                await client.answer(1)
        else:
            with pytest.raises(ConnectionCut, match="reset"):
                await wire.answer()
        handler.gate.set()


@on_both_loops
async def test_stalled_reader_does_not_delay_drain() -> None:
    async def flood(request: Request, responder: Responder) -> None:
        responder.start(200, (), 10_000_000)
        responder.write(b"x" * 10_000_000)
        responder.finish()

    async with open_port(flood) as rig:
        wire = await rig.connect(receive_buffer=4096)
        await wire.send(ask())
        client = await rig.connect_http2(receive_buffer=4096)
        client.open()
        await client.flush()
        await eventually(lambda: rig.open_connections == 2 and not rig.running_requests)
        assert SECONDS <= await Draining(rig).is_done() < SECONDS + 1
        assert rig.open_connections == 0


@on_both_loops
async def test_drain_finishes_upstream_responses() -> None:
    gate = asyncio.Event()

    async def script(exchange: UpstreamExchange) -> None:
        await exchange.send(build_response(b"x" * 100_000)[:1000])
        await gate.wait()
        await exchange.send(build_response(b"x" * 100_000)[1000:])

    through = ForwardingHandler()
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect()
            await wire.send(ask())
            await eventually(lambda: server.calls)
            draining = Draining(rig)
            await wait_quietly()
            gate.set()
            assert (await wire.answer()).body == b"x" * 100_000
            assert await draining.is_done() < 1
            assert through.taps[0].ends == [True]


class Interrupted:
    """Bedrock's side of an answer that is half given when its caller leaves."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, exchange: UpstreamExchange) -> None:
        whole = build_response(b"x" * 1000)
        await exchange.send(whole[:500])
        await self.gate.wait()
        await exchange.send(whole[500:])

    async def left_alone(self, rig: PortHarness) -> None:
        wire = await rig.connect()
        await wire.send(ask())
        await wire.take(400)
        wire.reset()
        await eventually(lambda: rig.open_connections == 0)
        assert rig.running_requests == 1


@on_both_loops
async def test_drain_waits_for_response_of_disconnected_caller() -> None:
    """Its usage comes last, and is charged even if the caller has left."""
    script, through = Interrupted(), ForwardingHandler()
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await script.left_alone(rig)
            draining = Draining(rig)
            await draining.passes(SECONDS / 2)
            assert through.taps[0].ends == []
            script.gate.set()
            assert SECONDS / 2 <= await draining.is_done() < SECONDS
            assert through.taps[0].ends == [True]


@on_both_loops
async def test_drain_past_limit_closes_drained_response_in_order() -> None:
    script, through = Interrupted(), ForwardingHandler()
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await script.left_alone(rig)
            draining = Draining(rig, lambda: through.forwarder.close())
            await draining.passes(SECONDS - 1)
            assert through.taps[0].ends == []
            assert SECONDS <= await draining.is_done() < SECONDS + 1
            assert through.taps[0].ends == [False]
            assert rig.running_requests == 0
            script.gate.set()
