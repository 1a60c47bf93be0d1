"""HTTP/1.1 on the data port: what it takes, what it refuses and how, and that no client can hold or hurt it."""

from __future__ import annotations

import asyncio

import pytest
from price_keeper.errors import UnknownOperation
from price_keeper.exchange import Request, Responder
from price_keeper.server import http1
from price_keeper.server.request_building import measure_head

from tests.support.port_harness import echo, on_both_loops, open_port
from tests.support.raw_clients import (
    ConnectionCut,
    ask,
    chunked,
    eventually,
    read_error_message,
    read_refusal,
    wait_quietly,
)

# What it takes.


@on_both_loops
async def test_connection_serves_successive_requests() -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        for body in (b"one", b"", b"x" * 300_000, b"four"):
            await wire.send(ask(body))
            heard = await wire.answer()
            assert (heard.status, heard.body, heard[b"target"]) == (200, body, b"/a")
            assert b"connection" not in heard
        assert rig.open_connections == 1


@pytest.mark.parametrize("size", [1, 7, 100])
@on_both_loops
async def test_request_split_anywhere_is_read(size: int) -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        whole = ask(b"a body") + chunked(b"two", b" chunks", trailers=b"trailer: x\r\n") + ask(b"last")
        await wire.send(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert [(await wire.answer()).body for _ in range(3)] == [b"a body", b"two chunks", b"last"]


@on_both_loops
async def test_whitespace_around_header_value_is_removed() -> None:
    """Otherwise a token with a space behind it would be invalid."""
    seen: list[dict[bytes, bytes]] = []

    async def note(request: Request, responder: Responder) -> None:
        seen.append(request.headers)
        await echo(request, responder)

    async with open_port(note) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"body", b"x-amz-security-token: \t token \t \r\nx:  \t\r\ny: a b\r\n"))
        assert (await wire.answer()).body == b"body"
        (headers,) = seen
        assert (headers[b"x-amz-security-token"], headers[b"x"], headers[b"y"]) == (b"token", b"", b"a b")


@on_both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    gates: dict[bytes, asyncio.Event] = {b"%d" % number: asyncio.Event() for number in range(40)}
    begun: list[bytes] = []

    async def gated(request: Request, responder: Responder) -> None:
        begun.append(request.body)
        await gates[request.body].wait()
        await echo(request, responder)

    async with open_port(gated) as rig:
        wire = await rig.connect()
        await wire.send(b"".join(ask(body) for body in gates))
        await wait_quietly()
        assert begun == [b"0"]
        for gate in reversed(gates.values()):
            gate.set()
        assert [(await wire.answer()).body for _ in gates] == list(gates) == begun


@on_both_loops
async def test_pipelining_depth_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past it nothing more is read: neither from what has arrived already, nor from the socket."""
    monkeypatch.setattr(http1, "SLICE_BYTES", 512)
    gate = asyncio.Event()

    async def gated(request: Request, responder: Responder) -> None:
        await gate.wait()
        await echo(request, responder)

    async with open_port(gated, pipelined=4) as rig:
        wire = await rig.connect()
        one, count = ask(b"x" * 100), 100_000
        sending = asyncio.create_task(wire.send(one * count))
        await wait_quietly()
        assert not sending.done()
        (connection,) = rig.listener._connections
        unread = len(connection._unread)
        assert unread < 1_000_000
        whole = measure_head(b"/a", {b"host": b"here", b"content-length": b"100"}) + 100
        assert 5 * whole <= rig.listener.reserved_bytes - unread <= 9 * whole  # one slice beyond what may wait
        wire.close()
        sending.cancel()
        gate.set()


@on_both_loops
async def test_unread_responses_stop_reading_requests() -> None:
    begun = 0

    async def count(request: Request, responder: Responder) -> None:
        nonlocal begun
        begun += 1
        await echo(request, responder)

    async with open_port(count, write_buffer_bytes=1024) as rig:
        wire = await rig.connect(receive_buffer=4096)
        sending = asyncio.create_task(wire.send(ask(b"x" * 10_000) * 2000))
        await wait_quietly(0.3)
        assert begun < 1000
        for _ in range(2000):
            assert (await wire.answer()).body == b"x" * 10_000
        await sending


@on_both_loops
async def test_100_continue_is_sent_at_turn_of_request() -> None:
    gate = asyncio.Event()

    async def gated(request: Request, responder: Responder) -> None:
        await gate.wait()
        await echo(request, responder)

    async with open_port(gated) as rig:
        wire = await rig.connect()
        head, _, body = ask(b"body", b"Expect: 100-Continue\r\n").partition(b"\r\n\r\n")
        await wire.send(ask(b"first") + head + b"\r\n\r\n")
        await wait_quietly()
        gate.set()
        assert (await wire.answer()).body == b"first"
        assert await wire.head() == (100, [])
        await wire.send(body)
        assert (await wire.answer()).body == b"body"
        await wire.send(head + b"\r\n\r\n")
        assert await wire.head() == (100, [])
        await wire.send(body)
        assert (await wire.answer()).body == b"body"


@on_both_loops
async def test_oversized_body_is_refused_before_100_continue() -> None:
    async with open_port(echo, body_bytes=10) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"12345678901", b"expect: 100-continue\r\n")[:-11])
        assert "at most 10 bytes" in await read_refusal(wire, 413)


@on_both_loops
async def test_head_response_has_no_body() -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"hidden", method=b"HEAD"), ask(b"shown"))
        heard = await wire.answer(has_body=False)
        assert heard[b"content-length"] == b"6"
        assert (await wire.answer()).body == b"shown"


async def stream(request: Request, responder: Responder) -> None:
    responder.start(200, (), None)
    responder.write(b"of no known ")
    responder.write(b"length")
    responder.finish()


@on_both_loops
async def test_http_1_0_gets_no_chunks_and_no_second_request() -> None:
    for handler, body in ((stream, b"of no known length"), (echo, b"")):
        async with open_port(handler) as rig:
            wire = await rig.connect()
            await wire.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            heard = await wire.answer()
            assert (heard.body, heard[b"connection"]) == (body, b"close")
            assert b"transfer-encoding" not in heard
            assert await wire.read_ending() == "closed"


@on_both_loops
async def test_streamed_response_is_chunked_and_connection_stays() -> None:
    async with open_port(stream) as rig:
        wire = await rig.connect()
        for _ in range(2):
            await wire.send(ask())
            heard = await wire.answer()
            assert (heard.body, heard[b"transfer-encoding"]) == (b"of no known length", b"chunked")


@on_both_loops
async def test_connection_close_is_honoured() -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x", b"connection: close\r\n"))
        assert (await wire.answer())[b"connection"] == b"close"
        assert await wire.read_ending() == "closed"


@on_both_loops
async def test_half_closed_client_gets_all_responses() -> None:
    gate = asyncio.Event()

    async def gated(request: Request, responder: Responder) -> None:
        await gate.wait()
        await echo(request, responder)

    async with open_port(gated) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"one") + ask(b"two") + b"POST /never-whole HTTP/1.1\r\n")
        wire.half_close()
        await wait_quietly()
        gate.set()
        assert [(await wire.answer()).body for _ in range(2)] == [b"one", b"two"]
        assert await wire.read_ending() == "closed"


@pytest.mark.parametrize("body", [b"", b"a body", b"x" * 100_000])
@on_both_loops
async def test_upgrade_offer_is_ignored(body: bytes) -> None:
    """Java's own client offers HTTP/2 with its first request, whose body the parser would take for the new protocol."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
    )
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(ask(body, offer) + chunked(body or b"-", more=offer) + ask(b"next"))
        for expected in (body, body or b"-", b"next"):
            heard = await wire.answer()
            assert (heard.status, heard.body, heard[b"target"]) == (200, expected, b"/a")
        await wire.send(ask(body, offer.replace(b"Upgrade,", b"Upgrade, close,")))
        assert (await wire.answer())[b"connection"] == b"close"
        assert await wire.read_ending() == "closed"


