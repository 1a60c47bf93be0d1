"""One file of the journal, which only ever grows: its lines are whole in the kernel before `append` returns."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

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

    def append(self, content: bytes) -> None:
        """All of it or nothing."""
        self._write(b"%08x %b\n" % (crc32(content), content))  # `line`, spelt out for every call's sake

    def append_all(self, contents: Iterable[bytes]) -> None:
        """All of them or none."""
        self._write(b"".join(map(line, contents)))

    def _write(self, data: bytes) -> None:
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


def sync_file(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """So that after a power cut the names of new files are there too."""
    sync_file(folder, os.O_RDONLY | os.O_DIRECTORY)
