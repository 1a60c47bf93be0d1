"""One connection at a quiet pace: what a caller waits who is not in a queue. Run as a program, beside the load's core.

python -m bench.speed.paced PORT SECONDS PER_SECOND < request
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

from bench.speed.contenders import ROOT, Running, question
from bench.speed.figures import percentile
from bench.speed.machine import OTHER_CORE, CannotMeasure

PER_SECOND = 50
WARM = 20  # requests that do not count
_SPIN = 0.0003  # a sleep ends late by about so much


@dataclass(frozen=True)
class Quiet:
    median_us: float
    p99_us: float


def quiet(running: Running, path: str, seconds: float) -> Quiet:
    command = [sys.executable, "-m", "bench.speed.paced", str(running.port), str(seconds), str(PER_SECOND)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=question(running, path),
        capture_output=True,
        timeout=seconds + 60,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    if done.returncode:
        raise CannotMeasure(f"at a quiet pace: {done.stderr.decode()[-300:]}")
    times = json.loads(done.stdout)
    return Quiet(median(times) * 1e6, percentile(times, 0.99) * 1e6)


def answer(connection: socket.socket, buffer: bytearray) -> None:
    """Read one answer to its end, of a length told or in chunks."""
    view = memoryview(buffer)
    size = 0
    while (end := buffer.find(b"\r\n\r\n", 0, size)) < 0:
        size += _more(connection, view[size:])
    head = bytes(buffer[:end]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(f"refused: {head[:200]!r}")
    if b"transfer-encoding: chunked" in head:
        while buffer[max(0, size - 5) : size] != b"0\r\n\r\n":
            size += _more(connection, view[size:])
        return
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    while size < end + 4 + length:
        size += _more(connection, view[size:])


def _more(connection: socket.socket, room: memoryview) -> int:
    size = connection.recv_into(room)
    if size == 0:
        raise SystemExit("the connection was closed")
    return size


def _wait(until: float) -> None:
    left = until - time.monotonic() - _SPIN
    if left > 0:
        time.sleep(left)
    while time.monotonic() < until:
        pass


def main(port: int, seconds: float, per_second: float) -> None:
    asked = sys.stdin.buffer.read()
    buffer = bytearray(2**20)
    times = []
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.monotonic()
        for number in range(WARM + int(seconds * per_second)):
            _wait(begin + number / per_second)
            asked_at = time.perf_counter()
            connection.sendall(asked)
            answer(connection, buffer)
            times.append(time.perf_counter() - asked_at)
    print(json.dumps(times[WARM:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
