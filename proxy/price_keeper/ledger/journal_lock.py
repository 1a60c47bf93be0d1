"""The lock of a journal's folder: one process at a time writes there.

The lock file records the machine's boot id and the file's own inode, so that a copy of a journal is recognised as a
copy. A copy can be locked although the owner of the original still runs; `has_owner_ended` checks that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import orjson

from price_keeper.errors import JournalInUse, JournalUnusable
from price_keeper.ledger.segment import OPEN_FLAGS

LOCK_NAME = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_OWNER_BYTES = 8192


def is_disk_full(failure: OSError) -> bool:
    return failure.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_removed(path: Path, file: int) -> bool:
    """Checks the link count and the path, as some file systems do not count links, or do not keep inode numbers."""
    found = os.fstat(file)
    try:
        return not found.st_nlink and not os.path.samestat(os.stat(path), found)
    except FileNotFoundError:
        return True


@contextmanager
def lock_folder(folder: Path, *, create: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. With `create` the folder is made, and this process is recorded as its owner, which is
    the one that writes to the journal. The kernel releases the lock when the process ends, however it ends."""
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / LOCK_NAME, OPEN_FLAGS, 0o600)
    except OSError as failure:
        more = "; copy it to a disk that can be written to" if failure.errno == errno.EROFS else ""
        raise JournalUnusable(f"cannot use the journal in {folder}: {failure.strerror}{more}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_removed(folder / LOCK_NAME, lock):  # its owner removed the folder between `open` and `flock`
            raise BlockingIOError
    except BlockingIOError:
        os.close(lock)
        raise JournalInUse(f"another process writes to the journal in {folder}; each needs one of its own") from None
    except OSError as failure:
        os.close(lock)
        raise JournalUnusable(f"cannot lock the journal in {folder}: {failure.strerror}") from None
    try:
        if create:
            _write_owner(lock, folder)
        yield
    finally:
        os.close(lock)


def has_owner_ended(folder: Path) -> bool:
    """Whether the owner has certainly ended; call it with the folder locked. False for a folder brought from another
    machine, or copied from a place that no longer exists. Raises JournalInUse if the owner runs."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        owner, own = _read_owner(file), os.fstat(file)
    finally:
        os.close(file)
    if owner is None or owner[0] != _read_machine_id():
        return False
    _, device, number, place = owner
    return (device, number) == (own.st_dev, own.st_ino) or _has_original_ended(Path(place), device, number)


def _has_original_ended(original: Path, device: int, number: int) -> bool:
    """Like `has_owner_ended`, for a copy: its lock file names the folder it was copied from, `original`, whose lock is
    free once its owner has ended. False if another folder is there now."""
    try:
        file = os.open(original / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = os.fstat(file)
        if (found.st_dev, found.st_ino) != (device, number):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalInUse(f"it is a copy of the journal in {original}, which another process writes to") from None
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _write_owner(lock: int, folder: Path) -> None:
    """A disk that refuses this does not prevent the start; then a copy is not recognised, and its replay asks the
    operator."""
    with suppress(OSError):
        own = os.fstat(lock)
        owner = orjson.dumps([_read_machine_id(), own.st_dev, own.st_ino, str(folder.absolute())])
        if os.pread(lock, _MAX_OWNER_BYTES, 0) != owner:
            os.ftruncate(lock, 0)
            os.pwrite(lock, owner, 0)


def _read_owner(lock: int) -> tuple[str, int, int, str] | None:
    """None: the file was made by an earlier version, or has no owner."""
    try:
        machine, device, number, place = orjson.loads(os.pread(lock, _MAX_OWNER_BYTES, 0))
    except (OSError, TypeError, ValueError):
        return None
    return str(machine), device, number, str(place)


@cache
def _read_machine_id() -> str:
    """Valid until the next boot, which no lock outlives. The host name stands in where there is no boot id."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
