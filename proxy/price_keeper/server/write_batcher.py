"""Batch short writes until the next iteration of the event loop.

Waking the reader of a socket costs more than the write itself. Under load, writes are delayed until a few others have
joined them; at the latest they go out in the next iteration, before the loop waits for I/O again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

MAX_BATCH_WRITES = 32  # in a larger batch the first writes would wait longer than the others gain
MAX_BATCH_BYTES = 256 * 1024  # more would hide for too long that a pipelining client reads nothing
BATCHING_THRESHOLD = 4  # active requests; with fewer, every write goes out at once

Write: TypeAlias = Callable[[bytes], None]


class WriteBatcher:
    """Delays writes while `is_busy`, in order, until the next loop iteration at the latest."""

    def __init__(self) -> None:
        self.is_busy = False  # set by the listener: enough requests are active that batching pays
        self._pending: list[tuple[Write, bytes]] = []
        self._pending_bytes = 0
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()

    def write(self, write: Write, data: bytes) -> None:
        """Call `write(data)` now, or in the next loop iteration at the latest. The caller must `flush` before it writes
        to the same transport in any other way, or closes it, or the order of bytes changes."""
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
            self._loop.call_soon(self._flush_next_turn)

    def flush(self) -> None:
        if not self._pending:
            return
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for write, data in pending:
            try:
                write(data)
            except Exception:  # noqa: S112 - a client that has disconnected must not cost the others their data
                continue

    def _flush_next_turn(self) -> None:
        self._is_flush_due = False
        self.flush()
