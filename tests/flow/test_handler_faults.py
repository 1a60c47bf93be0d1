"""What can happen to a call, and to what waits in the outbox, at the least convenient moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from price_keeper import handler
from price_keeper.errors import RecordingUnavailable
from price_keeper.exchange import Handler, Request, Responder
from price_keeper.server.listener import MAX_IMMEDIATE_ANSWERS
from price_keeper.server.server_limits import DEFAULT_LIMITS
from price_keeper.server.write_batcher import MAX_BATCH_BYTES
from price_keeper.stores import schema
from price_keeper.stores.contract import Put
from price_keeper.upstream import forwarder
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import Forwarder, SigV4Authorizer
from price_keeper.usage.meter import Meter
from price_keeper.usage.meter_factory import MeterFactory

from tests.support.compiled import replaces_a_method
from tests.support.data_port import APP, ORG
from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    RecordingObserver,
    UpstreamExchange,
    build_response,
    echo,
    on_both_loops,
    open_forwarding_port,
    open_port,
    upstream,
)
from tests.support.port_with_listener import PortWithListener, open_port_with_listener
from tests.support.raw_clients import Http2TestClient, RawConnection, ask, eventually, read_error_message
from tests.support.simulated import CHAT_PATH

PATH = b"/model/premium/converse"
BODY = b'{"messages":[{"role":"user","content":[{"text":"hello"}]}]}'
RETRIED = b"amz-sdk-invocation-id: one\r\n"


@pytest.fixture
async def opened_lane(tmp_path: Path) -> AsyncIterator[PortWithListener]:
    async with open_port_with_listener(tmp_path) as opened:
        await opened.port.ask(PATH.decode(), {"messages": [{"role": "user", "content": [{"text": "hi"}]}]})
        yield opened


def request_of(lane: PortWithListener, more: bytes = b"", *, token: str | None = None, **how: Any) -> bytes:
    who = f"authorization: Bearer {lane.port.token if token is None else token}\r\n".encode()
    return ask(how.pop("body", BODY), who + b"content-type: application/json\r\n" + more, **{"path": PATH, **how})


@asynccontextmanager
async def wired(lane: PortWithListener) -> AsyncIterator[RawConnection]:
    wire = await RawConnection.connect(lane.port_number)
    try:
        yield wire
    finally:
        wire.close()


# Who reads what.


async def test_body_of_unknown_caller_is_not_parsed(
    opened_lane: PortWithListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("the body was looked into")

    monkeypatch.setattr(handler, "parse_call", read)
    async with wired(opened_lane) as wire:
        await wire.send(request_of(opened_lane, path=CHAT_PATH.encode(), body=b"{}", token="nobody"))
        read_error_message(await wire.answer(), 403, "AccessDeniedException")
    await opened_lane.wait_until_quiet()


# What fails on the way.


def _raises(*_: Any) -> None:
    raise RuntimeError("XYZZY")


@pytest.mark.parametrize("more", [b"", RETRIED])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SigV4Authorizer, "build_header_lines"),
        pytest.param(Forwarder, "forward", marks=replaces_a_method),
        pytest.param(forwarder, "Relay", marks=replaces_a_method),
        (Meter, "on_sent"),
    ],
)
async def test_any_failure_is_answered_and_leaves_nothing_open(
    opened_lane: PortWithListener, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, more: bytes
) -> None:
    port = opened_lane.port
    await port.store.put(Put(schema.app_config_key(ORG, APP), {"version": 1, "limits": {"rpm": 600, "tpm": 10**6}}))
    before = opened_lane.journal.recorded
    async with wired(opened_lane) as wire:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _raises)
            for _ in range(2):
                await wire.send(request_of(opened_lane, more))
                read_error_message(await wire.answer(), 500, "InternalServerException")
        await opened_lane.wait_until_quiet()
        assert opened_lane.journal.recorded == before
        await wire.send(request_of(opened_lane, more))
        assert (await wire.answer()).status == 200


@replaces_a_method
@pytest.mark.parametrize("more", [b"", RETRIED])
@pytest.mark.parametrize("fault", ["x-simulate-fault: reset\r\n", ""])
async def test_failing_meter_keeps_nobody_waiting(
    opened_lane: PortWithListener, monkeypatch: pytest.MonkeyPatch, fault: str, more: bytes
) -> None:
    closed = Meter.close

    def close(meter: Meter) -> None:
        closed(meter)
        raise RuntimeError

    monkeypatch.setattr(Meter, "close", close)
    if fault:
        more += fault.encode()
    else:
        monkeypatch.setattr(SigV4Authorizer, "build_header_lines", _raises)
    async with wired(opened_lane) as wire:
        await wire.send(request_of(opened_lane, more))
        read_error_message(await wire.answer(), 500, "InternalServerException")
    monkeypatch.setattr(Meter, "close", closed)
    await opened_lane.wait_until_quiet()


@replaces_a_method
@pytest.mark.parametrize("is_known", [True, False])
async def test_call_that_cannot_be_recorded_is_not_sent(
    opened_lane: PortWithListener, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def refused() -> None:
        raise RecordingUnavailable("the journal is not sound")

    sent = len(opened_lane.port.bedrock.ledger)
    with monkeypatch.context() as patch:
        if is_known:
            patch.setattr(opened_lane.handler._label_selector, "_check_recordable", refused)
        else:
            patch.setattr(opened_lane.journal._segment, "append", full)
        async with wired(opened_lane) as wire:
            await wire.send(request_of(opened_lane))
            assert (await wire.answer()).status == 503
    assert len(opened_lane.port.bedrock.ledger) == sent
    await opened_lane.wait_until_quiet()


@replaces_a_method
async def test_failure_before_limits_is_answered_500(
    opened_lane: PortWithListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MeterFactory, "pricing_for", _raises)
        async with wired(opened_lane) as wire:
            await wire.send(request_of(opened_lane, path=b"/model/economy/converse"))
            read_error_message(await wire.answer(), 500, "InternalServerException")
    await opened_lane.wait_until_quiet()


# Callers that leave.


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@pytest.mark.parametrize("more", [b"", RETRIED])
async def test_disconnected_caller_is_charged_and_nothing_stays_open(
    opened_lane: PortWithListener, protocol: str, more: bytes
) -> None:
    port, recorded = opened_lane.port, opened_lane.journal.recorded.requests
    port.bedrock.always(latency_ms=100)
    sent = len(port.bedrock.ledger)
    if protocol == "h1":
        wire = await RawConnection.connect(opened_lane.port_number)
        await wire.send(request_of(opened_lane, more))
    else:
        client = await Http2TestClient.connect(opened_lane.port_number)
        wire = client.connection
        head = [(b"authorization", b"Bearer " + port.token.encode()), (b"content-type", b"application/json")]
        if more:
            head.append((b"amz-sdk-invocation-id", b"one"))
        await client.body(client.open(PATH, head, ends=False), BODY)
    await eventually(lambda: len(port.bedrock.ledger) > sent)
    wire.reset()
    await opened_lane.wait_until_quiet()
    assert opened_lane.journal.recorded.requests == recorded + 1
    assert opened_lane.journal.recorded.estimated_requests == 0


# Requests sent ahead.


async def test_pipelined_refusals_and_calls_are_answered_in_order(opened_lane: PortWithListener) -> None:
    """Refusals end within the reading of what was sent, and answers of Bedrock's begin the next request."""
    refused = ask(path=PATH)  # the shortest there is, so that hundreds come at once
    async with wired(opened_lane) as wire:
        for pattern in ([403] * 500, [200, 403, 200, 200, 403, 403], [403, 200] * 40, [200, *[403] * 300]):
            await wire.send(b"".join(refused if each == 403 else request_of(opened_lane) for each in pattern))
            assert [(await wire.answer()).status for _ in pattern] == pattern
        await wire.send(request_of(opened_lane, RETRIED) * 50)
        assert {(await wire.answer()).status for _ in range(50)} == {200}
    await opened_lane.wait_until_quiet()


