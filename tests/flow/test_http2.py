"""HTTP/2 on the data port: many calls on one connection, each by itself, and no client that can hold or hurt it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, ExtensionFrame, GoAwayFrame, PingFrame, SettingsFrame

from proxy.errors import UnknownOperation
from proxy.exchange import Header, Request, Responder
from tests.support.rig import Rig, echo, on_both_loops, port
from tests.support.wire import CutError, Http2Wire, ask, eventually, quiet, said


async def stream(request: Request, responder: Responder) -> None:
    responder.start(200, (), None)
    responder.write(b"of no known ")
    responder.flush()
    await asyncio.sleep(0)
    responder.write(b"length")
    responder.finish()


class Gated:
    """Echoes once it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0

    async def __call__(self, request: Request, responder: Responder) -> None:
        self.begun += 1
        await self.gate.wait()
        await echo(request, responder)


# What it takes.


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
@on_both_loops
async def test_bodies_of_any_size_both_ways(size: int) -> None:
    """Also larger than a window, which both sides must count alike from the first byte on."""
    async with port(echo) as rig:
        client = await rig.connect2()
        for _ in range(2):
            heard = await client.call(b"/a", b"x" * size)
            assert (heard.status, len(heard.body), heard[b"target"]) == (200, size, b"/a")


@on_both_loops
async def test_it_says_what_it_takes() -> None:
    async with port(echo, streams=7, head_bytes=12345) as rig:
        client = await rig.connect2()
        await client.call()
        settings = client.h2.remote_settings
        assert (settings.max_concurrent_streams, settings.max_header_list_size) == (7, 12345)
        assert settings.enable_connect_protocol == 0


@on_both_loops
async def test_answers_come_as_they_are_ready() -> None:
    gates = {b"/%d" % number: asyncio.Event() for number in range(20)}

    async def gated(request: Request, responder: Responder) -> None:
        await gates[request.target].wait()
        await echo(request, responder)

    async with port(gated) as rig:
        client = await rig.connect2()
        streams = {path: client.open(path, ends=False) for path in gates}
        for path, number in streams.items():
            await client.body(number, path)
        for path in reversed(gates):
            gates[path].set()
            assert (await client.answer(streams[path])).body == path


@on_both_loops
async def test_streams_and_head_and_trailers() -> None:
    async with port(stream) as rig:
        client = await rig.connect2()
        heard = await client.call()
        assert heard.body == b"of no known length"
        assert b"content-length" not in heard
    async with port(echo) as rig:
        client = await rig.connect2()
        number = client.open(method=b"HEAD", ends=False)
        await client.body(number, b"hidden")
        heard = await client.answer(number)
        assert (heard[b"content-length"], heard.body) == (b"6", b"")
        number = client.open(ends=False)
        await client.body(number, b"shown", ends=False)
        client.h2.send_headers(number, [(b"trailer", b"x")], end_stream=True)
        await client.flush()
        assert (await client.answer(number)).body == b"shown"


@on_both_loops
async def test_tiny_windows_and_frames_only_slow_it_down() -> None:
    async with port(echo) as rig:
        client = await rig.connect2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 100})
        assert (await client.call(b"/a", b"x" * 10_000)).body == b"x" * 10_000


@on_both_loops
async def test_a_goodbye_of_the_client_lets_its_calls_end() -> None:
    """Node's client says goodbye at once when it is told to close after the calls under way."""
    handler = Gated()
    async with port(handler) as rig:
        client = await rig.connect2()
        number = client.open(ends=False)
        await client.body(number, b"x" * 200_000)
        await eventually(lambda: handler.begun)
        ping = PingFrame(0)
        await client.wire.send(GoAwayFrame(0).serialize() + ping.serialize())
        handler.gate.set()
        assert (await client.answer(number)).body == b"x" * 200_000
        await eventually(lambda: rig.open == 0)


# How it refuses.


async def test_faults_break_off_one_stream_alone() -> None:
    async def fails(request: Request, responder: Responder) -> None:
        if request.target == b"/refused":
            raise UnknownOperation("there is no such thing")
        await echo(request, responder) if request.target != b"/half" else responder.start(200, (), None)
        if request.target != b"/good":
            raise RuntimeError("a secret")

    async with port(fails) as rig:
        client = await rig.connect2()
        assert said(await client.call(b"/refused"), 404, "UnknownOperationException") == "there is no such thing"
        with pytest.raises(CutError, match="stream reset with"):
            await client.call(b"/half")
        assert (await client.call(b"/late", b"x")).body == b"x"
        assert (await client.call(b"/good", b"x")).body == b"x"
        await eventually(lambda: len(rig.log.lines) == 2)
        rig.log.lines.clear()


