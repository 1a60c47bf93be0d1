"""What the disks of simulated processes do: they fill up, break, and have written half of a line when a process dies.

The files are real, in memory where there is such a place; what is asked of the system goes through here first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

from price_keeper.ledger import segment
from price_keeper.ledger.segment import Segment

from tests.sim import scheduler as simulated
from tests.sim.scheduler import Killed

_NAMES = ("open", "close", "fdopen", "pwrite", "fsync", "ftruncate", "statvfs", "unlink", "rename")
_REAL = {name: getattr(os, name) for name in _NAMES}
_APPEND, _MADE = Segment.append, Segment.__init__


class Disk:
    """Of one life of a process. `dies_in` counts what is written or asked, lines of the journal among it."""

    def __init__(self) -> None:
        self.is_full = self.cannot_sync = False
        self.has_failed = False  # something that was asked of it
        self.dies_in: int | None = None
        self.tear = 1.0  # how much of what it writes last is written, in parts
        self.files: set[int] = set()
        self.segments: list[Segment] = []

    def is_its_end(self) -> bool:
        if self.dies_in is None:
            return False
        self.dies_in -= 1
        return self.dies_in < 0

    def bury(self) -> None:
        """What the system does for a process that has died."""
        for each in self.segments:
            if each._window is not None:
                each._window.close()
            each._window, each._file, each._is_mapped = None, -1, False
            each._window_start = each._window_offset = each._window_end = 0
        for file in self.files:
            with suppress(OSError):
                _REAL["close"](file)
        self.segments, self.files = [], set()


class Disks:
    """Whose turn it is decides on whose disk something is done."""

    def __init__(self) -> None:
        self.scheduler: simulated.Scheduler | None = None

    def _asks(self, *, is_write: bool = False) -> Any:
        """The process that asks; None: it is none of the simulated ones."""
        process: Any = None if self.scheduler is None else self.scheduler.current
        if process is None:
            return None
        if process.is_dead:
            raise Killed
        disk = process.disk
        if is_write and disk.is_full:
            disk.has_failed = True
            raise OSError(28, "No space left on device")
        return process

    def _meets(self, process: Any) -> None:
        if process is not None and process.disk.is_its_end():
            process.is_dead = True
            raise Killed

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        process = self._asks()
        file = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
        if process is not None:
            process.disk.files.add(file)
        return int(file)

    def close(self, file: int) -> None:
        process: Any = None if self.scheduler is None else self.scheduler.current
        if process is not None:
            if process.is_dead:
                return
            process.disk.files.discard(file)
        _REAL["close"](file)

    def fdopen(self, file: int, mode: str) -> Any:
        simulates = self.scheduler is not None and self.scheduler.current is not None
        return Opened(self, file) if simulates else _REAL["fdopen"](file, mode)

    def statvfs(self, path: Any) -> Any:
        process = self._asks()
        if process is None:
            return _REAL["statvfs"](path)
        process.disk.has_failed |= process.disk.is_full
        return SimpleNamespace(f_bavail=0 if process.disk.is_full else 2**30, f_frsize=1)

    def pwrite(self, file: int, data: Any, at: int) -> int:
        process = self._asks(is_write=True)
        if process is not None and process.disk.is_its_end():
            process.is_dead = True
            written = round(len(data) * process.disk.tear)
            _REAL["pwrite"](file, bytes(data[:written]), at)
            raise Killed(is_whole=written == len(data) and any(data))  # zeros are room for lines to come
        return int(_REAL["pwrite"](file, data, at))

    def fsync(self, file: int) -> None:
        process = self._asks()
        if process is not None:
            self._meets(process)
            if process.disk.cannot_sync:
                process.disk.has_failed = True
                raise OSError(5, "Input/output error")

    def ftruncate(self, file: int, length: int) -> None:
        self._meets(self._asks())
        _REAL["ftruncate"](file, length)

    def unlink(self, path: Any, *, dir_fd: Any = None) -> None:
        self._meets(self._asks())
        _REAL["unlink"](path, dir_fd=dir_fd)

    def rename(self, source: Any, target: Any, **more: Any) -> None:
        self._meets(self._asks())
        _REAL["rename"](source, target, **more)

    def made(self, each: Segment, *arguments: Any, **named: Any) -> None:
        process = self._asks()
        if process is not None:
            process.disk.segments.append(each)
        _MADE(each, *arguments, **named)

    def append(self, each: Segment, content: bytes) -> None:
        process = self._asks()
        if process is not None and process.disk.is_its_end():
            process.is_dead = True
            data = b"%08x %b\n" % (crc32(content), content)
            some = data[: round(len(data) * process.disk.tear)]
            if each._window_offset + len(data) <= each._window_end and each._window is not None:
                each._window[each._window_offset : each._window_offset + len(some)] = some
                raise Killed(is_whole=len(some) == len(data))
            raise Killed
        _APPEND(each, content)


class Opened:
    """Of what is written whole, as notes are."""

    def __init__(self, disks: Disks, file: int) -> None:
        self._disks, self._file = disks, file

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._disks.close(self._file)

    def fileno(self) -> int:
        return self._file

    def write(self, data: bytes) -> None:
        self._disks.pwrite(self._file, data, 0)

    def flush(self) -> None: ...


DISKS = Disks()


@contextmanager
def disks() -> Iterator[None]:
    """For any number of runs."""
    with (
        mock.patch.multiple(os, **{name: getattr(DISKS, name) for name in _REAL}),
        mock.patch.object(segment.Segment, "append", lambda each, content: DISKS.append(each, content)),
        mock.patch.object(
            segment.Segment, "__init__", lambda each, *arguments, **named: DISKS.made(each, *arguments, **named)
        ),
    ):
        yield
