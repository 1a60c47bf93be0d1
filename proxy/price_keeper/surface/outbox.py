"""Short messages that are written together, some at a time.

The other side sleeps until something comes. To wake it costs more than to write, and it is awake only for as long as it
takes to read one message: less than it takes us to make the next. So when there is much to do, messages wait for a few
others, but never beyond this turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

AT_ONCE = 32  # messages: with more the first ones would wait longer than the others gain
AT_ONCE_BYTES = 256 * 1024  # else one who sends much ahead and reads nothing is found out too late
MUCH = 4  # requests under way, before which nothing waits

Write: TypeAlias = Callable[[bytes], None]


class Outbox:
    def __init__(self) -> None:
        self.is_busy = False  # as its owner says
        self._waiting: list[tuple[Write, bytes]] = []
        self._waiting_bytes = 0
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()

    def put(self, write: Write, data: bytes) -> None:
        """Everything else that is to be written to the same place, or is done to it, comes after a `flush`."""
        waiting = self._waiting
        if not self.is_busy and not waiting:
            write(data)
            return
        waiting.append((write, data))
        self._waiting_bytes += len(data)
        if len(waiting) >= AT_ONCE or self._waiting_bytes >= AT_ONCE_BYTES:
            self.flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_what_is_left)

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for write, data in waiting:
            try:
                write(data)
            except Exception:  # noqa: S112 - whoever is gone hears nothing, and the others are not to suffer
                continue

    def _flush_what_is_left(self) -> None:
        self._is_flush_due = False
        self.flush()
