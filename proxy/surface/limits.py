"""What the data port takes from anybody, each limit with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    head_bytes: int = 64 * 1024  # tokens may be long, and a header list beyond this is an attack
    body_bytes: int = 25 * 1000 * 1000  # Bedrock's own limit: what is larger it would refuse
    head_seconds: float = 20.0  # a client on this machine sends its head at once; slow ones hold a connection each
    body_seconds: float = 120.0  # 25 MB over a slow link; a body that takes longer is not coming
    idle_seconds: float = 75.0  # between requests; longer than any SDK's pool keeps a connection
    stalled_seconds: float = 300.0  # a caller that reads nothing of its answer for so long is gone
    connections: int = 10_000  # at once; the process has about as many descriptors
    pipelined: int = 16  # requests sent ahead on one connection before we stop reading
    write_buffer_bytes: int = 64 * 1024  # of an answer, waiting for a slow caller; past it upstream is paused
    streams: int = 256  # of one HTTP/2 connection at once
    resets: int = 200  # of streams by the client in one window: rapid reset is an attack
    reset_window_seconds: float = 10.0


DEFAULT = Limits()
