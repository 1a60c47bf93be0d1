"""A call sent again is carried out once: a retry gets the response of the first call, as far as it is kept."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from price_keeper.upstream import retry_joiner as limits

from tests.support.port_harness import (
    ExchangeScript,
    ForwardingHandler,
    PortHarness,
    UpstreamExchange,
    build_response,
    on_both_loops,
    open_forwarding_port,
    reply_with,
    upstream,
)
from tests.support.raw_clients import (
    ConnectionCut,
    Http2TestClient,
    RawConnection,
    WireResponse,
    ask,
    eventually,
    wait_quietly,
)

BODY = random.Random(5).randbytes(300_000)
OK = build_response(BODY)


def chunked(*parts: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-from: upstream\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


class Stepwise:
    """Upstream that sends one part of its answer on each command."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self._may = asyncio.Semaphore(0)

    def go_on(self, steps: int = 1000) -> None:
        for _ in range(steps):
            self._may.release()

    async def __call__(self, exchange: UpstreamExchange) -> None:
        for part in self._parts:
            await self._may.acquire()
            await exchange.send(part)


@dataclass
class Asking:
    """A caller over one of the protocols, which can disconnect."""

    client: RawConnection | Http2TestClient

    async def answer(self) -> WireResponse:
        if isinstance(self.client, RawConnection):
            return await self.client.answer()
        return await self.client.answer(1)

    async def begun(self, size: int) -> None:
        if isinstance(self.client, RawConnection):
            while len(self.client.received) < size:
                assert await self.client.read_more()
        else:
            await self.client.wait_until(lambda: len(self.client.streams[1].body) >= size)

    async def reads(self) -> bool:
        if isinstance(self.client, RawConnection):
            return await self.client.read_more(4096)
        return await self.client.listen()

    def leave(self) -> None:
        (self.client if isinstance(self.client, RawConnection) else self.client.connection).reset()


async def asks(
    rig: PortHarness,
    protocol: str = "h1",
    *,
    caller: bytes = b"me",
    body: bytes = b"b",
    invocation: bytes = b"1",
    **how: int,
) -> Asking:
    headers = [(b"caller", caller), (b"invocation", invocation)]
    if protocol == "h1":
        wire = await rig.connect(**how)
        await wire.send(ask(body, b"".join(b"%b: %b\r\n" % header for header in headers)))
        return Asking(wire)
    client = await rig.connect_http2(**how)
    number = client.open(b"/a", headers, ends=False)
    await client.body(number, body)
    return Asking(client)


async def joined(rig: PortHarness, through: ForwardingHandler, count: int) -> None:
    await eventually(lambda: through.retry_joiner and through.retry_joiner.joined == count)


BOTH = pytest.mark.parametrize(("first", "second"), [("h1", "h2"), ("h2", "h1")])


@BOTH
@on_both_loops
async def test_retry_joins_call_in_flight(first: str, second: str) -> None:
    script = Stepwise(*chunked(b"one ", b"two ", b"three"))
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            readers = [await asks(rig, first)]
            await eventually(lambda: server.calls)
            for step in range(1, 5):
                readers.append(await asks(rig, second))  # before the head, after it, and in the middle of the body
                await joined(rig, through, step)
                script.go_on(1)
                await wait_quietly(0.01)
            script.go_on()
            answers = [await reader.answer() for reader in readers]
            assert {heard.body for heard in answers} == {b"one two three"}
            assert {(heard.status, heard[b"x-from"], heard[b"x-added"]) for heard in answers} == {
                (200, b"upstream", b"by us")
            }
            assert len(server.calls) == 1


@BOTH
@on_both_loops
async def test_retry_joins_call_after_first_caller_left(first: str, second: str) -> None:
    script = Stepwise(*chunked(b"one ", b"two ", b"three"))
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            for _ in range(3):
                reader = await asks(rig, first)
                script.go_on(1)
                await wait_quietly(0.01)
                reader.leave()
                await eventually(lambda: rig.open_connections == 0)
            last = await asks(rig, second)
            script.go_on()
            assert (await last.answer()).body == b"one two three"
            assert len(server.calls) == 1
            assert (through.taps[0].received, through.taps[0].ends) == (b"one two three", [True])