# How it refuses.


@on_both_loops
async def test_refusals_and_errors_have_aws_form() -> None:
    async def refuses(request: Request, responder: Responder) -> None:
        raise UnknownOperation("there is no such thing")

    async def fails(request: Request, responder: Responder) -> None:
        raise RuntimeError("a secret")

    async def fails_late(request: Request, responder: Responder) -> None:
        responder.start(200, (), 100)
        responder.write(b"x")
        raise RuntimeError("a secret")

    async def fails_after(request: Request, responder: Responder) -> None:
        await echo(request, responder)
        raise RuntimeError("a secret")

    request_ids: set[bytes] = set()
    async with open_port(refuses) as rig:
        wire = await rig.connect()
        for _ in range(2):
            await wire.send(ask())
            heard = await wire.answer()
            assert read_error_message(heard, 404, "UnknownOperationException") == "there is no such thing"
            assert heard[b"x-price-keeper-request-id"] not in request_ids
            request_ids.add(heard[b"x-price-keeper-request-id"])
    for handler in (fails, fails_late, fails_after):
        async with open_port(handler) as rig:
            wire = await rig.connect()
            await wire.send(ask(b"one") + ask(b"two"))
            request_ids = b""
            if handler is fails:
                heard = await wire.answer()
                assert "secret" not in read_error_message(heard, 500, "InternalServerException")
                request_ids = heard[b"x-price-keeper-request-id"]
            elif handler is fails_late:
                with pytest.raises(ConnectionCut, match="reset"):
                    await wire.answer()
            else:
                assert [(await wire.answer()).body for _ in range(2)] == [b"one", b"two"]
            await eventually(lambda: rig.log.lines)
            assert f"request {request_ids.decode()}" in rig.log.lines[0]  # so that who has the answer finds its cause
            assert all("failed: RuntimeError" in line for line in rig.log.lines)
            rig.log.lines.clear()


async def broken_off(request: Request, responder: Responder) -> None:
    responder.start(200, (), None)
    responder.write(b"some")
    responder.flush()
    await asyncio.sleep(0)
    responder.abort()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@on_both_loops
async def test_aborted_response_never_appears_complete(version: bytes) -> None:
    async with open_port(broken_off) as rig:
        wire = await rig.connect()
        await wire.send(b"GET / HTTP/%b\r\nhost: here\r\n\r\n" % version)
        with pytest.raises(ConnectionCut, match="reset"):
            await wire.answer()


@on_both_loops
async def test_writer_of_former_response_cannot_write_next() -> None:
    held: list[Responder] = []

    async def kept(request: Request, responder: Responder) -> None:
        held.append(responder)
        if len(held) == 2:
            held[0].write(b"too late")
            held[0].finish()
            held[0].abort()
        await echo(request, responder)

    async with open_port(kept) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"one") + ask(b"two") + ask(b"three"))
        assert [(await wire.answer()).body for _ in range(3)] == [b"one", b"two", b"three"]


@on_both_loops
async def test_response_ending_after_disconnect_within_request_is_harmless() -> None:
    gate = asyncio.Event()

    async def late(request: Request, responder: Responder) -> None:
        await gate.wait()
        await echo(request, responder)

    async with open_port(late) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x") + b"not a request\r\n\r\n")
        await eventually(lambda: rig.running_requests)
        wire.reset()
        await eventually(lambda: rig.open_connections == 0)
        gate.set()
        await eventually(lambda: not rig.running_requests)  # and nothing is logged
