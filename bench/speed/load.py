"""Requests as fast as they are answered: wrk for HTTP/1.1, h2load for HTTP/2, both from the distribution."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.speed.contenders import Running
from bench.speed.machine import OTHER_CORE, CannotMeasure, cpu_seconds, needed
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
class Speed:
    per_second: float
    median_us: float
    p99_us: float
    cpu_us: float | None  # of the contender, for each request


def http1(running: Running, path: str, connections: int, seconds: float, folder: Path) -> Speed:
    wrk = needed("wrk", "wrk")
    (folder / "body").write_bytes(QUESTION)
    headers = {"content-type": "application/json", **running.headers}
    told = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in headers.items())
    (folder / "ask.lua").write_text(_LUA.format(body=folder / "body", headers=told))
    command = [wrk, "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(folder / "ask.lua"), running.url(path)]
    output, spent = _measured(command, running, seconds)
    match = re.search(r"^RESULT (\d+) (\d+) (\d+) (\d+) (\S+) (\S+)$", output, re.MULTILINE)
    if match is None:
        raise CannotMeasure(f"wrk said nothing that can be used: {output[-300:]}")
    asked, micros, refused, broken = (int(each) for each in match.groups()[:4])
    if refused or broken:
        raise CannotMeasure(f"{refused} of {asked} requests were refused, {broken} broke")
    cpu = None if spent is None else spent / asked * 1e6
    return Speed(asked / micros * 1e6, float(match[5]), float(match[6]), cpu)


def http2(running: Running, path: str, connections: int, seconds: float, folder: Path, streams: int = 1) -> Speed:
    h2load = needed("h2load", "nghttp2-client")
    (folder / "body").write_bytes(QUESTION)
    headers = {"content-type": "application/json", **running.headers}
    told = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    command = [h2load, "-t1", f"-c{connections}", f"-m{streams}", f"-D{seconds:g}", "-d", str(folder / "body"), *told]
    output, spent = _measured([*command, running.url(path, http2=True)], running, seconds)
    rate = re.search(r"finished in [\d.]+s, ([\d.]+) req/s", output)
    codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
    times = re.search(r"time for request: +(\S+) +(\S+) +(\S+)", output)
    if rate is None or codes is None or times is None or int(codes[1]) == 0:
        raise CannotMeasure(f"h2load said nothing that can be used: {output[-500:]}")
    if any(int(codes[number]) for number in (2, 3, 4)):
        raise CannotMeasure(f"requests were refused: {codes[0]}")
    cpu = None if spent is None else spent / int(codes[1]) * 1e6
    return Speed(float(rate[1]), _micros(times[3]), _micros(times[2]), cpu)


def _micros(told: str) -> float:
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", told)
    assert match, told
    return float(match[1]) * {"us": 1.0, "ms": 1e3, "s": 1e6}[match[2]]


def _measured(command: list[str], running: Running, seconds: float) -> tuple[str, float | None]:
    before = None if running.pid is None else cpu_seconds(running.pid)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    spent = None if before is None or running.pid is None else cpu_seconds(running.pid) - before
    return done.stdout + done.stderr, spent
