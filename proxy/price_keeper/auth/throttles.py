"""Limits on what unauthenticated senders may cause, per client and per address: failed logins and store reads.

`LoginThrottle`: after FAILURE_BURST failed logins, one more per FAILURE_INTERVAL_SECONDS, per client and per
address. A failure is counted after a secret was found wrong, so the right one is always accepted and no attacker can
lock out a client, or others behind the same address.

`LookupThrottle`: a client or token that is not cached here may be an invention, and each costs a read of the store.
Such reads wait for their turn: each address has a rate, and all addresses together have a higher one. Waiting is
bounded; past the bound the answer is 503.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from price_keeper.clock import Clock
from price_keeper.domain import parse_client_id
from price_keeper.errors import Busy, TooManyRequests

ADMIN = "admin"  # stands for the administrator among the client ids, which are all longer
MAX_FAILURE_BUCKETS = 10_000  # of clients, and as many of addresses
FAILURE_BURST = 10  # failures at once, such as a deployment whose processes all start with an old secret
FAILURE_INTERVAL_SECONDS = 6.0  # after that, one failure per interval
_HOST_BITS = 64  # of an IPv6 address: a sender that has one such network has all of its addresses

MAX_LOOKUP_KEYS = 10_000  # addresses with a rate of their own
MAX_LOOKUP_WAIT_SECONDS = 5.0  # of both waits together; after that the answer would come too late
_ALL_ADDRESSES = "all addresses"
_NANOS_PER_SECOND = 10**9  # turns are counted in whole nanoseconds, so that rounding cannot delay one


class FailureBuckets:
    """A leaky bucket per key: holds `burst` failures and leaks one per `interval_seconds`. `now` is monotonic."""

    def __init__(
        self, now: Callable[[], float], burst: int = FAILURE_BURST, interval_seconds: float = FAILURE_INTERVAL_SECONDS
    ) -> None:
        self._now = now
        self._burst = burst
        self._interval_seconds = interval_seconds
        self._empty_at: dict[Hashable, float] = {}

    def wait_seconds(self, key: Hashable) -> float:
        """Return how long until the bucket has room for one more failure; 0 if it has room now."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._interval_seconds
        return max(0.0, empty_at - now - self._burst * self._interval_seconds)

    def add(self, key: Hashable) -> float:
        """Return the same as `wait_seconds`. If that is 0, this failure has taken the room."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._interval_seconds
        wait = self.wait_seconds(key)
        if wait > 0:
            return wait  # not counted, so that further attempts do not prolong the wait
        if key not in self._empty_at and len(self._empty_at) >= MAX_FAILURE_BUCKETS:
            self._make_room(now)
        self._empty_at[key] = empty_at
        return 0.0

    def _make_room(self, now: float) -> None:
        """Keep the fullest buckets, so that one failure each from many addresses cannot evict one of them."""
        fullest = sorted(self._empty_at.items(), key=lambda entry: entry[1], reverse=True)[: MAX_FAILURE_BUCKETS // 2]
        self._empty_at = {key: empty_at for key, empty_at in fullest if empty_at > now}


class LoginThrottle:
    """Counts failed logins per client and per address."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._by_client = FailureBuckets(now)
        self._by_address = FailureBuckets(now)
        self._malformed = FailureBuckets(now)

    def count_malformed(self, address: str) -> None:
        """Count a request without any secret, apart from wrong secrets. Raises TooManyRequests."""
        wait = self._malformed.add(network_of(address))
        if wait > 0:
            raise TooManyRequests("too many malformed requests; wait before the next one", retry_after=wait)

    def count_failure(self, client_id: str | None, address: str) -> None:
        """Count a wrong secret. Raises TooManyRequests instead of the caller's AccessDenied after too many.

        Clients that do not exist are counted like any other. `client_id` is None if the credentials do not name a
        client, such as an invalid token.
        """
        wait = self._by_address.add(network_of(address))
        if client_id is not None:
            # All ids that no client can have share one bucket.
            client = ADMIN if client_id == ADMIN else parse_client_id(client_id)
            wait = max(wait, self._by_client.add(client))
        if wait > 0:
            raise TooManyRequests("too many wrong secrets; wait before the next attempt", retry_after=wait)


def network_of(address: str) -> Hashable:
    """Return what one sender is recognised by: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None  # a Unix socket; all its users count as one
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed
    return parsed.ipv4_mapped or int(parsed) >> _HOST_BITS


@dataclass(frozen=True, slots=True)
class LookupRate:
    """`burst` lookups at once after a pause, then `per_second`."""

    burst: int
    per_second: float


# The control port accepts at most 64 connections from one address: together they wait little more than a second.
LOOKUP_RATE_PER_ADDRESS = LookupRate(50, 50.0)
LOOKUP_RATE_TOTAL = LookupRate(500, 500.0)


class LookupThrottle:
    """Makes reads of the store that any sender could cause wait for their turn."""

    def __init__(
        self, clock: Clock, per_address: LookupRate = LOOKUP_RATE_PER_ADDRESS, total: LookupRate = LOOKUP_RATE_TOTAL
    ) -> None:
        self._clock = clock
        self._per_address = per_address
        self._total = total
        self._next_turn_at: dict[Hashable, int] = {}

    async def wait_for_address(self, address: str) -> None:
        """Return when the store may be read for this address. Raises Busy if that would take too long.

        Behind a proxy that hides the sender, such as an ingress, all senders share one address.
        """
        await self.wait_for(network_of(address))

    async def wait_for(self, key: Hashable) -> None:
        """Like `wait_for_address`, for senders that are told apart by another key."""
        until = self._now_nanos() + round(MAX_LOOKUP_WAIT_SECONDS * _NANOS_PER_SECOND)
        # The turns are taken one after the other, so that an address takes no more of all turns than its own rate.
        for bucket, rate in ((key, self._per_address), (_ALL_ADDRESSES, self._total)):
            wait = self._reserve_turn(bucket, rate, until)
            if wait > 0:
                await self._clock.sleep(wait)

    def _now_nanos(self) -> int:
        return round(self._clock.monotonic() * _NANOS_PER_SECOND)

    def _reserve_turn(self, key: Hashable, rate: LookupRate, until: int) -> float:
        """Reserve the next turn, and return how long until it comes. Raises Busy if it comes too late."""
        now, interval = self._now_nanos(), round(_NANOS_PER_SECOND / rate.per_second)
        turn_at = max(self._next_turn_at.get(key, 0), now - (rate.burst - 1) * interval)
        if turn_at > until:
            raise Busy("too many lookups of unknown clients or tokens are waiting; try again", retry_after=2)
        if key not in self._next_turn_at and len(self._next_turn_at) >= MAX_LOOKUP_KEYS:
            self._make_room()
        self._next_turn_at[key] = turn_at + interval
        return (turn_at - now) / _NANOS_PER_SECOND

    def _make_room(self) -> None:
        """Keep the busiest keys, so that many addresses with one lookup each cannot evict one of them."""
        busiest = sorted(self._next_turn_at.items(), key=lambda entry: entry[1], reverse=True)[: MAX_LOOKUP_KEYS // 2]
        self._next_turn_at = {_ALL_ADDRESSES: self._next_turn_at.get(_ALL_ADDRESSES, 0), **dict(busiest)}
