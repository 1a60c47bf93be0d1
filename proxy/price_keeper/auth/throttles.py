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
from price_keeper.leaky_buckets import LeakyBuckets

ADMIN = "admin"  # stands for the administrator among the client ids, which are all longer
MAX_FAILURE_BUCKETS = 10_000  # of clients, and as many of addresses
FAILURE_BURST = 10  # failures at once, such as a deployment whose processes all start with an old secret
FAILURE_INTERVAL_SECONDS = 6.0  # after that, one failure per interval
_HOST_BITS = 64  # of an IPv6 address: a sender that has one such network has all of its addresses

MAX_LOOKUP_KEYS = 10_000  # addresses with a rate of their own
MAX_LOOKUP_WAIT_SECONDS = 5.0  # of both waits together; after that the answer would come too late


class LoginThrottle:
    """Counts failed logins per client and per address."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._by_client, self._by_address, self._malformed = (
            LeakyBuckets(now, FAILURE_BURST, FAILURE_INTERVAL_SECONDS, MAX_FAILURE_BUCKETS) for _ in range(3)
        )

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
        self._per_address, self._total = (
            LeakyBuckets(clock.monotonic, rate.burst, 1 / rate.per_second, MAX_LOOKUP_KEYS)
            for rate in (per_address, total)
        )

    async def wait_for_address(self, address: str) -> None:
        """Return when the store may be read for this address. Raises Busy if that would take too long.

        Behind a proxy that hides the sender, such as an ingress, all senders share one address.
        """
        await self.wait_for(network_of(address))

    async def wait_for(self, key: Hashable) -> None:
        """Like `wait_for_address`, for senders that are told apart by another key."""
        until = self._clock.monotonic() + MAX_LOOKUP_WAIT_SECONDS
        # The turns are taken one after the other, so that an address takes no more of all turns than its own rate.
        for buckets, bucket_key in ((self._per_address, key), (self._total, None)):
            # The first wait may have taken a little longer than the whole of it: a timer ends late, if only by 1 ms.
            wait = buckets.reserve(bucket_key, max(0.0, until - self._clock.monotonic()))
            if wait is None:
                raise Busy("too many lookups of unknown clients or tokens are waiting; try again", retry_after=2)
            if wait > 0:
                await self._clock.sleep(wait)
