"""Connection limits of the control port: one client cannot take the port away from the others.

A connection is accepted or closed at once. A request at work holds a slot; a connection without a slot may be evicted
in favour of a new one, beginning with the one whose last complete request head is the oldest. There are fewer slots
than connections, so the head of a new connection is always read. Probes need no slot.

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
TIMEOUT_CHECK_SECONDS = 5.0  # a connection may exceed its timeout by so much
MIN_CONNECTIONS = 8  # however few descriptors there are
_SIXTEENTHS = 16


@dataclass(frozen=True, slots=True)
class ControlPortLimits:
    """What the clients of one control port may use together."""

    max_connections: int = 128  # at once; well below the descriptors that the data port leaves to the rest
    max_per_network: int = 64  # from one address, or one IPv6 network
    reserved_for_loopback: int = 16  # of all connections, so that local probes get through under any load
    head_timeout_seconds: float = 20.0  # a well-meaning client sends its head at once
    write_stall_seconds: float = 60.0  # a response of which nothing is read for so long has no reader


DEFAULT_PORT_LIMITS = ControlPortLimits()


def fit_port_limits(descriptors: int, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> ControlPortLimits:
    """Lower the limits to an eighth of the descriptors; the data port uses two thirds of them."""
    connections = min(limits.max_connections, max(descriptors // 8, MIN_CONNECTIONS))
    return replace(
        limits,
        max_connections=connections,
        max_per_network=min(limits.max_per_network, connections // 2),
        reserved_for_loopback=min(limits.reserved_for_loopback, connections // 8),
    )


class SlotClass(Enum):
    """The share of connections, in sixteenths, that active requests of a class may occupy: that class alone, and all
    classes together. It applies to one network and to the whole port. The rest is for new connections.
    """

    UNVERIFIED = (8, 13)  # its credentials may be made up, and checking them may wait for the store
    RECEIVING_BODY = (4, 13)  # of a client whose body has not arrived yet
    CLIENT = (13, 13)
    ADMIN = (14, 14)


class ConnectionPeer(Protocol):
    """What the registry needs of a connection."""

    def check_timeouts(self, now: float) -> None:
        """Aborts the connection if its client neither sends nor reads in time."""

    def abort(self) -> None: ...


@dataclass(slots=True)
class _Peer:
    network: Hashable
    is_local: bool
    slot_class: SlotClass | None = None  # of the slot that it holds


class ConnectionRegistry:
    """The connections of one listener, and the slots of their active requests."""

    def __init__(self, clock: Clock, limits: ControlPortLimits = DEFAULT_PORT_LIMITS) -> None:
        self.clock = clock
        self.limits = limits
        self._peers: dict[ConnectionPeer, _Peer] = {}  # the one whose last complete head is the oldest comes first
        self._count_by_network: Counter[Hashable] = Counter()

    def add(self, connection: ConnectionPeer, address: str) -> bool:
        """Register a connection, evicting another one if necessary. Returns whether there was room."""
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
        """Evict the first connection without a slot, and return whether there was one. If the network is at its limit,
        it must be of the same network. A remote connection cannot evict one of those reserved for this machine."""
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
        """Called when the connection has sent a complete head; makes it the last candidate for eviction."""
        if connection in self._peers:
            self._peers[connection] = self._peers.pop(connection)

    def acquire_slot(self, connection: ConnectionPeer, slot_class: SlotClass) -> bool:
        """Reserve a slot for the connection's request until `release_slot`. Returns whether there was one."""
        peer = self._peers.get(connection)
        if peer is None:
            return False
        others = [other for other in self._peers.values() if other.slot_class is not None and other is not peer]
        same_network = [other for other in others if other.network == peer.network]
        own_sixteenths, total_sixteenths = slot_class.value
        # Subtracted twice: once for the connections reserved for this machine, and once because a remote connection
        # cannot evict one of those.
        max_slots = self.limits.max_connections - 2 * self.limits.reserved_for_loopback
        for holders, room in ((others, max_slots), (same_network, self.limits.max_per_network)):
            of_class = sum(holder.slot_class is slot_class for holder in holders)
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
        """Unregister a connection. Does nothing for one that was evicted."""
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
    """Measures for how long a condition has held without interruption."""

    def __init__(self) -> None:
        self._since: float | None = None

    def update(self, holds: bool, now: float) -> float:
        """Records whether the condition holds now; returns for how many seconds it has held."""
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
    """Check protocol version, Host header and target. Raises ApiError for a request whose host is ambiguous, and, on a
    loopback port, for one that names another host."""
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
    """Whether the start of a request names another protocol: aiohttp's parser accepts RTSP's version as HTTP's."""
    return _NOT_HTTP.match(data) is not None


def _check_loopback_host(hosts: list[str]) -> None:
    """Raise ApiError if the Host header names neither localhost nor a loopback address.

    This prevents DNS rebinding: a web page whose host name resolves to 127.0.0.1 could otherwise read responses of this
    port through a browser on this machine.
    """
    for host in hosts:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() != "localhost" and not is_loopback(name):
            raise forbidden("this port listens only on this machine: use localhost or a loopback address as the host")
