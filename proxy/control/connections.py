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
from typing import NamedTuple, Protocol

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


class _From(NamedTuple):
    network: Hashable
    is_local: bool


class Crowd:
    """The connections of one listener."""

    def __init__(self, clock: Clock, limits: Limits = DEFAULT) -> None:
        self.clock = clock
        self.limits = limits
        self._known: dict[Connection, _From] = {}  # the longest there is the first
        self._of: Counter[Hashable] = Counter()

    def joined(self, connection: Connection, address: str) -> bool:
        """Whether there was room for it."""
        came = _From(network_of(address), is_loopback(address))
        reserved = 0 if came.is_local else self.limits.for_loopback
        is_one_too_many = self._of[came.network] >= self.limits.of_one
        is_full = is_one_too_many or len(self._known) >= self.limits.connections - reserved
        if is_full and not self._has_made_room(came, is_one_too_many):
            return False
        self._known[connection] = came
        self._of[came.network] += 1
        return True

    def _has_made_room(self, came: _From, is_one_too_many: bool) -> bool:
        """By one that is not at work: of the same network where that has its share, and none of those that are kept for
        this machine for one from elsewhere. So who only stays keeps nobody out."""
        has_more = sum(its.is_local for its in self._known.values()) > self.limits.for_loopback
        rivals = [each for each, its in self._known.items() if came.is_local or has_more or not its.is_local]
        if is_one_too_many:
            rivals = [each for each in rivals if self._known[each].network == came.network]
        idlest = max(rivals, key=lambda each: each.idleness, default=None)
        if idlest is None or not idlest.idleness:
            return False
        self.left(idlest)
        idlest.cut()
        return True

    def left(self, connection: Connection) -> None:
        """Also of one that had to make room, and so has left before."""
        its = self._known.pop(connection, None)
        if its is None:
            return
        self._of[its.network] -= 1
        if not self._of[its.network]:
            del self._of[its.network]

    async def watch(self) -> None:
        while True:
            await self.clock.sleep(CHECK_SECONDS)
            now = self.clock.monotonic()
            for connection in list(self._known):
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
