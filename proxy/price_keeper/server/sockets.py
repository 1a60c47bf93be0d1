"""Sockets: binding the listening ones, and what asyncio does not offer for connected ones.

All addresses of a host are bound to the same port before anybody listens. Workers share a port by SO_REUSEPORT: the
kernel gives each connection to one of them. `WriteStallDetector` finds clients that stopped reading, and
`reset_connection` ends a connection so that its response cannot be mistaken for a complete one.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any

from price_keeper.auth.throttles import network_of
from price_keeper.errors import ListenFailed

BACKLOG = 1024  # connections the kernel holds for us while the loop is busy
MAX_BIND_ATTEMPTS = 20  # of free ports, until one is free at every address of the host

_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


async def bind_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """One for each of the host's addresses; port 0 is one free port, the same at all of them. Raises ListenFailed."""
    with _describe_bind_errors(host, port):
        resolved = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return _bind_all(_addresses(resolved), port, is_shared=is_shared)


def reserve_port(host: str, port: int) -> list[socket.socket]:
    """A port that nobody has, for processes that are to share it: nobody listens on these. Raises ListenFailed.

    Any process of this user may share a port that is shared, and would take its connections unseen. So it is taken
    for a moment without sharing, which fails if anybody listens.
    """
    with _describe_bind_errors(host, port):
        addresses = _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        exclusive = _bind_all(addresses, port, is_shared=False)
        port = exclusive[0].getsockname()[1]
        for each in exclusive:
            each.close()
        return _bind_all(addresses, port, is_shared=True)


@contextmanager
def _describe_bind_errors(host: str, port: int) -> Iterator[None]:
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield
    except OSError as failure:
        number = failure.errno or 0  # below 0 it is the resolver's, whose own words say more
        reason = os.strerror(number) if number > 0 else str(failure.strerror)
        raise ListenFailed(f"cannot listen on {shown}: {reason}") from None


def _addresses(found: list[Any]) -> list[_Address]:
    return [(family, address) for family, _, _, _, address in found]


def _bind_all(addresses: list[_Address], port: int, *, is_shared: bool) -> list[socket.socket]:
    for attempts_left in reversed(range(MAX_BIND_ATTEMPTS)):
        try:
            return _bind_same_port(dict.fromkeys(addresses), port, is_shared=is_shared)
        except OSError as failure:
            if port or failure.errno != errno.EADDRINUSE or not attempts_left:
                raise
    raise AssertionError("the last try returns or raises")


def _bind_same_port(addresses: Iterable[_Address], port: int, *, is_shared: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    unavailable: OSError | None = None
    try:
        for family, address in addresses:
            try:
                sockets.append(_bind_socket(family, (address[0], port, *address[2:]), is_shared=is_shared))
            except OSError as failure:
                # A host's name may have an address of a kind that this machine has switched off.
                if failure.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                unavailable = failure
            else:
                port = sockets[0].getsockname()[1]
    except OSError:
        for each in sockets:
            each.close()
        raise
    if not sockets and unavailable is not None:
        raise unavailable
    return sockets


def _bind_socket(family: socket.AddressFamily, address: tuple[Any, ...], *, is_shared: bool) -> socket.socket:
    bound_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound_socket.setblocking(False)
        if os.name == "posix":  # elsewhere it would let two processes have one port
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound_socket.bind(address)
    except OSError:
        bound_socket.close()
        raise
    return bound_socket


@lru_cache(1024)  # nearly all connections come from a few addresses
def find_remote_network(address: str) -> Hashable | None:
    """What one sender that is not on this machine can be held to; None for one that is."""
    try:
        found = ip_address(address)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return None if (mapped or found).is_loopback else network_of(address)


def get_peer_address(transport: asyncio.BaseTransport) -> str:
    """The address at the other end; a socket in the file system has none."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


class WriteStallDetector:
    """A wait for one client to take what was written to it; looked at every second or so."""

    __slots__ = ("_progress_at", "_transport", "_unsent_bytes")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._progress_at = now
        self._unsent_bytes = _count_unsent_bytes(transport)

    def measure_stall(self, now: float) -> float:
        """For how long the client has taken nothing at all."""
        unsent = _count_unsent_bytes(self._transport)
        if unsent < self._unsent_bytes:
            self._progress_at = now
        self._unsent_bytes = unsent
        return now - self._progress_at


def _count_unsent_bytes(transport: asyncio.Transport) -> int:
    """In our buffer and in the kernel's, which on this machine may hold megabytes and moves them in large steps."""
    kernel_bytes = 0
    connected_socket = transport.get_extra_info("socket")
    if connected_socket is not None:
        with suppress(OSError, ValueError):  # it is closed, or this system does not tell
            (kernel_bytes,) = struct.unpack("i", fcntl.ioctl(connected_socket.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return transport.get_write_buffer_size() + kernel_bytes


_NO_LINGER = struct.pack("ii", 1, 0)  # close at once, with a reset


def reset_connection(transport: asyncio.Transport) -> None:
    """A body that ends with its connection would look whole after an orderly close, as `abort` alone makes."""
    connected_socket = transport.get_extra_info("socket")
    if connected_socket is not None:
        with suppress(OSError):  # it is closed already
            connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