def sized(size: int) -> list[Header]:
    """What makes a head of this size, as the protocol counts it."""
    rest: Sequence[Header] = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"here"), (b":path", b"/")]
    taken = sum(len(name) + len(value) + 32 for name, value in rest)
    return [(b"x", b"y" * (size - taken - 33))]


@on_both_loops
async def test_a_head_has_so_many_bytes() -> None:
    async with port(echo, head_bytes=1000) as rig:
        client = await rig.connect2()
        assert (await client.call(more=sized(1000))).status == 200
        assert "at most 1000 bytes" in said(await client.call(more=sized(1001)), 400, "ValidationException")
        assert (await client.call(more=sized(1000))).status == 200
        with pytest.raises(CutError):
            await client.call(more=sized(2001))
        assert client.goodbye is not None
        await eventually(lambda: rig.open == 0)


@on_both_loops
async def test_a_body_has_so_many_bytes() -> None:
    async with port(echo, body_bytes=100_000) as rig:
        client = await rig.connect2()
        assert len((await client.call(body=b"x" * 100_000)).body) == 100_000
        number = client.open(more=[(b"content-length", b"100001")], ends=False)
        await client.flush()
        said(await client.answer(number), 413, "ValidationException")
        await client.until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)  # need not send the rest
        number = client.open(ends=False)
        await client.body(number, b"x" * 100_001, ends=False)
        said(await client.answer(number), 413, "ValidationException")
        await client.until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)
        assert (await client.call(body=b"x")).body == b"x"


@on_both_loops
async def test_the_bodies_of_all_requests_share_one_room() -> None:
    handler = Gated()
    async with port(handler, bodies_bytes=1000) as rig:
        client = await rig.connect2()
        held, part = [client.open(ends=False) for _ in range(2)]
        await client.body(held, b"x" * 600)
        await client.body(part, b"x" * 300, ends=False)
        await eventually(lambda: rig.listener.held_bytes == 900)
        assert "memory" in said(await client.call(body=b"x" * 101), 503, "ServiceUnavailableException")
        assert rig.listener.held_bytes == 900
        client.h2.reset_stream(part)
        await client.flush()
        await eventually(lambda: rig.listener.held_bytes == 600)
        other = await rig.connect()
        await other.send(ask(b"x" * 401))
        said(await other.answer(), 503, "ServiceUnavailableException")
        handler.gate.set()
        assert len((await client.answer(held)).body) == 600


@on_both_loops
async def test_a_slow_body_and_an_idle_connection() -> None:
    async with port(echo, body_seconds=120, idle_seconds=75) as rig:
        client = await rig.connect2()
        number = client.open(ends=False)
        await client.body(number, b"x", ends=False)
        await eventually(lambda: rig.listener.held_bytes)
        await rig.pass_time(119)
        await rig.pass_time(2)
        assert "120 seconds" in said(await client.answer(number), 400, "ValidationException")
        await rig.pass_time(74)
        assert (await client.call()).status == 200
        await rig.pass_time(74)
        assert rig.open == 1
        await rig.pass_time(2)
        await client.until(lambda: client.goodbye)
        await eventually(lambda: rig.open == 0)


@on_both_loops
async def test_too_many_streams() -> None:
    handler = Gated()
    async with port(handler, streams=5) as rig:
        client = await rig.connect2()
        await client.listen()
        numbers = [client.open() for _ in range(5)]
        await client.flush()
        await eventually(lambda: handler.begun == 5)
        client.h2.remote_settings.max_concurrent_streams = 100
        client.h2.remote_settings.acknowledge()
        client.open()
        await client.flush()
        with pytest.raises(CutError):
            await client.answer(numbers[0])
        await eventually(lambda: rig.open == 0)
        assert handler.begun == 5
        handler.gate.set()


@on_both_loops
async def test_too_many_connections() -> None:
    async with port(echo, connections=1, surplus=1) as rig:
        first = await rig.connect2()
        await first.call()
        second = await rig.connect2()
        assert "1 connections already" in said(await second.call(body=b"x"), 503, "ServiceUnavailableException")
        await second.until(lambda: second.goodbye)
        assert (await first.call(body=b"x")).body == b"x"
        await eventually(lambda: rig.open == 1)


