"""Who may stay connected to the control port, and how long, so that nobody takes the process away from everybody else.

connects -> counted, or closed at once -> sends a head in time -> reads his answers, or is cut

Where there is no room for one more, one that only stays makes room.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from proxy.auth.failures import network_of
from proxy.clock import Clock
from proxy.control.problems import forbidden

CHECK_SECONDS = 5.0  # by so much a connection may outstay its time


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 128  # at once, well below the descriptors that the process keeps for what is not the data port's
    of_one: int = 64  # from one address, or one network of IPv6
    for_loopback: int = 16  # of all, so that probes on this machine get through whatever comes from others
    head_seconds: float = 20.0  # a whole head comes at once from whoever means it
    stalled_seconds: float = 60.0  # an answer that nobody has read for so long has no reader


DEFAULT = Limits()
FEWEST = 8  # connections, however few descriptors there are


def fitting(descriptors: int, limits: Limits = DEFAULT) -> Limits:
    """An eighth of the descriptors: two thirds are the data port's."""
    connections = min(limits.connections, max(descriptors // 8, FEWEST))
    return replace(
        limits,
        connections=connections,
        of_one=min(limits.of_one, connections // 2),
        for_loopback=min(limits.for_loopback, connections // 8),
    )


class Connection(Protocol):
    @property
    def idleness(self) -> int:
        """0 for one at work; the more, the less it has to lose."""

    def check_time(self, now: float) -> None:
        """Cuts it where it only stays."""

    def cut(self) -> None: ...


class Crowd:
    """The connections of one listener."""

    def __init__(self, clock: Clock, limits: Limits = DEFAULT) -> None:
        self.clock = clock
        self.limits = limits
        self._networks: dict[Connection, Hashable] = {}  # the longest there is the first
        self._of: Counter[Hashable] = Counter()

    def joined(self, connection: Connection, address: str) -> bool:
        """Whether there was room for it."""
        network = network_of(address)
        is_one_too_many = self._of[network] >= self.limits.of_one
        if (is_one_too_many or self._is_full(address)) and not self._has_made_room(network, is_one_too_many):
            return False
        self._networks[connection] = network
        self._of[network] += 1
        return True

    def _is_full(self, address: str) -> bool:
        reserved = 0 if is_loopback(address) else self.limits.for_loopback
        return len(self._networks) >= self.limits.connections - reserved

    def _has_made_room(self, network: Hashable, is_own: bool) -> bool:
        """By one that is not at work, of its own network where that has its share: who only stays keeps nobody out."""
        crowded = [each for each, whose in self._networks.items() if whose == network or not is_own]
        idlest = max(crowded, key=lambda each: each.idleness, default=None)
        if idlest is None or not idlest.idleness:
            return False
        self.left(idlest)
        idlest.cut()
        return True

    def left(self, connection: Connection) -> None:
        """Also of one that had to make room, and so has left before."""
        network = self._networks.pop(connection, None)
        if network is None:
            return
        self._of[network] -= 1
        if not self._of[network]:
            del self._of[network]

    async def watch(self) -> None:
        while True:
            await self.clock.sleep(CHECK_SECONDS)
            now = self.clock.monotonic()
            for connection in list(self._networks):
                connection.check_time(now)


class Since:
    """How long something has been so."""

    def __init__(self) -> None:
        self._since: float | None = None

    def told(self, is_so: bool, now: float) -> float:
        if not is_so:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


@lru_cache(maxsize=64)  # nearly all requests name the same host
def is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def check_host(hosts: list[str]) -> None:
    """Raises Problem for what is asked of a name that is not this machine's own.

    A web page may have its own name point to 127.0.0.1; the browser of somebody here would then read our answers to it.
    """
    for host in hosts:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() != "localhost" and not is_loopback(name):
            raise forbidden("what listens on this machine alone is asked for as localhost, or by a loopback address")
