"""Every fault at the socket between sidecar and Bedrock: what the caller sees, what is recorded, what is left open.

Whatever breaks, a call is sent once, no answer is made up, what is not known is an estimate and never zero, and the
next call finds everything in order.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import pytest
from price_keeper.config import LabelConfig, PricesConfig
from price_keeper.config.config_sections import DEMO_LABELS, JournalConfig
from price_keeper.ledger.ledger_entries import Receipt
from price_keeper.upstream import connection_pool
from price_keeper.upstream.forwarder import parse_endpoint

from tests.support.data_port import DataPort, data_port
from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    build_response,
    on_both_loops,
    open_forwarding_port,
    reply_with,
)
from tests.support.port_harness import upstream as scripted_upstream
from tests.support.raw_clients import (
    ConnectionCut,
    Http2TestClient,
    RawConnection,
    WireResponse,
    ask,
    descriptors,
    eventually,
    read_error_message,
)
from tests.support.sidecar_crashes import JournalContents
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE_BODY, TURN
from tests.support.wire_faults import AtAccept, Break, FaultKind, FaultPoint, Slow, Surplus, bedrock_error
from tests.support.wire_proxy import WireProxy, may_vanish, wire_proxy

ASKED = {
    "converse": ("/model/premium/converse", TURN),
    "converse-stream": ("/model/premium/converse-stream", TURN),
    "invoke": ("/model/premium/invoke", CLAUDE_BODY),
    "invoke-stream": ("/model/premium/invoke-with-response-stream", CLAUDE_BODY),
    "chat": (CHAT_PATH, CHAT | {"model": "oss"}),
    "chat-stream": (CHAT_PATH, CHAT | {"model": "oss", "stream": True}),
}
PROTOCOLS = ["h1", "h2"]
FEW = [(kind, protocol) for protocol in PROTOCOLS for kind in ("converse", "converse-stream")]
BEFORE_THE_BODY = (FaultPoint.REQUEST, FaultPoint.ANSWER, FaultPoint.HEAD)
STOPS_AFTER = 0.05  # seconds in which nothing comes; then it is reset
HOWS = [FaultKind.CLOSE, FaultKind.RESET, FaultKind.HALF, FaultKind.STALL]


@dataclass
class Socket:
    """One sidecar, and what has become of each call of it so far."""

    port: DataPort
    wire: WireProxy
    journal: Path
    reported: int = 0
    arrived: int = 0
    open: list[RawConnection] = field(default_factory=list)

    async def ask(self, kind: str, protocol: str) -> WireResponse | ConnectionCut:
        path, document = ASKED[kind]
        body = json.dumps(document).encode()
        token = f"Bearer {self.port.token}".encode()
        number = int(self.port.url.rpartition(":")[2])
        try:
            if protocol == "h2":
                client = await Http2TestClient.connect(number)
                self.open.append(client.connection)
                more = [(b"authorization", token), (b"content-type", b"application/json")]
                return await client.call(path.encode(), body, more)
            wire = await RawConnection.connect(number)
            self.open.append(wire)
            more = b"authorization: %b\r\ncontent-type: application/json\r\n" % token
            await wire.send(ask(body, more, path=path.encode()))
            return await wire.answer()
        except ConnectionCut as cut:
            return cut

    def receipts(self) -> list[Receipt]:
        """Of what was asked since the last look. A call that costs nothing has none."""
        found = JournalContents.read(self.journal).receipts
        fresh, self.reported = found[self.reported :], len(found)
        return fresh

    def arrivals(self) -> int:
        """Of calls at Bedrock, since the last look."""
        before, self.arrived = self.arrived, len(self.port.bedrock.ledger)
        return self.arrived - before

    def is_what_bedrock_says(self, receipt: Receipt) -> bool:
        usage = self.port.bedrock.ledger[-1].usage
        assert usage is not None
        return (receipt.counts.input_tokens, receipt.counts.output_tokens) == (usage.input_tokens, usage.output_tokens)

    def hang_up(self) -> None:
        for each in self.open:
            each.close()
        self.open.clear()

    async def is_well(self, kind: str, protocol: str) -> None:
        """A call goes as ever, and nothing is left of those before it."""
        heard = await self.ask(kind, protocol)
        assert isinstance(heard, WireResponse)
        assert heard.status == 200, heard.body
        (receipt,) = self.receipts()
        assert "why" not in receipt.about
        assert self.arrivals() == 1
        assert self.is_what_bedrock_says(receipt)
        self.hang_up()
        await eventually(lambda: self.port.forwarder.connection_counts[0] == 0 and self.wire.open <= 1)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Socket]:
    journal = tmp_path / "journal"
    kept = JournalConfig(dir=str(journal), flush_interval_secs=3600, flush_interval_max_secs=3600)
    oss = LabelConfig(CHAT["model"], "openai", PricesConfig(Decimal("0.15"), Decimal("0.6")))
    async with data_port(tmp_path, open_proxy=wire_proxy, journal=kept, labels={**DEMO_LABELS, "oss": oss}) as port:
        port.bedrock.always(frame_ms=1)  # so that frames come one by one
        made = Socket(port, port.proxy, journal)
        try:
            yield made
        finally:
            made.hang_up()


def is_estimated(receipt: Receipt) -> bool:
    assert receipt.counts.pico > 0
    assert receipt.counts.estimated_requests == ("why" in receipt.about)
    return "why" in receipt.about


@pytest.mark.parametrize(("kind", "protocol"), [*((kind, "h1") for kind in ASKED), *FEW[2:]])
async def test_call_broken_at_any_point_is_reported_and_recorded(rig: Socket, kind: str, protocol: str) -> None:
    await rig.is_well(kind, protocol)
    before = descriptors()
    for how in HOWS:
        for where in FaultPoint:
            rig.wire.next(Break(where, how, STOPS_AFTER, after=1 if "stream" in kind else 0))
            heard = await rig.ask(kind, protocol)
            about = f"{how} at {where}: {heard}"
            if where in BEFORE_THE_BODY:
                assert isinstance(heard, WireResponse), about
                read_error_message(heard, 503, "ServiceUnavailableException")
            else:
                assert isinstance(heard, ConnectionCut), about
                assert "reset" in heard.ending, about
            assert rig.arrivals() == (where is not FaultPoint.REQUEST), about
            (receipt,) = rig.receipts()
            if not is_estimated(receipt):
                assert rig.is_what_bedrock_says(receipt), about
            # Only where what was used had come already is it known.
            is_known = where is FaultPoint.END and "stream" in kind
            is_known |= kind.startswith("invoke") and "stream" not in kind and where not in BEFORE_THE_BODY
            assert is_estimated(receipt) or is_known, about
            if is_known and how is not FaultKind.RESET:  # with which the kernel may drop unread data
                assert not is_estimated(receipt), about
            await rig.is_well(kind, protocol)
    await eventually(lambda: descriptors() <= before)


@pytest.mark.parametrize(("kind", "protocol"), FEW)
async def test_slow_response_is_complete_and_exact(rig: Socket, kind: str, protocol: str) -> None:
    for piece in (1, 7, 100):
        rig.wire.next(Slow(0.01, piece))
        await rig.is_well(kind, protocol)
    assert rig.wire.connections == 1


@pytest.mark.parametrize("kind", ["converse", "chat-stream"])
@pytest.mark.parametrize("data", [None, b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"])
async def test_surplus_bytes_answer_no_call(rig: Socket, kind: str, data: bytes | None) -> None:
    for later in (0.0, 0.01):
        rig.wire.next(Surplus(data, later))
        await rig.is_well(kind, "h1")
        await asyncio.sleep(2 * later)
        await eventually(lambda: rig.wire.open == 0)
        await rig.is_well(kind, "h2")


@pytest.mark.parametrize(("kind", "protocol"), FEW)
async def test_refusal_of_bedrock_is_shown_and_free(rig: Socket, kind: str, protocol: str) -> None:
    errors = [
        bedrock_error("ThrottlingException", 429),
        bedrock_error("ModelNotReadyException", 429),
        bedrock_error("ServiceUnavailableException", 503),
        bedrock_error("InternalServerException", 500),
    ]
    for error in errors:
        rig.wire.next(error)
        asked = rig.wire.requests
        heard = await rig.ask(kind, protocol)
        assert isinstance(heard, WireResponse)
        assert read_error_message(heard, error.status, error.name) == "by the script"
        assert rig.wire.requests == asked + 1
        assert rig.receipts() == []
        await rig.is_well(kind, protocol)
    assert rig.wire.connections == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_refused_connections_cost_nothing(rig: Socket, protocol: str) -> None:
    rig.wire.refuse()
    for kind in ASKED:
        heard = await rig.ask(kind, protocol)
        assert isinstance(heard, WireResponse)
        read_error_message(heard, 503, "ServiceUnavailableException")
    assert rig.receipts() == []
    rig.wire.accept()
    await rig.is_well("converse", protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_connection_reset_at_once_is_reported(rig: Socket, protocol: str) -> None:
    """Whether the call was sent by then is for the kernel to say; if so, it is taken for carried out."""
    for kind in ASKED:
        rig.wire.at_accept.append(AtAccept.RESET)
        heard = await rig.ask(kind, protocol)
        assert isinstance(heard, WireResponse)
        read_error_message(heard, 503, "ServiceUnavailableException")
        assert all(is_estimated(receipt) for receipt in rig.receipts())
        await rig.is_well(kind, protocol)
        rig.wire.reset_all()
        await eventually(lambda: rig.port.forwarder.connection_counts == (0, 0))


async def test_broken_stream_leaves_others_alone(rig: Socket) -> None:
    """Of the streams of one caller's connection."""
    client = await Http2TestClient.connect(int(rig.port.url.rpartition(":")[2]))
    more = [(b"authorization", f"Bearer {rig.port.token}".encode()), (b"content-type", b"application/json")]
    rig.wire.next(
        Break(FaultPoint.MIDDLE, FaultKind.RESET, after=1), Slow(0.05), Break(FaultPoint.MIDDLE), Slow(0.1, 100)
    )
    path, body = b"/model/premium/converse-stream", json.dumps(TURN).encode()
    numbers = [client.open(path, more, ends=False) for _ in range(4)]
    for number in numbers:
        await client.body(number, body)
    heard = await asyncio.gather(*(_answered(client, number) for number in numbers[:1]))
    for number in numbers[1:]:
        heard.append(await _answered(client, number))
    assert [isinstance(each, WireResponse) for each in heard] == [False, True, False, True]
    client.connection.close()
    receipts = rig.receipts()
    assert sorted(is_estimated(receipt) for receipt in receipts) == [False, False, True, True]


