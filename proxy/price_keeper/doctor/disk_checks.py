"""Checks of files: the embedded store (writable, on a local disk, intact) and the journal's folder (writable, with
free space, without unsent segments).

Nothing is written to the folder of a running sidecar. Its lock is released at once after it was tested, so that a
sidecar that starts at the same time can take it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from time import monotonic
from uuid import uuid4

from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.errors import JournalUnusable, StoreError
from price_keeper.ledger.counter_writes import MARKER_TTL_SECONDS
from price_keeper.ledger.journal_lock import LOCK_NAME
from price_keeper.ledger.orphaned_journals import find_worker_folders
from price_keeper.ledger.recovery import read_segment
from price_keeper.ledger.segment import SEGMENT_SUFFIX
from price_keeper.ledger.segment_sender import MARKER_MARGIN_SECONDS
from price_keeper.ledger.ulid import is_ulid, read_created_at
from price_keeper.stores.schema import TABLES
from price_keeper.stores.sqlite_file import find_missing_tables

QUICK_CHECK_SECONDS = 4.0  # less than the deadline of a check; a file of gigabytes takes longer
PROGRESS_STEPS = 100_000  # SQLite VM instructions between two checks of the time

# File systems on which SQLite's shared-memory log fails, or fails once two machines write.
NETWORK_FILESYSTEMS = frozenset(
    ("9p", "afs", "ceph", "cifs", "fuse.s3fs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
)
_MOUNTS = Path("/proc/mounts")  # exists on Linux only


def check_store_file(context: DoctorContext) -> Finding:
    if context.is_on_dynamodb:
        return skipped("the store is DynamoDB")
    path = Path(context.config.store.path)
    remedy = f"let this user write to {path.parent}, or name another file in store.path"
    kind = get_filesystem_type(path)
    if kind in NETWORK_FILESYSTEMS:
        return trouble(
            f"{path} is on {kind}, a file system of the network", "name a file on a local disk in store.path"
        )
    if not path.exists():
        if is_writable(find_existing_ancestor(path.parent)):
            return ok(f"{path} is not there yet; the start of a sidecar makes it")
        return trouble(f"{path} is not there, and cannot be made", remedy)
    if not (is_writable(path) and is_writable(path.parent)):
        return trouble(f"{path} or its folder cannot be written to", remedy)
    return ok(f"{path}, {path.stat().st_size // 1024} KiB{f', on {kind}' if kind else ''}")


def check_store_integrity(context: DoctorContext) -> Finding:
    path = Path(context.config.store.path)
    if context.is_on_dynamodb or not path.exists():
        return skipped("the store is DynamoDB" if context.is_on_dynamodb else "the file is not there yet")
    try:
        missing = find_missing_tables(path)
        damage = _find_damage(path)
    except StoreError as failure:
        return trouble(str(failure), "name another file in store.path, or run the version that made this one")
    except sqlite3.DatabaseError as failure:
        return trouble(f"{path}: {failure}", f"stop the sidecar, then: sqlite3 {path} .recover")
    if damage is None:
        message = f"not checked to its end in {QUICK_CHECK_SECONDS:g} seconds"
        return warning(message, f"check it at leisure: sqlite3 {path} 'PRAGMA quick_check'")
    if damage:
        return trouble(f"{path} is damaged: {damage}", f"stop the sidecar, then: sqlite3 {path} .recover")
    if missing:
        return warning(f"{len(missing)} of {len(TABLES)} tables are missing", "start the sidecar, which makes them")
    return ok(f"{len(TABLES)} tables, and no damage")


def _find_damage(path: Path) -> str | None:
    """The first damage that SQLite finds: empty if there is none, None if the check did not finish in time."""
    deadline = monotonic() + QUICK_CHECK_SECONDS
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: monotonic() > deadline, PROGRESS_STEPS)
        try:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError as failure:
            if failure.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                return None
            raise
    return "" if result == "ok" else str(result).splitlines()[-1]


def find_existing_ancestor(folder: Path) -> Path:
    """The folder itself, or its nearest ancestor that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def get_filesystem_type(path: Path) -> str:
    """The type of the file system, such as ext4 or nfs4; empty where /proc/mounts does not exist."""
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    resolved = find_existing_ancestor(path).resolve()
    mounted = [(len(point), kind) for point, kind in mounts if resolved.is_relative_to(_unescape_mount(point))]
    return max(mounted, key=lambda found: found[0])[1] if mounted else ""  # of two on one point the first


