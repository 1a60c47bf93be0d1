"""HTTP/2 on the data port: many calls on one connection, each by itself, and no client that can hold or hurt it."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    PingFrame,
)
from price_keeper.errors import InvalidRequest, Refusal, UnknownOperation
from price_keeper.exchange import Request, Responder

from tests.fuzz.strict_http2 import frames
from tests.support.port_harness import GatedEcho, echo, on_both_loops, open_port
from tests.support.raw_clients import ConnectionCut, eventually, read_error_message


async def stream(request: Request, responder: Responder) -> None:
    responder.start(200, (), None)
    responder.write(b"of no known ")
    responder.flush()
    await asyncio.sleep(0)
    responder.write(b"length")
    responder.finish()


# What it takes.


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
@on_both_loops
async def test_bodies_of_any_size_pass_both_ways(size: int) -> None:
    """Also larger than a window, which both sides must count alike from the first byte on."""
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        for _ in range(2):
            heard = await client.call(b"/a", b"x" * size)
            assert (heard.status, len(heard.body), heard[b"target"]) == (200, size, b"/a")


@on_both_loops
async def test_settings_announce_limits() -> None:
    async with open_port(echo, streams=7, head_bytes=12345) as rig:
        client = await rig.connect_http2()
        await client.call()
        settings = client.h2.remote_settings
        assert (settings.max_concurrent_streams, settings.max_header_list_size) == (7, 12345)
        assert settings.enable_connect_protocol == 0


@on_both_loops
async def test_responses_arrive_as_they_are_ready() -> None:
    gates = {b"/%d" % number: asyncio.Event() for number in range(20)}

    async def gated(request: Request, responder: Responder) -> None:
        await gates[request.target].wait()
        await echo(request, responder)

    async with open_port(gated) as rig:
        client = await rig.connect_http2()
        streams = {path: client.open(path, ends=False) for path in gates}
        for path, number in streams.items():
            await client.body(number, path)
        for path in reversed(gates):
            gates[path].set()
            assert (await client.answer(streams[path])).body == path


@on_both_loops
async def test_streamed_response_head_request_and_trailers() -> None:
    async with open_port(stream) as rig:
        client = await rig.connect_http2()
        heard = await client.call()
        assert heard.body == b"of no known length"
        assert b"content-length" not in heard
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
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
async def test_tiny_windows_and_frames_only_slow_down() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 100})
        assert (await client.call(b"/a", b"x" * 10_000)).body == b"x" * 10_000


@on_both_loops
async def test_goaway_of_client_lets_calls_finish() -> None:
    """Node's client says goodbye as soon as it is asked to close after the calls in flight."""
    handler = GatedEcho()
    async with open_port(handler) as rig:
        client = await rig.connect_http2()
        number = client.open(ends=False)
        await client.body(number, b"x" * 200_000)
        await eventually(lambda: handler.started)
        ping = PingFrame(0)
        await client.connection.send(GoAwayFrame(0).serialize() + ping.serialize())
        handler.gate.set()
        assert (await client.answer(number)).body == b"x" * 200_000
        await eventually(lambda: rig.open_connections == 0)


# How it refuses.


async def test_failure_resets_one_stream_only() -> None:
    async def fails(request: Request, responder: Responder) -> None:
        if request.target == b"/refused":
            raise UnknownOperation("there is no such thing")
        await echo(request, responder) if request.target != b"/half" else responder.start(200, (), None)
        if request.target != b"/good":
            raise RuntimeError("a secret")

    async with open_port(fails) as rig:
        client = await rig.connect_http2()
        assert (
            read_error_message(await client.call(b"/refused"), 404, "UnknownOperationException")
            == "there is no such thing"
        )
        with pytest.raises(ConnectionCut, match="stream reset with"):
            await client.call(b"/half")
        assert (await client.call(b"/late", b"x")).body == b"x"
        assert (await client.call(b"/good", b"x")).body == b"x"
        await eventually(lambda: len(rig.log.lines) == 2)
        rig.log.lines.clear()


