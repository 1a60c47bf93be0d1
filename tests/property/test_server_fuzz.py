"""Whatever bytes come to the data port, it stays up, answers correctly and releases the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hyperframe import frame as frames
from hypothesis import example, given, settings
from hypothesis import strategies as st
from price_keeper.exchange import Request, Responder
from price_keeper.parse_call import parse_call, select_upstream_headers

from tests.support.effort import tries
from tests.support.port_harness import LOOPS, PortHarness, echo, open_port
from tests.support.raw_clients import ConnectionCut, RawConnection, ask, chunked

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def understands(request: Request, responder: Responder) -> None:
    """As far as the pipeline goes without knowing the caller."""
    parse_call(request)
    select_upstream_headers(request, None)
    await echo(request, responder)


async def is_well(rig: PortHarness) -> None:
    """Nothing is left of who was here, and the next caller is served, over both protocols."""
    rig.disconnect_clients()
    await rig.wait_until_empty()
    assert rig.log.lines == []
    wire = await rig.connect()
    await wire.send(ask(b"well", path=b"/model/premium/converse"))
    assert (await wire.answer()).body == b"well"
    client = await rig.connect_http2()
    assert (await client.call(b"/model/premium/converse", b"well")).body == b"well"
    rig.disconnect_clients()
    await rig.wait_until_empty()
    rig.clients.clear()


@asynccontextmanager
async def small() -> AsyncIterator[PortHarness]:
    async with open_port(
        understands, head_bytes=2000, body_bytes=5000, streams=5, stream_resets=20, control_frames=30
    ) as rig:
        yield rig


def with_rig(
    loop: str,
    opened: Any,
    strategy: st.SearchStrategy[Any],
    check: Callable[[PortHarness, Any], Coroutine[Any, Any, None]],
    *known: Any,
    examples: int = 150,
) -> None:
    """One port for all examples, so that what one leaves behind troubles the next."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        rig = runner.run(opened.__aenter__())

        @settings(max_examples=tries(examples))
        @given(strategy)
        def run(case: Any) -> None:
            runner.run(check(rig, case))

        for each in known:
            run = example(each)(run)
        run()
        runner.run(opened.__aexit__(None, None, None))


# HTTP/1.1.

GOOD = [
    ask(b"a body", b"content-type: application/json\r\n", path=b"/model/premium/converse"),
    chunked(b"two", b"chunks", more=b"expect: 100-continue\r\n", trailers=b"t: 1\r\n"),
    ask(method=b"GET", path=b"/async-invoke?x=1&y=%20"),
    ask(b"{}", b"connection: upgrade\r\nupgrade: h2c\r\n", path=b"/openai/v1/chat/completions"),
    b"GET /model/a%2Fb:c/invoke HTTP/1.0\r\n\r\n",
    b"HEAD /model/%C3%A4/invoke HTTP/1.1\r\nhost: here\r\nx-amzn-bedrock-y: 1\r\n\r\n",
]
BITS = [b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"%", b"%00", b"..", b"/", b"\x80", b"0", b"-1",
        b"ffffffffffffffff", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n",
        b"host: other\r\n", b"upgrade: websocket\r\n", b"expect: 100-continue\r\n", b"HTTP/1.1", b"HTTP/2.0",
        b"CONNECT ", PREFACE]  # fmt: skip

edits = st.tuples(st.integers(0, 10_000), st.integers(0, 5), st.one_of(st.sampled_from(BITS), st.binary(max_size=4)))
corrupted = st.tuples(st.lists(st.sampled_from(GOOD), min_size=1, max_size=4), st.lists(edits, max_size=6))
endings = st.sampled_from(["half", "close", "reset"])
talks = st.tuples(corrupted, st.lists(st.integers(0, 10_000), max_size=6), endings)


