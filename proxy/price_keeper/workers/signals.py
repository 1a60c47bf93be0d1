"""Signals for a process without an event loop: they make a file descriptor readable, and wait there to be asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SignalQueue:
    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        for descriptor in (self.readable, self._writable):
            os.set_blocking(descriptor, False)
        self._pending: dict[int, None] = {}
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for number in HANDLED_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._pending.setdefault(number)

    def take_pending(self) -> list[int]:
        """Those that came since the last time, each once."""
        with suppress(BlockingIOError):
            while os.read(self.readable, 512):
                pass
        pending, self._pending = self._pending, {}
        return list(pending)

    @contextmanager
    def block(self) -> Iterator[None]:
        """What comes meanwhile comes after it; in a child that is forked meanwhile, once it has closed this."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

    def close(self) -> None:
        """As in a process that has just begun; but no hang-up ends it, as its supervisor tells it of one later."""
        signal.set_wakeup_fd(-1)
        handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_IGN}
        for number in HANDLED_SIGNALS:
            signal.signal(number, handlers.get(number, signal.SIG_DFL))
        os.close(self.readable)
        os.close(self._writable)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
