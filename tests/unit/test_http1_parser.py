"""What it costs to read a head that arrives byte by byte, before anybody has shown a token."""

from __future__ import annotations

from time import process_time
from types import SimpleNamespace
from typing import Any

from price_keeper.server.http1_parser import Http1RequestParser


def ignore(*_: Any) -> None:
    pass


LIMITS = SimpleNamespace(head_bytes=65_536, body_bytes=1, unchecked_body_bytes=1, body_seconds=9, head_seconds=9)
LISTENER: Any = SimpleNamespace(limits=LIMITS, release_memory=ignore, reserve_memory=lambda _: True)
CONNECTION: Any = SimpleNamespace(restart_wait_timer=ignore, stop_reading=ignore)


def test_long_target_in_single_bytes_takes_linear_time() -> None:
    """A target of four times the length takes four times as long, and sixteen if each byte has the line searched."""
    short, long = (min(measure_head(size) for _ in range(3)) for size in (15_000, 60_000))
    assert long / short < 8


def measure_head(size: int) -> float:
    parser = Http1RequestParser(CONNECTION, LISTENER)
    began = process_time()
    for byte in b"GET /" + b"x" * size:
        parser.feed(bytes([byte]))
    took = process_time() - began
    parser.detach()
    return took
