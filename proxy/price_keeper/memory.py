"""How much memory this process may have, by its cgroup and those around it; and how freed memory is given back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LARGE_BLOCK_BYTES = 256 * 1024

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_NO_LIMIT = 1 << 60  # version 1 spells "none" as a number of this order


class MemoryLimits(NamedTuple):
    """`own` is the limit of this process's own cgroup, None without one. `least` is the lowest that holds for it: of
    that, of the cgroups around it and of the machine."""

    own: int | None = None
    least: int | None = None


def read_memory_limits(proc: Path = Path("/proc/self"), machine: int | None = None) -> MemoryLimits:
    """`machine` is what the machine has; it is asked for unless given."""
    own, *around = [*_iter_cgroup_limits(proc)] or [None]
    limits = [limit for limit in (own, *around, machine or _read_machine_memory()) if limit is not None]
    return MemoryLimits(own, min(limits, default=None))


def release_large_blocks() -> None:
    """Has the C library give large blocks back as they are freed.

    glibc keeps blocks as large as the largest that was ever freed, up to 32 MB, on a heap that shrinks at its end
    alone: after bodies of 20 MB the process stays as large as it was at the peak. With a fixed threshold it maps each
    large block by itself.
    """
    with suppress(OSError, AttributeError):  # another C library, which does not have it
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _iter_cgroup_limits(proc: Path) -> Iterator[int | None]:
    """Of the cgroup of this process first, then outwards as far as they can be seen from here."""
    try:
        cgroups, mounts = ((proc / name).read_text().splitlines() for name in ("cgroup", "mountinfo"))
    except OSError:  # no Linux
        return
    paths: dict[str, Path] = {}
    for number, controllers, name in (line.split(":", 2) for line in cgroups if line):
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = Path(name)
    for mount in (line.split() for line in mounts if line):
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind not in paths or (kind == "cgroup" and "memory" not in options):
            continue
        root, top, path = Path(mount[3]), Path(mount[4]), paths[kind]
        relative = path.relative_to(root) if path.is_relative_to(root) else Path()
        folders = [top / relative, *(top / each for each in relative.parents)]
        found = [_read_limit(folder, _LIMIT_FILES[kind]) for folder in dict.fromkeys(folders)]
        if any(limit is not None for limit in found):
            yield from found
            return


def _read_limit(folder: Path, names: tuple[str, ...]) -> int | None:
    found = []
    for name in names:
        with suppress(OSError, ValueError):  # it is not there, or it is "max"
            found.append(int((folder / name).read_text()))
    return min((limit for limit in found if limit < _NO_LIMIT), default=None)


def _read_machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
