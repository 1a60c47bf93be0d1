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
from price_keeper.recording.lines import line, lines_in
from price_keeper.recording.segment import OPENED, sync_folder
from price_keeper.selection.notes import MAX_SNAPSHOT_BYTES, RecordKey, BudgetSnapshot, select_newest
from price_keeper.tasks import Tasks

PREFIX: Final = "notes-"
NEW_PREFIX: Final = "new-"  # of what takes its place
FORMAT: Final = 1
TICK_SECONDS: Final = 1.0
STANDINGS_SECONDS: Final = 5.0  # settings are written as soon as they are new, what is spent no more often than this
AT_A_TIME: Final = 100  # standings that are noted before others have their turn
AGAIN_SECONDS: Final = 5.0  # between two looks at what other workers have noted
FAILED_SECONDS: Final = 60.0  # until a disk is tried again
BYTES_A_SECOND: Final = 256 * 1024  # at most, in the long run
ROOM_LEFT: Final = 8 * 2**20  # bytes, which are the journal's
LONGEST_FILE: Final = 2 * MAX_SNAPSHOT_BYTES

_NAME = re.compile(rf"{PREFIX}(0|[1-9][0-9]{{0,8}})")
_HEAD = ["NOTES", FORMAT]

_log = logging.getLogger("price_keeper.selection")


class Notebook:
    def __init__(self, folder: Path, clock: Clock, worker: int = 0, workers: int = 1) -> None:
        """`folder` is that of the first worker's journal."""
        self.notes = BudgetSnapshot(clock.now, worker)
        self._folder = folder
        self._clock = clock
        self._path = folder / f"{PREFIX}{worker}"
        self._workers = workers if worker == 0 else None  # the first one clears up after workers that are no more
        self._former: list[Path] = []  # of those
        self._writing = asyncio.Lock()
        self._looking = asyncio.Lock()  # another one: calls wait for it, and a disk may take long over a sync
        self._quiet_until = self._standings_due = self._again_at = clock.monotonic()
        self._trouble = ""

    async def open(self) -> None:
        """Reads what was noted before."""
        found, self._former = await asyncio.to_thread(self._read_all)
        self.notes.merge(found)

    async def look_again(self) -> None:
        """What other workers have noted since; once for all who ask, and not often."""
        async with self._looking:
            if self._clock.monotonic() >= self._again_at:
                found, _ = await asyncio.to_thread(self._read_all)
                self.notes.merge(found)
                self._again_at = self._clock.monotonic() + AGAIN_SECONDS

    def start(self, tasks: Tasks) -> None:
        tasks.run_every("notes to disk", TICK_SECONDS, self.keep)

    async def keep(self) -> None:
        """Once: what is new is on the disk, if it is time for that."""
        moment, notes = self._clock.monotonic(), self.notes
        is_due = notes.has_changes or (notes.pending_count and moment >= self._standings_due)
        if is_due and moment >= self._quiet_until:
            await self.write()

    async def write(self) -> None:
        """What is new; also at the end, when the last flush is over."""
        async with self._writing:
            for _ in range(0, self.notes.pending_count, AT_A_TIME):
                self.notes.record_pending(AT_A_TIME)
                await asyncio.sleep(0)
            self._standings_due = self._clock.monotonic() + STANDINGS_SECONDS
            if not self.notes.has_changes:
                return
            content = [line(orjson.dumps(_HEAD)), *self.notes.export_lines()]
            pause = sum(map(len, content)) / BYTES_A_SECOND
            try:
                await asyncio.to_thread(self._put, content)
            except OSError as failure:
                self._failed(failure)
                pause = FAILED_SECONDS
            else:
                self._trouble = ""
            self._quiet_until = self._clock.monotonic() + pause

    def _failed(self, failure: OSError) -> None:
        self.notes.has_changes = True
        if self._trouble != failure.strerror:
            self._trouble = str(failure.strerror)
            told = "what is known of budgets cannot be noted in %s, for a start while the store is away: %s"
            _log.warning(told, self._folder, failure.strerror)

    # In a thread.

    def _put(self, content: list[bytes]) -> None:
        """Raises OSError; then the file before it stays."""
        data = b"".join(content)
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < len(data) + ROOM_LEFT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        new = _new(self._path)
        try:
            with os.fdopen(os.open(new, OPENED | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        while self._former:  # what they said stands in this one now
            former = self._former.pop()
            for each in (_new(former), former):
                each.unlink(missing_ok=True)

    def _read_all(self) -> tuple[dict[RecordKey, bytes], list[Path]]:
        """And the files to be cleared up."""
        try:
            paths = [*self._folder.iterdir()]
        except OSError as failure:
            _log.warning("notes in %s cannot be read: %s", self._folder, failure.strerror)
            paths = []
        named = [(path, name) for path in paths if (name := _NAME.fullmatch(path.name))]
        found, spoilt = select_newest(values for path, _ in named for values in _read(path))
        if spoilt:
            _log.warning("%d of the notes in %s are none, and passed over", spoilt, self._folder)
        return found, [path for path, name in named if self._workers is not None and int(name[1]) >= self._workers]


def _new(path: Path) -> Path:
    return path.with_name(f"{NEW_PREFIX}{path.name}")


def _read(path: Path) -> list[list[object]]:
    """Nothing, where the file as a whole is of no use."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > LONGEST_FILE:
            raise ValueError("it is no file of this kind")
        found = lines_in(path.read_bytes())
        if not found.values or found.values[0] != _HEAD:
            raise ValueError("it is of another version, or spoilt")
    except FileNotFoundError:  # its worker has just ended
        return []
    except (OSError, ValueError) as failure:
        _log.warning("what %s says of budgets is passed over: %s", path, getattr(failure, "strerror", None) or failure)
        return []
    if found.spoilt:
        _log.warning("%s: %d lines are spoilt, and passed over", path, found.spoilt)
    return found.values[1:]
