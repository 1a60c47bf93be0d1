"""The last known settings and budget states, kept on disk for a process that starts while the store is away.

`BudgetSnapshot` keeps one record per org, app and budget in memory, bounded in number and bytes; budget records are
evicted first, as they are useless without settings. Records hold neither credentials nor who made an override and
why. `SnapshotFile` writes them beside the journal, one file per worker, replaced as a whole, and reads those of all
workers. An unreadable file or record is logged and skipped; it never keeps a process from starting.

The format is stored: file names, record kinds and field names must not change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from price_keeper.budgets import active_label
from price_keeper.budgets.budget_state import RefreshState
from price_keeper.budgets.org_settings import ORG_SETTINGS
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import InvalidStoreRequest
from price_keeper.ledger.segment import OPEN_FLAGS, decode_lines, encode_line, sync_folder
from price_keeper.stores.contract import Item, Value
from price_keeper.stores.item_codec import decode_item, encode_item
from price_keeper.tasks import Tasks

MAX_RECORDS: Final = 10_000
MAX_SNAPSHOT_BYTES: Final = 4 * 2**20
MAX_RECORD_BYTES: Final = 64 * 2**10  # bytes of one

_SETTINGS_KIND, _BUDGET_KIND = "settings", "standing"
_SETTINGS_FIELDS = frozenset({*ORG_SETTINGS, "version", "settled", "settled_until_epoch"} - {"org_name"})
_STICKY_FIELDS = frozenset({active_label.LABEL_ATTRIBUTE, "override_label", "override_until_epoch", "override_version"})
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidStoreRequest)

RecordKey = tuple[str, str]  # what it is about, and of which scope


class BudgetSnapshotRecord(NamedTuple):
    """How a scope stood. `spent`, in pico-dollars by label: what was in the store, and what of the worker's own was
    not, yet. `is_ours`: it was this worker's."""

    sticky_item: Item
    spent: Mapping[str, tuple[int, int]]
    is_own: bool


