"""Measure all of it on this machine, and write docs/performance.md.

python -m bench.speed                   the whole, in twenty minutes at most
python -m bench.speed --quick           whether it works, in two; written only where --out says
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench.speed import report
from bench.speed.contenders import litellm_program
from bench.speed.machine import CORES, CannotMeasure, described, found, needed
from bench.speed.suite import FULL, QUICK, Suite


def versions() -> str:
    known = [f"aiohttp {version('aiohttp')}", f"uvloop {version('uvloop')}", f"CPython {platform.python_version()}"]
    for program, pattern in (("nginx", r"nginx/([\d.]+)"), ("wrk", r"wrk \S*?([\d.]+)"), ("h2load", r"nghttp2/(\S+)")):
        path = found(program)
        if path is not None:
            option = "-v" if program != "h2load" else "--version"
            told = subprocess.run([path, option], capture_output=True, text=True, check=False)
            match = re.search(pattern, told.stdout + told.stderr)
            known.append(f"{program} {match[1] if match else '?'}")
    installed = litellm_program().parents[1].glob("lib/python*/site-packages/litellm-*.dist-info")
    known += [f"LiteLLM {path.name.split('-')[1].removesuffix('.dist')}" for path in installed]
    return ", ".join(known)


def measured(quick: bool, folder: Path | None) -> None:
    needed("wrk", "wrk")
    needed("nginx", "nginx-light")
    if len(CORES) < 2:
        raise CannotMeasure("two cores are needed: one for what is measured, one for the load")
    plan = QUICK if quick else FULL
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(plan, Path(scratch), lambda line: print(line, flush=True))
        suite.run()
    minutes = (time.monotonic() - began) / 60
    suite.figures.about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": described(),
        "versions": versions(),
        "run": f"rounds: {plan.rounds}, each figure over {plan.seconds:g} s; {minutes:.1f} minutes in all",
    }
    if folder is None:
        print(report.as_text(suite.figures))
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / report.RESULTS).write_text(json.dumps(suite.figures.as_json(), indent=1) + "\n")
    if suite.flame is not None:
        (folder / report.FLAME).write_text(suite.flame)
    print(f"written: {report.write(folder)}")


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    options.add_argument("--quick", action="store_true", help="one short round")
    options.add_argument("--out", type=Path, help=f"a folder; the page stands beside it (default: {report.FOLDER})")
    chosen = options.parse_args()
    try:
        measured(chosen.quick, chosen.out or (None if chosen.quick else report.FOLDER))
    except CannotMeasure as missing:
        print(f"cannot measure: {missing}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
