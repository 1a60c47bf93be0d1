"""Each limit of an HTTP/2 connection: at it all is well, beyond it one stream is refused, or the connection ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from price_keeper.errors import AccessDenied, Refusal
from price_keeper.exchange import Header, Request, Responder
from price_keeper.server import http2_frames
from price_keeper.server.http2 import FRAMES_PER_WINDOW, Http2Connection
from price_keeper.server.http2_frames import MAX_FRAME_BYTES
from price_keeper.server.http2_stream import STREAM_BYTES, Http2Stream
from price_keeper.server.request_building import measure_head
from price_keeper.server.server_limits import HEAD_COST, MAX_COST_PER_TURN, MAX_HEAD_FRAMES

from tests.support.compiled import replaces_a_method
from tests.support.port_harness import GatedEcho, PortHarness, echo, on_both_loops, open_port
from tests.support.raw_clients import ConnectionCut, Http2TestClient, ask, eventually, read_error_message, wait_quietly


def sized(size: int) -> list[Header]:
    """What makes a head of this size, as the protocol counts it."""
    rest: Sequence[Header] = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"here"), (b":path", b"/")]
    taken = sum(len(name) + len(value) + 32 for name, value in rest)
    return [(b"x", b"y" * (size - taken - 33))]


@on_both_loops
async def test_head_size_is_limited() -> None:
    async with open_port(echo, head_bytes=1000) as rig:
        client = await rig.connect_http2()
        assert (await client.call(more=sized(1000))).status == 200
        assert "at most 1000 bytes" in read_error_message(
            await client.call(more=sized(1001)), 400, "ValidationException"
        )
        assert (await client.call(more=sized(1000))).status == 200
        with pytest.raises(ConnectionCut):
            await client.call(more=sized(2001))
        assert client.goodbye is not None
        await eventually(lambda: rig.open_connections == 0)


@on_both_loops
async def test_body_size_is_limited() -> None:
    async with open_port(echo, body_bytes=100_000) as rig:
        client = await rig.connect_http2()
        assert len((await client.call(body=b"x" * 100_000)).body) == 100_000
        number = client.open(more=[(b"content-length", b"100001")], ends=False)
        await client.flush()
        read_error_message(await client.answer(number), 413, "ValidationException")
        await client.wait_until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)  # need not send the rest
        number = client.open(ends=False)
        await client.body(number, b"x" * 100_001, ends=False)
        read_error_message(await client.answer(number), 413, "ValidationException")
        await client.wait_until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)
        assert (await client.call(body=b"x")).body == b"x"


@on_both_loops
async def test_refused_client_is_read_until_it_can_see_refusal() -> None:
    """Node abandons a stream that is reset while more than 10 MB wait, and its caller gets no answer."""

    def nobody(_: Request) -> Refusal:
        return AccessDenied("nobody is served")

    async with open_port(echo, refused_at_head=nobody) as rig:
        client = await rig.connect_http2()
        number = client.open(more=[(b"content-length", b"3000000")], ends=False)
        await client.body(number, b"x" * 1_900_000, ends=False)
        (connection,) = rig.listener._connections
        await eventually(lambda: connection._streams[number]._unsent_body_bytes == 1_100_000)  # type: ignore[attr-defined]
        assert rig.listener.reserved_bytes < STREAM_BYTES + 1000  # none of it is kept
        await client.body(number, b"x" * 100_000, ends=False)
        assert "nobody" in read_error_message(await client.answer(number), 403, "AccessDeniedException")
        await client.wait_until(lambda: client.streams[number].reset == ErrorCodes.NO_ERROR)


def weight(body: int) -> int:
    """Of a request as `open` makes it."""
    return STREAM_BYTES + measure_head(b"/", {b"host": b"here"}) + body


@on_both_loops
async def test_all_requests_share_one_memory_budget() -> None:
    handler = GatedEcho()
    three = weight(600) + weight(300) + weight(100)
    async with open_port(handler, requests_bytes=three) as rig:
        client = await rig.connect_http2()
        held, part = [client.open(ends=False) for _ in range(2)]
        await client.body(held, b"x" * 600)
        await client.body(part, b"x" * 300, ends=False)
        await eventually(lambda: rig.listener.reserved_bytes == three - weight(100))
        assert "memory" in read_error_message(await client.call(body=b"x" * 101), 503, "ServiceUnavailableException")
        await eventually(lambda: rig.listener.reserved_bytes == three - weight(100))
        client.h2.reset_stream(part)
        await client.flush()
        await eventually(lambda: rig.listener.reserved_bytes == weight(600))
        other = await rig.connect()
        await other.send(ask(b"x" * (three - weight(600))))
        read_error_message(await other.answer(), 503, "ServiceUnavailableException")
        handler.gate.set()
        assert len((await client.answer(held)).body) == 600


@on_both_loops
async def test_body_without_room_ends_no_other_call_of_connection() -> None:
    handler = GatedEcho()
    async with open_port(handler, requests_bytes=200_000) as rig:
        client = await rig.connect_http2()
        held, late = [client.open(ends=False) for _ in range(2)]
        await client.body(held, b"x")
        await eventually(lambda: handler.started)
        (connection,) = rig.listener._connections
        connection.data_received(DataFrame(late, b"x" * 16_000).serialize() * 20)  # type: ignore[attr-defined]
        read_error_message(await client.answer(late), 503, "ServiceUnavailableException")
        handler.gate.set()
        assert (await client.answer(held)).body == b"x"
        assert client.goodbye is None


@on_both_loops
async def test_heads_count_in_memory_budget() -> None:
    """The heads of open streams, and one in many frames, the last of which never arrives."""
    async with open_port(echo, requests_bytes=10_000 + 4 * STREAM_BYTES, head_bytes=5000) as rig:
        client = await rig.connect_http2()
        held = [client.open(more=sized(3000), ends=False) for _ in range(3)]
        await client.flush()
        await eventually(lambda: rig.listener.reserved_bytes > 9000 + 3 * STREAM_BYTES)
        heard = await client.call(more=sized(3000))
        assert "memory" in read_error_message(heard, 503, "ServiceUnavailableException")
        assert heard[b"x-price-keeper-request-id"]
        client.h2.reset_stream(held[0])
        await client.flush()
        await eventually(lambda: rig.listener.reserved_bytes < 9000 + 3 * STREAM_BYTES)
        assert (await client.call(more=sized(2000))).status == 200
        slow = await rig.connect_http2()
        await slow.listen()
        await slow.connection.send(HeadersFrame(1, data=b"x" * 2000).serialize())
        await eventually(lambda: rig.listener.reserved_bytes > 8000 + 2 * STREAM_BYTES)
        await slow.connection.send(ContinuationFrame(1, data=b"x" * 6500).serialize())
        await calmed(rig, slow, left=1)


@on_both_loops
async def test_continued_head_is_limited() -> None:
    async with open_port(echo, head_bytes=1000) as rig:
        client = await rig.connect_http2()
        await client.listen()
        await client.connection.send(HeadersFrame(1, data=b"x" * 1500).serialize())
        await eventually(lambda: rig.listener.reserved_bytes == 1500)
        await client.connection.send(ContinuationFrame(1, data=b"x" * 501).serialize())
        await calmed(rig, client)


@on_both_loops
async def test_concurrent_requests_are_bounded() -> None:
    """Over many streams one connection could take every descriptor for calls upstream."""
    handler = GatedEcho()
    async with open_port(handler, requests=2) as rig:
        client = await rig.connect_http2()
        numbers = [client.open() for _ in range(2)]
        await client.flush()
        await eventually(lambda: handler.started == 2)
        assert "2 requests under way" in read_error_message(await client.call(), 503, "ServiceUnavailableException")
        handler.gate.set()
        for number in numbers:
            assert (await client.answer(number)).status == 200


@on_both_loops
async def test_slow_body_and_idle_connection_time_out() -> None:
    async with open_port(echo, body_seconds=120, idle_seconds=75) as rig:
        client = await rig.connect_http2()
        number = client.open(ends=False)
        await client.body(number, b"x", ends=False)
        await eventually(lambda: rig.listener.reserved_bytes)
        await rig.pass_time(119)
        await rig.pass_time(2)
        assert "120 seconds" in read_error_message(await client.answer(number), 400, "ValidationException")
        await rig.pass_time(74)
        assert (await client.call()).status == 200
        await rig.pass_time(74)
        assert rig.open_connections == 1
        await rig.pass_time(2)
        await client.wait_until(lambda: client.goodbye)
        await eventually(lambda: rig.open_connections == 0)


@on_both_loops
async def test_partial_frame_does_not_keep_connection_alive() -> None:
    async with open_port(echo, idle_seconds=75) as rig:
        client = await rig.connect_http2()
        await client.call()
        for byte in PingFrame(0).serialize()[:-1]:
            await client.connection.send(bytes([byte]))
            await wait_quietly(0.005)
            await rig.pass_time(5)
        await client.wait_until(lambda: client.goodbye)
        await eventually(lambda: rig.open_connections == 0)


@on_both_loops
async def test_streams_are_bounded() -> None:
    handler = GatedEcho()
    async with open_port(handler, streams=5) as rig:
        client = await rig.connect_http2()
        await client.listen()
        numbers = [client.open() for _ in range(5)]
        await client.flush()
        await eventually(lambda: handler.started == 5)
        client.h2.remote_settings.max_concurrent_streams = 100
        client.h2.remote_settings.acknowledge()
        client.open()
        await client.flush()
        with pytest.raises(ConnectionCut):
            await client.answer(numbers[0])
        await eventually(lambda: rig.open_connections == 0)
        assert handler.started == 5
        handler.gate.set()


@on_both_loops
async def test_connections_are_bounded() -> None:
    async with open_port(echo, connections=1, surplus_connections=1) as rig:
        first = await rig.connect_http2()
        await first.call()
        second = await rig.connect_http2()
        assert "1 connections already" in read_error_message(
            await second.call(body=b"x"), 503, "ServiceUnavailableException"
        )
        await second.wait_until(lambda: second.goodbye)
        assert (await first.call(body=b"x")).body == b"x"
        await eventually(lambda: rig.open_connections == 1)
        assert len(rig.log.lines) == 1
        rig.log.lines.clear()


async def calmed(rig: PortHarness, client: Http2TestClient, left: int = 0) -> None:
    await client.wait_until(lambda: client.goodbye)
    assert client.goodbye is not None
    assert client.goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await eventually(lambda: rig.open_connections == left)


@on_both_loops
async def test_rapid_resets_close_connection() -> None:
    handler = GatedEcho()
    async with open_port(handler, stream_resets=10, window_seconds=10) as rig:
        client = await rig.connect_http2()
        for round_ in range(2):
            for _ in range(10):
                number = client.open()
                client.h2.reset_stream(number)
            await client.flush()
            await wait_quietly()
            assert rig.open_connections == 1, round_
            await rig.pass_time(11)
        for _ in range(15):
            number = client.open()
            client.h2.reset_stream(number)
        await client.flush()
        await calmed(rig, client)
        handler.gate.set()


FLOODS: dict[str, Callable[[int, int], Frame]] = {
    "ping": lambda _, __: PingFrame(0),
    "answers to pings": lambda _, __: PingFrame(0, flags=["ACK"]),
    "settings": lambda _, __: SettingsFrame(0),
    "answers to settings": lambda _, __: SettingsFrame(0, flags=["ACK"]),
    "priority": lambda number, _: PriorityFrame(number, depends_on=0),
    "unknown": lambda _, __: ExtensionFrame(77, 0),
    "other places": lambda _, __: AltSvcFrame(0, b"here", b"there"),
    "empty": lambda number, _: DataFrame(number),
    "drops": lambda number, _: DataFrame(number, b"x"),
    "window": lambda _, __: WindowUpdateFrame(0, window_increment=1),
    "own window": lambda number, _: WindowUpdateFrame(number, window_increment=1),
    "what is over": lambda _, gone: DataFrame(gone, b"x"),
    "much of what is over": lambda _, gone: DataFrame(gone, b"x" * 64),
    "the end of what is over": lambda _, gone: DataFrame(gone, flags=["END_STREAM"]),
    "its window": lambda _, gone: WindowUpdateFrame(gone, window_increment=1),
    "its reset": lambda _, gone: RstStreamFrame(gone),
}


@pytest.mark.parametrize("kind", FLOODS)
@on_both_loops
async def test_frame_floods_close_connection(kind: str) -> None:
    async with open_port(echo, control_frames=50, window_seconds=10) as rig:
        client = await rig.connect_http2()
        number, gone = client.open(ends=False), client.open(ends=False)
        client.h2.reset_stream(gone)
        await client.flush()
        flood = FLOODS[kind](number, gone).serialize() * 49
        for _ in range(2):
            await client.connection.send(flood)
            await wait_quietly()
            assert rig.open_connections == 1
            await rig.pass_time(11)
        await client.connection.send(flood + flood)
        await calmed(rig, client)


@on_both_loops
async def test_refused_streams_of_a_draining_connection_are_limited() -> None:
    """One open stream keeps it, and the head of each further one is decoded and answered."""
    handler = GatedEcho()
    async with open_port(handler, stream_resets=10, window_seconds=10) as rig:
        client = await rig.connect_http2()
        held = client.open()
        await client.flush()
        await eventually(lambda: handler.started)
        await client.connection.send(GoAwayFrame(0).serialize())
        for rounds in (10, 11):
            for _ in range(rounds):
                client.open()
            await client.flush()
            await wait_quietly()
            if rounds == 10:
                assert rig.open_connections == 1
                await rig.pass_time(11)
        with pytest.raises(ConnectionCut):
            await client.answer(held)
        await eventually(lambda: rig.open_connections == 0)
        handler.gate.set()


@on_both_loops
async def test_rest_of_refused_bodies_is_no_flood() -> None:
    """What a client had sent before it saw the refusal: at most a window of each."""
    async with open_port(echo, control_frames=5, body_bytes=100) as rig:
        client = await rig.connect_http2()
        for _ in range(5):
            number = client.open(more=[(b"content-length", b"1000000")], ends=False)
            await client.flush()
            read_error_message(await client.answer(number), 413, "ValidationException")
            await client.connection.send(DataFrame(number, b"x" * MAX_FRAME_BYTES).serialize() * FRAMES_PER_WINDOW)
        await wait_quietly()
        assert client.goodbye is None
        assert rig.open_connections == 1


@replaces_a_method
@on_both_loops
async def test_flood_is_detected_within_received_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames behind the one that exceeded the limit are not interpreted."""
    taken: list[http2_frames.Frame] = []
    receive = Http2Connection._receive

    def counted(self: Http2Connection, frame: http2_frames.Frame) -> None:
        taken.append(frame)
        receive(self, frame)

    for flood in (PingFrame(0), HeadersFrame(1, b"\x83")):
        handler = GatedEcho()  # a request that is answered at once cannot be abandoned
        async with open_port(handler, control_frames=50, stream_resets=50) as rig:
            client = await rig.connect_http2()
            await wait_quietly()
            pieces = [flood.serialize()] * 1000
            if isinstance(flood, HeadersFrame):
                pieces = [_opened_and_reset(client) for _ in range(500)]
            monkeypatch.setattr(Http2Connection, "_receive", counted)
            (connection,) = rig.listener._connections
            taken.clear()
            connection.data_received(b"".join(pieces))  # type: ignore[attr-defined]
            monkeypatch.undo()
            assert 50 < len(taken) < 110
            await calmed(rig, client)
            handler.gate.set()


