"""A cgroup with a limit of memory, of either version, for processes that the kernel is to end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    folder: Path

    @property
    def _is_v1(self) -> bool:
        return self.folder.parent == _V1

    @property
    def wrapper_command(self) -> tuple[str, ...]:
        """A command that becomes another one, within."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    @property
    def used_bytes(self) -> int:
        return int((self.folder / ("memory.usage_in_bytes" if self._is_v1 else "memory.current")).read_text())

    @property
    def resident_bytes(self) -> int:
        """What processes have of memory of their own, without what the kernel keeps of files for them."""
        name = "total_rss " if self._is_v1 else "anon "
        lines = (self.folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    @property
    def count_killed(self) -> int:
        """How many processes the kernel has ended."""
        lines = (self.folder / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def limit(self, size: int | None) -> None:
        """None is no limit. What could be swapped out instead is not."""
        if self._is_v1:
            (self.folder / "memory.swappiness").write_text("0")
            (self.folder / "memory.limit_in_bytes").write_text(str(-1 if size is None else size))
        else:
            with suppress(FileNotFoundError):  # where there is no swap
                (self.folder / "memory.swap.max").write_text("0")
            (self.folder / "memory.max").write_text("max" if size is None else str(size))


@contextmanager
def cgroup() -> Iterator[Cgroup]:
    """Empty again at the end. Raises OSError where none can be made."""
    made = Cgroup((_V1 if _V1.is_dir() else _V2) / f"price-keeper-test-{os.getpid()}")
    made.folder.mkdir()
    try:
        made.limit(None)
        yield made
    finally:
        made.folder.rmdir()


def why_unavailable() -> str:
    """Why there can be none here; empty if there can."""
    try:
        with cgroup() as made:
            _ = made.used_bytes, made.count_killed
    except OSError as failure:
        return f"no cgroup with a limit of memory can be made here, which takes root: {failure.strerror}"
    return ""
