"""How fast strangers may have the store read: whoever asks waits for his turn, and is not refused for what others sent.

Anybody can invent a client or a token, and each costs a read that somebody pays for. Refusing an address once it was
wrong too often would lock out those who share it. So each address has a pace, at which its questions are let through
one after the other, and all addresses together have a wider one. A pace is told by when its next turn comes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from price_keeper.auth.failures import network_of
from price_keeper.clock import Clock
from price_keeper.errors import Busy

MAX_LOOKUP_KEYS = 10_000  # addresses
MAX_LOOKUP_WAIT_SECONDS = 5.0  # of both waits together; past this the answer would come too late
_ALL_ADDRESSES = "all addresses"
_NANOS_PER_SECOND = 10**9  # whole ones, so that a turn that has come is not a rounding error away


@dataclass(frozen=True, slots=True)
class LookupRate:
    """So many that have not asked for a while come at once, then so many in a second."""

    burst: int
    per_second: float


# From one address at most 64 connections are taken at the control port: together they wait little more than a second.
LOOKUP_RATE_PER_ADDRESS = LookupRate(50, 50.0)
LOOKUP_RATE_TOTAL = LookupRate(500, 500.0)


class LookupThrottle:
    def __init__(
        self, clock: Clock, per_address: LookupRate = LOOKUP_RATE_PER_ADDRESS, total: LookupRate = LOOKUP_RATE_TOTAL
    ) -> None:
        self._clock = clock
        self._per_address = per_address
        self._total = total
        self._next_turn_at: dict[Hashable, int] = {}

    async def wait_for_address(self, address: str) -> None:
        """Returns when the store may be asked for somebody at this address. Raises Busy if that would take too long.

        Behind something that hides who calls, as an ingress does, all who come through it are one address.
        """
        await self.wait_for(network_of(address))

    async def wait_for(self, key: Hashable) -> None:
        """As `turn`, for somebody who is told apart from others by something else."""
        until = self._now_nanos() + round(MAX_LOOKUP_WAIT_SECONDS * _NANOS_PER_SECOND)
        # One after the other, so that an address takes of all turns no more than it could use by itself.
        for bucket, rate in ((key, self._per_address), (_ALL_ADDRESSES, self._total)):
            wait = self._reserve_turn(bucket, rate, until)
            if wait > 0:
                await self._clock.sleep(wait)

    def _now_nanos(self) -> int:
        return round(self._clock.monotonic() * _NANOS_PER_SECOND)

    def _reserve_turn(self, key: Hashable, rate: LookupRate, until: int) -> float:
        """The next turn is theirs, unless it comes too late: how long until it comes."""
        now, interval = self._now_nanos(), round(_NANOS_PER_SECOND / rate.per_second)
        turn_at = max(self._next_turn_at.get(key, 0), now - (rate.burst - 1) * interval)
        if turn_at > until:
            raise Busy("too much is being looked up that is not known here; try again", retry_after=2)
        if key not in self._next_turn_at and len(self._next_turn_at) >= MAX_LOOKUP_KEYS:
            self._make_room()
        self._next_turn_at[key] = turn_at + interval
        return (turn_at - now) / _NANOS_PER_SECOND

    def _make_room(self) -> None:
        """The busiest stay, so that many addresses with one question each do not make one of them be forgotten."""
        busiest = sorted(self._next_turn_at.items(), key=lambda each: each[1], reverse=True)[: MAX_LOOKUP_KEYS // 2]
        self._next_turn_at = {_ALL_ADDRESSES: self._next_turn_at.get(_ALL_ADDRESSES, 0), **dict(busiest)}
