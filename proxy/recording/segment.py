"""One file of the journal, which only ever grows: its lines are whole in the kernel before `append` returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from proxy.recording.lines import line

SUFFIX = ".seg"


class Segment:
    """Raises OSError when the disk will not take a line; nothing of that line is left behind then."""

    def __init__(self, folder: Path, ulid: str) -> None:
        self.ulid = ulid
        self.path = folder / f"{ulid}{SUFFIX}"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self._synced_size = self.size

    def append(self, *contents: bytes) -> None:
        """All of it or nothing."""
        data = line(contents[0]) if len(contents) == 1 else b"".join(map(line, contents))
        try:
            written = os.write(self._file, data)
        except OSError:
            self._cut_back()
            raise
        if written != len(data):
            self._cut_back()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += written

    def _cut_back(self) -> None:
        os.ftruncate(self._file, self.size)

    @property
    def is_synced(self) -> bool:
        return self._synced_size == self.size

    def sync(self) -> None:
        """May be called from another thread: what is appended meanwhile is left for the next time."""
        size = self.size
        os.fsync(self._file)
        self._synced_size = size

    def close(self) -> None:
        os.close(self._file)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def sync_folder(folder: Path) -> None:
    """So that after a power cut the names of new files are there too."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