def _answering(counted: list[int]) -> Handler:
    """Counts in each turn of the loop what is answered without a task."""

    async def answer(request: Request, responder: Responder) -> None:
        counted[-1] += asyncio.current_task() is None
        await echo(request, responder)

    return answer


@asynccontextmanager
async def turns_of(counted: list[int]) -> AsyncIterator[None]:
    """From now on there is a count for each turn of the loop."""

    async def count() -> None:
        while True:
            counted.append(0)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()


@pytest.mark.parametrize("http2", [False, True])
@on_both_loops
async def test_flood_of_refused_requests_leaves_turns_to_others(http2: bool) -> None:
    in_turns, requests = [0], DEFAULT_LIMITS.streams if http2 else 3000
    async with open_port(_answering(in_turns)) as rig, turns_of(in_turns):
        if http2:
            client = await rig.connect_http2()
            numbers = [client.open(b"/a", [], ends=True) for _ in range(requests)]
            await client.flush()
            assert {(await client.answer(number)).status for number in numbers} == {200}
        else:
            wire = await rig.connect()
            await wire.send(b"".join(ask(b"%d" % number) for number in range(requests)))
            for number in range(requests):
                assert (await wire.answer()).body == b"%d" % number
    assert sum(in_turns) >= MAX_IMMEDIATE_ANSWERS
    assert max(in_turns) <= MAX_IMMEDIATE_ANSWERS + 1


# The outbox.


@replaces_a_method
@pytest.mark.parametrize("is_last", [True, False])
@on_both_loops
async def test_half_closed_client_gets_batched_response(is_last: bool) -> None:
    """The answer and the end of what the client says come in one turn of the loop."""
    through = ForwardingHandler()
    wires: list[RawConnection] = []

    async def script(exchange: UpstreamExchange) -> None:
        exchange.writer.write(build_response(b"all is well"))
        if is_last:
            wires[0].half_close()
            time.sleep(0.02)  # noqa: ASYNC251 - so that the loop finds both at once

    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            wires.append(await rig.connect())
            always_waits(rig)
            await wires[0].send(ask(b"hello"))
            assert (await wires[0].answer()).body == b"all is well"


