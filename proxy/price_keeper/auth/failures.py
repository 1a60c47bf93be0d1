"""How many wrong secrets are taken calmly: of each client, and from each address.

Counted after a secret was found wrong: the right one is served whatever was tried before it, so nobody can lock out a
client or those who share an address with him. What is refused is the answer to one more wrong one. What those cost
meanwhile that are not known here is bounded by `lookups.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable

from price_keeper.errors import TooManyRequests
from price_keeper.model import parse_client_id

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
