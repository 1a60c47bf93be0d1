"""Callers that read slowly make upstream wait; callers that leave do not keep the answer from being counted."""

from __future__ import annotations

import asyncio
import random

import pytest
from h2.settings import SettingCodes
from price_keeper.exchange import Request, Responder
from price_keeper.tasks import switch_to_task
from price_keeper.upstream import relay

from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    ScriptedUpstream,
    UpstreamExchange,
    build_response,
    on_both_loops,
    open_forwarding_port,
    upstream,
)
from tests.support.raw_clients import Http2TestClient, RawConnection, ask, descriptors, eventually, wait_quietly

BIG = random.Random(7).randbytes(8_000_000)
IN_FLIGHT = 64 * 1024 + 256 * 1024 + 64 * 1024  # our buffer, one read, and the kernel's buffer


def chunks(body: bytes, size: int = 50_000) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


class Source:
    """Upstream that sends a part of its answer at once and the rest on command."""

    def __init__(self, answer: bytes, first: int) -> None:
        self.answer = answer
        self.first = first
        self.goes_on = asyncio.Event()

    async def __call__(self, exchange: UpstreamExchange) -> None:
        await exchange.send(self.answer[: self.first])
        await self.goes_on.wait()
        await exchange.send(self.answer[self.first :])


class Reader:
    """A caller of either protocol that reads nothing unless asked."""

    def __init__(self, client: RawConnection | Http2TestClient) -> None:
        self.client = client

    @classmethod
    async def begins(cls, rig: PortHarness, protocol: str) -> Reader:
        if protocol == "h1":
            wire = await rig.connect(receive_buffer=4096)
            await eventually(lambda: rig.open_connections)
            rig.shrink_send_buffers()
            await wire.send(ask())
            return cls(wire)
        client = await rig.connect_http2(receive_buffer=4096, settings={SettingCodes.INITIAL_WINDOW_SIZE: 30_000})
        await eventually(lambda: rig.open_connections)
        rig.shrink_send_buffers()
        client.open()
        await client.flush()
        return cls(client)

    async def body(self) -> bytes:
        if isinstance(self.client, RawConnection):
            return (await self.client.answer()).body
        return (await self.client.answer(1)).body

    async def begun(self) -> None:
        """Something of the body is here."""
        if isinstance(self.client, RawConnection):
            await self.client.read_more(1000)
        else:
            await self.client.wait_until(lambda: self.client.streams[1].body)

    async def leaves(self, how: str) -> None:
        if how == "stream":
            assert isinstance(self.client, Http2TestClient)
            self.client.h2.reset_stream(1)
            await self.client.flush()
            return
        wire = self.client if isinstance(self.client, RawConnection) else self.client.connection
        wire.reset() if how == "reset" else wire.close()


WAYS = [("h1", "close"), ("h1", "reset"), ("h2", "stream"), ("h2", "close"), ("h2", "reset")]


def is_paused(through: ForwardingHandler) -> bool:
    return any(each._is_paused for each in through.busy_connections)


@pytest.mark.parametrize("answer", [build_response(BIG), chunks(BIG)], ids=["length", "chunks"])
@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_slow_reader_pauses_upstream_and_gets_everything(protocol: str, answer: bytes) -> None:
    source = Source(answer, len(answer))
    source.goes_on.set()
    through = ForwardingHandler()
    async with upstream(source, send_buffer=100_000) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            reader = await Reader.begins(rig, protocol)
            await eventually(lambda: is_paused(through))
            await wait_quietly()
            seen = len(through.taps[0].received)
            assert 0 < seen < IN_FLIGHT
            await rig.pass_time(290)  # however long: this is no silence of Bedrock's
            assert len(through.taps[0].received) == seen
            assert await reader.body() == BIG
            assert (through.taps[0].received, through.taps[0].ends) == (BIG, [True])
            await eventually(lambda: len(through.idle_connections) == 1)
            again = await rig.connect()
            await again.send(ask())
            assert (await again.answer()).body == BIG
            assert server.connections == 1


