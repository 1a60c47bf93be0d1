"""Which connections the control port keeps, so that none of them takes the port away from the others.

A connection is accepted, or closed at once. It may be displaced by a newer one unless its request holds a place: the
one whose last whole head is the oldest goes first, be it idle, silent, or in the middle of a body. There are fewer
places than connections, so a newcomer is accepted and its head read whatever else is under way. Probes need no place.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Protocol

from price_keeper.auth.failures import network_of
from price_keeper.authority import find_host_error, find_target_error
from price_keeper.clock import Clock
from price_keeper.control.problems import forbidden, invalid

_OTHER_PROTOCOL = re.compile(rb"[\r\n]*[^ \r\n]+ +[^ \r\n]+ +(?!HTTP/)[A-Za-z]+/[0-9]")
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


class Share(Enum):
    """Which part of the connections requests of a kind may hold: they alone, and together with all others.

    Of one network, and of all, in sixteenths. What is left is for newcomers.
    """

    STRANGER = (8, 13)  # shows what anybody may have invented, and may wait for its turn at the store
    SENDING = (4, 13)  # a client's whose body is still to come; others of its kind can be displaced
    KNOWN = (13, 13)
    ADMIN = (14, 14)


_WHOLE = 16


class Connection(Protocol):
    def check_time(self, now: float) -> None:
        """Cuts it where it only stays."""

    def cut(self) -> None: ...


@dataclass(slots=True)
class _Peer:
    network: Hashable
    is_local: bool
    share: Share | None = None  # of the place that it holds


class Crowd:
    """The connections of one listener."""

    def __init__(self, clock: Clock, limits: Limits = DEFAULT) -> None:
        self.clock = clock
        self.limits = limits
        self._known: dict[Connection, _Peer] = {}  # the longest without a whole head is the first
        self._of: Counter[Hashable] = Counter()

    def joined(self, connection: Connection, address: str) -> bool:
        """Whether there was room for it."""
        came = _Peer(network_of(address), is_loopback(address))
        reserved = 0 if came.is_local else self.limits.for_loopback
        is_one_too_many = self._of[came.network] >= self.limits.of_one
        is_full = is_one_too_many or len(self._known) >= self.limits.connections - reserved
        if is_full and not self._has_made_room(came, is_one_too_many):
            return False
        self._known[connection] = came
        self._of[came.network] += 1
        return True

    def _has_made_room(self, came: _Peer, is_one_too_many: bool) -> bool:
        """By one without a place: of the same network where that has its share, and none of those that are kept for
        this machine for one from elsewhere."""
        has_more = sum(its.is_local for its in self._known.values()) > self.limits.for_loopback
        for each, its in self._known.items():
            is_rival = its.network == came.network if is_one_too_many else came.is_local or has_more or not its.is_local
            if its.share is None and is_rival:
                self.left(each)
                each.cut()
                return True
        return False

    def heard(self, connection: Connection) -> None:
        """It has sent a whole head."""
        if connection in self._known:
            self._known[connection] = self._known.pop(connection)

    def hold(self, connection: Connection, share: Share) -> bool:
        """Whether there was a place for its request, which it holds until `release`."""
        its = self._known.get(connection)
        if its is None:
            return False
        others = [each for each in self._known.values() if each.share is not None and each is not its]
        of_one = [each for each in others if each.network == its.network]
        own, together = share.value
        # Twice: this machine's part, and that no newcomer from elsewhere may displace what is within it.
        in_all = self.limits.connections - 2 * self.limits.for_loopback
        for holding, room in ((others, in_all), (of_one, self.limits.of_one)):
            of_kind = sum(each.share is share for each in holding)
            if len(holding) >= room * together // _WHOLE or of_kind >= room * own // _WHOLE:
                return False
        its.share = share
        return True

    def release(self, connection: Connection) -> None:
        its = self._known.get(connection)
        if its is not None:
            its.share = None

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


def check_names(version: tuple[int, int], target: str, hosts: list[str], is_for_loopback: bool) -> None:
    """Raises Problem for what two readers could take for requests to different hosts."""
    mistake = None
    if version not in ((1, 0), (1, 1)):
        mistake = "this port speaks HTTP/1.1 and HTTP/1.0"
    elif len(hosts) > 1 or (not hosts and version == (1, 1)):
        mistake = "a request has one Host header"
    host = hosts[0].encode("utf-8", "surrogateescape") if hosts else b""
    mistake = mistake or find_host_error(host) or find_target_error(target.encode("utf-8", "surrogateescape"), host)
    if mistake is not None:
        raise invalid(mistake)
    if is_for_loopback:
        _check_host(hosts)


def is_other_protocol(data: bytes) -> bool:
    """Of what begins a request: the parser takes the version of RTSP for one of HTTP."""
    return _OTHER_PROTOCOL.match(data) is not None


def _check_host(hosts: list[str]) -> None:
    """Raises Problem for what is asked of a name that is not this machine's own.

    A web page may have its own name point to 127.0.0.1; the browser of somebody here would then read our answers to it.
    """
    for host in hosts:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() != "localhost" and not is_loopback(name):
            raise forbidden("what listens on this machine alone is asked for as localhost, or by a loopback address")