@BOTH
@on_both_loops
async def test_successful_response_is_replayed_for_a_while(first: str, second: str) -> None:
    through = ForwardingHandler(joins_retries=True)
    async with upstream(reply_with(OK)) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            original = await (await asks(rig, first)).answer()
            for protocol in (first, second):
                again = await (await asks(rig, protocol)).answer()
                assert (again.status, again.headers, again.body) == (200, original.headers, BODY)
            await rig.pass_time(limits.RESPONSE_TTL_SECONDS - 1)
            assert (await (await asks(rig, second)).answer()).body == BODY
            assert len(server.calls) == 1
            await rig.pass_time(2)
            assert (await (await asks(rig, second)).answer()).body == BODY
            assert (await (await asks(rig, second)).answer()).body == BODY
            assert len(server.calls) == 2


@on_both_loops
async def test_other_caller_body_or_invocation_is_not_joined() -> None:
    script = Stepwise(OK)
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            other = [{}, {"caller": b"you"}, {"body": b"c"}, {"invocation": b"2"}]
            under_way = [await asks(rig, **how) for how in other]
            await eventually(lambda: len(server.calls) == 4)
            script.go_on()
            for reader in under_way:
                await reader.answer()
            for how in (*other, {"caller": b"they"}):
                await (await asks(rig, **how)).answer()
            assert len(server.calls) == 5
            wire = await rig.connect()
            for _ in range(2):  # without an invocation's id nothing is a retry
                await wire.send(ask(b"b", b"caller: me\r\n"))
                await wire.answer()
            assert len(server.calls) == 7


CUT = build_response(b"x" * 100)[:-1]
ERRORS: dict[str, ExchangeScript] = {
    "throttled": reply_with(build_response(b"no", 429)),
    "fault": reply_with(build_response(b"no", 500)),
    "moved": reply_with(build_response(b"no", 302)),
    "no head": reply_with(then=UpstreamExchange.close),
    "cut": reply_with(CUT, then=UpstreamExchange.close),
}


@pytest.mark.parametrize("what", ERRORS)
@BOTH
@on_both_loops
async def test_errors_are_never_replayed(what: str, first: str, second: str) -> None:
    async def script(exchange: UpstreamExchange) -> None:
        await (ERRORS[what] if len(server.calls) == 1 else reply_with(OK))(exchange)

    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            reader = await asks(rig, first)
            if what == "cut":
                with pytest.raises(ConnectionCut):
                    await reader.answer()
            else:
                assert (await reader.answer()).status >= 300
            assert through.retry_joiner is not None
            assert through.retry_joiner.kept_bytes == 0
            assert (await (await asks(rig, second)).answer()).body == BODY
            assert len(server.calls) == 2


@on_both_loops
async def test_abort_reaches_every_joined_caller() -> None:
    script = Stepwise(CUT)
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            readers = [await asks(rig, protocol) for protocol in ("h1", "h2", "h1")]
            await joined(rig, through, 2)
            script.go_on()
            await readers[0].begun(150)
            server.calls[0].reset()
            for reader in readers:
                with pytest.raises(ConnectionCut):
                    await reader.answer()


# Bounds.


@on_both_loops
async def test_response_above_bound_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RESPONSE_BYTES", 200_000)
    script = Stepwise(OK[:250_000], OK[250_000:], OK)
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            first = await asks(rig)
            script.go_on(1)
            await first.begun(250_000)
            assert through.retry_joiner is not None
            assert (through.retry_joiner.kept_bytes, through.retry_joiner._calls) == (0, {})
            second = await asks(rig)
            await eventually(lambda: len(server.calls) == 2)
            script.go_on()
            assert (await first.answer()).body == (await second.answer()).body == BODY
            assert through.retry_joiner.joined == 0


