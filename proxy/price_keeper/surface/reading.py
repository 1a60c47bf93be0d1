"""Whether a client that is being written to still reads, be it ever so slowly."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from contextlib import suppress


class Reading:
    """A wait for one client to take what was written to it; looked at every second or so."""

    __slots__ = ("_since", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._since = now
        self._unsent = _unsent(transport)

    def waited(self, now: float) -> float:
        """For how long the client has taken nothing at all."""
        unsent = _unsent(self._transport)
        if unsent < self._unsent:
            self._since = now
        self._unsent = unsent
        return now - self._since


def _unsent(transport: asyncio.Transport) -> int:
    """In our buffer and in the kernel's, which on this machine may hold megabytes and moves them in large steps."""
    in_kernel = 0
    kernel = transport.get_extra_info("socket")
    if kernel is not None:
        with suppress(OSError, ValueError):  # it is closed, or this system does not tell
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(kernel.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return transport.get_write_buffer_size() + in_kernel
