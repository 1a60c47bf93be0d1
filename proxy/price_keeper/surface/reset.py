"""Breaks a connection in a way that no client takes for the end of its answer."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

_NO_LINGER = struct.pack("ii", 1, 0)  # close at once, with a reset


def reset_connection(transport: asyncio.Transport) -> None:
    """A body that ends with its connection would look whole after an orderly close, as `abort` alone makes."""
    connected_socket = transport.get_extra_info("socket")
    if connected_socket is not None:
        with suppress(OSError):  # it is closed already
            connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