async def calmed(rig: Rig, client: Http2Wire) -> None:
    await client.until(lambda: client.goodbye)
    assert client.goodbye is not None
    assert client.goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await eventually(lambda: rig.open == 0)


@on_both_loops
async def test_rapid_resets() -> None:
    handler = Gated()
    async with port(handler, resets=10, window_seconds=10) as rig:
        client = await rig.connect2()
        for round_ in range(2):
            for _ in range(10):
                number = client.open()
                client.h2.reset_stream(number)
            await client.flush()
            await quiet()
            assert rig.open == 1, round_
            await rig.pass_time(11)
        for _ in range(11):
            number = client.open()
            client.h2.reset_stream(number)
        await client.flush()
        await calmed(rig, client)
        handler.gate.set()


@pytest.mark.parametrize("kind", ["ping", "settings", "unknown", "empty"])
@on_both_loops
async def test_floods(kind: str) -> None:
    async with port(echo, controls=50, window_seconds=10) as rig:
        client = await rig.connect2()
        number = client.open(ends=False)
        await client.flush()
        empty = DataFrame(number)
        frame = {"ping": PingFrame(0), "settings": SettingsFrame(0), "empty": empty, "unknown": ExtensionFrame(77, 0)}
        flood = frame[kind].serialize() * 49
        for _ in range(2):
            await client.wire.send(flood)
            await quiet()
            assert rig.open == 1
            await rig.pass_time(11)
        await client.wire.send(flood + flood)
        await calmed(rig, client)


@on_both_loops
async def test_answers_to_pings_that_nobody_reads() -> None:
    async with port(echo, controls=10**9, control_backlog_bytes=100_000) as rig:
        client = await rig.connect2(receive_buffer=4096)
        with pytest.raises(ConnectionError):  # noqa: PT012 - which of the sends it is does not matter
            for _ in range(1000):
                await client.wire.send(PingFrame(0).serialize() * 1000)
        await eventually(lambda: rig.open == 0)


# Streams that are no more, when the library knows it and we are yet to hear of it.


@on_both_loops
async def test_one_streams_reset_in_the_middle_of_its_answer_leaves_the_others_alone() -> None:
    """The client opens the window and resets the stream in one packet; and resets one that is just refused."""
    async with port(echo, body_bytes=1_000_000) as rig:
        client = await rig.connect2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.reads_on = False
        one, two = [client.open(ends=False) for _ in range(2)]
        for number in (one, two):
            await client.body(number, b"x" * 100)
        await client.until(lambda: len(client.streams[two].body) == 10)
        client.h2.increment_flow_control_window(10, one)
        client.h2.reset_stream(one)
        refused = client.open(more=[(b"content-length", b"1000001")], ends=False)
        client.h2.reset_stream(refused)
        client.h2.increment_flow_control_window(90, two)
        await client.flush()
        assert (await client.answer(two)).body == b"x" * 100


@on_both_loops
async def test_windows_that_never_open_hold_a_stream_for_a_while_only() -> None:
    async with port(echo, stalled_seconds=300, idle_seconds=75) as rig:
        client = await rig.connect2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.reads_on = False
        number = client.open(ends=False)
        await client.body(number, b"x" * 100)
        await client.until(lambda: len(client.streams[number].body) == 10)
        await rig.pass_time(290)
        client.h2.increment_flow_control_window(10, number)
        await client.flush()
        await client.until(lambda: len(client.streams[number].body) == 20)
        await rig.pass_time(299)
        await client.wire.send(PingFrame(0).serialize())  # which is not reading
        await quiet()
        assert client.streams[number].reset is None
        await rig.pass_time(2)
        with pytest.raises(CutError, match="stream reset"):
            await client.answer(number)
        assert rig.open == 1


@on_both_loops
async def test_a_connection_that_nobody_reads_is_cut_though_it_pings() -> None:
    async def flood(request: Request, responder: Responder) -> None:
        responder.start(200, (), None)
        responder.write(b"x" * 10_000_000)
        responder.finish()

    async with port(flood, stalled_seconds=300) as rig:
        client = await rig.connect2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1}, receive_buffer=4096)
        client.h2.increment_flow_control_window(2**30)
        client.open()
        await client.flush()
        await quiet(0.1)
        assert rig.open == 1
        for _ in range(4):
            await client.wire.send(PingFrame(0).serialize())
            await quiet(0.01)
            await rig.pass_time(100)
        await eventually(lambda: rig.open == 0)
