"""A data port with its listener at hand, for tests that look at what calls leave open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from price_keeper import data_port_wiring
from price_keeper.server.listener import Listener

from tests.support.data_port import DataPort, data_port
from tests.support.raw_clients import eventually


@dataclass
class PortWithListener:
    port: DataPort
    listener: Listener

    @property
    def port_number(self) -> int:
        return urlsplit(self.port.url).port or 0

    @property
    def handler(self) -> Any:
        return self.listener._handler

    @property
    def journal(self) -> Any:
        return self.port.recording.flusher.journal

    async def wait_until_quiet(self) -> None:
        """Nothing is left open by any call, whatever became of it."""
        holders = self.handler._rate_limiter._lease_manager._holders
        await eventually(lambda: not self.listener.active_requests)
        await eventually(lambda: not self.journal.open_calls)
        await eventually(lambda: not self.handler.retry_joiner._calls or self._all_shares_finished())
        assert self.listener.reserved_bytes == 0
        assert not any(holder.unsettled for holder in holders.values())

    def _all_shares_finished(self) -> bool:
        return all(shared.is_finished for shared in self.handler.retry_joiner._calls.values())


@asynccontextmanager
async def open_port_with_listener(folder: Path, **config: Any) -> AsyncIterator[PortWithListener]:
    listeners: list[Listener] = []
    real = data_port_wiring.open_data_port

    async def record_listener(*arguments: Any) -> tuple[Listener, int]:
        listener, number = await real(*arguments)
        listeners.append(listener)
        return listener, number

    async with AsyncExitStack() as running:
        with patch.object(data_port_wiring, "open_data_port", record_listener):
            port = await running.enter_async_context(data_port(folder, **config))
        yield PortWithListener(port, listeners[0])
