"""Event streams, from outside the driver: what a frame costs and how long it takes, and what a silent stream holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.speed.contenders import ROOT, STREAMING, Running, question
from bench.speed.machine import OTHER_CORE, CannotMeasure, memory_bytes, wait_until
from bench.speed.upstream import answers, free_port

STREAMS = 16
IDLE = 2000


@dataclass
class Bedrock:
    """The driver, from outside."""

    port: int
    process: subprocess.Popen[bytes]

    def told(self, do: str, running: Running | None = None, **more: object) -> dict[str, Any]:
        message: dict[str, object] = {"do": do, **more}
        if running is not None:
            request = question(running, STREAMING).decode("latin-1")
            message |= {"port": running.port, "pid": running.pid, "request": request}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise CannotMeasure("the driver of streams has ended")
        found: dict[str, Any] = json.loads(line)
        if "refused" in found:
            raise CannotMeasure(f"streams: {found['refused']}")
        return found


@contextmanager
def bedrock() -> Iterator[Bedrock]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.speed.driver", str(port)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    try:
        wait_until(lambda: answers(port), "the driver of streams listens")
        yield Bedrock(port, process)
    finally:
        process.kill()  # it holds nothing that would have to be put in order
        process.wait()


def flowing(bedrock: Bedrock, running: Running, seconds: float) -> dict[str, float | None]:
    found = bedrock.told("flow", running, streams=STREAMS, seconds=seconds)
    times = {name: found.get(name) for name in ("median_us", "p99_us", "p999_us")}
    return {"per_second": _frames(found) / found["seconds"], "cpu_us": _cpu(found, running), **times}


def idle(bedrock: Bedrock, running: Running, streams: int) -> float:
    """Bytes that each of many streams holds on which nothing comes."""
    assert running.pid is not None
    before = memory_bytes(running.pid)
    bedrock.told("hold", running, streams=streams)
    held = memory_bytes(running.pid)
    bedrock.told("release")
    return (held - before) / streams


def _frames(found: dict[str, Any]) -> int:
    frames: int = found["frames"]
    if frames <= 0:
        raise CannotMeasure("streams: no frame came")
    return frames


def _cpu(found: dict[str, Any], running: Running) -> float | None:
    return None if running.pid is None else found["cpu"] / _frames(found) * 1e6