@on_both_loops
async def test_request_refused_early_is_answered_while_it_arrives() -> None:
    """A client of a stream in both directions says nothing more until it has heard something."""

    def no_streams(request: Request) -> Refusal | None:
        return InvalidRequest("no streams") if (request.method, request.target) == (b"POST", b"/both-ways") else None

    async with open_port(echo, refused_at_head=no_streams, unchecked_body_bytes=10) as rig:
        client = await rig.connect_http2()
        number = client.open(b"/both-ways", ends=False)
        await client.body(number, b"x" * 100, ends=False)
        assert read_error_message(await client.answer(number), 400, "ValidationException") == "no streams"
        await client.wait_until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)
        assert (await client.call(body=b"x")).body == b"x"
        for size, status in ((10, 200), (11, 400)):
            number = client.open(b"/both-ways", more=[(b"content-length", b"%d" % size)], ends=False)
            await client.flush()
            if status == 200:
                await client.body(number, b"x" * size)
            assert (await client.answer(number)).status == status


# Streams that end while frames of theirs, or for them, are still on their way.


@on_both_loops
async def test_reset_stream_mid_response_leaves_others_alone() -> None:
    """The client opens the window and resets the stream in one packet; and resets one that is just refused."""
    async with open_port(echo, body_bytes=1_000_000) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.reopens_windows = False
        one, two = [client.open(ends=False) for _ in range(2)]
        for number in (one, two):
            await client.body(number, b"x" * 100)
        await client.wait_until(lambda: len(client.streams[two].body) == 10)
        client.h2.increment_flow_control_window(10, one)
        client.h2.reset_stream(one)
        refused = client.open(more=[(b"content-length", b"1000001")], ends=False)
        client.h2.reset_stream(refused)
        client.h2.increment_flow_control_window(90, two)
        await client.flush()
        assert (await client.answer(two)).body == b"x" * 100


@on_both_loops
async def test_refusal_for_stream_already_gone_is_harmless() -> None:
    """All in one packet."""
    async with open_port(echo, body_bytes=10) as rig:
        client = await rig.connect_http2()
        gone = client.open(more=[(b"content-length", b"11")], ends=False)
        client.h2.reset_stream(gone)
        other = client.open()
        await client.flush()
        assert (await client.answer(other)).status == 200


@on_both_loops
async def test_response_of_known_length_is_two_frames() -> None:
    """Head and body; the body's frame is also the end of the stream."""
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        await client.call(b"/a", b"first")
        received = b""
        client.open(ends=False)
        await client.flush()
        await client.connection.send(DataFrame(3, b"body", flags=["END_STREAM"]).serialize())
        while not received.endswith(b"body"):
            await client.connection.read_more()
            received += client.connection.take_all()
        kinds = [(frame.kind, frame.flags) for frame in frames(received) if frame.stream == 3]
        assert kinds == [(1, 0x4), (0, 0x1)]


@on_both_loops
async def test_abort_before_end_of_known_length_resets_stream() -> None:
    """All bytes were written, but nobody said that they are all: the client must not take them for a whole response."""

    async def aborts(request: Request, responder: Responder) -> None:
        responder.start(200, (), 4)
        responder.write(b"four")
        responder.abort()

    async with open_port(aborts) as rig:
        client = await rig.connect_http2()
        with pytest.raises(ConnectionCut, match="reset with 2"):
            await client.call()


@on_both_loops
async def test_long_head_of_response_is_continued_in_more_frames() -> None:
    async def long(request: Request, responder: Responder) -> None:
        responder.start(200, ((b"x", b"y" * 40_000),), 0)
        responder.finish()

    async with open_port(long) as rig:
        client = await rig.connect_http2()
        assert (await client.call())[b"x"] == b"y" * 40_000


@on_both_loops
async def test_client_that_allows_no_table_reads_responses() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2(settings={SettingCodes.HEADER_TABLE_SIZE: 0})
        client.h2.decoder.max_allowed_table_size = 0
        for _ in range(2):
            assert (await client.call(b"/a", b"x")).body == b"x"
