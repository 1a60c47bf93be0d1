"""A request that two readers could take for different ones is refused, and nothing that comes after it is read."""

from __future__ import annotations

from contextlib import suppress

import pytest
from price_keeper.exchange import Request, Responder

from tests.support.port_harness import (
    ForwardingHandler,
    echo,
    on_both_loops,
    open_forwarding_port,
    open_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import ConnectionCut, StreamedResponse, ask, read_refusal, wait_quietly

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: here\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nhost: here\r\n"
CHUNKS = b"0\r\n\r\n" + HIDDEN
LENGTH = b"content-length: %d\r\n" % len(CHUNKS)
CHUNKED = b"transfer-encoding: chunked\r\n"

AMBIGUOUS = {
    "length and chunks": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": POST + b"content-length: 5\r\n" + LENGTH + b"\r\n" + CHUNKS,
    "the same length twice": POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\n" + CHUNKS,
    "a list of lengths": POST + b"content-length: 5, 5\r\n\r\n" + CHUNKS,
    "a signed length": POST + b"content-length: +5\r\n\r\n" + CHUNKS,
    "a negative length": POST + b"content-length: -5\r\n\r\n" + CHUNKS,
    "a length in base 16": POST + b"content-length: 0x5\r\n\r\n" + CHUNKS,
    "an empty length": POST + b"content-length:\r\n\r\n" + CHUNKS,
    "a length with a gap": POST + b"content-length: 5 0\r\n\r\n" + CHUNKS,
    "a length that overflows": POST + b"content-length: 18446744073709551621\r\n\r\n" + CHUNKS,
    "a length in other digits": POST + "content-length: \u0665\r\n\r\n".encode() + CHUNKS,
    "a length folded": POST + b"content-length:\r\n 5\r\n\r\n" + CHUNKS,
    "a space before the colon": POST + b"content-length : 5\r\n\r\n" + CHUNKS,
    "a tab before the colon": POST + b"transfer-encoding\t: chunked\r\n\r\n" + CHUNKS,
    "two codings": POST + b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKS,
    "chunked and another": POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "another and chunked": POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "a coding nearly chunked": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "a coding in quotes": POST + b'transfer-encoding: "chunked"\r\n\r\n' + CHUNKS,
    "a coding behind a vertical tab": POST + b"transfer-encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "an empty coding": POST + b"transfer-encoding:\r\n\r\n" + CHUNKS,
    "a coding under HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "a bare line feed in a header": POST + b"x: y\ncontent-length: 5\r\n\r\n" + CHUNKS,
    "a bare carriage return": POST + b"x: y\rcontent-length: 5\r\n\r\n" + CHUNKS,
    "a zero byte": POST + b"x: y\0\r\n\r\n" + CHUNKS,
    "a line without a colon": POST + b"content-length\r\n\r\n" + CHUNKS,
    "an empty name": POST + b": 5\r\n\r\n" + CHUNKS,
    "a fold in the first line": b"POST /a HTTP/1.1\r\n content-length: 5\r\n\r\n" + CHUNKS,
    "a space in the target": b"POST /a b HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "a version unknown": b"POST /a HTTP/1.2\r\nhost: here\r\n\r\n" + HIDDEN,
    "two hosts": POST + b"host: there\r\n\r\n" + HIDDEN,
    "HTTP/0.9": b"GET /a\r\n\r\n" + HIDDEN,
    "HTTP/0.9 in words": b"GET /a HTTP/0.9\r\nhost: here\r\n\r\n" + HIDDEN,
    "RTSP/1.0": b"POST /a RTSP/1.0\r\nhost: here\r\n\r\n" + HIDDEN,
    "RTSP/1.1": b"POST /a RTSP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "RTSP/1.1 above a line of HTTP": b"POST /a RTSP/1.1\r\nx: POST /a HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "ICE/1.0": b"SOURCE /a ICE/1.0\r\nhost: here\r\n\r\n" + HIDDEN,
    "two spaces before the target": b"POST  /a HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "two spaces behind the target": b"POST /a  HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "a user in the host": b"POST /a HTTP/1.1\r\nhost: you@here\r\n\r\n" + HIDDEN,
    "a path in the host": b"POST /a HTTP/1.1\r\nhost: here/a\r\n\r\n" + HIDDEN,
    "a list of hosts": b"POST /a HTTP/1.1\r\nhost: here, there\r\n\r\n" + HIDDEN,
    "a host with a space": b"POST /a HTTP/1.1\r\nhost: he re\r\n\r\n" + HIDDEN,
    "a port that is none": b"POST /a HTTP/1.1\r\nhost: here:x\r\n\r\n" + HIDDEN,
    "a host without an end": b"POST /a HTTP/1.1\r\nhost: [::1\r\n\r\n" + HIDDEN,
    "another host in the target": b"POST http://there/a HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "a user in the target": b"POST http://you@here/a HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "another scheme in the target": b"POST ftp://here/a HTTP/1.1\r\nhost: here\r\n\r\n" + HIDDEN,
    "a chunk's size signed": POST + CHUNKED + b"\r\n+5\r\nhello\r\n" + CHUNKS,
    "a chunk's size too long": POST + CHUNKED + b"\r\n10000000000000005\r\nhello\r\n" + CHUNKS,
    "a chunk's size with 0x": POST + CHUNKED + b"\r\n0x5\r\nhello\r\n" + CHUNKS,
    "a chunk's size missing": POST + CHUNKED + b"\r\n\r\nhello\r\n" + CHUNKS,
    "a chunk longer than it says": POST + CHUNKED + b"\r\n2\r\nhello\r\n" + CHUNKS,
    "a chunk's line ends with LF alone": POST + CHUNKED + b"\r\n5\nhello\r\n" + CHUNKS,
    "an extension with LF": POST + CHUNKED + b"\r\n5;a\nb\r\nhello\r\n" + CHUNKS,
}


@pytest.mark.parametrize("what", AMBIGUOUS)
@on_both_loops
async def test_ambiguous_request_is_refused(what: str) -> None:
    seen: list[bytes] = []

    async def note(request: Request, responder: Responder) -> None:
        seen.append(request.target)
        await echo(request, responder)

    async with open_port(note) as rig:
        wire = await rig.connect()
        await wire.send(AMBIGUOUS[what])
        await read_refusal(wire)
        assert seen == []


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@on_both_loops
async def test_other_protocol_is_refused_however_its_first_line_is_split(pieces: int) -> None:
    async with open_port(echo) as rig:
        for line, is_good in ((b"POST /a RTSP/1.1", False), (b"\r\nPOST /a HTTP/1.1", True)):
            wire = await rig.connect()
            whole = line + b"\r\nhost: here\r\nx: HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
            size = -(-len(whole) // pieces)
            for at in range(0, len(whole), size):
                await wire.send(whole[at : at + size])
                await wait_quietly(0.001)
            if is_good:
                assert (await wire.answer()).status == 200
            else:
                await read_refusal(wire)


@on_both_loops
async def test_pipelined_request_of_another_protocol_is_refused() -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(ask(b"x") + ask(b"y") + b"POST /a RTSP/1.0\r\nhost: here\r\n\r\n")
        assert [(await wire.answer()).body for _ in range(2)] == [b"x", b"y"]
        await read_refusal(wire)


LINE = b"GET /b HTTP/1.1"
LINE_IN_BODY = POST + b"content-length: %d\r\n\r\n%b" % (len(LINE), LINE)
LINE_IN_CHUNKS = POST + CHUNKED + b"\r\n5;a=b\r\nGET /\r\na\r\nb HTTP/1.1\r\n0\r\nx: %b\r\n\r\n" % LINE


@pytest.mark.parametrize("before", [LINE_IN_BODY, LINE_IN_CHUNKS], ids=["body", "chunks"])
@pytest.mark.parametrize("line", [b"GET  /b HTTP/1.1", b"GET /b   HTTP/1.1", b"GET  /b  HTTP/1.1", b"GET /b RTSP/1.1"])
@on_both_loops
async def test_malformed_line_is_refused_where_the_right_one_stands_elsewhere(before: bytes, line: bytes) -> None:
    rest = line + b"\r\nx: " + LINE + b"\r\nhost: here\r\n\r\n"
    async with open_port(echo) as rig:
        for cut in range(len(line)):
            wire = await rig.connect()
            await wire.send(before + rest[:cut])
            await wait_quietly(0.001)
            await wire.send(rest[cut:])
            assert (await wire.answer()).body == LINE
            await read_refusal(wire)


@on_both_loops
async def test_pipelined_requests_are_answered_however_they_are_split() -> None:
    whole = LINE_IN_BODY + LINE_IN_CHUNKS + b"\r\n" + LINE + b"\r\nx: GET  /b HTTP/1.1\r\nhost: here\r\n\r\n"
    async with open_port(echo) as rig:
        wire = await rig.connect()
        for cut in range(len(whole)):
            await wire.send(whole[:cut])
            await wait_quietly(0.001)
            await wire.send(whole[cut:])
            assert [(await wire.answer()).body for _ in range(3)] == [LINE, LINE, b""]


@pytest.mark.parametrize("split", range(1, 25))
@on_both_loops
async def test_first_line_may_follow_another_request(split: int) -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        second = b"UNSUBSCRIBE /a HTTP/1.1\r\nhost: here\r\ncontent-length: 1\r\n\r\ny"
        await wire.send(ask(b"x") + second[:split])
        assert (await wire.answer()).body == b"x"
        await wire.send(second[split:])
        assert (await wire.answer()).body == b"y"


@pytest.mark.parametrize(
    "host", [b"here", b"HERE:80", b"my_host.docker", b"127.0.0.1:8080", b"[::1]:8080", b"", b"a-b.c~"]
)
@on_both_loops
async def test_valid_hosts_are_accepted(host: bytes) -> None:
    async with open_port(echo) as rig:
        wire = await rig.connect()
        await wire.send(b"POST /a HTTP/1.1\r\nhost: %b\r\ncontent-length: 0\r\n\r\n" % host)
        assert (await wire.answer()).status == 200
        await wire.send(b"POST /a HTTP/1.1\r\nhost: other\r\ncontent-length: 0\r\n\r\n")
        assert (await wire.answer()).status == 200


@on_both_loops
async def test_upstream_request_is_framed_anew() -> None:
    """With a length, and the bytes it counts, even if they look like a request."""
    through = ForwardingHandler()
    async with upstream(reply_with(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect()
            await wire.send(POST + CHUNKED + b"trailer: x\r\n\r\n%x\r\n%b\r\n0\r\nx: y\r\n\r\n" % (len(HIDDEN), HIDDEN))
            await wire.answer()
            await wire.send(ask(HIDDEN))
            await wire.answer()
            client = await rig.connect_http2()
            await client.call(body=HIDDEN)
            assert [call.body for call in server.calls] == [HIDDEN] * 3
            assert [call.head.count(b"content-length: %d" % len(HIDDEN)) for call in server.calls] == [1] * 3
            assert not any(b"transfer-encoding" in call.head.lower() for call in server.calls)


HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"here"), (b":path", b"/a")]
UNFIT: dict[str, list[tuple[bytes, bytes]]] = {
    "a coding": [*HEAD, (b"transfer-encoding", b"chunked")],
    "a connection header": [*HEAD, (b"connection", b"keep-alive")],
    "an upgrade": [*HEAD, (b"upgrade", b"h2c")],
    "a wrong length": [*HEAD, (b"content-length", b"5")],
    "two lengths": [*HEAD, (b"content-length", b"4"), (b"content-length", b"5")],
    "two lengths, the right one last": [*HEAD, (b"content-length", b"5"), (b"content-length", b"4")],
    "the same length twice": [*HEAD, (b"content-length", b"4"), (b"content-length", b"4")],
    "a signed length": [*HEAD, (b"content-length", b"+4")],
    "a length with an underscore": [*HEAD, (b"content-length", b"0_4")],
    "a length with a space": [*HEAD, (b"content-length", b" 4")],
    "a length that is none": [*HEAD, (b"content-length", b"four")],
    "a line end in a value": [*HEAD, (b"x", b"y\r\ncontent-length: 5")],
    "a line end in a name": [*HEAD, (b"x\r\ny", b"z")],
    "a line feed in a value": [*HEAD, (b"x", b"y\nz: 1")],
    "a zero byte": [*HEAD, (b"x", b"y\0z")],
    "a colon in a name": [*HEAD, (b"x:y", b"z")],
    "a space in a name": [*HEAD, (b"x y", b"z")],
    "an empty name": [*HEAD, (b"", b"z")],
    "capitals": [*HEAD, (b"Content-Length", b"4")],
    "a request line as path": [*HEAD[:3], (b":path", b"/a HTTP/1.1\r\nhost: there\r\n\r\n")],
    "a space in the path": [*HEAD[:3], (b":path", b"/a b")],
    "a tab behind the path": [*HEAD[:3], (b":path", b"/a\t")],
    "an empty path": [*HEAD[:3], (b":path", b"")],
    "no path": HEAD[:3],
    "two paths": [*HEAD, (b":path", b"/b")],
    "a line end in the method": [(b":method", b"POST /x HTTP/1.1\r\n\r\n"), *HEAD[1:]],
    "a pseudo-header unknown": [*HEAD, (b":protocol", b"websocket")],
    "a pseudo-header behind others": [*HEAD[:3], (b"x", b"y"), HEAD[3]],
    "two hosts": [*HEAD, (b"host", b"there")],
    "the same host twice": [*HEAD, (b"host", b"here"), (b"host", b"here")],
    "another scheme": [HEAD[0], (b":scheme", b"ftp"), *HEAD[2:]],
    "an empty scheme": [HEAD[0], (b":scheme", b""), *HEAD[2:]],
    "a user in the authority": [*HEAD[:2], (b":authority", b"you@here"), HEAD[3]],
    "a path in the authority": [*HEAD[:2], (b":authority", b"here/a"), HEAD[3]],
    "a malformed host": [*HEAD[:2], HEAD[3], (b"host", b"he re")],
}


@pytest.mark.parametrize("what", UNFIT)
@on_both_loops
async def test_ambiguous_http2_request_is_refused(what: str) -> None:
    seen: list[bytes] = []

    async def note(request: Request, responder: Responder) -> None:
        seen.append(request.target)
        await echo(request, responder)

    async with open_port(note) as rig:
        client = await rig.connect_http2()
        client.h2.config.validate_outbound_headers = client.h2.config.normalize_outbound_headers = False
        client.streams[1] = StreamedResponse()
        client.h2.send_headers(1, UNFIT[what])
        client.h2.send_data(1, b"body", end_stream=True)
        await client.flush()
        with suppress(ConnectionCut):
            assert (await client.answer(1)).status == 400
        assert seen == []


@pytest.mark.parametrize("body", [b"", b"bod", b"body!"])
@on_both_loops
async def test_body_ended_by_trailers_must_match_content_length(body: bytes) -> None:
    """Also where no data ends the stream."""
    seen: list[bytes] = []

    async def note(request: Request, responder: Responder) -> None:
        seen.append(request.body)
        await echo(request, responder)

    async with open_port(note) as rig:
        client = await rig.connect_http2()
        for stream, sent in ((1, body), (3, b"body")):
            client.streams[stream] = StreamedResponse()
            client.h2.send_headers(stream, [*HEAD, (b"content-length", b"4")])
            client.h2.send_data(stream, sent)
            client.h2.send_headers(stream, [(b"x", b"y")], end_stream=True)
            await client.flush()
        with suppress(ConnectionCut):
            assert (await client.answer(1)).status == 400
        if len(body) < 4:
            assert (await client.answer(3)).body == b"body"
        assert seen in ([b"body"], [])


@pytest.mark.parametrize("lines", [[b"upgrade", b"close"], [b"close", b"upgrade"], [b"upgrade, close"]])
@on_both_loops
async def test_last_request_closes_whatever_else_it_offers(lines: list[bytes]) -> None:
    seen: list[bytes] = []

    async def note(request: Request, responder: Responder) -> None:
        seen.append(request.target)
        await echo(request, responder)

    async with open_port(note) as rig:
        wire = await rig.connect()
        offer = b"".join(b"connection: %b\r\n" % line for line in lines) + b"upgrade: x\r\n"
        await wire.send(ask(b"body", offer) + HIDDEN)
        heard = await wire.answer()
        assert (heard.body, heard[b"connection"]) == (b"body", b"close")
        assert await wire.read_ending() in ("closed", "reset")
        assert seen == [b"/a"]
