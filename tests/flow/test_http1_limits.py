"""Each limit of an HTTP/1.1 connection: accepted at it, refused with a reason beyond it, and nothing stays behind."""

from __future__ import annotations

import sys

import pytest
from price_keeper.errors import InvalidRequest, Refusal
from price_keeper.exchange import Request
from price_keeper.server import http1
from price_keeper.server.http1_parser import Http1RequestParser
from price_keeper.server.request_building import HEADER_OVERHEAD_BYTES, measure_head
from price_keeper.server.server_limits import MAX_SLICES_PER_TURN, SLICE_BYTES

from tests.support.port_harness import GatedEcho, PortHarness, echo, on_both_loops, open_port
from tests.support.raw_clients import (
    ConnectionCut,
    RawConnection,
    ask,
    chunked,
    eventually,
    read_error_message,
    read_refusal,
    wait_quietly,
)

HEAD = 300  # bytes


def head_of(size: int) -> bytes:
    bare = b"GET / HTTP/1.1\r\nhost: here\r\nx: \r\n\r\n"
    return bare.replace(b"x: ", b"x: " + b"y" * (size - len(bare)))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 99, HEAD - 1, HEAD, HEAD + 1, 10_000])
@on_both_loops
async def test_head_size_is_limited_however_split(size: int) -> None:
    async with open_port(echo, head_bytes=HEAD) as rig:
        wire = await rig.connect()
        for _ in range(2):
            await wire.send(*cut(head_of(HEAD), size))
            assert (await wire.answer()).status == 200
        await wire.send(*cut(head_of(HEAD + 1), size))
        assert f"at most {HEAD} bytes" in await read_refusal(wire)


@pytest.mark.parametrize("bytes_over", [0, 1])
@on_both_loops
async def test_default_head_limit_is_exact(bytes_over: int) -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(head_of(64 * 1024 + bytes_over))
        if bytes_over:
            assert "at most 65536 bytes" in await read_refusal(wire)
        else:
            assert (await wire.answer()).status == 200


@on_both_loops
async def test_body_in_packet_of_full_head_does_not_count_as_head() -> None:
    async with open_port(echo, head_bytes=HEAD) as rig:
        wire = await rig.connect()
        bare = ask(b"x" * 1000)
        head = bare[: -1000 - 4] + b"\r\ny: "
        full = head + b"z" * (HEAD - len(head) - 4) + b"\r\n\r\n" + b"x" * 1000
        assert full.index(b"\r\n\r\n") + 4 == HEAD
        await wire.send(full + full)
        for _ in range(2):
            assert (await wire.answer()).body == b"x" * 1000


@on_both_loops
async def test_many_small_requests_in_one_packet_are_no_large_head() -> None:
    async with open_port(echo, head_bytes=HEAD) as rig:
        wire = await rig.connect()
        await wire.send(head_of(100) * 50)
        for _ in range(50):
            assert (await wire.answer()).status == 200


@on_both_loops
async def test_endless_head_is_refused() -> None:
    for endless in (b"GET /" + b"a" * HEAD * 2, b"GET / HTTP/1.1\r\n" + b"a" * HEAD * 2, b"\r\n" * HEAD):
        async with open_port(echo, head_bytes=HEAD) as rig:
            wire = await rig.connect()
            await wire.send(*cut(endless, 50))
            assert f"at most {HEAD} bytes" in await read_refusal(wire)


def bodies(size: int) -> list[bytes]:
    return [ask(b"x" * size), chunked(*[b"x"] * size), chunked(b"x" * size)]


@pytest.mark.parametrize("kind", [0, 1, 2])
@on_both_loops
async def test_body_size_is_limited_however_framed(kind: int) -> None:
    async with open_port(echo, body_bytes=1000) as rig:
        wire = await rig.connect()
        for size in (1000, 999):
            await wire.send(bodies(size)[kind])
            assert (await wire.answer()).body == b"x" * size
        await wire.send(bodies(1001)[kind])
        assert "at most 1000 bytes" in await read_refusal(wire, 413)


