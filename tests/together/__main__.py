"""An older version and this one at work together, on one store and on each other's journals.

    python -m tests.together --old CHECKOUT [--calls N] [--seconds SECONDS] [--engine sqlite|ministack] [--keep DIR]

CHECKOUT is a folder with the older version, installed in its `.venv`; `make together OLD=COMMIT` makes one. Two
sidecars, one of each version, share a store and a simulated Bedrock. Under load both are killed again and again, and
each time the versions change places: each recovers what the other left in its folder. At the end the store, the
reports and what callers had are compared with Bedrock's own ledger.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from bench.speed.scaling_results import Results, Table
from tests.support.engines import TEST_CREDENTIALS
from tests.together.course import ENGINES, Course
from tests.together.versions import version_in


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=60.0, help="in which the calls are begun, with each engine")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="all of them, unless given")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="of the load")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave journals, logs and books there, to look at")
    asked = parser.parse_args(arguments)
    old = version_in(asked.old)
    os.environ |= TEST_CREDENTIALS
    is_good = True
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="together-")))
        for engine in asked.engine or ENGINES:
            place = (folder / engine).absolute()
            place.mkdir(parents=True)
            verdict = uvloop.run(Course(engine, old, asked.calls, asked.seconds, asked.seed, place).run())
            figures = {"engine": engine, "seed": asked.seed, **verdict.figures}
            table = Table("Two versions together", "", ("what", "figure"), list(figures.items()))
            Results(tables=[table], goals=verdict.goals).print()
            print("\nmost of the logs:", *verdict.log_findings, sep="\n  ", flush=True)
            is_good = is_good and verdict.is_good
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
