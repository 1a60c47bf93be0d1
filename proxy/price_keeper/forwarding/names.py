"""Where a host is. Its name is looked up once at a time, however many want to know, and in a thread of its own: the
event loop has four for all names together, and a resolver that says nothing keeps one of them for ten seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any


class Name:
    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_address = _is_address(host)
        self._looking: asyncio.Future[list[Any]] | None = None

    async def addresses(self) -> list[str]:
        """In the order in which they are to be tried. Raises OSError, and UnicodeError of what can be no name."""
        if self._is_address:
            return [self._host]
        looking = self._looking
        if looking is None:
            loop = asyncio.get_running_loop()
            looking = loop.run_in_executor(None, socket.getaddrinfo, self._host, self._port, 0, socket.SOCK_STREAM)
            self._looking = looking
            looking.add_done_callback(self._looked)
        found = await asyncio.shield(looking)
        return list(dict.fromkeys(address[0] for *_, address in found))

    def _looked(self, looking: asyncio.Future[list[Any]]) -> None:
        self._looking = None
        if not looking.cancelled():
            looking.exception()  # perhaps nobody waits for it any more, and then it is nobody's


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
