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

REMEMBERED = 10_000  # addresses
LONGEST_WAIT_SECONDS = 5.0  # of both waits together; past this the answer would come too late
_ALL = "all addresses"
_NANOS = 10**9  # whole ones, so that a turn that has come is not a rounding error away


@dataclass(frozen=True, slots=True)
class Pace:
    """So many that have not asked for a while come at once, then so many in a second."""

    at_once: int
    per_second: float


# From one address at most 64 connections are taken at the control port: together they wait little more than a second.
OF_AN_ADDRESS = Pace(50, 50.0)
OF_ALL = Pace(500, 500.0)


class Lookups:
    def __init__(self, clock: Clock, of_an_address: Pace = OF_AN_ADDRESS, of_all: Pace = OF_ALL) -> None:
        self._clock = clock
        self._of_an_address = of_an_address
        self._of_all = of_all
        self._next: dict[Hashable, int] = {}

    async def turn(self, address: str) -> None:
        """Returns when the store may be asked for somebody at this address. Raises Busy if that would take too long.

        Behind something that hides who calls, as an ingress does, all who come through it are one address.
        """
        await self.turn_of(network_of(address))

    async def turn_of(self, who: Hashable) -> None:
        """As `turn`, for somebody who is told apart from others by something else."""
        until = self._moment() + round(LONGEST_WAIT_SECONDS * _NANOS)
        # One after the other, so that an address takes of all turns no more than it could use by itself.
        for key, pace in ((who, self._of_an_address), (_ALL, self._of_all)):
            wait = self._taken(key, pace, until)
            if wait > 0:
                await self._clock.sleep(wait)

    def _moment(self) -> int:
        return round(self._clock.monotonic() * _NANOS)

    def _taken(self, key: Hashable, pace: Pace, until: int) -> float:
        """The next turn is theirs, unless it comes too late: how long until it comes."""
        now, each = self._moment(), round(_NANOS / pace.per_second)
        at = max(self._next.get(key, 0), now - (pace.at_once - 1) * each)
        if at > until:
            raise Busy("too much is being looked up that is not known here; try again", retry_after=2)
        if key not in self._next and len(self._next) >= REMEMBERED:
            self._make_room()
        self._next[key] = at + each
        return (at - now) / _NANOS

    def _make_room(self) -> None:
        """The busiest stay, so that many addresses with one question each do not make one of them be forgotten."""
        busiest = sorted(self._next.items(), key=lambda each: each[1], reverse=True)[: REMEMBERED // 2]
        self._next = {_ALL: self._next.get(_ALL, 0), **dict(busiest)}
