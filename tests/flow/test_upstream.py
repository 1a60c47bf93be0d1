"""Upstream trouble of every kind: what the caller gets, what is tried again, what is kept open; and nothing hangs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from price_keeper.server.tls import create_server_context, ensure_local_certificates
from price_keeper.upstream import connection_pool as limits
from price_keeper.upstream import relay

from tests.support.port_harness import (
    ExchangeScript,
    ForwardingHandler,
    PortHarness,
    ScriptedUpstream,
    UpstreamExchange,
    build_response,
    closed_endpoint,
    on_both_loops,
    open_forwarding_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import ConnectionCut, WireResponse, ask, eventually, read_error_message, wait_quietly

OK = build_response(b"all is well")
THROTTLED = build_response(b'{"message": "slow down"}', 429, b"x-amzn-errortype: ThrottlingException\r\n")


async def asked(rig: PortHarness, protocol: str = "h1", body: bytes = b"hello") -> WireResponse:
    if protocol == "h2":
        return await (await rig.connect_http2()).call(body=body)
    wire = await rig.connect()
    await wire.send(ask(body) if protocol == "h1" else b"GET / HTTP/1.0\r\n\r\n")
    return await wire.answer()


def away(heard: WireResponse) -> str:
    return read_error_message(heard, 503, "ServiceUnavailableException")


def in_turn(*scripts: ExchangeScript) -> ExchangeScript:
    left = list(scripts)

    async def script(exchange: UpstreamExchange) -> None:
        await left.pop(0)(exchange)

    return script


# Connections.


@on_both_loops
async def test_idle_connections_are_reused_last_used_first() -> None:
    async def in_company(exchange: UpstreamExchange) -> None:
        await eventually(lambda: len(server.calls) <= 3 or len(server.calls) >= 8)
        await exchange.send(OK)

    through = ForwardingHandler()
    async with upstream(in_company) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for _ in range(3):
                assert (await asked(rig)).body == b"all is well"
            assert (server.connections, len(through.idle_connections)) == (1, 1)
            await asyncio.gather(*(asked(rig) for _ in range(5)))
            assert server.connections == len(through.idle_connections) == 5
            last = through.idle_connections[-1]
            await asked(rig)
            assert through.idle_connections[-1] is last
            await rig.pass_time(limits.IDLE_TIMEOUT_SECONDS + 1)
            await eventually(lambda: server.open_connections == 0)
            assert through.idle_connections == []
            assert (await asked(rig)).body == b"all is well"


@on_both_loops
async def test_connection_closed_by_upstream_while_idle_is_not_used() -> None:
    through = ForwardingHandler()
    async with upstream(reply_with(OK, then=UpstreamExchange.close)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for number in range(3):
                assert (await asked(rig)).body == b"all is well"
                await eventually(lambda: through.idle_connections == [])
                assert server.connections == len(server.calls) == number + 1


@on_both_loops
async def test_unsolicited_bytes_close_connection() -> None:
    async def talkative(exchange: UpstreamExchange) -> None:
        await exchange.send(OK)
        await wait_quietly(0.02)
        await exchange.send(OK)

    through = ForwardingHandler()
    async with upstream(talkative) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await asked(rig)).body == b"all is well"
            await eventually(lambda: through.idle_connections == [])


@pytest.mark.parametrize("extra", [b"x", b"xyz", OK, OK[:20], b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_extra_bytes_after_response_reach_nobody(extra: bytes, protocol: str) -> None:
    through = ForwardingHandler()
    async with upstream(reply_with(OK + extra)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for number in range(2):
                heard = await asked(rig, protocol)
                assert (heard.status, heard.body) == (200, b"all is well")
                assert through.idle_connections == []
                assert server.connections == number + 1


@pytest.mark.parametrize("more", [b"connection: close\r\n", b"Connection: Close\r\n"])
@on_both_loops
async def test_connection_close_is_honoured_and_not_forwarded(more: bytes) -> None:
    through = ForwardingHandler()
    async with upstream(reply_with(build_response(b"x", extra_headers=more))) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            heard = await asked(rig)
            assert b"connection" not in heard
            await eventually(lambda: server.open_connections == 0)


@on_both_loops
async def test_upstream_over_tls_behaves_equally(tmp_path: Path) -> None:
    """Pauses, reuse and cuts go through another kind of transport there."""
    authority, certificate, key = ensure_local_certificates(tmp_path, 1_800_000_000.0)
    trust = ssl.create_default_context(cafile=str(authority))
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    big = b"y" * 3_000_000
    through = ForwardingHandler(tls=trust)
    script = in_turn(
        reply_with(build_response(big)),
        reply_with(OK),
        reply_with(OK[:-1], then=UpstreamExchange.reset),
        reply_with(OK, then=UpstreamExchange.close),
    )
    async with upstream(script, ssl=create_server_context(certificate, key)) as server:
        through.set_targets(server.endpoint._replace(is_tls=True))
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect(receive_buffer=4096)
            await eventually(lambda: rig.open_connections)
            rig.shrink_send_buffers()
            await wire.send(ask())
            await eventually(lambda: any(each._is_paused for each in through.busy_connections))
            assert (await wire.answer()).body == big
            assert (await asked(rig)).body == b"all is well"
            assert server.connections == 1
            with pytest.raises(ConnectionCut, match="reset"):
                await asked(rig)
            assert (await asked(rig)).body == b"all is well"
            await eventually(lambda: server.open_connections == 0)


# Answers.


@on_both_loops
async def test_interim_responses_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    through = ForwardingHandler()
    async with upstream(reply_with(early, early, OK)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for _ in range(2):
                heard = await asked(rig)
                assert (heard.status, heard.body, b"link" in heard) == (200, b"all is well", False)
            assert server.connections == 1


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_response_ended_by_close_is_relayed(protocol: str) -> None:
    for head in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n\r\n"):
        through = ForwardingHandler()
        async with upstream(
            in_turn(reply_with(head, b"to the", b" end", then=UpstreamExchange.close), reset_after(head))
        ) as server:
            through.set_targets(server.endpoint)
            async with open_forwarding_port(through) as rig:
                assert (await asked(rig, protocol)).body == b"to the end"
                assert (through.idle_connections, through.outcomes[0].is_whole) == ([], True)
                with pytest.raises(ConnectionCut):
                    await asked(rig, protocol)


def reset_after(data: bytes) -> ExchangeScript:
    async def script(exchange: UpstreamExchange) -> None:
        await exchange.send(data)
        await wait_quietly(0.02)
        exchange.reset()

    return script


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_responses_without_body_are_relayed(status: int, protocol: str) -> None:
    through = ForwardingHandler()
    async with upstream(reply_with(b"HTTP/1.1 %d None\r\netag: x\r\n\r\n" % status)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for _ in range(2):
                heard = await asked(rig, protocol)
                assert (heard.status, heard.body, heard[b"etag"]) == (status, b"", b"x")
            assert server.connections == 1


@on_both_loops
async def test_response_before_request_was_read_closes_connection() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(build_response(b"too large", 413))
        await eventually(lambda: bool(rig.clients[0].received) or reader.at_eof() or not rig.running_requests)
        writer.close()

    server = await asyncio.start_server(hasty, "127.0.0.1", 0, limit=4096)
    through = ForwardingHandler(ScriptedUpstream(server.sockets[0].getsockname()[1]).endpoint)
    async with open_forwarding_port(through) as rig:
        heard = await asked(rig, body=b"x" * 20_000_000)
        assert (heard.status, heard.body) == (413, b"too large")
        assert through.idle_connections == []
    server.close()


# Trouble.


@on_both_loops
async def test_refused_connection_fails_over() -> None:
    through = ForwardingHandler()
    async with upstream(reply_with(OK)) as server:
        through.set_targets(closed_endpoint(), closed_endpoint(), server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await asked(rig)).body == b"all is well"
            assert len(rig.log.lines) == 2
            rig.log.lines.clear()
    through = ForwardingHandler(closed_endpoint(), closed_endpoint())
    async with open_forwarding_port(through) as rig:
        heard = await asked(rig)
        assert away(heard) == "Bedrock cannot be reached"
        assert heard[b"retry-after"] == b"1"
        rig.log.lines.clear()


@on_both_loops
async def test_throttled_call_fails_over_and_last_answer_is_shown() -> None:
    async with (
        upstream(reply_with(THROTTLED)) as first,
        upstream(in_turn(reply_with(OK), reply_with(THROTTLED))) as second,
    ):
        through = ForwardingHandler(first.endpoint, second.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await asked(rig)).body == b"all is well"
            heard = await asked(rig)
            assert (heard.status, heard.body) == (429, b'{"message": "slow down"}')
            assert heard[b"x-amzn-errortype"] == b"ThrottlingException"
            assert b"retry-after" not in heard
            assert (len(first.calls), len(second.calls)) == (2, 2)
            assert (first.connections, second.connections) == (1, 1)
            assert [tap.ends for tap in through.taps] == [[True], [True]]


@on_both_loops
async def test_endless_throttled_response_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DRAIN_BYTES", 100_000)
    head = b"HTTP/1.1 429 Slow\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        upstream(without_end(head, b"1\r\nx\r\n" * 100)) as first,
        upstream(reply_with(OK)) as second,
        open_forwarding_port(ForwardingHandler(first.endpoint, second.endpoint)) as rig,
    ):
        assert (await asked(rig)).body == b"all is well"
        await eventually(lambda: first.open_connections == 0)


@pytest.mark.parametrize("status", [400, 403, 408, 424, 500, 502, 503, 504])
@on_both_loops
async def test_other_errors_are_not_retried(status: int) -> None:
    async with upstream(reply_with(build_response(b"no", status))) as first, upstream(reply_with(OK)) as second:
        through = ForwardingHandler(first.endpoint, second.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await asked(rig)).status == status
            assert second.calls == []


GARBAGE = b"this is no HTTP at all\r\n\r\n"
BEFORE_THE_HEAD: dict[str, ExchangeScript] = {
    "closed": reply_with(then=UpstreamExchange.close),
    "reset": reply_with(then=UpstreamExchange.reset),
    "half a head": reply_with(OK[:30], then=UpstreamExchange.close),
    "garbage": reply_with(GARBAGE),
    "two lengths": reply_with(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx"),
    "length and chunks": reply_with(
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "another coding": reply_with(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "another protocol": reply_with(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"),
    "endless head": reply_with(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000),
    "endless line": reply_with(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 500_000),
    "endless interim": reply_with(b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000),
}


@pytest.mark.parametrize("what", BEFORE_THE_HEAD)
@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_failure_before_head_is_reported_and_not_retried(what: str, protocol: str) -> None:
    async with upstream(BEFORE_THE_HEAD[what]) as first, upstream(reply_with(OK)) as second:
        through = ForwardingHandler(first.endpoint, second.endpoint)
        async with open_forwarding_port(through) as rig:
            away(await asked(rig, protocol))
            assert (len(first.calls), second.calls) == (1, [])
            assert through.taps[0].ends == []
            await eventually(lambda: first.open_connections == 0)


def in_parts(*parts: bytes) -> ExchangeScript:
    async def script(exchange: UpstreamExchange) -> None:
        for part in parts:
            await exchange.send(part)
            await wait_quietly(0.02)

    return script


def without_end(begins: bytes, goes_on: bytes) -> ExchangeScript:
    async def script(exchange: UpstreamExchange) -> None:
        await exchange.send(begins)
        with suppress(ConnectionError):
            while not exchange.writer.is_closing():
                await exchange.send(goes_on)

    return script


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
IN_THE_BODY: dict[str, ExchangeScript] = {
    "cut": reply_with(build_response(b"x" * 1000)[:-1], then=UpstreamExchange.close),
    "reset": reset_after(build_response(b"x" * 1000)[:-1]),
    "no body at all": reply_with(build_response(b"x" * 1000)[:-1000], then=UpstreamExchange.close),
    "between chunks": reply_with(CHUNKED + b"1\r\nx\r\n", then=UpstreamExchange.close),
    "in a chunk": reply_with(CHUNKED + b"5\r\nxx", then=UpstreamExchange.close),
    "before the last line": reply_with(CHUNKED + b"1\r\nx\r\n0\r\n", then=UpstreamExchange.close),
    "garbage": in_parts(CHUNKED + b"1\r\nx\r\n", GARBAGE),
    "garbage in one packet with the head": reply_with(CHUNKED + b"1\r\nx\r\n" + GARBAGE),
    "chunk extensions without end": without_end(CHUNKED + b"1\r\nx\r\n1;", b"e" * 1000),
    "trailers without end": without_end(CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n" * 100),
    "one trailer without end": without_end(CHUNKED + b"1\r\nx\r\n0\r\nx: ", b"y" * 1000),
}


@pytest.mark.parametrize("what", IN_THE_BODY)
@pytest.mark.parametrize("protocol", ["h1", "h2", "h1.0"])
@on_both_loops
async def test_failure_in_body_aborts_response(what: str, protocol: str) -> None:
    async with upstream(IN_THE_BODY[what]) as first, upstream(reply_with(OK)) as second:
        through = ForwardingHandler(first.endpoint, second.endpoint)
        async with open_forwarding_port(through) as rig:
            with pytest.raises(ConnectionCut, match="reset"):
                await asked(rig, protocol)
            assert (len(first.calls), second.calls) == (1, [])
            assert through.taps[0].ends == [False]
            await eventually(lambda: first.open_connections == 0)


# Time.


@on_both_loops
async def test_connect_timeout_fails_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with upstream(reply_with(OK)) as server:
            through = ForwardingHandler(server.endpoint._replace(port=address[1]), server.endpoint)
            async with open_forwarding_port(through) as rig:
                assert (await asked(rig)).body == b"all is well"
                assert len(rig.log.lines) == 1
                rig.log.lines.clear()
        for filler in fillers:
            filler.close()


@on_both_loops
async def test_server_closing_at_once_was_sent_nothing() -> None:
    async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    slammer = await asyncio.start_server(slam, "127.0.0.1", 0)
    async with upstream(reply_with(OK)) as server:
        first = server.endpoint._replace(port=slammer.sockets[0].getsockname()[1])
        through = ForwardingHandler(first, server.endpoint)
        async with open_forwarding_port(through) as rig:
            for _ in range(20):
                assert (await asked(rig)).status in (200, 503)  # it may be gone by then, or only soon
            rig.log.lines.clear()
    slammer.close()


@on_both_loops
async def test_silence_times_out() -> None:
    async def mute(exchange: UpstreamExchange) -> None:
        await exchange.send(b"" if len(server.calls) == 1 else OK[:-1])

    through = ForwardingHandler()
    async with upstream(mute) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for limit, error in (
                (limits.FIRST_BYTE_TIMEOUT_SECONDS, None),
                (limits.READ_TIMEOUT_SECONDS, ConnectionCut),
            ):
                calling = asyncio.create_task(asked(rig))
                await eventually(lambda: len(through.busy_connections) == 1 and len(server.calls) == server.connections)
                await wait_quietly()
                await rig.pass_time(limit - 1)
                assert len(through.busy_connections) == 1
                await rig.pass_time(2)
                if error is None:
                    assert f"said nothing for {limit:g} seconds" in away(await calling)
                else:
                    with pytest.raises(error):
                        await calling
                await eventually(lambda: server.open_connections == 0)
