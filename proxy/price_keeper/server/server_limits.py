"""The limits of the data port, each with its reason, and how they are fitted to the machine.

`fit_to_descriptors` lowers them to the file descriptors of the process, `fit_to_memory` to the memory of its cgroup.
`release_large_blocks` has the C library return freed memory to the system.
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

RESERVED_DESCRIPTORS = 256  # for the store, the journal, the control port, and whatever else is not the data port's
UNLIMITED_DESCRIPTORS = 65_536  # where the system sets no limit, but refuses to be asked for none
MIN_LIMIT = 16  # connections, however few descriptors there are, or however little memory
CONNECTION_BYTES = 32 * 1024  # what one takes before it asks for anything; measured: 18 kB over HTTP/2
TLS_CONNECTION_BYTES = 64 * 1024  # measured: 45 kB over HTTP/2
HANDSHAKE_BYTES = 512 * 1024  # measured: 327 kB of one that sent most of a long greeting
CALL_BYTES = 16 * 1024  # what a call takes beside its request; measured: 15 kB with an open stream of an answer
SLICE_BYTES = 16 * 1024  # what arrives in one piece is parsed in such slices, so that limits are seen to in between
MAX_SLICES_PER_TURN = (
    4  # of one connection: a slice of the smallest parts takes milliseconds, and all others wait meanwhile
)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    head_bytes: int = 64 * 1024  # tokens may be long, and a header list beyond this is an attack
    body_bytes: int = 25 * 1000 * 1000  # Bedrock's own limit: what is larger it would refuse
    unchecked_body_bytes: int = (
        64 * 1024
    )  # of a body, from anybody; of one that may be longer it is asked first who sends it
    requests_bytes: int = 256 * 1024 * 1024  # heads and bodies of all requests at once; `within` goes by the memory
    head_seconds: float = 20.0  # a client on this machine sends its head at once; slow ones hold a connection each
    body_seconds: float = 120.0  # 25 MB over a slow link; a body that takes longer is not coming
    idle_seconds: float = 75.0  # between requests; longer than any SDK's pool keeps a connection
    stalled_seconds: float = 300.0  # a caller that reads nothing of its answer for so long is gone
    lingering_seconds: float = 5.0  # for a client to read why it was refused, before what it still sends is cut off
    connections: int = 10_000  # at once; `fitting` and `within` lower it to what there is
    connections_per_network: int = (
        5_000  # of those, from one address elsewhere, or one network of IPv6: half, so that others get in
    )
    surplus_connections: int = 256  # connections beyond those, told that there are too many; even more are cut unheard
    handshakes: int = 512  # of TLS under way; more are not clients in a hurry, and the oldest makes room
    requests: int = 10_000  # under way at once, since over HTTP/2 one connection may hold many
    pipelined: int = 16  # requests sent ahead on one connection before we stop reading
    write_buffer_bytes: int = 64 * 1024  # of an answer, waiting for a slow caller; past it upstream is paused
    streams: int = 256  # of one HTTP/2 connection at once
    stream_resets: int = 200  # of streams by the client in one window: rapid reset is an attack
    control_frames: int = (
        1000  # frames in one window that ask for nothing, pings among them: they cost the client nothing
    )
    window_seconds: float = 10.0  # over which those are counted
    control_backlog_bytes: int = 1024 * 1024  # answers to them that the client does not read


DEFAULT_LIMITS = ServerLimits()


def fit_to_descriptors(descriptors: int, limits: ServerLimits = DEFAULT_LIMITS) -> ServerLimits:
    """A third of the descriptors for callers, one for their calls upstream, one for connections that stand by."""
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
    """The limits of each of so many processes that have this memory together.

    Half of it is for requests, an eighth for connections; the rest is the processes' own. Only a limit of our own
    cgroup makes it more than usual: those around it hold for others too. `requests_bytes` is what the configuration
    says instead. A single request must have room in any case.
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
    """How many the process may have, now that it has asked for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # macOS says "unlimited" and has a limit of its own beneath it.
    for wanted in (hard, UNLIMITED_DESCRIPTORS) if hard == unlimited else (hard,):
        if soft in (wanted, unlimited):
            break
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
            break
    return UNLIMITED_DESCRIPTORS if soft == unlimited else soft


class FixedWindowLimit:
    """So many in one window of time; a burst across the seam of two windows may hold twice as many."""

    def __init__(self, maximum: int, seconds: float, now: Callable[[], float]) -> None:
        self._maximum = maximum
        self._seconds = seconds
        self._now = now
        self._window_start = now()
        self._count = 0

    def is_exceeded_by_one_more(self) -> bool:
        """Counts one more."""
        now = self._now()
        if now - self._window_start > self._seconds:
            self._window_start, self._count = now, 0
        self._count += 1
        return self._count > self._maximum


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
