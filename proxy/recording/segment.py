"""One file of the journal, which only ever grows: its lines are whole in the kernel before `append` returns.

It is written to through memory that is mapped to it, which costs a tenth of a system call. The room for that is taken
from the disk beforehand, as zeros: so a full disk is an error of `append` and no crash, and a process that was killed
leaves zeros behind its last line. `close` cuts them off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from zlib import crc32

from proxy.recording.lines import line

SUFFIX = ".seg"
LEAST_ROOM, MOST_ROOM = 64 * 1024, 256 * 1024  # taken at a time: small files stay small, large ones seldom ask


class Segment:
    """Raises OSError when the disk will not take a line; nothing of that line is left behind then."""

    def __init__(self, folder: Path, ulid: str) -> None:
        self.ulid = ulid
        self.path = folder / f"{ulid}{SUFFIX}"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._window: mmap | None = None
        self._start = os.fstat(self._file).st_size  # of the window, in the file
        self._at = self._end = 0  # in the window: where the next line goes, and where it ends
        self._synced_size = self.size

    @property
    def size(self) -> int:
        return self._start + self._at

    def append(self, content: bytes) -> None:
        """All of it or nothing."""
        data = b"%08x %b\n" % (crc32(content), content)  # `line`, spelt out for every call's sake
        at = self._at
        end = at + len(data)
        if end > self._end:
            self._write(data)
        else:
            self._window[at:end] = data  # type: ignore[index]  # where there is room there is a window
            self._at = end

    def append_all(self, contents: Iterable[bytes]) -> None:
        """All of them or none."""
        self._write(b"".join(map(line, contents)))

    def _write(self, data: bytes) -> None:
        if self._at + len(data) > self._end:
            self._open_window(len(data))
        assert self._window is not None
        self._window[self._at : self._at + len(data)] = data
        self._at += len(data)

    def _open_window(self, needed: int) -> None:
        """Where the last one ends, but on the border of a page."""
        size, taken = self.size, self._start + self._end
        start = size - size % ALLOCATIONGRANULARITY
        room = max(size - start + needed, min(max(size, LEAST_ROOM), MOST_ROOM))
        self._take(max(taken, size), start + room)
        window = mmap(self._file, room, offset=start)
        if self._window is not None:
            self._window.close()
        self._window, self._start, self._at, self._end = window, start, size - start, room

    def _take(self, start: int, end: int) -> None:
        try:
            while start < end:
                start += os.pwrite(self._file, bytes(end - start), start)
        except OSError:
            os.ftruncate(self._file, max(self.size, self._start + self._end))
            raise

    @property
    def is_synced(self) -> bool:
        return self._synced_size == self.size

    def sync(self) -> None:
        """May be called from another thread: what is appended meanwhile is left for the next time."""
        size = self.size
        os.fsync(self._file)
        self._synced_size = size

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            os.ftruncate(self._file, self.size)
        os.close(self._file)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def sync_file(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """So that after a power cut the names of new files are there too."""
    sync_file(folder, os.O_RDONLY | os.O_DIRECTORY)
