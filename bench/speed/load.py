"""Calls to one contender: closed-loop over kept HTTP/1.1 connections by wrk, all others by our own `client`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.speed.client import ID_DIGITS, Outcome, Plan
from bench.speed.contenders import ROOT, UNARY, Running, new_invocation, question, sdk_headers
from bench.speed.machine import (
    OTHER_CORE,
    PROXY_CORE,
    CannotMeasure,
    busy_seconds,
    busy_share,
    cpu_seconds,
    needed,
    wait_until_quiet,
)

NEW_AT_ONCE = 20  # calls, each on a connection of its own: as the AWS SDK for JavaScript does
PACED_CONNECTIONS = 16
LEFTOVER_SECONDS, LEFTOVER_LOOK_SECONDS = 10.0, 0.2  # for calls that were left unanswered

# What the id of a call ends in is its number, so that no two calls have the same; without an id it stands nowhere.
_LUA = """\
local function read(name) return io.open("{folder}/" .. name, "rb"):read("*a") end
local before, after, number = read("before"), read("after"), 0
request = function()
  number = number + 1
  return {request}
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %f %f %f\\n", summary.requests, summary.duration,
    e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50), latency:percentile(99), latency:percentile(99.9)))
end
"""
_RESULT = re.compile(r"^RESULT (\d+) (\d+) (\d+) (\d+) (\S+) (\S+) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Pattern:
    """How calls are made."""

    protocol: str  # http1 or http2
    connections: int
    is_sdk: bool = True  # with the headers that AWS's SDKs send, an id of its own for each call among them
    is_new: bool = False  # a connection for each call

    @property
    def path(self) -> tuple[str, str, str]:
        """Of its figures."""
        return (self.protocol, "sdk" if self.is_sdk else "bare", "new" if self.is_new else str(self.connections))


@dataclass(frozen=True)
class Speed:
    per_second: float
    median_us: float
    p99_us: float
    p999_us: float
    requests: int
    cpu_us: float | None = None  # of the contender, for each request
    others: float | None = None  # what other programs took of the contender's core

    def figures(self) -> dict[str, float | None]:
        found: dict[str, float | None] = asdict(self)
        del found["requests"]
        return found


def calls(running: Running, pattern: Pattern, seconds: float, folder: Path, path: str = UNARY) -> Speed:
    """Closed-loop: the next call when the one before is answered."""
    if pattern.protocol == "http1" and not pattern.is_new:
        command = _wrk(running, path, pattern, seconds, folder)
        output, cpu, others = _measured(command, running, seconds, None)
        return _with_cpu(parse_wrk(output), cpu, others)
    return _client(running, _plan(running, path, pattern, seconds), seconds)


def paced(running: Running, protocol: str, seconds: float, per_second: float) -> Speed:
    """Open-loop: each call at its time."""
    pattern = Pattern(protocol, PACED_CONNECTIONS)
    return _client(running, replace(_plan(running, UNARY, pattern, seconds), per_second=per_second), seconds)


@contextmanager
def loaded(running: Running, pattern: Pattern, seconds: float, folder: Path) -> Iterator[None]:
    """A load beside which something else is looked at; it ends by itself, or with the block."""
    command = _wrk(running, UNARY, pattern, seconds, folder)
    load = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE})
    )
    try:
        yield
    finally:
        load.kill()
        load.wait()


def parse_wrk(output: str) -> Speed:
    match = _RESULT.search(output)
    if match is None:
        raise CannotMeasure(f"wrk printed no result: {output[-300:]}")
    answered, micros, refused, broken = (int(each) for each in match.groups()[:4])
    if not answered:
        raise CannotMeasure(f"no call was answered in {micros / 1e6:.1f} s")
    if refused or broken:
        raise CannotMeasure(f"{refused} of {answered} requests were refused, {broken} broke")
    median, p99, p999 = (float(each) for each in match.groups()[4:])
    return Speed(answered / micros * 1e6, median, p99, p999, answered)


def _wrk(running: Running, path: str, pattern: Pattern, seconds: float, folder: Path) -> list[str]:
    wrk = needed("wrk", "wrk")
    invocation = new_invocation()
    whole = question(running, path, headers=sdk_headers(invocation) if pattern.is_sdk else {})
    before, _, after = whole.partition(invocation.encode()) if pattern.is_sdk else (whole, b"", b"")
    request = "before"
    if pattern.is_sdk:
        before += invocation[:-ID_DIGITS].encode()
        request = f'before .. string.format("%0{ID_DIGITS}x", number) .. after'
    (folder / "before").write_bytes(before)
    (folder / "after").write_bytes(after)
    script = folder / "call.lua"
    script.write_text(_LUA.format(folder=folder, request=request))
    duration = f"-d{max(1, round(seconds))}s"  # whole seconds are all it takes
    options = ["-t1", f"-c{pattern.connections}", duration, "--timeout", "30s", "-s", str(script)]
    return [wrk, *options, f"http://127.0.0.1:{running.port}/"]


def _plan(running: Running, path: str, pattern: Pattern, seconds: float) -> Plan:
    port = running.port if pattern.protocol == "http1" else running.http2_port
    if port is None:
        raise CannotMeasure("it does not speak HTTP/2")
    headers, invocation = running.headers | {"content-type": "application/json"}, ""
    if pattern.is_sdk:
        whole = new_invocation()
        invocation = whole[:-ID_DIGITS]
        headers |= sdk_headers(whole)
        del headers["amz-sdk-invocation-id"]  # the client makes one for each call
    address, body = running.call(path)
    return Plan(
        pattern.protocol,
        port,
        address,
        list(headers.items()),
        body.decode(),
        pattern.connections,
        seconds,
        invocation,
        is_new=pattern.is_new,
    )


def _client(running: Running, plan: Plan, seconds: float) -> Speed:
    command = [sys.executable, "-m", "bench.speed.client"]
    output, cpu, others = _measured(command, running, seconds, json.dumps(asdict(plan)))
    try:
        outcome = Outcome(**json.loads(output))
    except (ValueError, TypeError):
        raise CannotMeasure(output[-300:]) from None
    return _with_cpu(Speed(**asdict(outcome)), cpu, others)


def _with_cpu(speed: Speed, cpu: float | None, others: float) -> Speed:
    return speed if cpu is None else replace(speed, cpu_us=cpu / speed.requests * 1e6, others=others)


def _measured(
    command: list[str], running: Running, seconds: float, text: str | None
) -> tuple[str, float | None, float]:
    """What a load printed, the contender's processor seconds, and which share of its core others took.

    It begins when the core is idle: a slow contender may still work on calls whose load has gone."""
    wait_until_quiet(LEFTOVER_SECONDS, lambda: busy_share(LEFTOVER_LOOK_SECONDS, [PROXY_CORE]))
    before, began = _used(running), time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    after, took = _used(running), time.monotonic() - began
    output = done.stdout or done.stderr
    if running.pid is None:
        return output, None, 0.0
    own = after[0] - before[0]
    return output, own, max(0.0, (after[1] - before[1] - own) / took)


def _used(running: Running) -> tuple[float, float]:
    return 0.0 if running.pid is None else cpu_seconds(running.pid), busy_seconds(PROXY_CORE)
