"""The last known settings and budget states, kept on disk for a process that starts while the store is away.

`BudgetSnapshot` keeps one record per org, app and budget in memory, bounded in number and bytes; budget records are
evicted first, as they are useless without settings, and of each kind those of the org that has most, so that no org's
apps push another org out of its fair share. Records hold neither credentials nor who made an override and why.
`SnapshotFile` writes them beside the journal, one file per worker, replaced as a whole, and reads those of all workers.
An unreadable file or record is logged and skipped; it never keeps a process from starting.

The format is stored: file names, record kinds and field names must not change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, islice
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
ROOM_SHARE: Final = 100  # a hundredth of either bound is made free when it is reached, so orgs are compared seldom
MAX_RECORD_BYTES: Final = 64 * 2**10  # of one record; a larger one is not stored
SNAPSHOT_FILE_PREFIX: Final = "notes-"
TEMPORARY_FILE_PREFIX: Final = "new-"  # of the file that replaces it
SNAPSHOT_FORMAT: Final = 1
WRITE_CHECK_SECONDS: Final = 1.0
BUDGET_WRITE_SECONDS: Final = 5.0  # new settings are written at once, spend no more often than this
RECORDS_PER_TURN: Final = 100  # budgets that are recorded before other tasks get a turn
REREAD_SECONDS: Final = 5.0  # between two reads of other workers' snapshots
FAILURE_PAUSE_SECONDS: Final = 60.0  # before a failed write is repeated
MAX_BYTES_PER_SECOND: Final = 256 * 1024  # on average
RESERVED_DISK_BYTES: Final = 8 * 2**20  # kept free for the journal
MAX_FILE_BYTES: Final = 2 * MAX_SNAPSHOT_BYTES
MAX_READ_SECONDS: Final = 120.0  # by then a read of settings has been answered, or has failed

_SETTINGS_KIND, _BUDGET_KIND = "settings", "standing"
_SETTINGS_FIELDS = frozenset({*ORG_SETTINGS, "version", "settled", "settled_until_epoch"} - {"org_name"})
_STICKY_FIELDS = frozenset({active_label.LABEL_ATTRIBUTE, "override_label", "override_until_epoch", "override_version"})
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidStoreRequest)
_FILE_NAME = re.compile(rf"{SNAPSHOT_FILE_PREFIX}(0|[1-9][0-9]{{0,8}})")
_HEADER = ["NOTES", SNAPSHOT_FORMAT]
_log = logging.getLogger("price_keeper.selection")

RecordKey = tuple[str, str]  # kind and scope


class BudgetSnapshotRecord(NamedTuple):
    """The last known state of a budget. `spent`, in pico-dollars by label, is what was in the store, and the worker's
    own spend that was not in it yet. `is_own`: this worker recorded it."""

    sticky_item: Item
    spent: Mapping[str, tuple[int, int]]
    is_own: bool


@dataclass(slots=True)
class _OrgRecords:
    """The scopes of the records of one kind that an org has, the one made or confirmed last at the end."""

    scopes: dict[str, None] = field(default_factory=dict)
    size: int = 0


class _RecordedVersion(NamedTuple):
    version: int
    reads_started: int  # by the time at which it was recorded
    renews_after: float  # a read that confirms the settings after this time gives their record a new time, once


class BudgetSnapshot:
    """The snapshot in memory: encoded records of settings and budgets, and the budgets whose record is outdated."""

    def __init__(self, now: Callable[[], float], worker: int = 0) -> None:
        self._now = now
        self._worker = worker
        self._lines: dict[str, dict[str, bytes]] = {_SETTINGS_KIND: {}, _BUDGET_KIND: {}}  # by kind and scope
        # By kind and org; the org whose record was made or confirmed last comes last.
        self._orgs: dict[str, dict[str, _OrgRecords]] = {_SETTINGS_KIND: {}, _BUDGET_KIND: {}}
        self._size = 0
        self._reads_started = 0
        self._versions: dict[str, _RecordedVersion] = {}  # of the recorded settings, by scope
        self._pending: dict[str, RefreshState] = {}  # budgets to be recorded, by scope
        self.has_changes = False  # some record is new since the last export

    # Recording.

    def start_read(self) -> int:
        """Begin a consistent read of settings; returns its number, for `record_settings`."""
        self._reads_started += 1
        return self._reads_started

    def record_settings(self, scope: Scope, item: Item | None, read_number: int | None = None) -> None:
        """Record an item of settings that was read consistently; None: there is none. Of concurrent reads the one that
        ends last may have the older item: of those with a `read_number` the higher version is kept."""
        version = _read_version(item)
        last = self._versions.get(scope.key, _RecordedVersion(-1, 0, math.inf))
        if read_number is not None and read_number <= last.reads_started and version < last.version:
            return
        fields = {name: value for name, value in (item or {}).items() if name in _SETTINGS_FIELDS}
        if item is not None and not fields:  # an item written by hand with only a name still exists
            fields = {"version": 0}
        renews = self._now() > last.renews_after
        is_new = self._record(_SETTINGS_KIND, scope.key, fields, renews=renews)
        if scope.key not in self._lines[_SETTINGS_KIND]:
            self._versions.pop(scope.key, None)
        elif is_new or renews:
            self._set_version(scope.key, version, is_renewed=not is_new)

    def _set_version(self, scope: str, version: int, *, is_renewed: bool = False) -> None:
        # Another worker may have recorded a higher version that is no longer the store's, up to MAX_READ_SECONDS from
        # now, and that counts as newer for as long again.
        renews_after = math.inf if is_renewed else self._now() + 2 * MAX_READ_SECONDS
        self._versions[scope] = _RecordedVersion(version, self._reads_started, renews_after)

    def mark_changed(self, refresh: RefreshState, *, is_urgent: bool = False) -> None:
        """Mark a budget as possibly changed. As that happens often, it is recorded at the next write; `is_urgent` asks
        for one soon, when more than spend has changed. A budget whose period is over is ignored, so it takes no
        room."""
        if refresh.budget.span.covers(self._now()):
            self._pending[refresh.budget.scope.key] = refresh
            self.has_changes |= is_urgent

    @property
    def pending_count(self) -> int:
        """How many budgets wait to be recorded."""
        return len(self._pending)

    def record_pending(self, limit: int) -> None:
        """Record at most `limit` of the waiting budgets."""
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

    def _record(self, kind: str, scope: str, content: Item, *, renews: bool = False) -> bool:
        """Record the content. The same content keeps its time, unless `renews`. Returns whether it is another."""
        last_line = self._remove_line(kind, scope)
        try:
            rest = orjson.dumps([kind, scope, orjson.Fragment(encode_item(content))])[1:]
        # an item written by hand may not be encodable; the other records are not affected
        except (AssertionError, *_MALFORMED):
            return False
        is_new = not last_line.endswith(rest + b"\n")
        self.has_changes |= is_new or renews
        self._store_line((kind, scope), _encode_record(self._now(), rest) if is_new or renews else last_line)
        return is_new

    def _store_line(self, key: RecordKey, record_line: bytes) -> None:
        """Add the record of a key that has none."""
        if len(record_line) > MAX_RECORD_BYTES:
            return
        kind, scope = key
        self._lines[kind][scope] = record_line
        self._size += len(record_line)
        name = _get_org(scope)
        org = self._orgs[kind].pop(name, None) or _OrgRecords()
        org.scopes[scope] = None
        org.size += len(record_line)
        self._orgs[kind][name] = org
        if self._count_records() > MAX_RECORDS:
            self._make_room(
                lambda org: len(org.scopes), lambda: self._count_records() > MAX_RECORDS - MAX_RECORDS // ROOM_SHARE
            )
        if self._size > MAX_SNAPSHOT_BYTES:
            self._make_room(
                lambda org: org.size, lambda: self._size > MAX_SNAPSHOT_BYTES - MAX_SNAPSHOT_BYTES // ROOM_SHARE
            )

    def _count_records(self) -> int:
        return sum(map(len, self._lines.values()))

    def _make_room(self, weigh: Callable[[_OrgRecords], int], is_full: Callable[[], bool]) -> None:
        """Remove records while it is full, budgets before settings: that made or confirmed longest ago of the org that
        has most of them."""
        for kind in (_BUDGET_KIND, _SETTINGS_KIND):
            orgs = self._orgs[kind]
            heaviest = [(-weigh(org), place, name) for place, (name, org) in enumerate(orgs.items())]
            heapify(heaviest)
            while heaviest and is_full():
                _, place, name = heappop(heaviest)
                evicted = next(iter(orgs[name].scopes))
                self._remove_line(kind, evicted)
                if kind == _SETTINGS_KIND:
                    self._versions.pop(evicted, None)
                if name in orgs:
                    heappush(heaviest, (-weigh(orgs[name]), place, name))

    def _remove_line(self, kind: str, scope: str) -> bytes:
        """Remove and return the record; empty if there is none."""
        line = self._lines[kind].pop(scope, b"")
        if line:
            self._size -= len(line)
            org = self._orgs[kind][_get_org(scope)]
            del org.scopes[scope]
            org.size -= len(line)
            if not org.scopes:
                del self._orgs[kind][_get_org(scope)]
        return line

    # Reading.

    def find_settings(self, scope: Scope) -> Item | None:
        """The recorded item of settings: empty if there was none in the store, None if nothing is known."""
        return self._decode_record(_SETTINGS_KIND, scope)

    def find_budget(self, scope: Scope, period: str) -> BudgetSnapshotRecord | None:
        """The record of a budget in this period; None if there is none."""
        found: Any = self._decode_record(_BUDGET_KIND, scope)
        try:
            if found is None or found["period"] != period:
                return None
            spent = {str(label): (int(stored), int(waiting)) for label, (stored, waiting) in found["spent"].items()}
            # Records of older versions do not name their worker, and so count as another worker's.
            return BudgetSnapshotRecord(dict(found["state"]), spent, found.get("worker") == self._worker)
        except _MALFORMED:
            return None

    def _decode_record(self, kind: str, scope: Scope) -> Item | None:
        found = self._lines[kind].get(scope.key)
        if found is None:
            return None
        try:
            return decode_item(orjson.dumps(orjson.loads(found.partition(b" ")[2])[-1]))
        except _MALFORMED:
            return None

    # Transfer between processes.

    def export_lines(self) -> list[bytes]:
        """All records, which count as written from now on."""
        self.has_changes = False
        return [*self._lines[_SETTINGS_KIND].values(), *self._lines[_BUDGET_KIND].values()]

    def copy_settings(self) -> dict[str, bytes]:
        """The records of settings, by scope."""
        return dict(self._lines[_SETTINGS_KIND])

    def merge(
        self, newest: Mapping[RecordKey, StoredRecord], compared_settings: Mapping[str, bytes] | None = None
    ) -> None:
        """Add the records of `select_newest`, except for scopes that have a record here. But the newest settings
        replace those of `compared_settings`, which they were selected from too."""
        compared = compared_settings or {}
        for (kind, scope), record in newest.items():
            lines, is_settings = self._lines[kind], kind == _SETTINGS_KIND
            if scope in lines and (lines[scope] == record.line or not is_settings):
                continue
            if scope in lines and lines[scope] is not compared.get(scope):
                continue
            self._remove_line(kind, scope)
            self._store_line(record.key, record.line)
            if is_settings and scope in lines:
                self._set_version(scope, record.version)


def _encode_record(recorded_at: float, rest: bytes) -> bytes:
    return encode_line(b"[%.3f,%b" % (recorded_at, rest))


def _get_org(scope: str) -> str:
    return scope.partition("#APP#")[0]


def _read_version(item: Item | None) -> int:
    """The version of an item of settings: 0 if it has none that can be used, -1 if there is no item."""
    version = -1 if item is None else item.get("version")
    return version if isinstance(version, int) else 0


class StoredRecord(NamedTuple):
    """A line of a snapshot file, and what decides whether it is the newest of its key."""

    recorded_at: float
    key: RecordKey
    version: int  # of settings
    line: bytes


def select_newest(records: Iterable[list[Any]]) -> tuple[dict[RecordKey, StoredRecord], int]:
    """The newest record of each key, and how many records were malformed. Workers read the same settings, each in its
    own time, and the one that ends last may have the older item: within MAX_READ_SECONDS the higher version counts as
    newer."""
    parsed: list[StoredRecord] = []
    malformed = 0
    for values in records:
        try:
            parsed.append(_parse_record(values))
        except _MALFORMED:
            malformed += 1
    newest: dict[RecordKey, StoredRecord] = {}
    for record in sorted(parsed):
        last = newest.get(record.key, record)
        if record.version >= last.version or record.recorded_at > last.recorded_at + MAX_READ_SECONDS:
            newest[record.key] = record
    return newest, malformed


def _parse_record(values: list[Any]) -> StoredRecord:
    """A line with a good checksum may still be no record, and raises one of _MALFORMED."""
    recorded_at, kind, scope, content = values
    if kind not in (_SETTINGS_KIND, _BUDGET_KIND) or type(recorded_at) not in (int, float):
        raise ValueError("not a snapshot record")
    version = _read_version(content or None) if kind == _SETTINGS_KIND else 0
    line = _encode_record(recorded_at, orjson.dumps(values[1:])[1:])  # byte for byte as it was recorded
    return StoredRecord(recorded_at, (kind, Scope.from_key(scope).key), version, line)


class SnapshotFile:
    """Writes the snapshot of this worker to its file, and reads the files of all workers."""

    def __init__(self, folder: Path, clock: Clock, worker: int = 0, workers: int = 1) -> None:
        """`folder` is that of the first worker's journal."""
        self.snapshot = BudgetSnapshot(clock.now, worker)
        self._folder = folder
        self._clock = clock
        self._path = folder / f"{SNAPSHOT_FILE_PREFIX}{worker}"
        # the first worker removes the files of workers that no longer exist
        self._workers = workers if worker == 0 else None
        self._obsolete_files: list[Path] = []  # files of such workers
        self._writing = asyncio.Lock()
        # not the same lock: calls wait for this one, and a sync of the disk may take long
        self._rereading = asyncio.Lock()
        self._next_write_at = self._budgets_due_at = self._next_reread_at = clock.monotonic()
        self._last_error = ""

    async def open(self) -> None:
        """Read the snapshots of earlier processes."""
        found, self._obsolete_files = await asyncio.to_thread(self._read_all)
        self.snapshot.merge(found)

    async def reread(self) -> None:
        """Read what other workers have recorded since; their newer settings replace those of this worker. Concurrent
        callers share one read, and it is done at most every REREAD_SECONDS."""
        async with self._rereading:
            if self._clock.monotonic() >= self._next_reread_at:
                own_settings = self.snapshot.copy_settings()
                found, _ = await asyncio.to_thread(self._read_all, own_settings.values())
                self.snapshot.merge(found, own_settings)
                self._next_reread_at = self._clock.monotonic() + REREAD_SECONDS

    def start(self, tasks: Tasks) -> None:
        tasks.run_every("notes to disk", WRITE_CHECK_SECONDS, self.write_if_due)

    async def write_if_due(self) -> None:
        """Write the snapshot if it has changed and a write is due."""
        moment, snapshot = self._clock.monotonic(), self.snapshot
        is_due = snapshot.has_changes or (snapshot.pending_count and moment >= self._budgets_due_at)
        if is_due and moment >= self._next_write_at:
            await self.write()

    async def write(self) -> None:
        """Write the snapshot if it has changed. Called once more at the end, after the last flush."""
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
            message = (
                "the budget snapshot cannot be written to %s; a restart while the store is away would find older "
                "values: %s"
            )
            _log.warning(message, self._folder, failure.strerror)

    # In a thread.

    def _replace_file(self, content: list[bytes]) -> None:
        """Replace the file as a whole. Raises OSError; the previous file stays then."""
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
        while self._obsolete_files:  # this file has their records now
            obsolete = self._obsolete_files.pop()
            for path in (_build_temporary_path(obsolete), obsolete):
                path.unlink(missing_ok=True)

    def _read_all(self, more_lines: Iterable[bytes] = ()) -> tuple[dict[RecordKey, StoredRecord], list[Path]]:
        """The newest records of all files and `more_lines`, and the files to be removed."""
        try:
            paths = [*self._folder.iterdir()]
        except OSError as failure:
            _log.warning(
                "budget snapshots in %s cannot be read: %s; budgets are unknown until the store answers",
                self._folder,
                failure.strerror,
            )
            paths = []
        named = [(path, name) for path in paths if (name := _FILE_NAME.fullmatch(path.name))]
        records = (values for path, _ in named for values in _read_file(path))
        found, malformed = select_newest(chain(decode_lines(b"".join(more_lines)).values, records))
        if malformed:
            _log.warning(
                "%d records of budget snapshots in %s are malformed; their budgets are unknown until the store answers",
                malformed,
                self._folder,
            )
        return found, [path for path, name in named if self._workers is not None and int(name[1]) >= self._workers]


def _build_temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_FILE_PREFIX}{path.name}")


def _read_file(path: Path) -> list[list[object]]:
    """The records of a file; empty if the file as a whole is unusable."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError("it is not a regular file, or too large")
        found = decode_lines(path.read_bytes())
        if not found.values or found.values[0] != _HEADER:
            raise ValueError("it is of another version, or corrupt")
    except FileNotFoundError:  # its worker has just ended
        return []
    except (OSError, ValueError) as failure:
        _log.warning(
            "budget snapshot %s is skipped: %s; budgets that it alone has are unknown until the store answers",
            path,
            getattr(failure, "strerror", None) or failure,
        )
        return []
    if found.corrupt_lines:
        _log.warning(
            "budget snapshot %s has %d corrupt lines; their budgets are unknown until the store answers",
            path,
            found.corrupt_lines,
        )
    return found.values[1:]
