"""Where a host is. Its name is looked up once at a time, however many want to know, and in a thread of its own: the
event loop has four for all names together, and a resolver that says nothing keeps one of them for ten seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any


class HostResolver:
    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_address = _is_address(host)
        self._lookup: asyncio.Future[list[Any]] | None = None

    async def resolve(self) -> list[str]:
        """In the order in which they are to be tried. Raises OSError, and UnicodeError of what can be no name."""
        if self._is_address:
            return [self._host]
        lookup = self._lookup
        if lookup is None:
            loop = asyncio.get_running_loop()
            lookup = loop.run_in_executor(None, socket.getaddrinfo, self._host, self._port, 0, socket.SOCK_STREAM)
            self._lookup = lookup
            lookup.add_done_callback(self._on_resolved)
        found = await asyncio.shield(lookup)
        return list(dict.fromkeys(address[0] for *_, address in found))

    def _on_resolved(self, lookup: asyncio.Future[list[Any]]) -> None:
        self._lookup = None
        if not lookup.cancelled():
            lookup.exception()  # perhaps nobody waits for it any more, and then it is nobody's


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
