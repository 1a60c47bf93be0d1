"""How much memory a process may have, read from cgroups of both versions, and what of it requests get."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from price_keeper.server.server_limits import DEFAULT_LIMITS, MIN_LIMIT, MemoryLimits, fit_to_memory, read_memory_limits

from tests.support.commands import ROOT

MIB = 2**20
MACHINE = 8192 * MIB
NONE_V1 = "9223372036854771712"


class Tree:
    """What /proc and /sys show to a process, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        self._lines: dict[str, list[str]] = {"cgroup": [], "mountinfo": ["21 1 8:1 / / rw - ext4 /dev/sda1 rw"]}

    def version1(self, path: str, root: str = "/") -> Tree:
        self._lines["cgroup"] += ["7:blkio:/x", f"4:memory:{path}", "0::/"]
        self._mount("blkio", "cgroup", "rw,blkio", root)
        self._mount("memory", "cgroup", "rw,memory", root)
        self._mount("unified", "cgroup2", "rw", "/")
        return self

    def version2(self, path: str, root: str = "/") -> Tree:
        self._lines["cgroup"].append(f"0::{path}")
        self._mount("cgroup", "cgroup2", "rw,nsdelegate", root)
        return self

    def limit(self, file: str, value: object) -> Tree:
        path = self._folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
        return self

    def _mount(self, name: str, kind: str, options: str, root: str) -> None:
        self._lines["mountinfo"].append(f"30 21 0:26 {root} {self._folder / name} rw shared:9 - {kind} cg {options}")

    def allowed(self) -> MemoryLimits:
        for name, lines in self._lines.items():
            (self.proc / name).write_text("\n".join(lines) + "\n")
        return read_memory_limits(self.proc, MACHINE)


def test_limit_of_own_cgroup_of_version_2(tmp_path: Path) -> None:
    tree = Tree(tmp_path).version2("/").limit("cgroup/memory.max", 512 * MIB)
    assert tree.allowed() == (512 * MIB, 512 * MIB)


def test_limit_of_own_cgroup_of_version_1(tmp_path: Path) -> None:
    tree = Tree(tmp_path).version1("/docker/abc", root="/docker/abc").limit("memory/memory.limit_in_bytes", 512 * MIB)
    assert tree.allowed() == (512 * MIB, 512 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_parent_cgroups_apply(tmp_path: Path, version: int) -> None:
    tree = Tree(tmp_path)
    _ = tree.version1("/pod/app") if version == 1 else tree.version2("/pod/app")
    top, name, none = ("memory", "memory.limit_in_bytes", NONE_V1) if version == 1 else ("cgroup", "memory.max", "max")
    tree.limit(f"{top}/pod/app/{name}", 1024 * MIB).limit(f"{top}/pod/{name}", 768 * MIB)
    assert tree.allowed() == (1024 * MIB, 768 * MIB)
    assert tree.limit(f"{top}/pod/app/{name}", none).allowed() == (None, 768 * MIB)
    assert tree.limit(f"{top}/pod/{name}", none).allowed() == (None, MACHINE)


def test_soft_limit_of_cgroup_version_2_applies(tmp_path: Path) -> None:
    tree = Tree(tmp_path).version2("/").limit("cgroup/memory.max", "max").limit("cgroup/memory.high", 300 * MIB)
    assert tree.allowed() == (300 * MIB, 300 * MIB)


def test_cgroup_outside_mount_is_mount_itself(tmp_path: Path) -> None:
    tree = Tree(tmp_path).version1("/kubepods/pod1/abc", root="/elsewhere")
    assert tree.limit("memory/memory.limit_in_bytes", 512 * MIB).allowed() == (512 * MIB, 512 * MIB)


def test_missing_cgroups_give_memory_of_machine(tmp_path: Path) -> None:
    assert Tree(tmp_path).allowed() == (None, MACHINE)
    assert read_memory_limits(tmp_path / "nowhere", MACHINE) == (None, MACHINE)
    real = read_memory_limits()
    assert real.least is not None
    assert real.least > 0


@pytest.mark.parametrize(
    ("memory", "processes", "expected"),
    [
        (MemoryLimits(), 1, 256),
        (MemoryLimits(512 * MIB, 512 * MIB), 1, 256),
        (MemoryLimits(512 * MIB, 512 * MIB), 4, 64),
        (MemoryLimits(2048 * MIB, 2048 * MIB), 1, 1024),
        (MemoryLimits(2048 * MIB, 300 * MIB), 1, 150),
        (MemoryLimits(None, 64 * 1024 * MIB), 1, 256),
        (MemoryLimits(None, 300 * MIB), 2, 75),
    ],
)
def test_requests_get_half_of_memory(memory: MemoryLimits, processes: int, expected: int) -> None:
    assert fit_to_memory(DEFAULT_LIMITS, memory, processes).requests_bytes == expected * MIB


def test_configured_request_memory_wins_over_derived() -> None:
    memory = MemoryLimits(512 * MIB, 512 * MIB)
    assert fit_to_memory(DEFAULT_LIMITS, memory, 1, 100 * MIB).requests_bytes == 100 * MIB
    assert fit_to_memory(DEFAULT_LIMITS, memory, 2, 400 * MIB).requests_bytes == 200 * MIB


def test_connections_and_calls_fit_into_an_eighth_of_memory() -> None:
    limits = fit_to_memory(DEFAULT_LIMITS, MemoryLimits(512 * MIB, 512 * MIB))
    assert (limits.connections, limits.connections_per_network, limits.requests) == (2048, 1024, 4096)
    assert limits.handshakes == 128
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits(512 * MIB, 512 * MIB), 4).connections == 512
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits(512 * MIB, 512 * MIB), is_tls=True).connections == 1024
    assert (
        fit_to_memory(replace(DEFAULT_LIMITS, connections=100), MemoryLimits(512 * MIB, 512 * MIB)).connections == 100
    )
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits(MIB, MIB)).connections == MIN_LIMIT
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits(None, MACHINE)) == DEFAULT_LIMITS


USE_AND_FREE = """
from pathlib import Path
from price_keeper.server.server_limits import release_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

release_large_blocks()
size, kept = 20_000_000, []
before = resident()
for _ in range(3):
    blocks = [b"x" * size for _ in range(5)]
    kept.append(bytes(4000))
    del blocks
print((resident() - before) // size)
"""


def test_freed_large_blocks_are_returned_to_system() -> None:
    """glibc alone keeps four of these blocks below what was allocated after them."""
    command = [sys.executable, "-c", USE_AND_FREE]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout == "0\n"
