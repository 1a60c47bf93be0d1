"""Writes a file completely or not at all: into a temporary file, which is synced and then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def open_atomically(path: Path, mode: int, *, overwrite: bool = False) -> Iterator[TextIO]:
    """Open a temporary file that gets the name `path` when the block ends without an exception.

    Readers of `path` see the complete file or none. Without `overwrite`, FileExistsError is raised if `path` exists by
    then, and the existing file stays. `mode` limits who may read the new file; to replace a file, pass its mode.
    """
    if overwrite and path.exists():
        mode &= path.stat().st_mode
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            draft.replace(path)
        else:
            _link_into_place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _link_into_place(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # some file systems have no hard links
        draft.rename(path)
