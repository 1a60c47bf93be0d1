"""One file of the journal, append-only, and the encoding of its lines.

A line is a checksum, a space, a JSON list and a line feed; the checksum shows which lines were written completely. A
line is in the kernel before `append` returns. Writes go through a memory map, which costs a tenth of a system call.
Room is allocated beforehand, as zeros, so a full disk is an OSError of `append` and not a crash, and a killed process
leaves zeros after its last line. `close` truncates them. On a file system without memory maps each line is a write.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import orjson

_CRC_DIGITS = 8
SEGMENT_SUFFIX: Final = ".seg"
# allocated at a time: small files stay small, and large ones grow in few steps
MIN_ROOM_BYTES, MAX_ROOM_BYTES = 64 * 1024, 256 * 1024
# In a folder that others can write to, a symbolic link may stand in the place of a journal file.
OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_log = logging.getLogger("price_keeper.recording")


def encode_line(content: bytes) -> bytes:
    return b"%08x %b\n" % (crc32(content), content)


@dataclass(frozen=True, slots=True)
class JournalLines:
    """The decoded lines of a file. `values` are those of the good lines, `texts` their bytes, and `ends` the offsets
    after them. `corrupt_lines` counts what could not be decoded; `end` is the offset after the last good line, where
    writing may continue.

    `has_gaps`: before that end is something that may have been a line, unlike an unfinished line at the end of the
    file.
    """

    values: list[list[Any]]
    corrupt_lines: int
    end: int
    has_gaps: bool = False
    texts: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def decode_lines(data: bytes) -> JournalLines:
    """Torn and corrupt lines are skipped; the lines after them are still good."""
    found: list[list[Any]] = []
    texts: list[bytes] = []
    ends: list[int] = []
    at = end = corrupt_lines = 0
    has_gaps = False
    while (stop := data.find(b"\n", at)) >= 0:
        torn, hole, text = data[at:stop].rpartition(b"\0")
        values, start, at = _decode_line(text), at, stop + 1
        if values is not None:
            found.append(values)
            texts.append(data[stop - len(text) : at])
            ends.append(at)
            has_gaps |= start != end or bool(hole)
            end = at
        if values is None or torn.strip(b"\0"):
            corrupt_lines += 1
    return JournalLines(found, corrupt_lines + bool(data[at:].strip(b"\0")), end, has_gaps, texts, ends)


def _decode_line(text: bytes) -> list[Any] | None:
    content = text[_CRC_DIGITS + 1 :]
    if text[: _CRC_DIGITS + 1] != b"%08x " % crc32(content):
        return None
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return values if isinstance(values, list) and values else None


class Segment:
    """Raises OSError if the disk refuses a line; nothing of that line is left behind then."""

    def __init__(self, folder: Path, ulid: str, *, is_mapped: bool = True) -> None:
        """A segment that is not mapped allocates no more room than its lines take; it is for a few last lines."""
        self.ulid = ulid
        self.path = folder / f"{ulid}{SEGMENT_SUFFIX}"
        self._file = os.open(self.path, OPEN_FLAGS, 0o600)
        self._is_mapped = is_mapped
        self._window: mmap | None = None
        self._window_start = os.fstat(self._file).st_size  # offset of the window in the file
        self._window_offset = self._window_end = 0  # offsets in the window: of the next line, and of the window's end
        self._synced_size = self.size

    @property
    def size(self) -> int:
        return self._window_start + self._window_offset

    def append(self, content: bytes) -> None:
        """Append one line: all of it or nothing."""
        # `encode_line` inlined, as each call of the proxy appends lines
        data = b"%08x %b\n" % (crc32(content), content)
        at = self._window_offset
        end = at + len(data)
        if end > self._window_end:
            self._write(data)
        else:
            self._window[at:end] = data  # type: ignore[index]  # where there is room there is a window
            self._window_offset = end

    def append_all(self, contents: Iterable[bytes]) -> None:
        """Append lines: all of them or none."""
        self._write(b"".join(map(encode_line, contents)))

    def _write(self, data: bytes) -> None:
        if self._is_mapped and self._window_offset + len(data) > self._window_end:
            try:
                self._open_window(len(data))
            except MemoryError:  # callers treat it like a full disk
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        if self._window is None:
            self._write_at(data, self._window_start)
            self._window_start += len(data)
        else:
            self._window[self._window_offset : self._window_offset + len(data)] = data
            self._window_offset += len(data)

    def _open_window(self, needed: int) -> None:
        """Map the next part of the file, from a page border. There is no window where the file system cannot map
        files."""
        size, taken = self.size, self._window_start + self._window_end
        start = size - size % ALLOCATIONGRANULARITY
        room = self._preallocate(max(taken, size), start, size - start + needed)
        try:
            window = mmap(self._file, room, offset=start)
        except OSError as failure:
            self._disable_mapping(failure)
            return
        if self._window is not None:
            self._window.close()
        self._window, self._window_start, self._window_offset, self._window_end = window, start, size - start, room

    def _preallocate(self, allocated_end: int, start: int, needed: int) -> int:
        """Allocate room and return its size: on a nearly full disk one page, or only what is needed."""
        wished = max(needed, min(max(self.size, MIN_ROOM_BYTES), MAX_ROOM_BYTES))
        a_page = needed + -needed % ALLOCATIONGRANULARITY
        *generous, exact = sorted({wished, min(wished, a_page), needed}, reverse=True)
        for room in generous:
            with suppress(OSError, MemoryError):
                self._write_at(bytes(max(0, start + room - allocated_end)), allocated_end)
                return room
        self._write_at(bytes(max(0, start + exact - allocated_end)), allocated_end)
        return exact

    def _write_at(self, data: bytes, offset: int) -> None:
        """Write all of the data, or truncate the file to where it began."""
        start, end = offset, offset + len(data)
        try:
            while offset < end:
                offset += os.pwrite(self._file, data[offset - start :] if offset > start else data, offset)
        except OSError:
            os.ftruncate(self._file, start)
            raise

    def _disable_mapping(self, failure: OSError) -> None:
        _warn_not_mapped(str(self.path.parent), str(failure.strerror))
        window, size = self._window, self.size
        self._is_mapped, self._window = False, None
        self._window_start, self._window_offset, self._window_end = size, 0, 0
        if window is not None:
            window.close()
        os.ftruncate(self._file, size)

    @property
    def is_synced(self) -> bool:
        return self._synced_size == self.size

    def sync(self) -> None:
        """May be called from another thread; what is appended meanwhile is left for the next sync."""
        size = self.size
        os.fsync(self._file)
        self._synced_size = size

    def close(self) -> None:
        """Never raises: all that was appended is in the file, and zeros after it do no harm. A later append raises
        OSError, as on any closed file."""
        file, window, size = self._file, self._window, self.size
        self._file, self._window, self._is_mapped = -1, None, False
        self._window_start, self._window_offset, self._window_end = size, 0, 0
        if file < 0:
            return
        try:
            try:
                if window is not None:
                    window.close()
                    os.ftruncate(file, size)
            finally:
                os.close(file)
        except OSError as failure:
            _log.error("segment %s cannot be closed cleanly; its lines are complete: %s", self.ulid, failure.strerror)

    def discard(self) -> None:
        """Delete and close the file."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.close()


@lru_cache(64)  # so that it is logged once per folder, and not for every segment
def _warn_not_mapped(folder: str, why: str) -> None:
    _log.warning("files in %s cannot be memory-mapped, so each line is a separate, slower write: %s", folder, why)


def sync_file(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names of new files survive a power cut."""
    sync_file(folder, os.O_RDONLY | os.O_DIRECTORY)