def _opened_and_reset(client: Http2TestClient) -> bytes:
    number = client.open()
    client.h2.reset_stream(number)
    return client.h2.data_to_send() or b""


@on_both_loops
async def test_body_in_small_frames_is_no_flood_if_large_enough() -> None:
    async with open_port(echo, control_frames=5) as rig:
        client = await rig.connect_http2()
        number = client.open(ends=False)
        await client.flush()
        await client.connection.send(DataFrame(number, b"x" * 64).serialize() * 100)
        await client.connection.send(DataFrame(number, b"", flags=["END_STREAM"]).serialize())
        assert (await client.answer(number)).body == b"x" * 6400


@on_both_loops
async def test_connection_input_per_turn_is_bounded() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        number = client.open(ends=False)
        await client.flush()
        await eventually(lambda: rig.listener.reserved_bytes > 0)
        (connection,) = rig.listener._connections
        frames = DataFrame(number, b"x" * 100).serialize() * 2000 + DataFrame(number, flags=["END_STREAM"]).serialize()
        connection.data_received(frames)  # type: ignore[attr-defined]
        stream = connection._streams[number]  # type: ignore[attr-defined]
        assert stream._body_bytes <= MAX_COST_PER_TURN
        assert (await client.answer(number)).body == b"x" * 200_000
        await eventually(lambda: rig.listener.reserved_bytes == 0)


