"""The embedded store's file: ours to write to, on a disk that SQLite can work on, and whole."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from time import monotonic

from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.errors import StoreError
from price_keeper.stores.schema import TABLES
from price_keeper.stores.sqlite_file import find_missing_tables

QUICK_CHECK_SECONDS = 4.0  # less than a check has; a file of gigabytes takes longer
PROGRESS_STEPS = 100_000  # of SQLite's machine, between two looks at the time

# Where SQLite's log in shared memory does not work, or only until two machines write.
NETWORK_FILESYSTEMS = frozenset(
    ("9p", "afs", "ceph", "cifs", "fuse.s3fs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
)
_MOUNTS = Path("/proc/mounts")  # of Linux; elsewhere nobody says


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
    """Empty if there is none, None if the time did not suffice to say."""
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
    """The folder itself, or the nearest one around it that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def get_filesystem_type(path: Path) -> str:
    """Its kind, as Linux tells it; empty where nobody does."""
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    resolved = find_existing_ancestor(path).resolve()
    mounted = [(len(point), kind) for point, kind in mounts if resolved.is_relative_to(_unescape_mount(point))]
    return max(mounted, key=lambda found: found[0])[1] if mounted else ""  # of two on one point the first is shown


def _unescape_mount(point: str) -> str:
    return point.replace("\\040", " ")
