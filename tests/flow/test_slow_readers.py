"""Callers that read slowly: a reader, however slow, gets everything; one that stops reading is cut in the end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, PingFrame
from price_keeper.exchange import Request, Responder

from tests.support.port_harness import PortHarness, echo, on_both_loops, open_port
from tests.support.raw_clients import ConnectionCut, Http2TestClient, RawConnection, ask, eventually, wait_quietly


async def flood(request: Request, responder: Responder) -> None:
    size = int(request.target[1:])
    responder.start(200, (), size)
    responder.write(b"x" * size)
    responder.finish()


@pytest.mark.parametrize("size", [60_000, 300_000])
@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
@on_both_loops
async def test_stalled_reader_is_cut_and_reading_one_is_not(size: int, more: bytes) -> None:
    """Also when the response is finished and its rest fits into a buffer, which causes no event."""
    async with open_port(flood, stalled_seconds=300, idle_seconds=75, write_buffer_bytes=64 * 1024) as rig:
        slow, stalled = [await rig.connect(receive_buffer=4096) for _ in range(2)]
        await eventually(lambda: rig.open_connections == 2)
        rig.shrink_send_buffers()
        for wire in (slow, stalled):
            await wire.send(ask(path=b"/%d" % size, more=more))
        before, left = None, [0]
        while left != before:  # until the kernel takes no more
            await wait_quietly()
            before, left = left, [each._transport.get_write_buffer_size() for each in rig.listener._connections]
        assert sum(size > 0 for size in left) == 2
        await rig.pass_time(1)
        for _ in range(2):
            await rig.pass_time(120)
            while len(slow.received) < size / 2 and await slow.read_more():
                pass
        assert rig.open_connections == 2
        assert len((await slow.answer()).body) == size
        await rig.pass_time(70)
        assert await stalled.read_ending() == "reset"


async def read_slowly(rig: PortHarness, wire: RawConnection, size: int) -> None:
    """Far less than a buffer holds in the time that a reader may stall, again and again."""
    while len(wire.received) < size:
        await rig.pass_time(100)
        until = len(wire.received) + 20_000
        while len(wire.received) < min(until, size):
            assert await wire.read_more(4096)
        await wait_quietly(0.01)  # until the kernel has told the other side


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
@on_both_loops
async def test_slow_steady_reader_is_not_cut(more: bytes) -> None:
    async with open_port(flood, stalled_seconds=300, write_buffer_bytes=64 * 1024) as rig:
        wire = await rig.connect(receive_buffer=4096)
        await eventually(lambda: rig.open_connections == 1)
        rig.shrink_send_buffers()
        await wire.send(ask(path=b"/300000", more=more))
        await wait_quietly()
        await read_slowly(rig, wire, 300_000)


@on_both_loops
async def test_half_closed_late_reader_gets_pipelined_responses() -> None:
    async with open_port(flood, write_buffer_bytes=64 * 1024) as rig:
        wire = await rig.connect(receive_buffer=4096)
        await eventually(lambda: rig.open_connections == 1)
        rig.shrink_send_buffers()
        await wire.send(ask(path=b"/300000") * 3)
        await eventually(lambda: any(getattr(each, "is_write_paused", False) for each in rig.listener._connections))
        wire.half_close()
        await wait_quietly()
        for _ in range(3):
            assert len((await wire.answer()).body) == 300_000
        assert await wire.read_ending() == "closed"


class Waited:
    """A flow that is notified how long its reader has read nothing."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def on_stalled(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def on_disconnected(self) -> None: ...


