"""What connections and calls were made of goes with them. The collector of cycles comes by so seldom that clients who
make a connection for each call would else have a sidecar hold thousands that are over (`app.GC_THRESHOLDS`).
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from tests.support.port_harness import ForwardingHandler, build_response, open_forwarding_port, reply_with, upstream
from tests.support.port_with_listener import PortWithListener, open_port_with_listener
from tests.support.raw_clients import Http2TestClient, RawConnection, ask, eventually
from tests.support.simulated import CHAT_PATH

BODY = b'{"messages":[{"role":"user","content":[{"text":"hello"}]}]}'
TIMES = 3
OURS = (
    "price_keeper.server",
    "price_keeper.parse_call",
    "price_keeper.handler",
    "price_keeper.upstream",
    "price_keeper.ledger",
    "price_keeper.usage",
    "httptools",
)

Client = Callable[[PortWithListener, list[tuple[bytes, bytes]]], Awaitable[None]]


@contextmanager
def uncollected(found: Counter[str]) -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _asked(path: str, head: list[tuple[bytes, bytes]], more: bytes = b"") -> bytes:
    return ask(BODY, b"".join(b"%b: %b\r\n" % header for header in head) + more, path=path.encode())


async def http1(lane: PortWithListener, head: list[tuple[bytes, bytes]], path: str = "/model/premium/converse") -> None:
    wire = await RawConnection.connect(lane.port_number)
    await wire.send(_asked(path, head) * 2)
    assert [(await wire.answer()).status for _ in range(2)] == [200, 200]
    wire.close()


async def streamed(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    await http1(lane, head, "/model/premium/converse-stream")


async def named_in_the_body(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    wire = await RawConnection.connect(lane.port_number)
    await wire.send(ask(b"{}", b"".join(b"%b: %b\r\n" % header for header in head), path=CHAT_PATH.encode()))
    assert (await wire.answer()).status == 400
    wire.close()


async def refused(lane: PortWithListener, _: list[tuple[bytes, bytes]]) -> None:
    wire = await RawConnection.connect(lane.port_number)
    await wire.send(_asked("/model/premium/converse", []))
    assert (await wire.answer()).status == 403
    wire.close()


async def broken_off(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    wire = await RawConnection.connect(lane.port_number)
    await wire.send(_asked("/model/premium/converse", head)[:-10])
    wire.reset()


async def leaving(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    sent = len(lane.port.bedrock.ledger)
    wire = await RawConnection.connect(lane.port_number)
    await wire.send(_asked("/model/premium/converse", head, b"x-simulate-latency-ms: 20\r\n"))
    await eventually(lambda: len(lane.port.bedrock.ledger) > sent)
    wire.reset()


async def http2(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    client = await Http2TestClient.connect(lane.port_number)
    assert (await client.call(b"/model/premium/converse", BODY, head)).status == 200
    client.connection.close()


async def http2_leaving(lane: PortWithListener, head: list[tuple[bytes, bytes]]) -> None:
    sent = len(lane.port.bedrock.ledger)
    client = await Http2TestClient.connect(lane.port_number)
    number = client.open(b"/model/premium/converse", [*head, (b"x-simulate-latency-ms", b"20")], ends=False)
    await client.body(number, BODY)
    await eventually(lambda: len(lane.port.bedrock.ledger) > sent)
    client.connection.reset()


@pytest.mark.parametrize(
    "client",
    [http1, streamed, named_in_the_body, refused, broken_off, leaving, http2, http2_leaving],
    ids=lambda c: c.__name__,
)
def test_connections_and_calls_leave_no_reference_cycles(client: Client, tmp_path: Path) -> None:
    left: Counter[str] = Counter()

    async def run() -> None:
        async with open_port_with_listener(tmp_path) as opened:
            head = [(b"authorization", b"Bearer " + opened.port.token.encode()), (b"content-type", b"application/json")]
            await client(opened, head)
            await _is_over(opened)
            with uncollected(left):
                for _ in range(TIMES):
                    await client(opened, head)
                await _is_over(opened)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert ours(left) == {}


def ours(found: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in found.items() if name.startswith(OURS)}


def test_connections_closed_by_bedrock_leave_no_reference_cycles() -> None:
    left: Counter[str] = Counter()

    async def run() -> None:
        async with upstream(reply_with(build_response(b"whole", extra_headers=b"connection: close\r\n"))) as server:
            through = ForwardingHandler(server.endpoint)
            async with open_forwarding_port(through) as rig:
                wire = await rig.connect()
                with uncollected(left):
                    for _ in range(TIMES):
                        await wire.send(ask())
                        assert (await wire.answer()).body == b"whole"
                    through.taps.clear()
                    await eventually(lambda: not through.busy_connections)
                    await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert ours(left) == {}


async def _is_over(lane: PortWithListener) -> None:
    await eventually(lambda: not lane.listener._connections)
    await lane.wait_until_quiet()
    await asyncio.sleep(0.01)
