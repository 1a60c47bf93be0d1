"""Where the time of the hot path goes: a flame graph of the loaded sidecar, fit to be shown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bench.speed.contenders import ROOT, UNARY, Running
from bench.speed.load import loaded
from bench.speed.machine import CannotMeasure

MOST_BYTES = 400_000
_CONNECTIONS = 16
_PER_SECOND = 400  # samples
_TITLE = "The sidecar under load: where its time goes, by function"
_ELSEWHERE = re.compile(r"[^\s()&;<>\"]*/(?:site-packages|lib/python3\.\d+)/")
_ROOTED = re.compile(r"(?<![\w.:/-])/(?:[\w.@+-]+/)+")


def drawn(running: Running, seconds: float, folder: Path) -> str:
    program = ROOT / ".venv" / "bench" / "bin" / "py-spy"
    if not program.exists():
        raise CannotMeasure("py-spy is not installed: make .venv/.bench")
    made = folder / "flame.svg"
    command = [str(program), "record", "-f", "flamegraph", "-o", str(made), "-d", f"{seconds:g}"]
    with loaded(running, UNARY, _CONNECTIONS, seconds + 5, folder):
        done = subprocess.run(
            # Who holds the interpreter is at work; threads that wait look as if they were, now and then.
            [*command, "-r", str(_PER_SECOND), "--function", "--gil", "--pid", str(running.pid)],
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    if done.returncode or not made.exists():
        raise CannotMeasure(f"py-spy: {done.stderr[-300:]}")
    return sized(without_places(made.read_text(), str(ROOT)))


def without_places(svg: str, root: str) -> str:
    """Files as the project names them, and libraries' as those who import them do; no folder of a machine is left."""
    svg = svg.replace(f"{root}/", "")
    svg = _ELSEWHERE.sub("", svg)
    svg = re.sub(r'(<text id="title"[^>]*>)[^<]*', rf"\1{_TITLE}", svg)
    return re.sub(r"<title>[^<]*</title>", lambda title: _ROOTED.sub("", title[0]), svg)


def sized(svg: str) -> str:
    if len(svg.encode()) > MOST_BYTES:
        raise CannotMeasure(f"the flame graph has {len(svg.encode())} bytes, more than {MOST_BYTES}")
    return svg
