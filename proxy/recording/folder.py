"""The journal's folder belongs to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.errors import JournalInUse, JournalUnusable
from proxy.recording.segment import OPENED

LOCK = "lock"


def has_no_room(failure: OSError) -> bool:
    return failure.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_removed(path: Path, file: int) -> bool:
    """Asked twice, as not every file system counts names, or keeps the number of a file."""
    found = os.fstat(file)
    try:
        return not found.st_nlink and not os.path.samestat(os.stat(path), found)
    except FileNotFoundError:
        return True


@contextmanager
def locked(folder: Path, *, make: bool = True) -> Iterator[None]:
    """Makes the folder unless told not to. The lock goes with the process, whatever becomes of it."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / LOCK, OPENED, 0o600)
    except OSError as failure:
        more = "; copy it to a disk that can be written to" if failure.errno == errno.EROFS else ""
        raise JournalUnusable(f"cannot use the journal in {folder}: {failure.strerror}{more}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_removed(folder / LOCK, lock):  # with the folder, by its owner, between the two lines above
            raise BlockingIOError
    except BlockingIOError:
        os.close(lock)
        raise JournalInUse(f"another process writes to the journal in {folder}; each needs one of its own") from None
    except OSError as failure:
        os.close(lock)
        raise JournalUnusable(f"cannot lock the journal in {folder}: {failure.strerror}") from None
    try:
        yield
    finally:
        os.close(lock)
