"""Small disks in memory that can be filled to the last byte, and folders that even root cannot write to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_HOG = "hog"
_PAGE = 4096


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk))
    try:
        yield disk
    finally:
        _run("umount", "-l", str(disk))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    _run("mount", "--bind", str(folder), str(folder))
    try:
        _run("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        _run("umount", "-l", str(folder))


@cache
def why_unavailable() -> str:
    """Why nothing can be mounted here; empty if it can."""
    with TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, check=False)
        if tried.returncode:
            return f"no disk can be mounted here: {tried.stderr.strip()}"
        _run("umount", folder)
    return ""


def fill(disk: Path) -> None:
    """To the last byte."""
    hog = os.open(disk / _HOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while os.write(hog, bytes(_PAGE)):
            pass
    except OSError:
        return
    finally:
        os.close(hog)


def make_room(disk: Path) -> None:
    (disk / _HOG).unlink(missing_ok=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
