"""A data port with its listener at hand, for tests that look at what calls leave open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from price_keeper import dataplane
from price_keeper.surface.listener import Listener

from tests.support.data_port import DataPort, data_port
from tests.support.wire import eventually


@dataclass
class Lane:
    port: DataPort
    listener: Listener

    @property
    def number(self) -> int:
        return urlsplit(self.port.url).port or 0

    @property
    def pipeline(self) -> Any:
        return self.listener._handler

    @property
    def journal(self) -> Any:
        return self.port.recording.recorder.journal

    async def is_quiet(self) -> None:
        """Nothing is left open by any call, whatever became of it."""
        holders = self.pipeline._admitting._leasing._holders
        await eventually(lambda: not self.listener.active_requests)
        await eventually(lambda: not self.journal.open_calls)
        await eventually(lambda: not self.pipeline.joining._calls or self._has_no_open_share())
        assert self.listener.reserved_bytes == 0
        assert not any(holder.open for holder in holders.values())

    def _has_no_open_share(self) -> bool:
        return all(shared.is_finished for shared in self.pipeline.joining._calls.values())


@asynccontextmanager
async def lane(folder: Path, **config: Any) -> AsyncIterator[Lane]:
    found: list[Listener] = []
    real = dataplane.open_data_port

    async def noted(*arguments: Any) -> tuple[Listener, int]:
        listener, number = await real(*arguments)
        found.append(listener)
        return listener, number

    async with AsyncExitStack() as running:
        with patch.object(dataplane, "open_data_port", noted):
            port = await running.enter_async_context(data_port(folder, **config))
        yield Lane(port, found[0])
