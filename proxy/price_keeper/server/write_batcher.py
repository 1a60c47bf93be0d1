"""Joins short writes of one turn of the event loop.

Waking the reader of a socket costs more than the write itself. Under load, writes wait for a few others, but never
beyond the current turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

MAX_BATCH_WRITES = 32  # messages: with more the first ones would wait longer than the others gain
MAX_BATCH_BYTES = 256 * 1024  # else one who sends much ahead and reads nothing is found out too late
BATCHING_THRESHOLD = 4  # requests under way, before which nothing waits

Write: TypeAlias = Callable[[bytes], None]


class WriteBatcher:
    def __init__(self) -> None:
        self.is_busy = False  # as its owner says
        self._pending: list[tuple[Write, bytes]] = []
        self._pending_bytes = 0
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()

    def write(self, write: Write, data: bytes) -> None:
        """Everything else that is to be written to the same place, or is done to it, comes after a `flush`."""
        pending = self._pending
        if not self.is_busy and not pending:
            write(data)
            return
        pending.append((write, data))
        self._pending_bytes += len(data)
        if len(pending) >= MAX_BATCH_WRITES or self._pending_bytes >= MAX_BATCH_BYTES:
            self.flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_at_turn_end)

    def flush(self) -> None:
        if not self._pending:
            return
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for write, data in pending:
            try:
                write(data)
            except Exception:  # noqa: S112 - whoever is gone hears nothing, and the others are not to suffer
                continue

    def _flush_at_turn_end(self) -> None:
        self._is_flush_due = False
        self.flush()