def _unescape_mount(point: str) -> str:
    return point.replace("\\040", " ")


LOW_SPACE_BYTES = 512 * 2**20  # at some hundred bytes a call, hours of a busy sidecar without its store
MIN_SPACE_BYTES = 16 * 2**20  # may be full within a minute
MAX_HEADER_BYTES = 4096  # a segment without calls is smaller


def check_journal_folder(context: DoctorContext) -> Finding:
    folder = Path(context.config.journal.dir)
    remedy = f"let this user write to {folder}, or name another folder on a local disk in journal.dir"
    if folder.is_dir() and is_held(folder):
        return ok(f"{folder} belongs to a sidecar that runs; nothing was written there")
    if not folder.exists():
        ancestor = find_existing_ancestor(folder)
        if ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK):
            return ok(f"{folder} is not there yet; the start of a sidecar makes it")
        return trouble(f"{folder} is not there, and cannot be made in {ancestor}", remedy)
    try:
        _write_probe_file(folder)
    except OSError as failure:
        return trouble(f"{folder} cannot be written to: {failure.strerror}", remedy)
    return ok(f"{folder} can be written to")


def _write_probe_file(folder: Path) -> None:
    """Write a file with a name that no sidecar takes for a segment, and delete it."""
    path = folder / f"doctor-{uuid4().hex}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(file, b"written by price-keeper doctor, and removed again\n")
        os.fsync(file)
    finally:
        os.close(file)
        path.unlink()


def check_journal_space(context: DoctorContext) -> Finding:
    folder = Path(context.config.journal.dir)
    try:
        free = shutil.disk_usage(find_existing_ancestor(folder)).free
    except OSError as failure:
        return trouble(f"the disk of {folder} does not say how full it is: {failure.strerror}", "look at: df")
    message, remedy = (
        f"{_format_size(free)} free",
        f"make room on the disk of {folder}, or name another one in journal.dir",
    )
    if free < MIN_SPACE_BYTES:
        return trouble(message, remedy)
    return ok(message) if free >= LOW_SPACE_BYTES else warning(message, remedy)


def check_unsent_segments(context: DoctorContext) -> Finding:
    folder = Path(context.config.journal.dir)
    if not folder.is_dir():
        return skipped("the folder is not there yet")
    if is_held(folder):
        return skipped("what lies there belongs to the sidecar that runs")
    folders = [folder, *(each for each in find_worker_folders(folder) if not is_held(each))]
    segments = (path for each in folders for path in each.glob(f"*{SEGMENT_SUFFIX}") if is_ulid(path.stem))
    paths = [path for path in segments if _has_calls(path)]
    if not paths:
        return ok("nothing waits to be brought to the store")
    ulids, size = sorted(path.stem for path in paths), sum(path.stat().st_size for path in paths)
    message = f"segments that wait to be brought to the store: {len(ulids)}, {_format_size(size)}"
    replay = f"price-keeper replay {folder}"
    if context.clock.now() - read_created_at(ulids[0]) > MARKER_TTL_SECONDS - MARKER_MARGIN_SECONDS:
        reason = "some are so old that they might count twice"
        return trouble(f"{message}; {reason}", f"if they were surely never sent: {replay} --force{context.source}")
    return warning(message, f"start the sidecar, which sends them, or: {replay}{context.source}")


def _has_calls(path: Path) -> bool:
    """Whether the segment has calls. A sidecar that drained before its end leaves a segment with a header only."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        return True
    try:
        segment = read_segment(path)
    except (OSError, JournalUnusable):
        return True
    return bool(segment.seal or segment.open or segment.corrupt_lines or segment.tally.requests)


def is_held(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the lock file does not exist, or this user may not open it
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _format_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
