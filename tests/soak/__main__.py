"""A fleet under load and faults for as long as asked: memory and descriptors stay as they are, every figure is exact.

    python -m tests.soak [--seconds SECONDS] [--seed SEED] [--output FILE] [--keep DIR]

Three sidecars of `serve` (the second with two workers) share one store that speaks DynamoDB's protocol and one
simulated Bedrock, over links that are spoilt. The load is half of what the same set-up, callers included, reaches at
its start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import uvloop

from bench.speed.contenders import ROOT
from bench.speed.scaling_results import Results, Table
from tests.soak.run import Soak
from tests.support.engines import TEST_CREDENTIALS

SECONDS = 3600.0
OUTPUT = ROOT / "docs" / "reliability" / "soak.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="of the load and of all that goes wrong")
    parser.add_argument("--output", type=Path, help="where the figures go; figures of an hour go to docs/reliability")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave journals, logs and books there, to look at")
    asked = parser.parse_args(arguments)
    os.environ |= TEST_CREDENTIALS
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        verdict = uvloop.run(Soak(asked.seconds, asked.seed, folder.absolute()).run())
    figures = {"seconds": asked.seconds, "seed": asked.seed, **verdict.figures}
    table = Table("A soak", "", ("what", "figure"), list(figures.items()))
    Results(tables=[table], goals=verdict.goals).print()
    print("\nmost of the logs:", *verdict.log_findings, sep="\n  ")
    output = asked.output or (OUTPUT if asked.seconds >= SECONDS else None)
    if output is not None:
        report = {"figures": figures, "goals": [asdict(goal) for goal in verdict.goals]}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
