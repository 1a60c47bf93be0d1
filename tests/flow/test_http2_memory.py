"""What an HTTP/2 connection may have in memory before anybody has shown a token: frames, and streams open or past."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, ExtensionFrame, Frame, HeadersFrame, PingFrame, SettingsFrame
from price_keeper.errors import AccessDenied, Refusal
from price_keeper.exchange import Request
from price_keeper.server.http2_stream import STREAM_BYTES
from price_keeper.server.server_limits import CONNECTION_BYTES, MAX_REMEMBERED_STREAMS

from tests.support.port_harness import echo, on_both_loops, open_port
from tests.support.raw_clients import eventually, wait_quietly

FRAME_BYTES = 16_384  # SETTINGS_MAX_FRAME_SIZE, which the port leaves at its default


@pytest.mark.parametrize("kind", [DataFrame, HeadersFrame, SettingsFrame, PingFrame, ExtensionFrame])
@on_both_loops
async def test_frame_longer_than_announced_ends_connection_at_its_ninth_byte(kind: type[Frame]) -> None:
    """Its payload is not awaited: it could be 16 MB on each connection of a client without a token."""
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        await client.listen()
        number = client.open(ends=False)
        await client.flush()
        await eventually(lambda: rig.listener.open_streams)
        head = (FRAME_BYTES + 1).to_bytes(3) + bytes([getattr(kind, "type", None) or 0x77, 0]) + number.to_bytes(4)
        await client.connection.send(head[:-1])
        await wait_quietly()
        assert rig.open_connections == 1
        await client.connection.send(head[-1:])
        await client.wait_until(lambda: client.goodbye)
        assert client.goodbye is not None
        assert client.goodbye.error_code == ErrorCodes.FRAME_SIZE_ERROR
        await eventually(lambda: rig.open_connections == 0)
        assert rig.listener.reserved_bytes == 0


@on_both_loops
async def test_partial_frame_is_counted_while_it_waits_for_its_rest() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        await client.listen()
        frame = DataFrame(client.open(ends=False), b"x" * FRAME_BYTES).serialize()
        await client.flush()
        await eventually(lambda: rig.listener.open_streams)
        before = rig.listener.reserved_bytes
        await client.connection.send(frame[:10_000])
        await eventually(lambda: rig.listener.reserved_bytes == before + 10_000)
        await client.connection.send(frame[10_000:])
        await eventually(lambda: rig.listener.reserved_bytes == before + FRAME_BYTES)
        await client.connection.send(frame[:10_000])
        await eventually(lambda: rig.listener.reserved_bytes == before + FRAME_BYTES + 10_000)
        client.connection.close()
        await eventually(lambda: rig.open_connections == 0)
        assert rig.listener.reserved_bytes == 0


@on_both_loops
async def test_refused_streams_with_closed_window_stay_within_memory_budget() -> None:
    """Their answers wait for a window that never opens. Each costs memory, and opening one needs no token."""

    def nobody(_: Request) -> Refusal:
        return AccessDenied("nobody is served")

    room = 10 * STREAM_BYTES
    async with open_port(echo, refused_at_head=nobody, requests_bytes=room) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 0})
        numbers = [client.open(ends=False) for _ in range(50)]
        await client.flush()
        await client.wait_until(lambda: client.streams[numbers[-1]].reset == ErrorCodes.ENHANCE_YOUR_CALM)
        assert rig.listener.reserved_bytes <= room
        assert 0 < rig.listener.open_streams <= 10
        client.connection.close()
        await eventually(lambda: rig.open_connections == 0)
        assert rig.listener.reserved_bytes == 0


@on_both_loops
async def test_stream_reset_for_lack_of_memory_releases_its_head() -> None:
    """The refusal of a long body waits until most of it has come, so the stream is reset before it was refused."""

    def nobody(_: Request) -> Refusal:
        return AccessDenied("nobody is served")

    room = 2 * STREAM_BYTES
    async with open_port(echo, refused_at_head=nobody, requests_bytes=room) as rig:
        client = await rig.connect_http2(settings={SettingCodes.INITIAL_WINDOW_SIZE: 0})
        long = (b"content-length", b"20000000")
        numbers = [client.open(more=[long, (b"x-filler", b"x" * 1000)], ends=False) for _ in range(20)]
        await client.flush()
        await client.wait_until(lambda: client.streams[numbers[-1]].reset == ErrorCodes.ENHANCE_YOUR_CALM)
        assert rig.listener.reserved_bytes <= room
        client.connection.close()
        await eventually(lambda: rig.open_connections == 0)
        assert rig.listener.reserved_bytes == 0


@on_both_loops
async def test_remembered_closed_streams_are_bounded() -> None:
    async with open_port(echo) as rig:
        client = await rig.connect_http2()
        for _ in range(15):
            numbers = [client.open() for _ in range(100)]
            await client.flush()
            assert {(await client.answer(number)).status for number in numbers} == {200}
        (connection,) = rig.listener._connections
        assert len(connection._closed_streams) == MAX_REMEMBERED_STREAMS  # type: ignore[attr-defined]


@on_both_loops
async def test_connection_with_full_tables_is_within_what_is_counted_for_it() -> None:
    """HPACK's table and the streams of the past are part of `CONNECTION_BYTES`, which limits the connections."""
    fields = b"".join(b"\x40\x02%c%c\x01%c" % (97 + n // 26, 97 + n % 26, 97 + n % 26) for n in range(120))
    head, flags = b"\x83\x86\x84\x01\x04here", ["END_HEADERS", "END_STREAM"]
    numbers = range(1, 2 * MAX_REMEMBERED_STREAMS + 2, 2)
    blocks = {number: head if number > 1 else head + fields for number in numbers}
    sent = b"".join(HeadersFrame(number, block, flags=flags).serialize() for number, block in blocks.items())

    def has_ended(connection: Any) -> bool:
        return getattr(connection, "_last_stream_id", 0) == numbers[-1] and not connection.open_streams

    async with open_port(echo) as rig:
        tracemalloc.start()
        try:
            used: list[int] = []
            for count in (1, 20):  # the first brings what is loaded once
                for _ in range(count):
                    client = await rig.connect_http2()
                    await client.connection.send(sent)
                await eventually(lambda: all(has_ended(connection) for connection in rig.listener._connections))
                gc.collect()
                used.append(_count_server_bytes())
        finally:
            tracemalloc.stop()
        connection: Any = next(iter(rig.listener._connections))
        assert len(connection._decoder._table.dynamic_entries) > 100
        assert len(connection._closed_streams) == MAX_REMEMBERED_STREAMS
        assert 10_000 < (used[1] - used[0]) / 20 < CONNECTION_BYTES


def _count_server_bytes() -> int:
    """What the server's modules and hpack have allocated, of all that this process has."""
    filters = [tracemalloc.Filter(True, "*/server/*"), tracemalloc.Filter(True, "*/hpack/*")]
    return sum(each.size for each in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename"))
