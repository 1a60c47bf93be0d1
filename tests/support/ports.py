"""Ports for processes that get theirs by configuration, and for none: each is given out once and stays reserved.

Asking the system for a free port and letting it go again is a race: until the process listens there, and whenever it
is started again, another test or any connection of this machine may be given that port. So these are of a range from
which the system gives none by itself, and a lock that ends with the process keeps other test processes off it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PORTS = range(20_000, 32_000)  # unless told otherwise, Linux gives those from 32,768 on, and macOS from 49,152 on
_LOCKS = Path(tempfile.gettempdir()) / f"price-keeper-ports-{os.getuid()}"  # of all test processes of this user
_STRIDE = 7  # no divisor of how many there are, so that going by it comes to each


def free_port() -> int:
    for port in _candidates():
        if _can_lock(port) and _is_free(port):
            return port
    raise RuntimeError(f"no port from {PORTS.start} to {PORTS.stop} is free")


@cache
def _candidates() -> Iterator[int]:
    """Each once. Processes begin at different places, to be in each other's way as little as can be."""
    return (PORTS[(os.getpid() * 101 + number * _STRIDE) % len(PORTS)] for number in range(len(PORTS)))


def _can_lock(port: int) -> bool:
    try:
        fcntl.lockf(_opened(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)  # of the file's byte with that number
    except OSError:
        return False
    return True


@cache
def _opened() -> int:
    """Once, and never closed: to close any descriptor of a file ends all locks that the process has on it."""
    return os.open(_LOCKS, os.O_RDWR | os.O_CREAT, 0o600)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