@on_both_loops
async def test_justified_window_updates_are_no_flood() -> None:
    async with open_port(echo, control_frames=5) as rig:
        reading = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 100})
        for _ in range(3):
            assert (await reading.call(b"/a", b"x" * 10_000)).body == b"x" * 10_000
        widening = await rig.connect_http2()  # as some clients widen the windows of every stream
        for _ in range(20):
            number = widening.open()
            widening.h2.increment_flow_control_window(1000, number)
            widening.h2.increment_flow_control_window(1000)
            await widening.flush()
            assert (await widening.answer(number)).status == 200


@replaces_a_method
@on_both_loops
async def test_many_window_updates_cause_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none for streams that have nothing to say."""
    pumped: list[int] = []
    pump = Http2Stream.pump
    async with open_port(echo) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.reopens_windows = False
        waiting = [client.open(ends=False) for _ in range(5)]
        silent = [client.open(ends=False) for _ in range(5)]
        for number in waiting:
            await client.body(number, b"x" * 100)
        await client.wait_until(lambda: all(len(client.streams[number].body) == 10 for number in waiting))
        monkeypatch.setattr(Http2Stream, "pump", lambda self: pumped.append(self.id) or pump(self))
        for _ in range(50):
            client.h2.increment_flow_control_window(1)
        client.h2.increment_flow_control_window(10, waiting[0])
        await client.flush()
        await client.wait_until(lambda: len(client.streams[waiting[0]].body) == 20)
        assert sorted(pumped) == waiting
        for number in silent:
            client.h2.reset_stream(number)
        await client.flush()


@on_both_loops
async def test_header_table_of_client_does_not_grow_ours() -> None:
    """Nothing of ours is kept in it, so there is nothing to look through for each header."""
    async with open_port(echo) as rig:
        client = await rig.connect_http2(settings={SettingCodes.HEADER_TABLE_SIZE: 2**32 - 1})
        for number in range(200):
            assert (await client.call(b"/%d" % number)).status == 200
        table = client.h2.decoder.header_table
        assert table.maxsize == 0
        assert not table.dynamic_entries


@on_both_loops
async def test_unread_ping_answers_close_connection() -> None:
    async with open_port(echo, control_frames=10**9, control_backlog_bytes=100_000) as rig:
        client = await rig.connect_http2(receive_buffer=4096)
        with pytest.raises(ConnectionError):  # noqa: PT012 - which of the sends it is does not matter
            for _ in range(1000):
                await client.connection.send(PingFrame(0).serialize() * 1000)
        await eventually(lambda: rig.open_connections == 0)


@pytest.mark.parametrize("mistake", ["a window beyond the largest", "data behind the end"])
@on_both_loops
async def test_streams_reset_for_mistakes_count_as_resets_of_client(mistake: str) -> None:
    """Each began a request that is abandoned, so a client could have any number of them without a reset of its own."""
    handler = GatedEcho()
    async with open_port(handler, stream_resets=10, window_seconds=10) as rig:
        client = await rig.connect_http2()
        await client.listen()
        for rounds in (10, 11):
            for _ in range(rounds):
                number = client.open()
                spoilt: Frame = DataFrame(number, b"x" * 100)
                if mistake == "a window beyond the largest":
                    spoilt = WindowUpdateFrame(number, window_increment=2**31 - 1)
                await client.connection.send((client.h2.data_to_send() or b"") + spoilt.serialize())
            await wait_quietly()
            if rounds == 10:
                assert rig.open_connections == 1
                await rig.pass_time(11)
        await calmed(rig, client)
        handler.gate.set()


@on_both_loops
async def test_head_of_too_many_frames_ends_connection_though_they_are_empty() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        await client.listen()
        whole = HeadersFrame(1, data=Encoder().encode(sized(300))).serialize()
        more = ContinuationFrame(1).serialize()
        await client.connection.send(whole + more * (MAX_HEAD_FRAMES - 1))
        await wait_quietly()
        assert rig.open_connections == 1
        await client.connection.send(more)
        await calmed(rig, client)


@on_both_loops
async def test_requests_with_large_heads_of_few_bytes_are_begun_over_several_turns() -> None:
    """A header that is in the table already takes one byte."""
    handler = GatedEcho()
    handler.gate.set()
    async with open_port(handler) as rig:
        client = await rig.connect_http2()
        cookies = [(b"cookie", b"c" * 200)] * 200
        await client.call(more=cookies)
        handler.started = 0
        numbers = [client.open(more=cookies) for _ in range(20)]
        data = client.h2.data_to_send() or b""
        assert len(data) < 20 * 300
        (connection,) = rig.listener._connections
        connection.data_received(data)  # type: ignore[attr-defined]
        assert handler.started == MAX_COST_PER_TURN // (200 * (6 + 200 + 32)) + 1
        assert {(await client.answer(number)).status for number in numbers} == {200}


@on_both_loops
async def test_requests_of_one_connection_are_begun_over_several_turns() -> None:
    """Two thousand of them fit into one packet."""
    begun = 0

    async def counted(request: Request, responder: Responder) -> None:
        nonlocal begun
        begun += 1
        await echo(request, responder)

    async with open_port(counted) as rig:
        client = await rig.connect_http2()
        await client.listen()
        numbers = [client.open() for _ in range(200)]
        data = client.h2.data_to_send() or b""
        (connection,) = rig.listener._connections
        connection.data_received(data)  # type: ignore[attr-defined]
        assert 0 < begun <= MAX_COST_PER_TURN // HEAD_COST + 1
        assert rig.listener.reserved_bytes > 0  # what is left for later turns
        assert {(await client.answer(number)).status for number in numbers} == {200}
        assert rig.listener.reserved_bytes == 0