@on_both_loops
async def test_response_without_possible_retry_is_drained_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RESPONSE_BYTES", 100_000)
    script = Stepwise(OK[:50_000], OK[50_000:200_000], OK[200_000:])
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            first = await asks(rig)
            script.go_on(1)
            await first.begun(10_000)
            first.leave()
            await eventually(lambda: rig.open_connections == 0)
            assert through.busy_connections[0].deadline is None  # it may come back
            script.go_on(1)
            await eventually(lambda: through.busy_connections[0].deadline is not None)  # not for this
            script.go_on()
            await eventually(lambda: through.outcomes)
            assert through.taps[0].received == BODY


@on_both_loops
async def test_kept_response_is_bounded_in_time() -> None:
    script = Stepwise(*chunked(b"drop ", b"by ", b"drop ", b"for ever"))
    through = ForwardingHandler(joins_retries=True)
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            first = await asks(rig)
            script.go_on(2)
            await first.begun(60)
            first.leave()
            await eventually(lambda: rig.open_connections == 0)
            await rig.pass_time(limits.ABANDONED_TTL_SECONDS + 1)
            assert through.busy_connections[0].deadline is None
            script.go_on(1)
            await eventually(lambda: through.busy_connections[0].deadline is not None)
            assert through.retry_joiner is not None
            assert through.retry_joiner.kept_bytes == 0
            await rig.pass_time(121)
            await eventually(lambda: through.outcomes)
            assert through.taps[0].ends == [False]


# Readers of different speed.


def shared_response_of(through: ForwardingHandler) -> Any:
    return through.busy_connections[0]._sink._responder  # type: ignore[union-attr]


def readers_of(through: ForwardingHandler) -> tuple[Any, ...]:
    readers: tuple[Any, ...] = shared_response_of(through)._readers
    return readers


LONG = random.Random(6).randbytes(3_000_000)


@pytest.mark.parametrize("protocol", ["h1", "h2"])
@on_both_loops
async def test_upstream_waits_for_slow_reader_but_not_for_stalled_one(protocol: str) -> None:
    through = ForwardingHandler(joins_retries=True)
    script = Stepwise(build_response(LONG)[:1000], build_response(LONG)[1000:])
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            stalled = await asks(rig, protocol, receive_buffer=4096)
            await eventually(lambda: server.calls)
            rig.shrink_send_buffers()
            others = [await asks(rig, each) for each in ("h1", "h2")]
            await joined(rig, through, 2)
            script.go_on()
            answers = [asyncio.create_task(other.answer()) for other in others]
            for _ in range(3):
                await eventually(lambda: [reader.is_paused for reader in readers_of(through)] == [True, False, False])
                await wait_quietly()
                await rig.pass_time(limits.MAX_STALL_SECONDS - 1)
                seen = len(through.taps[0].received)
                assert seen < 2_000_000
                while len(through.taps[0].received) == seen:  # it reads after all
                    assert await stalled.reads()
            shared = shared_response_of(through)
            for _ in range(10):  # at first it has read, which may be noticed late
                if len(shared._readers) == 3:
                    await wait_quietly()
                    await rig.pass_time(limits.MAX_STALL_SECONDS + 1)
            for answer in answers:
                assert (await answer).body == LONG
            with pytest.raises(ConnectionCut):
                await stalled.answer()
            assert (len(server.calls), through.taps[0].ends) == (1, [True])


@on_both_loops
async def test_last_remaining_reader_applies_back_pressure() -> None:
    through = ForwardingHandler(joins_retries=True)
    script = Stepwise(build_response(LONG)[:1000], build_response(LONG)[1000:])
    async with upstream(script) as server:
        through.set_targets(server.endpoint)
        async with open_forwarding_port(through) as rig:
            readers = [await asks(rig, receive_buffer=4096)]
            await eventually(lambda: server.calls)
            readers.append(await asks(rig, receive_buffer=4096))
            await joined(rig, through, 1)
            rig.shrink_send_buffers()
            script.go_on()
            await eventually(lambda: through.busy_connections[0]._is_paused)
            await wait_quietly()
            assert len(through.taps[0].received) < 1_000_000
            readers[0].leave()
            await eventually(lambda: rig.open_connections == 1)
            await rig.pass_time(limits.MAX_STALL_SECONDS + 1)
            assert through.busy_connections[0]._is_paused
            assert (await readers[1].answer()).body == LONG