def edited(whole: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for at, removed, put in changes:
        at %= len(whole) + 1
        whole = whole[:at] + put + whole[at + removed :]
    return whole


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({each % (len(data) + 1) for each in at} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("loop", LOOPS)
def test_corrupted_requests_are_answered_in_http(loop: str) -> None:
    """Good requests with a few bytes changed get answers in HTTP's form, one each at most, and then an end."""

    async def check(rig: PortHarness, talk: Any) -> None:
        (requests, changes), cuts, ending = talk
        data = edited(b"".join(requests), changes)
        wire = await rig.connect()
        try:
            await wire.send(*cut(data, cuts))
            if ending == "half" and b"HEAD" not in data and not data.startswith(PREFACE):
                wire.half_close()
                await all_answers(wire)
        except ConnectionError:
            pass  # it was refused before it had said all
        wire.reset() if ending == "reset" else wire.close()
        await is_well(rig)

    with_rig(loop, small(), talks, check)


async def all_answers(wire: RawConnection) -> None:
    """Until there is none any more, which must not be in the middle of one."""
    with pytest.raises(ConnectionCut) as ended:
        await _endless_answers(wire)
    assert ended.value.received == b""


async def _endless_answers(wire: RawConnection) -> None:
    while True:
        status, headers = await wire.head()
        assert status in (100, 200, 400, 404, 413)
        await wire.take(int(dict(headers).get(b"content-length", b"0")))


@pytest.mark.parametrize("loop", LOOPS)
def test_noise_is_refused_or_awaited(loop: str) -> None:
    """Bytes that mean nothing are refused or waited for, and never more than that."""

    async def check(rig: PortHarness, noise: bytes) -> None:
        wire = await rig.connect()
        await wire.send(noise)
        wire.half_close()
        await wire.read_ending()
        wire.close()
        await is_well(rig)

    with_rig(loop, small(), st.binary(max_size=200) | st.binary(max_size=50).map(PREFACE.__add__), check, examples=60)


# HTTP/2.


def encoded(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Without the table, so that frames mean the same in any order."""
    return b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers if len(value) < 127
    )


HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"here"), (b":path", b"/model/premium/converse")]
streams = st.sampled_from([1, 1, 1, 3, 5, 7, 0, 2, 2**31 - 1])
odd_headers = st.tuples(st.binary(max_size=10), st.binary(max_size=20)) | st.sampled_from(
    [(b"content-length", b"3"), (b"te", b"gzip"), (b"x-amzn-bedrock-x", b"\xff"), (b"x-amzn-bedrock-\r\n", b"y")]
)
header_lists = st.lists(odd_headers, max_size=3).map(HEAD.__add__) | st.lists(odd_headers, max_size=6)


def made(kind: type[frames.Frame], flags: list[str], **parts: Any) -> bytes:
    frame = kind(0 if kind.stream_association == "no-stream" else 1)
    for name, value in parts.items():
        setattr(frame, name, value)
    frame.flags |= set(flags) & {flag.name for flag in frame.defined_flags}
    return frame.serialize()


def of(kind: type[frames.Frame], **parts: Any) -> st.SearchStrategy[bytes]:
    flags = st.lists(st.sampled_from(["END_STREAM", "END_HEADERS", "ACK"]), max_size=3)
    return st.builds(made, st.just(kind), flags, **parts)


numbers = st.sampled_from([0, 1, 65_535, 2**31 - 1, 2**32 - 1])
settings_frames = st.dictionaries(st.integers(0, 9), numbers, max_size=3)
near_valid = st.one_of(
    *[of(frames.HeadersFrame, stream_id=streams, data=header_lists.map(encoded))] * 3,
    *[of(frames.DataFrame, stream_id=streams, data=st.binary(max_size=3000))] * 2,
    of(frames.ContinuationFrame, stream_id=streams, data=header_lists.map(encoded)),
    of(frames.RstStreamFrame, stream_id=streams, error_code=numbers),
    of(frames.PriorityFrame, stream_id=streams, depends_on=streams.map(lambda number: number % 2**31)),
    of(frames.SettingsFrame, stream_id=st.just(0), settings=settings_frames),
    of(frames.PingFrame, stream_id=st.just(0), opaque_data=st.binary(min_size=8, max_size=8)),
    of(frames.GoAwayFrame, stream_id=st.just(0), last_stream_id=numbers.map(lambda number: number % 2**31)),
    of(frames.WindowUpdateFrame, stream_id=streams, window_increment=st.sampled_from([1, 65_535, 2**31 - 1])),
    of(frames.PushPromiseFrame, stream_id=streams, promised_stream_id=streams, data=st.just(encoded(HEAD))),
).filter(lambda frame: len(frame) < 16_000)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


any_frames = st.builds(raw, st.integers(0, 12), st.integers(0, 255), streams, st.binary(max_size=30))
dialogues = st.tuples(st.lists(near_valid | any_frames, max_size=12), st.lists(edits, max_size=2), endings)


@pytest.mark.parametrize("loop", LOOPS)
def test_corrupted_frames_end_only_their_connection(loop: str) -> None:
    """Frames in any order, whole or damaged, end their connection at worst, and no other."""

    async def check(rig: PortHarness, dialogue: Any) -> None:
        sent, changes, ending = dialogue
        neighbour = await rig.connect_http2()
        wire = await rig.connect()
        opening = PREFACE + frames.SettingsFrame(0).serialize()
        try:
            await wire.send(opening + edited(b"".join(sent), [(at, cut, put[:3]) for at, cut, put in changes]))
            if ending == "half":
                wire.half_close()
                await wire.read_ending()
        except ConnectionError:
            pass
        wire.reset() if ending == "reset" else wire.close()
        assert (await neighbour.call(b"/model/premium/converse", b"unmoved")).body == b"unmoved"
        await is_well(rig)

    with_rig(loop, small(), dialogues, check)
