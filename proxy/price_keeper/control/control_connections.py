"""Connection limits of the control port: one client cannot take the port away from the others.

A connection is accepted or closed at once. A request at work holds a slot; a connection without a slot may be evicted
in favour of a new one, beginning with the one whose last complete request head is the oldest. There are fewer slots
than connections, so the head of a new connection is always read. Probes need no slot.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from price_keeper.auth.throttles import network_of
from price_keeper.clock import Clock
from price_keeper.server.sockets import is_loopback

TIMEOUT_CHECK_SECONDS = 5.0  # a connection may exceed its timeout by so much
MIN_CONNECTIONS = 8  # however few descriptors there are


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

    def add(self, connection: ConnectionPeer, address: str) -> bool:
        """Register a connection, evicting the first one without a slot if there is no room. Returns whether there was
        room. A network at its limit evicts one of its own; a remote connection none of those reserved for this
        machine."""
        peer, reserved = _Peer(network_of(address), is_loopback(address)), self.limits.reserved_for_loopback
        same_network = [other for other, known in self._peers.items() if known.network == peer.network]
        remote = [other for other, known in self._peers.items() if not known.is_local]
        if len(same_network) >= self.limits.max_per_network:
            has_room = self._evict_first(same_network)
        elif len(self._peers) < self.limits.max_connections - (0 if peer.is_local else reserved):
            has_room = True
        else:
            may_evict_local = peer.is_local or len(self._peers) - len(remote) > reserved
            has_room = self._evict_first(list(self._peers) if may_evict_local else remote)
        if has_room:
            self._peers[connection] = peer
        return has_room

    def _evict_first(self, candidates: list[ConnectionPeer]) -> bool:
        victim = next((each for each in candidates if self._peers[each].slot_class is None), None)
        if victim is not None:
            self.remove(victim)
            victim.abort()
        return victim is not None

    def remove(self, connection: ConnectionPeer) -> None:
        """Unregister a connection. Does nothing for one that was evicted."""
        self._peers.pop(connection, None)

    def mark_active(self, connection: ConnectionPeer) -> None:
        """Called when the connection has sent a complete head; makes it the last candidate for eviction."""
        if connection in self._peers:
            self._peers[connection] = self._peers.pop(connection)

    def acquire_slot(self, connection: ConnectionPeer, slot_class: SlotClass) -> bool:
        """Reserve a slot for the connection's request until `release_slot`. Returns whether there was one."""
        peer = self._peers.get(connection)
        if peer is None:
            return False
        holders = [other for other in self._peers.values() if other.slot_class is not None and other is not peer]
        same_network = [other for other in holders if other.network == peer.network]
        own_sixteenths, total_sixteenths = slot_class.value
        # Subtracted twice: once for the connections reserved for this machine, and once because a remote connection
        # cannot evict one of those.
        max_slots = self.limits.max_connections - 2 * self.limits.reserved_for_loopback
        for group, room in ((holders, max_slots), (same_network, self.limits.max_per_network)):
            of_class = sum(holder.slot_class is slot_class for holder in group)
            if of_class >= room * own_sixteenths // 16 or len(group) >= room * total_sixteenths // 16:
                return False
        peer.slot_class = slot_class
        return True

    def release_slot(self, connection: ConnectionPeer) -> None:
        peer = self._peers.get(connection)
        if peer is not None:
            peer.slot_class = None

    async def run_timeout_checks(self) -> None:
        while True:
            await self.clock.sleep(TIMEOUT_CHECK_SECONDS)
            now = self.clock.monotonic()
            for connection in list(self._peers):
                connection.check_timeouts(now)
