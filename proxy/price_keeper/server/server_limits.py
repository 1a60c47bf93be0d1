"""The limits of the data port, each with its reason, and how they are fitted to the machine.

`ServerLimits` has the defaults; `fit_to_descriptors` lowers them to the file descriptors of the process and
`fit_to_memory` to the memory of its cgroup. `release_large_blocks` makes the C library return freed memory to the
system.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

RESERVED_DESCRIPTORS = 256  # for the store, the journal, the control port and everything else beside the data port
UNLIMITED_DESCRIPTORS = 65_536  # requested where the limit is "unlimited" but the system refuses that value
MIN_LIMIT = 16  # connections, handshakes and requests, however few descriptors or little memory there is
CONNECTION_BYTES = 32 * 1024  # memory of an idle connection; measured: 4 kB over HTTP/2, 30 kB with full tables
TLS_CONNECTION_BYTES = 64 * 1024  # memory of an idle connection over TLS; measured: 45 kB over HTTP/2
HANDSHAKE_BYTES = 512 * 1024  # memory of a TLS handshake; measured: 327 kB after most of a long ClientHello
CALL_BYTES = 16 * 1024  # memory of a call beside its request; measured: 15 kB with an open response stream
SLICE_BYTES = 16 * 1024  # input is parsed in slices of this size, and limits are checked between them
# Slices per connection and loop iteration: a slice of many tiny frames takes milliseconds, and all others wait for it.
MAX_SLICES_PER_TURN = 4
# What one HTTP/2 connection may have processed per loop iteration: the bytes of its frames and of its decoded header
# lists, and a cost for each frame. That is about 30 requests or 2,000 empty frames, a few milliseconds of either.
MAX_COST_PER_TURN = SLICE_BYTES * MAX_SLICES_PER_TURN
FRAME_COST = 32
HEAD_COST = 1024
MAX_HEAD_FRAMES = 64  # of one head: CONTINUATION frames without end, or without content, are an attack
MAX_REMEMBERED_STREAMS = 128  # closed streams of a connection, to tell late frames from wrong ones
# Header strings in Huffman's code that are remembered, for all HTTP/2 connections together: 2 MB at most. Decoding one
# takes as long as all else about a header.
CACHED_STRINGS = 512
MAX_CACHED_STRING_BYTES = 1024  # a token fits
LARGE_BLOCK_BYTES = 256 * 1024  # see `release_large_blocks`

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_NO_LIMIT = 1 << 60  # cgroup version 1 writes a number of this order for "no limit"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients of the data port may use. `fit_to_descriptors` and `fit_to_memory` lower it to what there is."""

    head_bytes: int = 64 * 1024  # tokens may be long; a longer header list is an attack
    body_bytes: int = 25 * 1000 * 1000  # Bedrock's own limit: it would refuse a larger body
    unchecked_body_bytes: int = 64 * 1024  # a body that may be longer is read only after its sender is authenticated
    requests_bytes: int = 256 * 1024 * 1024  # heads and bodies of all requests together
    head_seconds: float = 20.0  # a local client sends its head at once; each slow client occupies a connection
    body_seconds: float = 120.0  # 25 MB over a slow link; a slower body will not arrive
    idle_seconds: float = 75.0  # between requests; longer than any SDK's pool keeps a connection
    stalled_seconds: float = 300.0  # a caller that reads nothing of its response for so long has left
    lingering_seconds: float = 5.0  # for a client to read its refusal before the rest of its input is cut off
    connections: int = 10_000  # at once
    # From one remote address, or one IPv6 network: half of all, so that one sender cannot lock the others out.
    connections_per_network: int = 5_000
    surplus_connections: int = 256  # beyond the limit, answered with "too many"; further ones are closed unanswered
    handshakes: int = 512  # unfinished TLS handshakes; more are an attack, and the oldest is aborted for a new one
    requests: int = 10_000  # active at once; over HTTP/2 one connection may hold many
    pipelined: int = 16  # queued requests of one connection before reading pauses
    write_buffer_bytes: int = 64 * 1024  # of a response to a slow caller; beyond it the upstream is paused
    streams: int = 256  # open at once on one HTTP/2 connection
    stream_resets: int = 200  # by the client in one window; more are a rapid-reset attack
    control_frames: int = 1000  # per window that do nothing useful, such as pings; they cost the client nothing
    window_seconds: float = 10.0  # over which resets and control frames are counted
    control_backlog_bytes: int = 1024 * 1024  # unread responses to control frames


DEFAULT_LIMITS = ServerLimits()


