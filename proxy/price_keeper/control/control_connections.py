"""Connection limits of the control port: one client cannot take the port away from the others.

A connection is accepted or closed at once. A request at work holds a slot; a connection without a slot may be evicted
in favour of a new one, beginning with the one whose last complete request head is the oldest. There are fewer slots than
connections, so the head of a new connection is always read. Probes need no slot.

Also checks the protocol, the Host header and the request target before a request is routed.
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

from price_keeper.auth.throttles import network_of
from price_keeper.clock import Clock
from price_keeper.control.api_errors import forbidden, invalid_request
from price_keeper.server.request_building import find_host_error, find_target_error

_NOT_HTTP = re.compile(rb"[\r\n]*[^ \r\n]+ +[^ \r\n]+ +(?!HTTP/)[A-Za-z]+/[0-9]")
TIMEOUT_CHECK_SECONDS = 5.0  # by so much a connection may outstay its time


@dataclass(frozen=True, slots=True)
class ControlPortLimits:
    max_connections: int = (
        128  # at once, well below the descriptors that the process keeps for what is not the data port's
    )
    max_per_network: int = 64  # from one address, or one network of IPv6
    reserved_for_loopback: int = 16  # of all, so that probes on this machine get through whatever comes from others
    head_timeout_seconds: float = 20.0  # a whole head comes at once from whoever means it
    write_stall_seconds: float = 60.0  # an answer that nobody has read for so long has no reader


DEFAULT_PORT_LIMITS = ControlPortLimits()
MIN_CONNECTIONS = 8  # connections, however few descriptors there are


def fit_port_limits(descriptors: int, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> ControlPortLimits:
    """An eighth of the descriptors: two thirds are the data port's."""
    connections = min(limits.max_connections, max(descriptors // 8, MIN_CONNECTIONS))
    return replace(
        limits,
        max_connections=connections,
        max_per_network=min(limits.max_per_network, connections // 2),
        reserved_for_loopback=min(limits.reserved_for_loopback, connections // 8),
    )


class SlotClass(Enum):
    """Which part of the connections requests of a kind may hold: they alone, and together with all others.

    Of one network, and of all, in sixteenths. What is left is for newcomers.
    """

    UNVERIFIED = (8, 13)  # shows what anybody may have invented, and may wait for its turn at the store
    RECEIVING_BODY = (4, 13)  # a client's whose body is still to come; others of its kind can be displaced
    CLIENT = (13, 13)
    ADMIN = (14, 14)


_SIXTEENTHS = 16


class ConnectionPeer(Protocol):
    def check_timeouts(self, now: float) -> None:
        """Cuts it where it only stays."""

    def abort(self) -> None: ...


@dataclass(slots=True)
class _Peer:
    network: Hashable
    is_local: bool
    slot_class: SlotClass | None = None  # of the place that it holds


class ConnectionRegistry:
    """The connections of one listener."""

    def __init__(self, clock: Clock, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.clock = clock
        self.limits = limits
        self._peers: dict[ConnectionPeer, _Peer] = {}  # the longest without a whole head is the first
        self._count_by_network: Counter[Hashable] = Counter()

    def add(self, connection: ConnectionPeer, address: str) -> bool:
        """Whether there was room for it."""
        peer = _Peer(network_of(address), is_loopback(address))
        reserved = 0 if peer.is_local else self.limits.reserved_for_loopback
        is_network_full = self._count_by_network[peer.network] >= self.limits.max_per_network
        is_full = is_network_full or len(self._peers) >= self.limits.max_connections - reserved
        if is_full and not self._evict_one_for(peer, is_network_full):
            return False
        self._peers[connection] = peer
        self._count_by_network[peer.network] += 1
        return True

    def _evict_one_for(self, newcomer: _Peer, is_network_full: bool) -> bool:
        """By one without a place: of the same network where that has its share, and none of those that are kept for
        this machine for one from elsewhere."""
        has_surplus_local = sum(peer.is_local for peer in self._peers.values()) > self.limits.reserved_for_loopback
        for candidate, peer in self._peers.items():
            is_rival = (
                peer.network == newcomer.network
                if is_network_full
                else newcomer.is_local or has_surplus_local or not peer.is_local
            )
            if peer.slot_class is None and is_rival:
                self.remove(candidate)
                candidate.abort()
                return True
        return False

    def mark_active(self, connection: ConnectionPeer) -> None:
        """It has sent a whole head."""
        if connection in self._peers:
            self._peers[connection] = self._peers.pop(connection)

    def acquire_slot(self, connection: ConnectionPeer, slot_class: SlotClass) -> bool:
        """Whether there was a place for its request, which it holds until `release`."""
        peer = self._peers.get(connection)
        if peer is None:
            return False
        others = [each for each in self._peers.values() if each.slot_class is not None and each is not peer]
        same_network = [each for each in others if each.network == peer.network]
        own_sixteenths, total_sixteenths = slot_class.value
        # Twice: this machine's part, and that no newcomer from elsewhere may displace what is within it.
        max_slots = self.limits.max_connections - 2 * self.limits.reserved_for_loopback
        for holders, room in ((others, max_slots), (same_network, self.limits.max_per_network)):
            of_class = sum(each.slot_class is slot_class for each in holders)
            if (
                len(holders) >= room * total_sixteenths // _SIXTEENTHS
                or of_class >= room * own_sixteenths // _SIXTEENTHS
            ):
                return False
        peer.slot_class = slot_class
        return True

    def release_slot(self, connection: ConnectionPeer) -> None:
        peer = self._peers.get(connection)
        if peer is not None:
            peer.slot_class = None

    def remove(self, connection: ConnectionPeer) -> None:
        """Also of one that had to make room, and so has left before."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        self._count_by_network[peer.network] -= 1
        if not self._count_by_network[peer.network]:
            del self._count_by_network[peer.network]

    async def run_timeout_checks(self) -> None:
        while True:
            await self.clock.sleep(TIMEOUT_CHECK_SECONDS)
            now = self.clock.monotonic()
            for connection in list(self._peers):
                connection.check_timeouts(now)


class ConditionTimer:
    """How long something has been so."""

    def __init__(self) -> None:
        self._since: float | None = None

    def update(self, holds: bool, now: float) -> float:
        if not holds:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


@lru_cache(maxsize=64)  # nearly all requests name the same host
def is_loopback(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def check_request_target(version: tuple[int, int], target: str, hosts: list[str], is_for_loopback: bool) -> None:
    """Raises Problem for what two readers could take for requests to different hosts."""
    mistake = None
    if version not in ((1, 0), (1, 1)):
        mistake = "this port speaks HTTP/1.1 and HTTP/1.0"
    elif len(hosts) > 1 or (not hosts and version == (1, 1)):
        mistake = "a request has one Host header"
    host = hosts[0].encode("utf-8", "surrogateescape") if hosts else b""
    mistake = mistake or find_host_error(host) or find_target_error(target.encode("utf-8", "surrogateescape"), host)
    if mistake is not None:
        raise invalid_request(mistake)
    if is_for_loopback:
        _check_loopback_host(hosts)


def is_not_http(data: bytes) -> bool:
    """Of what begins a request: the parser takes the version of RTSP for one of HTTP."""
    return _NOT_HTTP.match(data) is not None


def _check_loopback_host(hosts: list[str]) -> None:
    """Raises Problem for what is asked of a name that is not this machine's own.

    A web page may have its own name point to 127.0.0.1; the browser of somebody here would then read our answers to it.
    """
    for host in hosts:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() != "localhost" and not is_loopback(name):
            raise forbidden("what listens on this machine alone is asked for as localhost, or by a loopback address")