def always_waits(rig: PortHarness, before: Callable[[], object] = lambda: None) -> None:
    """Whatever is put; and this happens before it is written."""
    outbox = rig.listener.write_batcher
    put = outbox.write

    def waits(write: Callable[[bytes], None], data: bytes) -> None:
        outbox.is_busy = True
        asyncio.get_running_loop().call_soon(before)
        put(write, data)

    outbox.write = waits  # type: ignore[method-assign]


@replaces_a_method
@on_both_loops
async def test_idle_connection_is_closed_after_last_response() -> None:
    async with open_port(echo) as rig:
        always_waits(rig, lambda: [connection.drain() for connection in rig.listener._connections])
        wire = await rig.connect()
        await wire.send(ask(b"hello"))
        assert (await wire.answer()).body == b"hello"
        assert await wire.read_ending() == "closed"


@on_both_loops
async def test_pipelining_client_that_does_not_read_is_detected() -> None:
    """However many of its responses could be written in one turn."""
    answer = bytes(MAX_BATCH_BYTES // 2)

    async def handler(_: Request, responder: Responder) -> None:
        rig.listener.write_batcher.is_busy = True
        responder.start(200, (), len(answer))
        responder.write(answer)
        responder.finish()

    async with open_port(handler) as rig:
        wire = await rig.connect(receive_buffer=4096)
        await eventually(lambda: rig.open_connections)
        rig.shrink_send_buffers()
        await wire.send(ask() * DEFAULT_LIMITS.pipelined)
        await eventually(lambda: any(getattr(each, "is_write_paused", False) for each in rig.listener._connections))
        (behind,) = [each._transport.get_write_buffer_size() for each in rig.listener._connections]  # type: ignore[attr-defined]
        assert behind < 2 * MAX_BATCH_BYTES
        for _ in range(DEFAULT_LIMITS.pipelined):
            assert (await wire.answer()).body == answer


@replaces_a_method
@on_both_loops
async def test_client_awaiting_100_continue_gets_former_response_first() -> None:
    async with open_port(echo) as rig:
        always_waits(rig)
        wire = await rig.connect()
        second = ask(b"second", b"expect: 100-continue\r\n")
        await wire.send(ask(b"first") + second[:-6])
        assert (await wire.answer()).body == b"first"
        assert (await wire.head())[0] == 100
        await wire.send(second[-6:])
        assert (await wire.answer()).body == b"second"


class Heeded(RecordingObserver):
    unsent = 0

    def on_not_executed(self) -> None:
        self.unsent += 1


@asynccontextmanager
async def hasty(says: bytes) -> AsyncIterator[tuple[UpstreamEndpoint, list[bytes]]]:
    """A server that says this, and then listens, or if it says nothing closes: before it was asked."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(says)
        if says:
            heard.append(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield UpstreamEndpoint("127.0.0.1", server.sockets[0].getsockname()[1], False), heard


class Held:
    """A write batcher that flushes on command only."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[bytes], None], bytes]] = []

    def put(self, write: Callable[[bytes], None], data: bytes) -> None:
        self.waiting.append((write, data))


@on_both_loops
async def test_response_before_call_was_written_closes_connection() -> None:
    """It is to nothing that was asked, and the call would be read by then as the next one."""
    held = Held()
    async with hasty(build_response(b"too early", 408)) as (endpoint, heard):
        through = ForwardingHandler(endpoint, schedule_write=held.put)
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect()
            await wire.send(ask(b"hello"))
            assert (await wire.answer()).status == 503  # nothing was sent, so it may be sent again
            assert through.idle_connections == []
            for write, data in held.waiting:
                with suppress(RuntimeError):  # says uvloop
                    write(data)
            await eventually(lambda: heard)
            assert heard == [b""]


@on_both_loops
async def test_unwritten_call_fails_over() -> None:
    held = Held()

    def put(write: Callable[[bytes], None], data: bytes) -> None:
        if held.waiting:
            write(data)
        else:
            held.put(write, data)

    async with hasty(b"") as (endpoint, _), upstream(lambda each: each.send(build_response(b"here"))) as second:
        through = ForwardingHandler(endpoint, second.endpoint, new_tap=Heeded, schedule_write=put)
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect()
            await wire.send(ask(b"hello"))
            assert (await wire.answer()).body == b"here"
            assert through.taps[0].unsent == 1


@on_both_loops
async def test_unwritten_call_without_other_endpoint_is_unavailable() -> None:
    async with hasty(b"") as (endpoint, _):
        through = ForwardingHandler(endpoint, new_tap=Heeded, schedule_write=Held().put)
        async with open_forwarding_port(through) as rig:
            wire = await rig.connect()
            await wire.send(ask(b"hello"))
            heard = await wire.answer()
            assert read_error_message(heard, 503, "ServiceUnavailableException") == "Bedrock cannot be reached"
            assert heard[b"retry-after"] == b"1"
            assert through.taps[0].unsent == 1