def fit_to_descriptors(descriptors: int, limits: ServerLimits = DEFAULT_LIMITS) -> ServerLimits:
    """Split the descriptors in thirds: connections of callers, upstream connections of their calls, and idle upstream
    connections."""
    share = max((descriptors - RESERVED_DESCRIPTORS) // 3, MIN_LIMIT)
    surplus = min(limits.surplus_connections, share // 8)
    return replace(
        limits,
        connections=(connections := min(limits.connections, share - surplus)),
        connections_per_network=min(limits.connections_per_network, connections // 2),
        surplus_connections=surplus,
        requests=min(limits.requests, share),
    )


def fit_to_memory(
    limits: ServerLimits,
    memory: MemoryLimits,
    processes: int = 1,
    requests_bytes: int | None = None,
    *,
    is_tls: bool = False,
) -> ServerLimits:
    """The limits of each of `processes` processes that share this memory.

    Requests get half of it and connections an eighth; the processes themselves use the rest. Only a limit of this
    process's own cgroup can raise `requests_bytes` above its default, because the limits of enclosing cgroups apply to
    other processes too. The argument `requests_bytes`, from the configuration, overrides that rule. One request of the
    largest size always fits.
    """
    if requests_bytes is None:
        requests_bytes = limits.requests_bytes if memory.own is None else memory.own // 2
        if memory.least is not None:
            requests_bytes = min(requests_bytes, memory.least // 2)
    largest_request = limits.head_bytes + limits.body_bytes
    limits = replace(
        limits, requests_bytes=max(requests_bytes // processes, min(largest_request, limits.requests_bytes))
    )
    if memory.least is None:
        return limits
    connections_memory = memory.least // 8 // processes
    connection_bytes = TLS_CONNECTION_BYTES if is_tls else CONNECTION_BYTES
    connections = min(limits.connections, max(connections_memory // connection_bytes, MIN_LIMIT))
    return replace(
        limits,
        connections=connections,
        connections_per_network=min(limits.connections_per_network, connections // 2),
        handshakes=min(limits.handshakes, max(connections_memory // HANDSHAKE_BYTES, MIN_LIMIT)),
        requests=min(limits.requests, max(connections_memory // CALL_BYTES, MIN_LIMIT)),
    )


def raise_descriptor_limit() -> int:
    """Raise the soft limit on file descriptors as far as possible, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # macOS reports "unlimited", but its kernel has a lower limit.
    for wanted in (hard, UNLIMITED_DESCRIPTORS) if hard == unlimited else (hard,):
        if soft in (wanted, unlimited):
            break
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
            break
    return UNLIMITED_DESCRIPTORS if soft == unlimited else soft


class FixedWindowLimit:
    """Counts events per time window. A burst across the boundary of two windows may reach twice the maximum."""

    def __init__(self, maximum: int, seconds: float, now: Callable[[], float]) -> None:
        self._maximum = maximum
        self._seconds = seconds
        self._now = now
        self._window_start = now()
        self._count = 0

    def is_exceeded_by_one_more(self) -> bool:
        """Counts one event, and returns whether the window now has more than the maximum."""
        now = self._now()
        if now - self._window_start > self._seconds:
            self._window_start, self._count = now, 0
        self._count += 1
        return self._count > self._maximum


class MemoryLimits(NamedTuple):
    """`own` is the limit of this process's own cgroup, or None. `least` is the lowest limit that applies to the
    process: that of its own cgroup, of an enclosing cgroup or of the machine; None if unknown."""

    own: int | None = None
    least: int | None = None


def read_memory_limits(proc: Path = Path("/proc/self"), machine: int | None = None) -> MemoryLimits:
    """The memory limits of this process. `machine` is the machine's memory in bytes, by default read from the
    system."""
    own, *around = [*_iter_cgroup_limits(proc)] or [None]
    limits = [limit for limit in (own, *around, machine or _read_machine_memory()) if limit is not None]
    return MemoryLimits(own, min(limits, default=None))


def release_large_blocks() -> None:
    """Make the C library return large blocks to the system as they are freed.

    glibc raises its threshold for memory mapping to the largest block that was ever freed, up to 32 MB, and keeps
    smaller blocks on a heap that shrinks only at its end. After bodies of 20 MB the process would stay at its peak
    size. With a fixed threshold each large block is mapped, and unmapped, by itself.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _iter_cgroup_limits(proc: Path) -> Iterator[int | None]:
    """Memory limits of this process's cgroup, then of the enclosing ones as far as they are visible; None for none."""
    try:
        cgroups, mounts = ((proc / name).read_text().splitlines() for name in ("cgroup", "mountinfo"))
    except OSError:  # not Linux
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
        folders = [top / relative, *(top / parent for parent in relative.parents)]
        limits = [_read_limit(folder, _LIMIT_FILES[kind]) for folder in dict.fromkeys(folders)]
        if any(limit is not None for limit in limits):
            yield from limits
            return


def _read_limit(folder: Path, names: tuple[str, ...]) -> int | None:
    limits = []
    for name in names:
        with suppress(OSError, ValueError):  # the file is missing, or holds "max"
            limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _read_machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
