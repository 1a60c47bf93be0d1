"""How many wrong secrets are taken calmly: of each client, and from each address.

Counted after a secret was found wrong: the right one is served whatever was tried before it, so nobody can lock out a
client or those who share an address with him. What is refused is the answer to one more wrong one. What those cost
meanwhile that are not known here is bounded by `lookups.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable

from price_keeper.errors import TooManyRequests
from price_keeper.model import scope_of_client

ADMIN = "admin"  # the administrator among the clients, whose ids are longer
REMEMBERED = 10_000  # clients, and as many addresses
AT_ONCE = 10  # failures, as of a deployment with an old secret that starts all its processes
SECONDS = 6.0  # after that, one more in so many seconds
_HOST_BITS = 64  # of an IPv6 address: whoever has one such network has all of its addresses


class Failures:
    """A bucket for each key that holds `at_once` failures and leaks one in `seconds`. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float], at_once: int = AT_ONCE, seconds: float = SECONDS) -> None:
        self._now = now
        self._at_once = at_once
        self._seconds = seconds
        self._empty_at: dict[Hashable, float] = {}

    def wait(self, key: Hashable) -> float:
        """How long until there is room for one more in the bucket; 0 if there is some."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._seconds
        return max(0.0, empty_at - now - self._at_once * self._seconds)

    def count(self, key: Hashable) -> float:
        """As `wait`; where that is 0, this failure has taken the room."""
        now = self._now()
        empty_at = max(self._empty_at.get(key, 0.0), now) + self._seconds
        wait = self.wait(key)
        if wait > 0:
            return wait  # not counted: whoever keeps trying waits no longer for it
        if key not in self._empty_at and len(self._empty_at) >= REMEMBERED:
            self._make_room(now)
        self._empty_at[key] = empty_at
        return 0.0

    def _make_room(self, now: float) -> None:
        """The fullest buckets stay, so that one failure each from many addresses does not make one be forgotten."""
        fullest = sorted(self._empty_at.items(), key=lambda each: each[1], reverse=True)[: REMEMBERED // 2]
        self._empty_at = {key: empty_at for key, empty_at in fullest if empty_at > now}


class WrongSecrets:
    def __init__(self, now: Callable[[], float]) -> None:
        self._of_clients = Failures(now)
        self._from_addresses = Failures(now)
        self._unreadable = Failures(now)

    def count_unreadable(self, address: str) -> None:
        """What shows no secret at all, apart from wrong ones, of which it uses up nothing. Raises SlowDown."""
        wait = self._unreadable.count(network_of(address))
        if wait > 0:
            raise TooManyRequests("too many requests that cannot be served", retry_after=wait)

    def count(self, client_id: str | None, address: str) -> None:
        """Raises SlowDown in the place of AccessDenied. Clients that do not exist are counted like any other.

        None is for what does not tell whose it would be, such as a token that is none.
        """
        wait = self._from_addresses.count(network_of(address))
        if client_id is not None:
            # Of ids that nobody can have, all are one.
            client = ADMIN if client_id == ADMIN else scope_of_client(client_id)
            wait = max(wait, self._of_clients.count(client))
        if wait > 0:
            raise TooManyRequests("one more wrong secret, after too many", retry_after=wait)


def network_of(address: str) -> Hashable:
    """What one sender can be held to: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None  # a socket in the file system, whose users are one
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return found.ipv4_mapped or int(found) >> _HOST_BITS
