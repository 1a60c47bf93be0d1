"""Store reads for unknown callers: rate limited per address, and no address waits for another's requests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.auth import throttles as module
from price_keeper.auth.throttles import MAX_LOOKUP_WAIT_SECONDS, LookupRate, LookupThrottle
from price_keeper.errors import Busy

from tests.support.clock import ManualClock, settle
from tests.support.effort import tries

WIDE = LookupRate(10_000, 10_000.0)


class Turns:
    """When each turn came that was asked for."""

    def __init__(self, of_an_address: LookupRate, of_all: LookupRate = WIDE, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.began = self.clock.monotonic()
        self.lookups = LookupThrottle(self.clock, of_an_address, of_all)
        self.came: list[tuple[str, float]] = []
        self.refused = 0

    def ask(self, address: str, times: int = 1) -> list[asyncio.Future[None]]:
        return [asyncio.ensure_future(self._asked(address)) for _ in range(times)]

    async def _asked(self, address: str) -> None:
        try:
            await self.lookups.wait_for_address(address)
            self.came.append((address, round(self.clock.monotonic() - self.began, 6)))
        except Busy:
            self.refused += 1

    def times(self, address: str) -> list[float]:
        return [at for who, at in self.came if who == address]


async def test_lookups_within_burst_are_immediate_then_spaced() -> None:
    turns = Turns(LookupRate(3, 2.0))
    turns.ask("192.0.2.1", 6)
    await turns.clock.advance(10)
    assert turns.times("192.0.2.1") == [0, 0, 0, 0.5, 1.0, 1.5]
    turns.ask("192.0.2.1", 4)
    await turns.clock.advance(10)
    assert turns.times("192.0.2.1")[6:] == [10, 10, 10, 10.5]


async def test_lookups_of_other_address_do_not_wait() -> None:
    turns = Turns(LookupRate(2, 1.0), LookupRate(100, 100.0))
    turns.ask("192.0.2.1", 1000)
    turns.ask("192.0.2.2", 2)
    await settle()
    assert turns.times("192.0.2.2") == [0, 0]


async def test_slow_traffic_never_waits() -> None:
    turns = Turns(LookupRate(2, 1.0))
    for _ in range(100):
        turns.ask("192.0.2.1")
        await turns.clock.advance(1)
        (neighbour,) = turns.ask("192.0.2.1")
        await turns.clock.advance(1)
        assert neighbour.done()
    assert not turns.refused


async def test_lookup_with_too_long_wait_is_refused() -> None:
    turns = Turns(LookupRate(1, 2.0))
    turns.ask("192.0.2.1", 100)
    await turns.clock.advance(MAX_LOOKUP_WAIT_SECONDS)
    assert len(turns.came) == MAX_LOOKUP_WAIT_SECONDS * 2 + 1
    assert turns.refused == 100 - len(turns.came)
    (later,) = turns.ask("192.0.2.1")  # refused requests have used no turn
    await turns.clock.advance(0.5)
    assert later.done()


async def test_second_queue_adds_no_wait() -> None:
    turns = Turns(LookupRate(1, 0.5), LookupRate(1, 0.4))
    turns.ask("192.0.2.1", 3)
    turns.ask("192.0.2.2")
    await turns.clock.advance(10)
    assert turns.times("192.0.2.1") == [0, MAX_LOOKUP_WAIT_SECONDS]
    assert turns.refused == 1


class LateClock(ManualClock):
    """Wakes each sleeper 1 ms after its time, as an event loop may."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + 0.001)


async def test_flood_of_one_address_with_late_timers_is_served_at_its_rate() -> None:
    turns = Turns(LookupRate(1, 2.0), clock=LateClock())
    for _ in range(20):  # longer than the longest wait: all that come from there have waited nearly that long
        turns.ask("192.0.2.1", 5)
        await turns.clock.advance(0.5)
    await turns.clock.advance(2 * MAX_LOOKUP_WAIT_SECONDS)
    served_seconds = 20 * 0.5 + MAX_LOOKUP_WAIT_SECONDS
    assert len(turns.came) >= served_seconds * 2 - 1


async def test_all_addresses_together_are_rate_limited() -> None:
    turns = Turns(LookupRate(2, 1.0), LookupRate(10, 5.0))
    for number in range(20):
        turns.ask(f"192.0.2.{number}")
    await settle()
    assert len(turns.came) == 10
    await turns.clock.advance(2)
    assert len(turns.came) == 20


@settings(max_examples=tries(100))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=30), st.integers(1, 5))
def test_lookups_never_exceed_rate(steps: list[tuple[int, int]], at_once: int) -> None:
    asyncio.run(_played(steps, at_once))


async def _played(steps: list[tuple[int, int]], at_once: int) -> None:
    turns = Turns(LookupRate(at_once, 4.0))
    for wait, times in steps:
        await turns.clock.advance(wait)
        turns.ask("192.0.2.1", times)
    await turns.clock.advance(MAX_LOOKUP_WAIT_SECONDS)
    found = turns.times("192.0.2.1")
    assert len(found) + turns.refused == sum(times for _, times in steps)
    for first, begin in enumerate(found):
        for last, end in enumerate(found[first:], 1):
            assert last <= at_once + (end - begin) * 4 + 1e-6


async def test_memory_is_bounded_and_busiest_addresses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOOKUP_KEYS", 100)
    turns = Turns(LookupRate(2, 1.0))
    turns.ask("192.0.2.1", 5)
    await settle()
    for number in range(1000):
        turns.ask(f"2001:db8:{number:x}::1")
        await settle()
        assert len(turns.lookups._per_address._empty_at) <= 100
    (busy,) = turns.ask("192.0.2.1")
    await settle()
    assert not busy.done()
    await turns.clock.advance(10)
