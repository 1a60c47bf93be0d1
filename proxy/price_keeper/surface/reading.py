"""Whether a client that is being written to still reads, be it ever so slowly."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from contextlib import suppress


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
