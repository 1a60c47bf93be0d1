"""One file of the journal, append-only, and the encoding of its lines.

A line is a checksum, a space, a JSON list and a line feed; the checksum shows which lines were written completely. A
line is in the kernel before `append` returns. Writes go through a memory map, which costs a tenth of a system call. Room
is allocated beforehand, as zeros, so a full disk is an OSError of `append` and not a crash, and a killed process
leaves zeros behind its last line. `close` cuts them off. On a file system without memory maps each line is a write.
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


def encode_line(content: bytes) -> bytes:
    return b"%08x %b\n" % (crc32(content), content)


@dataclass(frozen=True, slots=True)
class JournalLines:
    """`values` of the good ones, with their `texts` as they stand there; `ends` are the offsets behind them. `spoilt`
    counts what was no line; `end` is the offset behind the last good one, where writing may go on.

    `has_gaps`: before that end is something that may have been a line, as one behind it that was never finished is not.
    """

    values: list[list[Any]]
    corrupt_lines: int
    end: int
    has_gaps: bool = False
    texts: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def decode_lines(data: bytes) -> JournalLines:
    """A line that is torn or spoilt is passed over: those behind it are still good."""
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


SEGMENT_SUFFIX: Final = ".seg"
MIN_ROOM_BYTES, MAX_ROOM_BYTES = 64 * 1024, 256 * 1024  # taken at a time: small files stay small, large ones seldom ask

# In a folder that others can write to, a link to somewhere else may stand in the place of a file of ours.
OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_log = logging.getLogger("price_keeper.recording")


class Segment:
    """Raises OSError when the disk will not take a line; nothing of that line is left behind then."""

    def __init__(self, folder: Path, ulid: str, *, is_mapped: bool = True) -> None:
        """One that is not mapped takes no more room than its lines do: for a few of them at the end."""
        self.ulid = ulid
        self.path = folder / f"{ulid}{SEGMENT_SUFFIX}"
        self._file = os.open(self.path, OPEN_FLAGS, 0o600)
        self._is_mapped = is_mapped
        self._window: mmap | None = None
        self._window_start = os.fstat(self._file).st_size  # of the window, in the file
        self._window_offset = self._window_end = 0  # in the window: where the next line goes, and where it ends
        self._synced_size = self.size

    @property
    def size(self) -> int:
        return self._window_start + self._window_offset

    def append(self, content: bytes) -> None:
        """All of it or nothing."""
        data = b"%08x %b\n" % (crc32(content), content)  # `line`, spelt out for every call's sake
        at = self._window_offset
        end = at + len(data)
        if end > self._window_end:
            self._write(data)
        else:
            self._window[at:end] = data  # type: ignore[index]  # where there is room there is a window
            self._window_offset = end

    def append_all(self, contents: Iterable[bytes]) -> None:
        """All of them or none."""
        self._write(b"".join(map(encode_line, contents)))

    def _write(self, data: bytes) -> None:
        if self._is_mapped and self._window_offset + len(data) > self._window_end:
            try:
                self._open_window(len(data))
            except MemoryError:  # for whoever writes it is as good as a disk that is full
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        if self._window is None:
            self._write_at(data, self._window_start)
            self._window_start += len(data)
        else:
            self._window[self._window_offset : self._window_offset + len(data)] = data
            self._window_offset += len(data)

    def _open_window(self, needed: int) -> None:
        """Where the last one ends, but on the border of a page. There is none where the file system maps no files."""
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
        """How much of what was wished for the disk has given: where it is nearly full, a page, or what is needed."""
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
        """All of it or nothing."""
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
        """May be called from another thread: what is appended meanwhile is left for the next time."""
        size = self.size
        os.fsync(self._file)
        self._synced_size = size

    def close(self) -> None:
        """Never raises: all that was appended is in the file, and zeros that stay behind it do no harm. Whatever is
        appended from then on is refused as by a file that is closed."""
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
            _log.error("segment %s did not close well: %s", self.ulid, failure.strerror)

    def discard(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.close()


@lru_cache(64)  # and so once: it may come with every segment
def _warn_not_mapped(folder: str, why: str) -> None:
    _log.warning("files in %s cannot be mapped, so each line is written by itself: %s", folder, why)


def sync_file(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """So that after a power cut the names of new files are there too."""
    sync_file(folder, os.O_RDONLY | os.O_DIRECTORY)