async def _answered(client: Http2TestClient, number: int) -> WireResponse | ConnectionCut:
    try:
        return await client.answer(number)
    except ConnectionCut as cut:
        return cut


# Time. What follows is of connections alone, on a clock that the test moves.


@pytest.mark.parametrize("deafness", ["deaf", "mute", "in the head", "in the body"])
@on_both_loops
async def test_silence_of_every_kind_times_out(deafness: str) -> None:
    """A call that is not read, one that is read and not answered, and responses that stop."""
    breaks = {"mute": FaultPoint.REQUEST, "in the head": FaultPoint.HEAD, "in the body": FaultPoint.MIDDLE}
    through = ForwardingHandler()
    async with scripted_upstream(reply_with(build_response(b"all is well"))) as server, _way(server.port) as wire:
        through.set_targets(parse_endpoint(wire.url))
        async with open_forwarding_port(through) as rig:
            if deafness == "deaf":
                wire.at_accept.append(AtAccept.DEAF)
            else:
                wire.next(Break(breaks[deafness], FaultKind.STALL))
            calling = asyncio.create_task(_call(rig, b"x" * 3_000_000))
            await eventually(lambda: wire.injected)
            await eventually(lambda: through.busy_connections)
            is_begun = deafness == "in the body"
            await eventually(lambda: not is_begun or through.taps[0].status)
            if deafness == "in the head":  # what has come of it arrives before the clock moves
                await eventually(lambda: all(each.received_bytes for each in through.busy_connections))
            limit = connection_pool.READ_TIMEOUT_SECONDS if is_begun else connection_pool.FIRST_BYTE_TIMEOUT_SECONDS
            await rig.pass_time(limit - 1)
            assert not calling.done()
            await rig.pass_time(2)
            heard = await calling
            assert isinstance(heard, ConnectionCut) if is_begun else heard.status == 503
            assert (await _call(rig, b"")).status == 200


