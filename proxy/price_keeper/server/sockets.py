"""Bind listening sockets, and what asyncio does not offer for connected sockets.

`bind_sockets` binds all addresses of a host to the same port before any of them listens. Workers share a port by
SO_REUSEPORT: the kernel gives each connection to one of them. `WriteStallDetector` finds clients that stopped reading,
and `reset_connection` ends a connection so that no client mistakes a partial response for a complete one.
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

BACKLOG = 1024  # connections that the kernel queues while the event loop is busy
MAX_BIND_ATTEMPTS = 20  # free ports to try until one is free at every address of the host

_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


async def bind_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Bind one socket for each address of the host. Port 0 picks a free port, the same at every address.

    Raises ListenFailed."""
    with _describe_bind_errors(host, port):
        resolved = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return _bind_all(_addresses(resolved), port, is_shared=is_shared)


def reserve_port(host: str, port: int) -> list[socket.socket]:
    """Bind, without listening, a port that is free, for worker processes that will share it. Raises ListenFailed.

    Any process of this user could join a port that is open to sharing and silently receive a part of its connections.
    So the port is first bound for a moment without SO_REUSEPORT, which fails if another process has it.
    """
    with _describe_bind_errors(host, port):
        addresses = _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        exclusive = _bind_all(addresses, port, is_shared=False)
        port = exclusive[0].getsockname()[1]
        for bound_socket in exclusive:
            bound_socket.close()
        return _bind_all(addresses, port, is_shared=True)


@contextmanager
def _describe_bind_errors(host: str, port: int) -> Iterator[None]:
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield
    except OSError as failure:
        number = failure.errno or 0  # a negative number is the resolver's, whose own text says more
        reason = os.strerror(number) if number > 0 else str(failure.strerror)
        raise ListenFailed(f"cannot listen on {shown}: {reason}") from None


def _addresses(resolved: list[Any]) -> list[_Address]:
    return [(family, address) for family, _, _, _, address in resolved]


def _bind_all(addresses: list[_Address], port: int, *, is_shared: bool) -> list[socket.socket]:
    for attempts_left in reversed(range(MAX_BIND_ATTEMPTS)):
        try:
            return _bind_same_port(dict.fromkeys(addresses), port, is_shared=is_shared)
        except OSError as failure:
            if port or failure.errno != errno.EADDRINUSE or not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _bind_same_port(addresses: Iterable[_Address], port: int, *, is_shared: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    unavailable: OSError | None = None
    try:
        for family, address in addresses:
            try:
                sockets.append(_bind_socket(family, (address[0], port, *address[2:]), is_shared=is_shared))
            except OSError as failure:
                # A host name may have an address of a family that this machine has disabled, such as IPv6.
                if failure.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                unavailable = failure
            else:
                port = sockets[0].getsockname()[1]
    except OSError:
        for bound_socket in sockets:
            bound_socket.close()
        raise
    if not sockets and unavailable is not None:
        raise unavailable
    return sockets


def _bind_socket(family: socket.AddressFamily, address: tuple[Any, ...], *, is_shared: bool) -> socket.socket:
    bound_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound_socket.setblocking(False)
        if os.name == "posix":  # on Windows this option would let two processes bind the same port
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
    """The network by which connections of a remote sender are limited; None for a sender on this machine."""
    return None if is_loopback(address) else network_of(address)


@lru_cache(64)  # nearly all requests of the control port name the same host
def is_loopback(address: str) -> bool:
    """Whether this is an IP address of this machine's loopback network. No name is."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def get_peer_address(transport: asyncio.BaseTransport) -> str:
    """The IP address of the client; empty for a Unix socket."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


class WriteStallDetector:
    """Measures for how long a client has read nothing of what was written to it. Its owner polls it about once a
    second while writing is paused."""

    __slots__ = ("_progress_at", "_transport", "_unsent_bytes")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._progress_at = now
        self._unsent_bytes = _count_unsent_bytes(transport)

    def measure_stall(self, now: float) -> float:
        """Seconds since the client last read anything, as far as earlier calls could see."""
        unsent = _count_unsent_bytes(self._transport)
        if unsent < self._unsent_bytes:
            self._progress_at = now
        self._unsent_bytes = unsent
        return now - self._progress_at


def _count_unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the transport's buffer and in the kernel's send buffer. The latter may hold megabytes on a loopback
    connection and drains in large steps, so the transport's buffer alone would look stalled."""
    kernel_bytes = 0
    connected_socket = transport.get_extra_info("socket")
    if connected_socket is not None:
        with suppress(OSError, ValueError):  # the socket is closed, or this system does not report the number
            (kernel_bytes,) = struct.unpack("i", fcntl.ioctl(connected_socket.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return transport.get_write_buffer_size() + kernel_bytes


_NO_LINGER = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing sends a reset


def reset_connection(transport: asyncio.Transport) -> None:
    """Close the connection with a TCP reset. After the orderly close that `abort` makes, a client would take a body
    that is delimited by the end of the connection for complete."""
    connected_socket = transport.get_extra_info("socket")
    if connected_socket is not None:
        with suppress(OSError):  # the socket is closed already
            connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
