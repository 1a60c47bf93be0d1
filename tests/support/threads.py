"""Threads that work side by side until the block they serve is left."""

from __future__ import annotations

import threading
from typing import Self


class ThreadGroup:
    """Each works until `_stop` is set."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
