"""Requests as fast as they are answered: wrk for HTTP/1.1, h2load for HTTP/2, both from the distribution."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.speed.contenders import Running
from bench.speed.figures import percentile
from bench.speed.machine import OTHER_CORE, PROXY_CORE, CannotMeasure, busy_seconds, cpu_seconds, needed
from bench.speed.upstream import QUESTION

_LUA = """\
wrk.method = "POST"
wrk.body = io.open("{body}", "rb"):read("*a")
{headers}
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %f %f\\n", summary.requests, summary.duration,
    e.status, e.connect + e.read + e.write + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True)
class Spent:
    """On the contender's core, while it was measured."""

    own: float | None
    busy: float
    seconds: float


@dataclass(frozen=True)
class Speed:
    per_second: float
    median_us: float
    p99_us: float
    requests: int
    cpu_us: float | None = None  # of the contender, for each request
    others: float | None = None  # their share of the contender's core: on a quiet machine next to nothing

    def figures(self) -> dict[str, float | None]:
        told: dict[str, float | None] = asdict(self)
        del told["requests"]
        return told


def http1(running: Running, path: str, connections: int, seconds: float, folder: Path) -> Speed:
    command = _wrk(running, path, connections, seconds, folder)
    output, spent = _measured(command, running, seconds)
    return _with_cpu(wrk_told(output), spent)


def http2(running: Running, path: str, connections: int, seconds: float, folder: Path, streams: int = 1) -> Speed:
    h2load = needed("h2load", "nghttp2-client")
    (folder / "body").write_bytes(QUESTION)
    log = folder / "h2load.log"
    log.unlink(missing_ok=True)
    headers = {"content-type": "application/json", **running.headers}
    told = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    command = [h2load, "-t1", f"-c{connections}", f"-m{streams}", f"-D{seconds:g}", "-d", str(folder / "body"), *told]
    output, spent = _measured([*command, f"--log-file={log}", running.url(path, http2=True)], running, seconds)
    return _with_cpu(h2load_told(output, log.read_text() if log.exists() else ""), spent)


@contextmanager
def loaded(running: Running, path: str, connections: int, seconds: float, folder: Path) -> Iterator[None]:
    """A load beside which something else is looked at; it ends by itself, or with the block."""
    command = _wrk(running, path, connections, seconds, folder)
    load = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE})
    )
    try:
        yield
    finally:
        load.kill()
        load.wait()


def wrk_told(output: str) -> Speed:
    match = re.search(r"^RESULT (\d+) (\d+) (\d+) (\d+) (\S+) (\S+)$", output, re.MULTILINE)
    if match is None or match[1] == "0":
        raise CannotMeasure(f"wrk said nothing that can be used: {output[-300:]}")
    asked, micros, refused, broken = (int(each) for each in match.groups()[:4])
    if refused or broken:
        raise CannotMeasure(f"{refused} of {asked} requests were refused, {broken} broke")
    return Speed(asked / micros * 1e6, float(match[5]), float(match[6]), asked)


def h2load_told(output: str, log: str) -> Speed:
    """Its summary has no percentiles; its log has a line for each request: when, the status, microseconds."""
    rate = re.search(r"finished in [\d.]+m?s, ([\d.]+) req/s", output)
    codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
    times = [int(line.split()[2]) for line in log.splitlines()]
    if rate is None or codes is None or codes[1] == "0" or not times:
        raise CannotMeasure(f"h2load said nothing that can be used: {output[-500:]}")
    if any(int(codes[number]) for number in (2, 3, 4)):
        raise CannotMeasure(f"requests were refused: {codes[0]}")
    return Speed(float(rate[1]), percentile(times, 0.5), percentile(times, 0.99), int(codes[1]))


def _wrk(running: Running, path: str, connections: int, seconds: float, folder: Path) -> list[str]:
    wrk = needed("wrk", "wrk")
    (folder / "body").write_bytes(QUESTION)
    headers = {"content-type": "application/json", **running.headers}
    told = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in headers.items())
    (folder / "ask.lua").write_text(_LUA.format(body=folder / "body", headers=told))
    duration = f"-d{max(1, round(seconds))}s"  # it knows whole seconds alone
    return [
        wrk,
        "-t1",
        f"-c{connections}",
        duration,
        "--timeout",
        "30s",
        "-s",
        str(folder / "ask.lua"),
        running.url(path),
    ]


def _with_cpu(speed: Speed, spent: Spent) -> Speed:
    if spent.own is None:
        return speed
    others = max(0.0, (spent.busy - spent.own) / spent.seconds)
    return replace(speed, cpu_us=spent.own / speed.requests * 1e6, others=others)


def _measured(command: list[str], running: Running, seconds: float) -> tuple[str, Spent]:
    before, began = _standing(running), time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    after, took = _standing(running), time.monotonic() - began
    own = None if running.pid is None else after[0] - before[0]
    return done.stdout + done.stderr, Spent(own, after[1] - before[1], took)


def _standing(running: Running) -> tuple[float, float]:
    return 0.0 if running.pid is None else cpu_seconds(running.pid), busy_seconds(PROXY_CORE)