@on_both_loops
async def test_sending_client_can_read_refusal() -> None:
    """Closing at once would answer what it sends with a reset, which destroys the answer it has not read yet."""
    async with open_port(echo, body_bytes=1000) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x" * 20_000_000))
        assert "at most 1000 bytes" in await read_refusal(wire, 413)


@on_both_loops
async def test_client_sending_forever_is_closed() -> None:
    async with open_port(echo, body_bytes=10, lingering_seconds=5) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x" * 11))
        read_error_message(await wire.answer(), 413, "ValidationException")
        await rig.pass_time(4)
        assert rig.open_connections == 1
        await rig.pass_time(2)
        assert await wire.read_ending() in ("closed", "reset")
        await eventually(lambda: rig.open_connections == 0)


@on_both_loops
async def test_trailers_count_until_request_is_over() -> None:
    async with open_port(echo, requests_bytes=30_000) as rig:
        wire = await rig.connect()
        await wire.send(b"POST /a HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        await eventually(lambda: rig.listener.reserved_bytes)
        before = rig.listener.reserved_bytes
        await wire.send(b"x: " + b"y" * 9997)
        await eventually(lambda: rig.listener.reserved_bytes == before + 10_000)
        await wire.send(b"y" * 20_000)
        assert "memory" in read_error_message(await wire.answer(), 503, "ServiceUnavailableException")
        await eventually(lambda: rig.listener.reserved_bytes == 0)


@on_both_loops
async def test_endless_trailers_and_extensions_are_refused() -> None:
    framed = chunked(b"x")[:-2]
    for endless in (framed + b"trailer: " + b"y" * 100_000, framed[:-3] + b"1;" + b"y" * 100_000):
        async with open_port(echo, head_bytes=HEAD) as rig:
            wire = await rig.connect()
            await wire.send(*cut(endless, 5000))
            assert f"at most {HEAD} bytes" in await read_refusal(wire)


def readers(rig: PortHarness) -> list[Http1RequestParser]:
    return [each._request_parser for each in rig.listener._connections if isinstance(each, http1.Http1Connection)]


@on_both_loops
async def test_connection_input_per_turn_is_bounded() -> None:
    """Whatever takes long, such as the smallest of chunks: all others wait for as long."""
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(b"POST /a HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        await eventually(lambda: rig.listener.reserved_bytes > 0)
        (connection,) = rig.listener._connections
        connection.data_received(b"1\r\nx\r\n" * 40_000)  # type: ignore[attr-defined]
        taken = connection._request_parser._body_bytes  # type: ignore[attr-defined]
        assert 0 < taken <= SLICE_BYTES * MAX_SLICES_PER_TURN // 6 + 1
        other = await rig.connect()
        await other.send(ask(b"mine"))
        assert (await other.answer()).body == b"mine"
        await wire.send(b"0\r\n\r\n")
        assert (await wire.answer()).body == b"x" * 40_000
        await eventually(lambda: rig.listener.reserved_bytes == 0)


@on_both_loops
async def test_small_body_pieces_use_no_extra_memory() -> None:
    whole = chunked(*[b"xy"] * 10_000)
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(whole[:-1])
        await eventually(lambda: any(reader._body_bytes == 20_000 for reader in readers(rig)))
        assert all(sys.getsizeof(reader._body) < 1.2 * 20_000 for reader in readers(rig))
        await wire.send(whole[-1:])
        assert (await wire.answer()).body == b"xy" * 10_000


def weight(body: int) -> int:
    """Of a request as `ask` makes it."""
    return measure_head(b"/a", {b"host": b"here", b"content-length": b"%d" % body}) + body


@on_both_loops
async def test_all_requests_share_one_memory_budget() -> None:
    """Those coming in, those that wait and those under way; and it is free again whatever becomes of them."""
    handler = GatedEcho()
    three = 3 * weight(300)
    async with open_port(handler, requests_bytes=three + 100) as rig:
        under_way, coming, late = [await rig.connect() for _ in range(3)]
        await under_way.send(ask(b"x" * 300) + ask(b"x" * 300))
        await coming.send(ask(b"x" * 300)[:-1])
        await eventually(lambda: rig.listener.reserved_bytes == three - 1)
        await late.send(ask(b"x" * 102))
        assert "memory" in await read_refusal(late, 503, "ServiceUnavailableException")
        assert rig.listener.reserved_bytes == three - 1
        coming.close()
        await eventually(lambda: rig.listener.reserved_bytes == 2 * weight(300))
        again = await rig.connect()
        await again.send(ask(b"x" * 400))
        await eventually(lambda: rig.listener.reserved_bytes == three + 100)
        under_way.reset()
        await eventually(lambda: rig.listener.reserved_bytes == three + 100 - weight(300))  # one is under way
        handler.gate.set()
        assert (await again.answer()).body == b"x" * 400


@on_both_loops
async def test_heads_count_in_memory_budget() -> None:
    """Many short headers weigh more than their bytes."""
    async with open_port(echo, requests_bytes=40_000) as rig:
        long, many, late = [await rig.connect() for _ in range(3)]
        await long.send(head_of(12_000)[:-4], b"\r\nx1: y")
        await eventually(lambda: 12_000 <= rig.listener.reserved_bytes < 13_000)
        await many.send(b"GET / HTTP/1.1\r\n", b"".join(b"a%d:\r\n" % number for number in range(100)))
        await eventually(lambda: rig.listener.reserved_bytes > 12_000 + 100 * HEADER_OVERHEAD_BYTES)
        await late.send(head_of(15_000))
        assert "memory" in await read_refusal(late, 503, "ServiceUnavailableException")
        many.close()
        await eventually(lambda: rig.listener.reserved_bytes < 13_000)
        again = await rig.connect()
        await again.send(head_of(15_000))
        assert (await again.answer()).status == 200
        await long.send(*[b"y" * 10_000] * 3)
        assert "memory" in await read_refusal(long, 503, "ServiceUnavailableException")


@on_both_loops
async def test_unread_input_behind_requests_counts_in_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "SLICE_BYTES", 512)
    handler = GatedEcho()
    async with open_port(handler, pipelined=2, requests_bytes=30_000) as rig:
        wire = await rig.connect()
        await wire.send(b"".join(head_of(250) for _ in range(100)))
        await eventually(lambda: rig.listener.reserved_bytes > 20_000)
        other = await rig.connect()
        await other.send(ask(b"x" * 10_000))
        assert "memory" in await read_refusal(other, 503, "ServiceUnavailableException")
        handler.gate.set()
        for _ in range(100):
            assert (await wire.answer()).status == 200
        assert rig.listener.reserved_bytes == 0


@on_both_loops
async def test_concurrent_requests_are_bounded() -> None:
    handler = GatedEcho()
    async with open_port(handler, requests=2) as rig:
        one, two, three = [await rig.connect() for _ in range(3)]
        for wire in (one, two):
            await wire.send(ask(b"x"))
        await eventually(lambda: rig.running_requests == 2)
        await three.send(ask(b"y"))
        assert "2 requests under way" in read_error_message(await three.answer(), 503, "ServiceUnavailableException")
        handler.gate.set()
        assert (await one.answer()).body == b"x"
        await three.send(ask(b"y"))
        assert (await three.answer()).body == b"y"


@on_both_loops
async def test_chunked_body_of_refused_request_is_not_awaited() -> None:
    def no_streams(request: Request) -> Refusal | None:
        return InvalidRequest("no streams") if (request.method, request.target) == (b"POST", b"/a") else None

    async with open_port(echo, refused_at_head=no_streams, unchecked_body_bytes=10) as rig:
        wire = await rig.connect()
        await wire.send(chunked(b"x")[:-5])
        assert await read_refusal(wire) == "no streams"
        wire = await rig.connect()
        await wire.send(ask(b"x" * 11)[:-5])
        assert await read_refusal(wire) == "no streams"
        wire = await rig.connect()
        await wire.send(ask(b"x" * 10))
        assert (await wire.answer()).body == b"x" * 10
        other = await rig.connect()
        await other.send(chunked(b"x").replace(b"/a", b"/b"))
        assert (await other.answer()).body == b"x"


# Time.


async def at_the_limit(rig: PortHarness, wire: RawConnection, seconds: float) -> None:
    await wait_quietly()
    await rig.pass_time(seconds - 1)
    await wait_quietly(0.01)
    assert rig.open_connections == 1
    await rig.pass_time(2)


@on_both_loops
async def test_slow_head_is_refused() -> None:
    async with open_port(echo, head_seconds=20) as rig:
        wire = await rig.connect()
        await wire.send(ask()[:20])
        await at_the_limit(rig, wire, 20)
        assert "head took more than 20 seconds" in await read_refusal(wire)


@on_both_loops
async def test_dripping_head_gains_no_time() -> None:
    async with open_port(echo, head_seconds=20) as rig:
        wire = await rig.connect()
        for byte in (b"G", b"E", b"T", b" ", b"/"):
            await wire.send(byte)
            await wait_quietly(0.01)
            await rig.pass_time(3)
        await wire.send(b"a")
        await at_the_limit(rig, wire, 5)
        assert "head took more" in await read_refusal(wire)


@pytest.mark.parametrize("sent", [b"", b"P", b"PRI * HTTP/2.0\r\n", b"GE", b"\r\n\r\n"])
@on_both_loops
async def test_silent_connection_is_closed(sent: bytes) -> None:
    async with open_port(echo, head_seconds=20) as rig:
        wire = await rig.connect()
        await wire.send(sent)
        await at_the_limit(rig, wire, 20)
        await eventually(lambda: rig.open_connections == 0)
        with pytest.raises(ConnectionCut):
            await wire.answer()


@on_both_loops
async def test_blank_lines_count_as_slow_head() -> None:
    async with open_port(echo, head_seconds=20, idle_seconds=75) as rig:
        wire = await rig.connect()
        await wire.send(ask())
        await wire.answer()
        for _ in range(6):
            await wire.send(b"\r\n")
            await wait_quietly(0.01)
            await rig.pass_time(3)
        await at_the_limit(rig, wire, 2)
        assert await wire.read_ending() == "closed"


@on_both_loops
async def test_slow_body_is_refused() -> None:
    async with open_port(echo, body_seconds=120, head_seconds=20) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x" * 300)[:-200])
        await wait_quietly()
        for _ in range(20):
            await rig.pass_time(5)
            await wire.send(b"x")
        await at_the_limit(rig, wire, 20)
        assert "body took more than 120 seconds" in await read_refusal(wire)


@on_both_loops
async def test_idle_connection_is_closed() -> None:
    async with open_port(echo, idle_seconds=75, head_seconds=20) as rig:
        wire = await rig.connect()
        for _ in range(3):
            await rig.pass_time(15)
            await wire.send(ask(b"x"))
            await wire.answer()
        await at_the_limit(rig, wire, 75)
        assert await wire.read_ending() == "closed"


# Numbers.


@on_both_loops
async def test_connection_above_limit_is_refused_and_others_unaffected() -> None:
    async with open_port(echo, connections=2, surplus_connections=1) as rig:
        first, second = [await rig.connect() for _ in range(2)]
        await eventually(lambda: rig.open_connections == 2)
        third = await rig.connect()
        await eventually(lambda: rig.open_connections == 3)
        fourth = await rig.connect()
        with pytest.raises(ConnectionCut):
            await fourth.answer()
        for wire in (first, second):
            await wire.send(ask(b"x"))
            assert (await wire.answer()).body == b"x"
        await third.send(ask(b"x" * 100_000))
        assert "2 connections already" in await read_refusal(third, 503, "ServiceUnavailableException")
        await eventually(lambda: rig.open_connections == 2)
        first.close()
        await eventually(lambda: rig.open_connections == 1)
        fifth = await rig.connect()
        await fifth.send(ask(b"x"))
        assert (await fifth.answer()).body == b"x"
        assert rig.log.lines == [
            "connection limit reached (2 connections); new connections are refused until some close"
        ]  # once
        rig.log.lines.clear()
