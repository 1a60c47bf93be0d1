"""A flame graph of the loaded sidecar, and which share of the time each step of the pipeline takes."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.speed.contenders import BENCH, ROOT, Running
from bench.speed.load import Pattern, loaded
from bench.speed.machine import CannotMeasure

MOST_BYTES = 400_000
_CONNECTIONS = 16
_PER_SECOND = 400  # samples
_TITLE = "The sidecar under load: where its time goes, by function"
_ELSEWHERE = re.compile(r"[^\s()&;<>\"]*/(?:site-packages|lib/python3\.\d+)/")
_ROOTED = re.compile(r"(?<![\w.:/-])/(?:[\w.@+-]+/)+")

_FRAME = re.compile(
    r'<title>(?P<name>[^<]*?) \([\d,]+ samples?, [^<]*</title>\s*<rect[^>]*? y="(?P<y>[\d.]+)"'
    r'[^>]*? fg:x="(?P<x>\d+)" fg:w="(?P<width>\d+)"'
)

# By the beginning of a file's path; the first that fits.
_STEPS = (
    ("proxy/price_keeper/server/", "server: read the request, write the response"),
    ("proxy/price_keeper/parse_call", "server: read the request, write the response"),
    ("proxy/price_keeper/auth/", "identify the caller"),
    ("proxy/price_keeper/rates/", "rate limits"),
    ("proxy/price_keeper/budgets/", "budgets: select the label"),
    ("proxy/price_keeper/upstream/", "forward: sign, send, read the answer"),
    ("proxy/price_keeper/operations", "forward: sign, send, read the answer"),
    ("proxy/price_keeper/usage/", "meter and record"),
    ("proxy/price_keeper/ledger/", "meter and record"),
    ("proxy/price_keeper/stores/", "the store, in the background"),
    ("proxy/price_keeper/", "handler: from step to step"),
)
ELSEWHERE = "the event loop and libraries"


def drawn(running: Running, seconds: float, folder: Path) -> str:
    program = BENCH / "bin" / "py-spy"
    if not program.exists():
        raise CannotMeasure("py-spy is not installed: make .venv/.bench")
    made = folder / "flame.svg"
    command = [str(program), "record", "-f", "flamegraph", "-o", str(made), "-d", f"{seconds:g}"]
    with loaded(running, Pattern("http1", _CONNECTIONS), seconds + 5, folder):
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


class Frame(NamedTuple):
    name: str
    level: float
    begin: int
    width: int

    @property
    def end(self) -> int:
        return self.begin + self.width


def shares(svg: str) -> dict[str, float]:
    """Of all samples, by step; the largest first."""
    own: Counter[str] = Counter()
    for frame, width in _own(_frames(svg)):
        own[_step(frame.name)] += width
    whole = own.total() or 1
    return {step: width / whole for step, width in own.most_common()}


def _frames(svg: str) -> list[Frame]:
    found = _FRAME.finditer(svg)
    return [Frame(each["name"], float(each["y"]), int(each["x"]), int(each["width"])) for each in found]


def _own(frames: list[Frame]) -> list[tuple[Frame, int]]:
    """What of each frame no frame below it has. In the picture a caller stands one level above what it calls."""
    levels = sorted({frame.level for frame in frames})
    below = dict(pairwise(levels))
    by_level: dict[float, list[Frame]] = {level: [] for level in levels}
    for frame in frames:
        by_level[frame.level].append(frame)
    return [(frame, frame.width - _called(frame, by_level.get(below.get(frame.level, -1.0), []))) for frame in frames]


def _called(frame: Frame, candidates: list[Frame]) -> int:
    return sum(each.width for each in candidates if frame.begin <= each.begin and each.end <= frame.end)


def _step(name: str) -> str:
    for beginning, step in _STEPS:
        if f"({beginning}" in name:
            return step
    return ELSEWHERE