@on_both_loops
async def test_write_stall_is_measured_from_resumed_reading() -> None:
    source = Source(build_response(BIG), len(BIG) // 2)
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through, stalled_seconds=1000) as rig:
            reader = await Reader.begins(rig, "h1")
            await eventually(lambda: is_paused(through))
            await rig.pass_time(299)
            assert isinstance(reader.client, RawConnection)
            while is_paused(through):
                await reader.client.read_more()
            await rig.pass_time(299)
            source.goes_on.set()
            assert await reader.body() == BIG


@on_both_loops
async def test_streams_of_one_connection_wait_independently() -> None:
    source = Source(build_response(BIG), len(BIG) + 1000)
    source.goes_on.set()
    through = ForwardingHandler()
    async with upstream(source, send_buffer=100_000) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 30_000})
            client.h2.increment_flow_control_window(2**30)
            client.reopens_windows = False
            slow, quick = client.open(), client.open()
            await client.flush()
            await client.wait_until(lambda: all(len(client.streams[each].body) == 30_000 for each in (slow, quick)))
            await eventually(lambda: sum(each._is_paused for each in through.busy_connections) == 2)
            for _ in range(1 + len(BIG) // 1_000_000):
                client.h2.increment_flow_control_window(1_000_000, quick)
            await client.flush()
            assert (await client.answer(quick)).body == BIG
            assert len(client.streams[slow].body) == 30_000
            assert min(len(tap.received) for tap in through.taps) < IN_FLIGHT
            client.h2.increment_flow_control_window(len(BIG), slow)
            await client.flush()
            assert (await client.answer(slow)).body == BIG


async def left(rig: PortHarness, through: ForwardingHandler, protocol: str, how: str, *, paused: bool) -> None:
    reader = await Reader.begins(rig, protocol)
    if paused:
        await eventually(lambda: is_paused(through))
    else:
        await reader.begun()
    await reader.leaves(how)


async def nothing_leaks(rig: PortHarness, through: ForwardingHandler, server: ScriptedUpstream, before: int) -> None:
    rig.disconnect_clients()
    await rig.wait_until_empty()
    assert through.busy_connections == []
    await eventually(lambda: server.open_connections == len(through.idle_connections))
    await eventually(lambda: descriptors() <= before + 2 * len(through.idle_connections))


@pytest.mark.parametrize(("protocol", "how"), WAYS)
@pytest.mark.parametrize("paused", [False, True])
@on_both_loops
async def test_response_of_disconnected_caller_is_drained(protocol: str, how: str, paused: bool) -> None:
    source = Source(chunks(BIG), len(BIG) // 2 if paused else 1000)
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await rig.pass_time(0)
            before = descriptors()
            await left(rig, through, protocol, how, paused=paused)
            await wait_quietly(0.01)
            source.goes_on.set()
            await eventually(lambda: through.outcomes)
            assert through.outcomes[0].is_whole
            assert (through.taps[0].received, through.taps[0].ends) == (BIG, [True])
            assert len(through.idle_connections) == 1
            await nothing_leaks(rig, through, server, before)


@pytest.mark.parametrize(("protocol", "how"), WAYS)
@on_both_loops
async def test_drain_of_disconnected_caller_is_bounded_in_time(protocol: str, how: str) -> None:
    source = Source(chunks(BIG), len(BIG) // 2)
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await rig.pass_time(0)
            before = descriptors()
            await left(rig, through, protocol, how, paused=True)
            await eventually(lambda: len(through.taps[0].received) > len(BIG) // 2 - 100_000)
            await rig.pass_time(relay.DRAIN_SECONDS - 1)
            assert through.taps[0].ends == []
            await rig.pass_time(2)
            await eventually(lambda: through.outcomes)
            assert (through.outcomes[0].is_whole, through.taps[0].ends) == (False, [False])
            assert through.idle_connections == []
            source.goes_on.set()
            await nothing_leaks(rig, through, server, before)


@pytest.mark.parametrize(("protocol", "how"), WAYS)
@on_both_loops
async def test_drain_of_disconnected_caller_is_bounded_in_bytes(
    protocol: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DRAIN_BYTES", 1_000_000)
    source = Source(chunks(BIG), len(chunks(BIG)))
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await rig.pass_time(0)
            before = descriptors()
            await left(rig, through, protocol, how, paused=True)
            await eventually(lambda: through.outcomes)
            assert (through.outcomes[0].is_whole, through.taps[0].ends) == (False, [False])
            assert len(through.taps[0].received) < 1_000_000 + 2 * IN_FLIGHT
            source.goes_on.set()
            await nothing_leaks(rig, through, server, before)


@pytest.mark.parametrize(("protocol", "how"), WAYS)
@on_both_loops
async def test_drain_counts_chunk_extensions(protocol: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of body and a kilobyte of extension in each chunk: the body alone would take a thousand times as long."""
    monkeypatch.setattr(relay, "DRAIN_BYTES", 1_000_000)
    extended = b"1;%b\r\nx\r\n" % (b"e" * 1000) * 8000
    answer = chunks(BIG[:1_000_000])[: -len(b"0\r\n\r\n")] + extended
    source = Source(answer, len(answer))
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            await rig.pass_time(0)
            before = descriptors()
            await left(rig, through, protocol, how, paused=True)
            await eventually(lambda: through.outcomes)
            assert (through.outcomes[0].is_whole, through.taps[0].ends) == (False, [False])
            assert len(through.taps[0].received) < 1_000_000 + 1500
            source.goes_on.set()
            await nothing_leaks(rig, through, server, before)


@pytest.mark.parametrize(("protocol", "how"), [way for way in WAYS if way != ("h1", "close")])
@on_both_loops
async def test_caller_leaving_before_response_is_counted(protocol: str, how: str) -> None:
    source = Source(chunks(b"a small answer"), 0)
    through = ForwardingHandler()
    async with upstream(source) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            reader = await Reader.begins(rig, protocol)
            await eventually(lambda: server.calls)
            await reader.leaves(how)
            await eventually(lambda: rig.open_connections == (1 if how == "stream" else 0))
            source.goes_on.set()
            await eventually(lambda: through.outcomes)
            assert through.taps[0].received == b"a small answer"


@pytest.mark.parametrize(("protocol", "how"), [way for way in WAYS if way != ("h1", "close")])
@on_both_loops
async def test_caller_leaving_before_call_is_sent_causes_no_call(protocol: str, how: str) -> None:
    class Late(ForwardingHandler):
        async def __call__(self, request: Request, responder: Responder) -> None:
            await switch_to_task()  # where `asyncio.timeout` works
            begun.set()
            await eventually(lambda: responder.is_disconnected)
            await super().__call__(request, responder)

    begun = asyncio.Event()
    source = Source(build_response(b"x"), 0)
    async with upstream(source) as server:
        through = Late(server.endpoint)
        async with open_forwarding_port(through) as rig:
            reader = await Reader.begins(rig, protocol)
            await begun.wait()
            await reader.leaves(how)
            await eventually(lambda: not rig.running_requests)
            assert (server.calls, len(through.idle_connections)) == ([], 1)


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_response_that_ended_in_order_does_not_count_its_caller_as_disconnected(protocol: str) -> None:
    class Kept(ForwardingHandler):
        async def __call__(self, request: Request, responder: Responder) -> None:
            responders.append(responder)
            await super().__call__(request, responder)

    responders: list[Responder] = []
    source = Source(build_response(b"x"), 0)
    source.goes_on.set()
    async with upstream(source) as server, open_forwarding_port(through := Kept(server.endpoint)) as rig:
        reader = await Reader.begins(rig, protocol)
        await eventually(lambda: through.outcomes and not rig.running_requests)
        assert not responders[0].is_disconnected
        await reader.leaves("close")
