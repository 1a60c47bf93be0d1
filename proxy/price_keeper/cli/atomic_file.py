"""Write a file completely or not at all: into a temporary file, synced, then given its name."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def open_atomically(path: Path, mode: int, *, overwrite: bool = False) -> Iterator[TextIO]:
    """What is written is under its name when this ends well; whoever finds the file finds all of it. Unless it
    `replaces`, FileExistsError is raised where somebody else was faster, and theirs stays. Nobody may read it who might
    not read what it replaces."""
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
    except OSError:  # not every file system has links
        draft.rename(path)
