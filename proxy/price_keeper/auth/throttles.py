"""Limits on what unauthenticated senders may cause, per client and per address: failed logins and store reads.

`LoginThrottle`: after FAILURE_BURST failed logins, one more per FAILURE_INTERVAL_SECONDS, per client and per
address. A failure is counted after a secret was found wrong, so the right one is always accepted and nobody can
lock out a client, or others behind the same address.

`LookupThrottle`: a client or token that is not cached here may be an invention, and each costs a read of the store.
Such reads wait for their turn: each address has a rate, and all addresses together have a wider one. Waiting is
bounded; past the bound the answer is 503.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from price_keeper.clock import Clock
from price_keeper.domain import parse_client_id
from price_keeper.errors import Busy, TooManyRequests

ADMIN = "admin"  # the administrator among the clients, whose ids are longer
MAX_FAILURE_BUCKETS = 10_000  # clients, and as many addresses
FAILURE_BURST = 10  # failures, as of a deployment with an old secret that starts all its processes
FAILURE_INTERVAL_SECONDS = 6.0  # after that, one more in so many seconds
_HOST_BITS = 64  # of an IPv6 address: whoever has one such network has all of its addresses


class FailureBuckets:
    """A bucket for each key that holds `at_once` failures and leaks one in `seconds`. `now` is a monotonic clock."""

    def __init__(
        self, now: Callable[[], float], burst: int = FAILURE_BURST, interval_seconds: float = FAILURE_INTERVAL_SECONDS
    ) -> None:
        self._now = now
        self._burst = burst
        self._interval_seconds = interval_seconds
        self._empty_at: dict[Hashable, float] = {}

    def wait_seconds(self, key: Hashable) -> float:
        """How long until there is room for one more in the bucket; 0 if there is some."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._interval_seconds
        return max(0.0, empty_at - now - self._burst * self._interval_seconds)

    def add(self, key: Hashable) -> float:
        """As `wait`; where that is 0, this failure has taken the room."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._interval_seconds
        wait = self.wait_seconds(key)
        if wait > 0:
            return wait  # not counted: whoever keeps trying waits no longer for it
        if key not in self._empty_at and len(self._empty_at) >= MAX_FAILURE_BUCKETS:
            self._make_room(now)
        self._empty_at[key] = empty_at
        return 0.0

    def _make_room(self, now: float) -> None:
        """The fullest buckets stay, so that one failure each from many addresses does not make one be forgotten."""
        fullest = sorted(self._empty_at.items(), key=lambda each: each[1], reverse=True)[: MAX_FAILURE_BUCKETS // 2]
        self._empty_at = {key: empty_at for key, empty_at in fullest if empty_at > now}


class LoginThrottle:
    def __init__(self, now: Callable[[], float]) -> None:
        self._by_client = FailureBuckets(now)
        self._by_address = FailureBuckets(now)
        self._malformed = FailureBuckets(now)

    def count_malformed(self, address: str) -> None:
        """What shows no secret at all, apart from wrong ones, of which it uses up nothing. Raises SlowDown."""
        wait = self._malformed.add(network_of(address))
        if wait > 0:
            raise TooManyRequests("too many requests that cannot be served", retry_after=wait)

    def count_failure(self, client_id: str | None, address: str) -> None:
        """Raises SlowDown in the place of AccessDenied. Clients that do not exist are counted like any other.

        None is for what does not tell whose it would be, such as a token that is none.
        """
        wait = self._by_address.add(network_of(address))
        if client_id is not None:
            # Of ids that nobody can have, all are one.
            client = ADMIN if client_id == ADMIN else parse_client_id(client_id)
            wait = max(wait, self._by_client.add(client))
        if wait > 0:
            raise TooManyRequests("one more wrong secret, after too many", retry_after=wait)


def network_of(address: str) -> Hashable:
    """What one sender can be held to: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None  # a socket in the file system, whose users are one
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed
    return parsed.ipv4_mapped or int(parsed) >> _HOST_BITS


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