@on_both_loops
async def test_unread_seconds_are_reported_to_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, gate = Waited(), asyncio.Event()

    async def attached(request: Request, responder: Responder) -> None:
        responder.attach(flow)
        responder.start(200, (), 1_000_000)
        responder.write(b"x" * 1_000_000)
        await gate.wait()
        responder.finish()

    async with open_port(attached, stalled_seconds=1000) as rig:
        wire = await rig.connect(receive_buffer=4096)
        await eventually(lambda: rig.open_connections == 1)
        rig.shrink_send_buffers()
        await wire.send(ask())
        await wait_quietly()
        await rig.pass_time(1)
        for _ in range(3):
            await rig.pass_time(100)
        await read_slowly(rig, wire, 60_000)
        assert flow.seconds[1:4] == [100.0, 200.0, 300.0]
        assert max(flow.seconds[5:]) <= 100
        gate.set()


@on_both_loops
async def test_closed_window_holds_stream_for_limited_time() -> None:
    async with open_port(echo, stalled_seconds=300, idle_seconds=75) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.reopens_windows = False
        number = client.open(ends=False)
        await client.body(number, b"x" * 100)
        await client.wait_until(lambda: len(client.streams[number].body) == 10)
        await rig.pass_time(290)
        client.h2.increment_flow_control_window(10, number)
        await client.flush()
        await client.wait_until(lambda: len(client.streams[number].body) == 20)
        await rig.pass_time(299)
        await client.connection.send(PingFrame(0).serialize())  # which is not reading
        await wait_quietly()
        assert client.streams[number].reset is None
        await rig.pass_time(2)
        with pytest.raises(ConnectionCut, match="stream reset"):
            await client.answer(number)
        assert rig.open_connections == 1


async def streamed_flood(request: Request, responder: Responder) -> None:
    size = int(request.target[1:])
    responder.start(200, (), None)
    responder.write(b"x" * size)
    responder.finish()


async def flooded(rig: PortHarness, *paths: bytes) -> Http2TestClient:
    """A client whose windows are wide open, and whose socket is not read."""
    client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1}, receive_buffer=4096)
    await eventually(lambda: rig.open_connections)
    rig.shrink_send_buffers()
    client.h2.increment_flow_control_window(2**30)
    for path in paths:
        client.open(path)
    await client.flush()
    await wait_quietly(0.1)
    assert rig.open_connections == 1
    await rig.pass_time(1)
    return client


@on_both_loops
async def test_unread_connection_is_cut_despite_pings() -> None:
    async with open_port(streamed_flood, stalled_seconds=300) as rig:
        client = await flooded(rig, b"/10000000")
        for _ in range(9):  # the kernels settle first
            with suppress(ConnectionError):
                await client.connection.send(PingFrame(0).serialize())
            await wait_quietly(0.01)
            await rig.pass_time(100)
        await eventually(lambda: rig.open_connections == 0)


@on_both_loops
async def test_slowly_read_connection_is_not_cut() -> None:
    """Nor any of its streams, however long it is before their turn comes."""
    async with open_port(streamed_flood, stalled_seconds=300, write_buffer_bytes=16 * 1024) as rig:
        client = await flooded(rig, b"/100000", b"/100001")
        streams = client.streams.values()
        for size in range(20_000, 200_001, 20_000):
            await rig.pass_time(100)
            while sum(len(stream.body) for stream in streams) < size:
                assert await client.listen(4096)
            await wait_quietly(0.01)  # until the kernel has told the other side
        await client.wait_until(lambda: all(stream.is_ended for stream in streams))
        assert [len(stream.body) for stream in client.streams.values()] == [100_000, 100_001]


@on_both_loops
async def test_reader_stalled_at_end_of_last_response_is_cut() -> None:
    """Although there was more to write for a while, and then so little that no event follows."""
    async with open_port(streamed_flood, lingering_seconds=5, write_buffer_bytes=64 * 1024) as rig:
        client = await flooded(rig, b"/150000")
        await client.connection.send(GoAwayFrame(0).serialize())
        (connection,) = rig.listener._connections
        while not connection._is_closed or connection.is_write_paused:
            assert await client.listen(4096)
        for _ in range(20):  # the kernels settle first
            await wait_quietly(0.01)
            await rig.pass_time(6)
        await eventually(lambda: rig.open_connections == 0)
