"""Pace and silence on the wire, by a clock that stands still until the test moves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from bedrock_simulator import Entry, SimulatedBedrock

from tests.support.clock import ManualClock, settle
from tests.support.simulated import CLAUDE, TURN, simulated_bedrock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def bedrock(clock: ManualClock) -> AsyncIterator[SimulatedBedrock]:
    async with simulated_bedrock(clock=clock, require_auth=False) as running:
        yield running


class Wire:
    """A connection whose answer is looked at as it arrives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.seen = b""

    def ask(self, action: str, **wishes: object) -> None:
        headers = "".join(f"x-simulate-{name.replace('_', '-')}: {value}\r\n" for name, value in wishes.items())
        body = json.dumps(TURN)
        head = f"POST /model/{CLAUDE}/{action} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write((head + body).encode())

    async def arrived(self) -> bytes:
        """All that has arrived by now."""
        await settle()
        while not self._reader.at_eof():
            try:
                async with asyncio.timeout(0):
                    self.seen += await self._reader.read(65536)
            except TimeoutError:
                break
        return self.seen

    def hang_up(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def wired(bedrock: SimulatedBedrock) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bedrock.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        await settle()


async def until(is_so: Callable[[], bool]) -> None:
    """What goes over a socket takes turns of the loop, but no time of the clock."""
    async with asyncio.timeout(5):
        while not is_so():
            await settle()


async def asleep(clock: ManualClock, seconds: float) -> None:
    await until(lambda: clock.remaining_sleeps() == [seconds])


async def done(bedrock: SimulatedBedrock, requests: int = 1) -> Entry:
    """The last request's entry, once all of them are done."""
    await until(lambda: len(bedrock.ledger) == requests and bedrock.ledger[-1].is_done)
    return bedrock.ledger[-1]


async def test_latency_comes_before_head(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse", latency_ms=1500)
        await asleep(clock, 1.5)
        assert await wire.arrived() == b""
        await clock.advance(1.5)
        assert b'"latencyMs":1500' in await wire.arrived()


async def test_first_byte_delay_comes_after_head(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse-stream", fault="slow-first-byte", delay_ms=700)
        await asleep(clock, 0.7)
        assert (await wire.arrived()).endswith(b"\r\n\r\n")
        await clock.advance(0.7)
        assert (await wire.arrived()).endswith(b"0\r\n\r\n")
    assert bedrock.ledger[-1].is_whole


async def test_frames_arrive_at_their_pace(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse-stream", frame_ms=40, output_tokens=8)
        for frame in (b"messageStart", b"contentBlockDelta", b"contentBlockDelta", b"contentBlockStop", b"messageStop"):
            await asleep(clock, 0.04)
            assert frame in await wire.arrived()
            assert b"metadata" not in wire.seen
            await clock.advance(0.04)
        assert (await wire.arrived()).endswith(b"0\r\n\r\n")
        assert b"metadata" in wire.seen
        assert clock.remaining_sleeps() == []


async def test_stall_with_end_resumes(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse-stream", fault="stall", after_frames=1, delay_ms=9000)
        await asleep(clock, 9.0)
        assert b"messageStart" in await wire.arrived()
        assert b"contentBlockDelta" not in wire.seen
        await clock.advance(9)
        assert (await wire.arrived()).endswith(b"0\r\n\r\n")
    assert bedrock.ledger[-1].is_whole


async def test_stall_without_end_keeps_connection_open(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse", fault="stall")
        await until(lambda: len(bedrock.ledger) == 1)
        await clock.advance(3600)
        assert await wire.arrived() == b""
        assert not bedrock.ledger[-1].is_done
        wire.hang_up()
        entry = await done(bedrock)
    assert (entry.status, entry.is_whole) == (None, False)
    assert entry.usage is not None


async def test_caller_disconnecting_midway_leaves_incomplete_entry(bedrock, clock):
    async with wired(bedrock) as wire:
        wire.ask("converse-stream", frame_ms=40)
        await asleep(clock, 0.04)
        wire.hang_up()
        entry = await done(bedrock)
    assert (entry.status, entry.is_whole) == (200, False)


async def test_simulator_stops_at_once_despite_waiting_caller(clock):
    async with simulated_bedrock(clock=clock, require_auth=False) as bedrock, wired(bedrock) as wire:
        wire.ask("converse", fault="stall")
        wire_two = await asyncio.open_connection("127.0.0.1", bedrock.port)
        await until(lambda: len(bedrock.ledger) == 1)
        began = asyncio.get_running_loop().time()
    wire_two[1].close()
    assert asyncio.get_running_loop().time() - began < 2
    assert bedrock.ledger[-1].is_done


@pytest.mark.parametrize(
    ("wishes", "ending"),
    [
        ({}, b"0\r\n\r\n"),
        ({"fault": "cut", "after_frames": 1}, b""),
        ({"fault": "cut", "after_frames": 0}, b"\r\n\r\n"),
    ],
)
async def test_only_complete_stream_ends_with_last_chunk(bedrock, wishes, ending):
    async with wired(bedrock) as wire:
        wire.ask("converse-stream", **wishes)
        await done(bedrock)
        seen = await wire.arrived()
    assert seen.endswith(ending)
    assert (b"\r\n0\r\n\r\n" in seen) == (not wishes) == bedrock.ledger[-1].is_whole


async def test_half_head_fault_sends_half_a_head(bedrock):
    async with wired(bedrock) as wire:
        wire.ask("converse", fault="half-head")
        await done(bedrock)
        seen = await wire.arrived()
    assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" not in seen


async def test_reset_fault_sends_nothing(bedrock):
    async with wired(bedrock) as wire:
        wire.ask("converse", fault="reset")
        await done(bedrock)
        with pytest.raises(ConnectionResetError):
            await wire.arrived()


async def test_connection_is_kept_for_next_request(bedrock):
    async with wired(bedrock) as wire:
        for number in (1, 2, 3):
            wire.ask("converse", **({"fault": "throttle"} if number == 2 else {}))
            await done(bedrock, number)
        seen = await wire.arrived()
    assert [seen.count(b"HTTP/1.1 200"), seen.count(b"HTTP/1.1 429")] == [2, 1]
