"""What the data port takes from anybody, each limit with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    head_bytes: int = 64 * 1024  # tokens may be long, and a header list beyond this is an attack
    body_bytes: int = 25 * 1000 * 1000  # Bedrock's own limit: what is larger it would refuse
    bodies_bytes: int = 256 * 1024 * 1024  # of all requests at once: a sidecar has little memory
    head_seconds: float = 20.0  # a client on this machine sends its head at once; slow ones hold a connection each
    body_seconds: float = 120.0  # 25 MB over a slow link; a body that takes longer is not coming
    idle_seconds: float = 75.0  # between requests; longer than any SDK's pool keeps a connection
    stalled_seconds: float = 300.0  # a caller that reads nothing of its answer for so long is gone
    lingering_seconds: float = 5.0  # for a client to read why it was refused, before what it still sends is cut off
    connections: int = 10_000  # at once; the process has about as many descriptors
    surplus: int = 256  # connections beyond those, told that there are too many; even more are cut unheard
    pipelined: int = 16  # requests sent ahead on one connection before we stop reading
    write_buffer_bytes: int = 64 * 1024  # of an answer, waiting for a slow caller; past it upstream is paused
    streams: int = 256  # of one HTTP/2 connection at once
    resets: int = 200  # of streams by the client in one window: rapid reset is an attack
    controls: int = 1000  # pings, settings and empty frames in one window: they cost the client nothing
    window_seconds: float = 10.0  # over which those are counted
    control_backlog_bytes: int = 1024 * 1024  # answers to them that the client does not read


DEFAULT = Limits()


class Rate:
    """So many in one window of time; a burst across the seam of two windows may hold twice as many."""

    def __init__(self, most: int, seconds: float, now: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._now = now
        self._since = now()
        self._count = 0

    def is_exceeded(self) -> bool:
        """Counts one more."""
        now = self._now()
        if now - self._since > self._seconds:
            self._since, self._count = now, 0
        self._count += 1
        return self._count > self._most
