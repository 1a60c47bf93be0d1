"""Stands between the sidecar and its connections to Bedrock, at the event loop: below all that may be compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

Connect = Callable[[], Awaitable[Any]]


@contextmanager
def intercept_connections(port: int, instead: Callable[[Connect], Awaitable[Any]]) -> Iterator[None]:
    """`instead` of making a connection to this port; it is handed what would make it."""
    loop = asyncio.get_running_loop()
    real = loop.create_connection

    async def create(factory: Any, host: Any = None, to: Any = None, **how: Any) -> Any:
        def make() -> Awaitable[Any]:
            return real(factory, host, to, **how)

        return await (instead(make) if to == port else make())

    with patch.object(loop, "create_connection", create):
        yield
