"""Notes on this machine's disk, beside the journal: for a process that begins while the store is away.

Each worker has a file of its own in the journal's folder, which takes the place of the one before it whole. A process
that begins reads all that are there, as the same callers may come to another worker than before. Whatever goes wrong
with them is told, and keeps nobody from starting and no call from being answered.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
from pathlib import Path
from typing import Final

import orjson

from price_keeper.clock import Clock
from price_keeper.recording.lines import decode_lines, encode_line
from price_keeper.recording.segment import OPEN_FLAGS, sync_folder
from price_keeper.selection.notes import MAX_SNAPSHOT_BYTES, BudgetSnapshot, RecordKey, select_newest
from price_keeper.tasks import Tasks

SNAPSHOT_FILE_PREFIX: Final = "notes-"
TEMPORARY_FILE_PREFIX: Final = "new-"  # of what takes its place
SNAPSHOT_FORMAT: Final = 1
WRITE_CHECK_SECONDS: Final = 1.0
BUDGET_WRITE_SECONDS: Final = 5.0  # settings are written as soon as they are new, what is spent no more often than this
RECORDS_PER_TURN: Final = 100  # standings that are noted before others have their turn
REREAD_SECONDS: Final = 5.0  # between two looks at what other workers have noted
FAILURE_PAUSE_SECONDS: Final = 60.0  # until a disk is tried again
MAX_BYTES_PER_SECOND: Final = 256 * 1024  # at most, in the long run
RESERVED_DISK_BYTES: Final = 8 * 2**20  # bytes, which are the journal's
MAX_FILE_BYTES: Final = 2 * MAX_SNAPSHOT_BYTES

_FILE_NAME = re.compile(rf"{SNAPSHOT_FILE_PREFIX}(0|[1-9][0-9]{{0,8}})")
_HEADER = ["NOTES", SNAPSHOT_FORMAT]

_log = logging.getLogger("price_keeper.selection")


class SnapshotFile:
    def __init__(self, folder: Path, clock: Clock, worker: int = 0, workers: int = 1) -> None:
        """`folder` is that of the first worker's journal."""
        self.snapshot = BudgetSnapshot(clock.now, worker)
        self._folder = folder
        self._clock = clock
        self._path = folder / f"{SNAPSHOT_FILE_PREFIX}{worker}"
        self._workers = workers if worker == 0 else None  # the first one clears up after workers that are no more
        self._obsolete_files: list[Path] = []  # of those
        self._writing = asyncio.Lock()
        self._rereading = asyncio.Lock()  # another one: calls wait for it, and a disk may take long over a sync
        self._next_write_at = self._budgets_due_at = self._next_reread_at = clock.monotonic()
        self._last_error = ""

    async def open(self) -> None:
        """Reads what was noted before."""
        found, self._obsolete_files = await asyncio.to_thread(self._read_all)
        self.snapshot.merge(found)

    async def reread(self) -> None:
        """What other workers have noted since; once for all who ask, and not often."""
        async with self._rereading:
            if self._clock.monotonic() >= self._next_reread_at:
                found, _ = await asyncio.to_thread(self._read_all)
                self.snapshot.merge(found)
                self._next_reread_at = self._clock.monotonic() + REREAD_SECONDS

    def start(self, tasks: Tasks) -> None:
        tasks.run_every("notes to disk", WRITE_CHECK_SECONDS, self.write_if_due)

    async def write_if_due(self) -> None:
        """Once: what is new is on the disk, if it is time for that."""
        moment, snapshot = self._clock.monotonic(), self.snapshot
        is_due = snapshot.has_changes or (snapshot.pending_count and moment >= self._budgets_due_at)
        if is_due and moment >= self._next_write_at:
            await self.write()

    async def write(self) -> None:
        """What is new; also at the end, when the last flush is over."""
        async with self._writing:
            for _ in range(0, self.snapshot.pending_count, RECORDS_PER_TURN):
                self.snapshot.record_pending(RECORDS_PER_TURN)
                await asyncio.sleep(0)
            self._budgets_due_at = self._clock.monotonic() + BUDGET_WRITE_SECONDS
            if not self.snapshot.has_changes:
                return
            content = [encode_line(orjson.dumps(_HEADER)), *self.snapshot.export_lines()]
            pause = sum(map(len, content)) / MAX_BYTES_PER_SECOND
            try:
                await asyncio.to_thread(self._replace_file, content)
            except OSError as failure:
                self._on_failure(failure)
                pause = FAILURE_PAUSE_SECONDS
            else:
                self._last_error = ""
            self._next_write_at = self._clock.monotonic() + pause

    def _on_failure(self, failure: OSError) -> None:
        self.snapshot.has_changes = True
        if self._last_error != failure.strerror:
            self._last_error = str(failure.strerror)
            message = "what is known of budgets cannot be noted in %s, for a start while the store is away: %s"
            _log.warning(message, self._folder, failure.strerror)

    # In a thread.

    def _replace_file(self, content: list[bytes]) -> None:
        """Raises OSError; then the file before it stays."""
        data = b"".join(content)
        filesystem = os.statvfs(self._folder)
        if filesystem.f_bavail * filesystem.f_frsize < len(data) + RESERVED_DISK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = _build_temporary_path(self._path)
        try:
            with os.fdopen(os.open(temporary, OPEN_FLAGS | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        while self._obsolete_files:  # what they said stands in this one now
            obsolete = self._obsolete_files.pop()
            for each in (_build_temporary_path(obsolete), obsolete):
                each.unlink(missing_ok=True)

    def _read_all(self) -> tuple[dict[RecordKey, bytes], list[Path]]:
        """And the files to be cleared up."""
        try:
            paths = [*self._folder.iterdir()]
        except OSError as failure:
            _log.warning("notes in %s cannot be read: %s", self._folder, failure.strerror)
            paths = []
        named = [(path, name) for path in paths if (name := _FILE_NAME.fullmatch(path.name))]
        found, malformed = select_newest(values for path, _ in named for values in _read_file(path))
        if malformed:
            _log.warning("%d of the notes in %s are none, and passed over", malformed, self._folder)
        return found, [path for path, name in named if self._workers is not None and int(name[1]) >= self._workers]


def _build_temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_FILE_PREFIX}{path.name}")


def _read_file(path: Path) -> list[list[object]]:
    """Nothing, where the file as a whole is of no use."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError("it is no file of this kind")
        found = decode_lines(path.read_bytes())
        if not found.values or found.values[0] != _HEADER:
            raise ValueError("it is of another version, or spoilt")
    except FileNotFoundError:  # its worker has just ended
        return []
    except (OSError, ValueError) as failure:
        _log.warning("what %s says of budgets is passed over: %s", path, getattr(failure, "strerror", None) or failure)
        return []
    if found.corrupt_lines:
        _log.warning("%s: %d lines are spoilt, and passed over", path, found.corrupt_lines)
    return found.values[1:]