class BudgetSnapshot:
    def __init__(self, now: Callable[[], float], worker: int = 0) -> None:
        self._now = now
        self._worker = worker
        # By what they are about and by scope; the one made or confirmed last is the last.
        self._lines: dict[str, dict[str, bytes]] = {_SETTINGS_KIND: {}, _BUDGET_KIND: {}}
        self._size = 0
        self._pending: dict[str, RefreshState] = {}  # to be noted, by scope
        self.has_changes = False  # something that was noted

    # What is noted.

    def record_settings(self, scope: Scope, item: Item | None) -> None:
        """As they were read consistently; None: nobody put any."""
        fields = {name: value for name, value in (item or {}).items() if name in _SETTINGS_FIELDS}
        if item is not None and not fields:  # written by hand with nothing but a name, and there all the same
            fields = {"version": 0}
        self._record(_SETTINGS_KIND, scope.key, fields)

    def mark_changed(self, refresh: RefreshState, *, is_urgent: bool = False) -> None:
        """Otherwise than it did, perhaps. It is noted when somebody has it taken down, since it may do so often; soon,
        where it is not only more that was spent. What ends in a period that is over takes nobody's place."""
        if refresh.budget.span.covers(self._now()):
            self._pending[refresh.budget.scope.key] = refresh
            self.has_changes |= is_urgent

    @property
    def pending_count(self) -> int:
        """To take down."""
        return len(self._pending)

    def record_pending(self, limit: int) -> None:
        """So many of them."""
        for scope in [*islice(self._pending, limit)]:
            self._record_budget(self._pending.pop(scope))

    def _record_budget(self, refresh: RefreshState) -> None:
        budget = refresh.budget
        sticky_fields = {name: value for name, value in (refresh.sticky_item or {}).items() if name in _STICKY_FIELDS}
        spent: dict[str, Value] = {
            label: [*budget.get_tracker(label).stored_and_pending] for label in budget.settings.quotas
        }
        content: Item = {"period": budget.span.key, "state": sticky_fields, "spent": spent, "worker": self._worker}
        self._record(_BUDGET_KIND, budget.scope.key, content)

    def _record(self, kind: str, scope: str, content: Item) -> None:
        last_line = self._lines[kind].pop(scope, b"")
        self._size -= len(last_line)
        try:
            rest = orjson.dumps([kind, scope, orjson.Fragment(encode_item(content))])[1:]
        except (AssertionError, *_MALFORMED):  # it was written by hand; whoever reads it goes by the rest
            return
        is_same = last_line.endswith(rest + b"\n")
        self.has_changes |= not is_same
        self._store_line((kind, scope), last_line if is_same else encode_line(b"[%.3f,%b" % (self._now(), rest)))

    def _store_line(self, key: RecordKey, record_line: bytes) -> None:
        if len(record_line) > MAX_RECORD_BYTES:
            return
        kind, scope = key
        self._lines[kind][scope] = record_line
        self._size += len(record_line)
        while sum(map(len, self._lines.values())) > MAX_RECORDS or self._size > MAX_SNAPSHOT_BYTES:
            lines = self._lines[_BUDGET_KIND] or self._lines[_SETTINGS_KIND]
            self._size -= len(lines.pop(next(iter(lines))))

    # What was noted.

    def find_settings(self, scope: Scope) -> Item | None:
        """Empty where nobody had put any; None where nothing is known."""
        return self._decode_record(_SETTINGS_KIND, scope)

    def find_budget(self, scope: Scope, period: str) -> BudgetSnapshotRecord | None:
        found: Any = self._decode_record(_BUDGET_KIND, scope)
        try:
            if found is None or found["period"] != period:
                return None
            spent = {str(label): (int(stored), int(waiting)) for label, (stored, waiting) in found["spent"].items()}
            # Notes of older versions do not tell whose they are.
            return BudgetSnapshotRecord(dict(found["state"]), spent, found.get("worker") == self._worker)
        except _MALFORMED:
            return None

    def has_settings(self, scope: Scope) -> bool:
        """What is to be known of it and of its org."""
        return all(each.key in self._lines[_SETTINGS_KIND] for each in (scope, Scope(scope.org)))

    def _decode_record(self, kind: str, scope: Scope) -> Item | None:
        found = self._lines[kind].get(scope.key)
        if found is None:
            return None
        try:
            return decode_item(orjson.dumps(orjson.loads(found.partition(b" ")[2])[-1]))
        except _MALFORMED:
            return None

    # From one process to the next.

    def export_lines(self) -> list[bytes]:
        """All of them, which are new no more."""
        self.has_changes = False
        return [*self._lines[_SETTINGS_KIND].values(), *self._lines[_BUDGET_KIND].values()]

    def merge(self, newest: Mapping[RecordKey, bytes]) -> None:
        """What `newest` found, but for what is known here."""
        for (kind, scope), record_line in newest.items():
            if scope not in self._lines[kind]:
                self._store_line((kind, scope), record_line)


def select_newest(records: Iterable[list[Any]]) -> tuple[dict[RecordKey, bytes], int]:
    """Of all that was noted, and how many of these are no notes."""
    parsed: list[tuple[float, RecordKey, bytes]] = []
    malformed = 0
    for values in records:
        try:
            parsed.append(_parse_record(values))
        except _MALFORMED:
            malformed += 1
    return {name: note for _, name, note in sorted(parsed)}, malformed


def _parse_record(values: list[Any]) -> tuple[float, RecordKey, bytes]:
    """When it was made, of what, and the note. A line that is whole may still be none."""
    recorded_at, kind, scope, _ = values
    if kind not in (_SETTINGS_KIND, _BUDGET_KIND) or type(recorded_at) not in (int, float):
        raise ValueError("no note")
    return recorded_at, (kind, Scope.from_key(scope).key), encode_line(orjson.dumps(values))


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
