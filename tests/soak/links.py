"""The ways of a sidecar to Bedrock and to the store, on which everything can go wrong; and whose calls were hit."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.wire_faults import Answer, Fault, Pass, Slow, Surplus
from tests.support.wire_proxy import WireProxy

_INVOCATION = b"amz-sdk-invocation-id: "
_HARMLESS = (Pass, Slow, Surplus, Answer)  # the caller has a complete answer


@dataclass
class Link(WireProxy):
    """`hit` has the invocation ids of calls whose answers may not have come, `hit_at` the moments."""

    hit: set[str] = field(default_factory=set)
    hit_at: list[float] = field(default_factory=list)
    _asked: dict[object, str] = field(default_factory=dict)  # by connection, what was asked last
    _cut: set[object] = field(default_factory=set)  # that have broken, and may have read one more request before

    def _fault(self, head: bytes) -> Fault:
        fault = super()._fault(head)
        invocation = head.partition(_INVOCATION)[2].partition(b"\r\n")[0].decode("latin-1")
        connection = asyncio.current_task()
        self._asked[connection] = invocation
        if not isinstance(fault, _HARMLESS) or connection in self._cut:
            self._is_hit(invocation)
        return fault

    async def _serve(self, near: socket.socket) -> None:
        try:
            with suppress(RuntimeError):  # of uvloop, where asyncio just drops unread data
                await super()._serve(near)
        finally:
            self._asked.pop(asyncio.current_task(), None)
            self._cut.discard(asyncio.current_task())

    def cut_off(self) -> None:
        """New connections are refused, and those there are break."""
        self.injected["away"] += 1
        self.refuse()
        for invocation in self._asked.values():
            self._is_hit(invocation)
        self._cut.update(self._serving)
        self.reset_all()

    def _is_hit(self, invocation: str) -> None:
        self.hit.add(invocation)
        self.hit_at.append(time.time())


@asynccontextmanager
async def link(url: str) -> AsyncIterator[Link]:
    """Its port stays reserved while it refuses, or another process might have it by the time it accepts again."""
    parts = urlsplit(url)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        opened = Link(parts.hostname or "", parts.port or 80, reserved.getsockname()[1])
        opened.accept()
        try:
            yield opened
        finally:
            await opened.close()
