"""Unsolicited data on a kept connection is not taken for the next call's response: at the store, and at Bedrock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from price_keeper.auth.control_service_client import open_control_service
from price_keeper.errors import StoreUnavailable
from price_keeper.stores.contract import Key, Put, Update
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.engines import PREFIX, Engines
from tests.support.port_harness import (
    ForwardingHandler,
    PortHarness,
    UpstreamExchange,
    build_response,
    on_both_loops,
    open_forwarding_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import ask, eventually, wait_quietly
from tests.support.wire_faults import Break, FaultKind, FaultPoint, Pass, Surplus
from tests.support.wire_proxy import WireProxy, wire_proxy

ANOTHER = b"HTTP/1.1 200 OK\r\nx-amzn-requestid: ANOTHER\r\ncontent-length: 2\r\n\r\n{}"
SURPLUS = {"the same again": None, "another answer": ANOTHER, "a byte": b"x", "half an answer": ANOTHER[:30]}
AT_ONCE, WHILE_IDLE = 0.0, 0.02


@dataclass
class Stored:
    wire: WireProxy
    store: DynamoStore
    direct: DynamoStore
    one: Key
    two: Key

    async def asked_again(self) -> None:
        """The next call has read both items as they are, and the next write is believed only if it was one."""
        assert await self.store.get_many([self.two, self.one]) == [{"n": 2}, {"n": 1}]
        self.wire.next(Break(FaultPoint.REQUEST))
        with pytest.raises(StoreUnavailable):
            await self.store.update(Update(self.one, add={"n": 1}))
        assert await self.direct.get(self.one, consistent=True) == {"n": 1}


@pytest.fixture
async def stored(engines: Engines, tmp_path: Path, pk: str) -> AsyncIterator[Stored]:
    async with engines.open("ministack", tmp_path) as direct, wire_proxy(engines.endpoints["ministack"]) as wire:
        store = DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=wire.url, sleep=asyncio.sleep)
        await store.open()
        one, two = Key("rate-buckets", pk, "ONE"), Key("rate-buckets", pk, "TWO")
        await direct.put(Put(one, {"n": 1}))
        await direct.put(Put(two, {"n": 2}))
        assert isinstance(direct, DynamoStore)
        yield Stored(wire, store, direct, one, two)
        await store.close()


@pytest.mark.parametrize("later", [AT_ONCE, WHILE_IDLE])
@pytest.mark.parametrize("what", SURPLUS)
async def test_unsolicited_store_data_moves_to_another_connection(stored: Stored, what: str, later: float) -> None:
    stored.wire.next(Surplus(SURPLUS[what], later))
    assert await stored.store.get(stored.one) == {"n": 1}
    await wait_quietly()
    await stored.asked_again()
    is_unseen = what == "half an answer" and later == AT_ONCE  # until the rest of it comes
    assert stored.wire.connections == (1 if is_unseen else 2)


@pytest.mark.parametrize("between", [0, 1, 5])
async def test_repeated_store_answer_is_not_taken_for_later_one(stored: Stored, between: int) -> None:
    is_asked = asyncio.Event()
    stored.wire.next(Surplus(None, is_asked), *[Pass()] * between, Break(FaultPoint.REQUEST, FaultKind.STALL, 5.0))
    assert await stored.store.get(stored.one) == {"n": 1}
    for _ in range(between):
        assert await stored.store.get(stored.two) == {"n": 2}
    assert stored.wire.connections == 1
    asking = asyncio.create_task(stored.store.get(stored.two))
    await eventually(lambda: stored.wire.requests == 2 + between)
    is_asked.set()
    assert await asking == {"n": 2}
    assert (stored.wire.requests, stored.wire.connections) == (3 + between, 2)
    await stored.asked_again()


# Bedrock. Data with a response, or on an idle connection, is tested with the other failures of upstream.


async def asked(rig: PortHarness) -> bytes:
    wire = await rig.connect()
    await wire.send(ask(b"hello"))
    return (await wire.answer()).body


@on_both_loops
async def test_data_before_call_is_not_its_response() -> None:
    waiting = []
    through = ForwardingHandler(schedule_write=lambda write, data: waiting.append((write, data)))
    async with (
        upstream(reply_with(build_response(b"the first"))) as first,
        upstream(reply_with(build_response(b"the second"))) as second,
    ):
        through.set_targets(first.endpoint, second.endpoint)
        async with open_forwarding_port(through) as rig:
            one = asyncio.create_task(asked(rig))
            await _written(waiting)
            assert await one == b"the first"
            another = asyncio.create_task(asked(rig))
            await eventually(lambda: waiting)
            await first.calls[0].send(build_response(b"unasked"))
            await eventually(lambda: len(waiting) == 2)  # it goes to the next place, as it was never sent to this one
            await _written(waiting)
            assert await another == b"the second"
            assert (len(first.calls), len(second.calls)) == (1, 1)


async def _written(waiting: list) -> None:
    await eventually(lambda: waiting)
    while waiting:
        write, data = waiting.pop(0)
        with suppress(RuntimeError):  # as the outbox does: the connection may be gone
            write(data)


# The control service, which is asked for credentials.


async def test_unsolicited_credentials_reach_nobody() -> None:
    async def script(exchange: UpstreamExchange) -> None:
        whose = next(line for line in exchange.head.split(b"\r\n") if line.lower().startswith(b"authorization"))
        await exchange.send(build_response(whose))
        await wait_quietly(0.02)
        await exchange.send(build_response(whose))

    async with upstream(script) as server, open_control_service(f"http://127.0.0.1:{server.port}") as ask_for:
        for name in ("one", "another"):
            assert (await ask_for(name)).body.endswith(name.encode())
            await wait_quietly()