@on_both_loops
async def test_vanished_endpoint_is_detected_before_response_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    if not may_vanish():
        pytest.skip("to end a connection without a word needs Linux and CAP_NET_ADMIN")
    monkeypatch.setattr(connection_pool, "KEEPALIVE_IDLE_SECONDS", 1)
    through = ForwardingHandler()
    async with scripted_upstream(reply_with(build_response(b"all is well"))) as server, _way(server.port) as wire:
        through.set_targets(parse_endpoint(wire.url))
        async with open_forwarding_port(through) as rig:
            for where in (FaultPoint.ANSWER, FaultPoint.MIDDLE):
                wire.next(Break(where, FaultKind.VANISH))
                heard = await _call(rig, b"")
                assert isinstance(heard, ConnectionCut) if where is FaultPoint.MIDDLE else heard.status == 503
                assert (await _call(rig, b"")).status == 200


@on_both_loops
async def test_connections_use_keepalive_probes() -> None:
    through = ForwardingHandler()
    async with scripted_upstream(reply_with(build_response(b"all is well"))) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            assert (await _call(rig, b"")).status == 200
            kernel = through.idle_connections[0].transport.get_extra_info("socket")
            assert kernel.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            after, every, probes, unheard = (
                kernel.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
            assert after == connection_pool.KEEPALIVE_IDLE_SECONDS
            # By then Linux gives up at the first probe that is lost, however many there may be.
            assert unheard >= 1000 * (after + probes * every)


def _way(port: int) -> AbstractAsyncContextManager[WireProxy]:
    return wire_proxy(f"http://127.0.0.1:{port}")


async def _call(rig: PortHarness, body: bytes) -> WireResponse | ConnectionCut:
    wire = await rig.connect()
    await wire.send(ask(body))
    try:
        return await wire.answer()
    except ConnectionCut as cut:
        return cut
