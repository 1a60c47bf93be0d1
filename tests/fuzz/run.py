"""Fuzzes the targets with atheris, several at a time, and says what came of it; what it finds stays in `found`.

python -m tests.fuzz.run                         # all of them, ten minutes in all
python -m tests.fuzz.run --target http2 --seconds 60
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.places import AT_WORK, FOUND, HERE, KEPT, inputs
from tests.fuzz.targets import NAMES, words

SECONDS = 600
LONGEST_INPUT = 2048
SLOWEST_SECONDS = 20  # of one input, on a machine that does other things too
MOST_MEGABYTES = 1024
MEMORY = Path("/dev/shm")
GRACE_SECONDS = 60  # beyond its time, for a child that is to end by itself

_STATE = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/")
_RAISED = "=== Uncaught Python exception: ==="
_COLUMNS = "{:<16} {:>7} {:>11} {:>9} {:>6} {:>9} {:>7}  {}"


@dataclass
class Came:
    """What came of one target."""

    name: str
    seconds: float
    executions: int = 0
    edges: int = 0
    features: int = 0
    corpus: int = 0
    trouble: str = ""
    found: tuple[Path, ...] = ()

    def __str__(self) -> str:
        a_second = f"{self.executions / max(self.seconds, 1):,.0f}"
        counted = (f"{self.executions:,}", a_second, f"{self.edges:,}", f"{self.features:,}", f"{self.corpus:,}")
        row = _COLUMNS.format(self.name, f"{self.seconds:.0f} s", *counted, "FOUND" if self.trouble else "clean")
        return "\n    ".join((row, *self.trouble.splitlines(), *map(str, self.found)))


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    if find_spec("atheris") is None:
        print("atheris is not installed here: it has wheels for Python 3.11 to 3.13 on Linux x86_64 alone.")
        print("What is kept is played without it: python -m pytest tests/fuzz")
        return 2
    names = chosen.target or NAMES
    each = max(1, chosen.seconds * chosen.jobs // len(names))
    print(f"{len(names)} targets, {each} seconds each, {chosen.jobs} at a time")
    print(_COLUMNS.format("target", "time", "executions", "a second", "edges", "features", "corpus", ""), flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        came = list(pool.map(lambda name: _fuzzed(name, each), names))
    executions, corpus = sum(each.executions for each in came), sum(each.corpus for each in came)
    bad = [each.name for each in came if each.trouble]
    print(f"{executions:,} executions, {corpus:,} inputs in the corpora; found in: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description="Fuzzes the targets with atheris.")
    parser.add_argument("--target", action="append", choices=NAMES, help="one of them, or several; all without")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="in all (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: one for each core)")
    return parser


def _fuzzed(name: str, seconds: int) -> Came:
    at_work, found = AT_WORK / name, FOUND / name
    for folder in (at_work, found):
        folder.mkdir(parents=True, exist_ok=True)
    known = inputs(found)
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.child", name, *_options(name, seconds)]
    said, code = _run(command, seconds + GRACE_SECONDS)
    came = came_of(name, time.monotonic() - began, said, code)
    came.found = tuple(path for path in inputs(found) if path not in known)
    if came.found and not came.trouble:
        came.trouble = "it is so slow that libFuzzer reports it"
    if not inputs(found):
        found.rmdir()
    print(came, flush=True)
    return came


def _options(name: str, seconds: int) -> list[str]:
    """Folders, the first of which is written to, and libFuzzer's own options."""
    words_of = AT_WORK / f"{name}.words"
    words_of.write_text("".join(f'"{_spelt(word)}"\n' for word in words(name) if word))
    return [
        *(str(folder) for folder in (AT_WORK / name, KEPT / name, FOUND / name)),
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST_INPUT}",
        "-len_control=20",  # longer ones sooner than it would by itself, since a run is short
        f"-timeout={SLOWEST_SECONDS}",
        f"-rss_limit_mb={MOST_MEGABYTES}",
        f"-dict={words_of}",
        f"-artifact_prefix={FOUND / name}/",
    ]


def _spelt(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _run(command: list[str], seconds: int) -> tuple[str, int]:
    """What it said, and how it ended. It never cleans up, so its files are in a folder of ours."""
    folder = TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | {"TMPDIR": folder.name}}
    with folder, subprocess.Popen(command, cwd=HERE.parents[1], **out) as child:
        try:
            said, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
    return said.decode("utf-8", "replace"), child.returncode


def came_of(name: str, seconds: float, said: str, code: int) -> Came:
    """By libFuzzer's last line about its state; with the traceback, or all that it said at last, where it fell."""
    came = Came(name, seconds)
    for state in _STATE.finditer(said):
        came.executions, came.edges, came.features, came.corpus = map(int, state.groups())
    if code:
        raised = said.partition(_RAISED)[2].partition("\n==")[0]
        came.trouble = raised.strip() or f"it ended with {code}: {said[-2000:].strip()}"
    return came


if __name__ == "__main__":
    sys.exit(main())
