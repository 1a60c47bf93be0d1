"""How far a fleet passes a soft quota, beside how far it may at most.

Without options sidecars of simulated fleets spend for hours of simulated time. With `--processes` real sidecars share
one store on this machine, are called by boto3, and the simulated Bedrock's ledger tells what was really spent.

Run as: python -m bench.overspend [--processes 8]
"""

from __future__ import annotations

import argparse
import logging

from bench.overspend_processes import measured_of_processes
from tests.support.overspend import LOADS, QUOTA, Figures, OverspendOutcome, bound, measure

FLEETS = (1, 8, 50)
SEEDS = range(1, 6)


def row(name: str, sidecars: int, quota: float, spent: float, figures: Figures) -> str:
    over, most = max(0.0, spent - quota), bound(figures)
    cells = [
        name,
        str(sidecars),
        f"{quota:.4g}",
        f"{spent:.4f}" if quota < 10 else f"{spent:.2f}",
        f"{over:.4f}" if quota < 10 else f"{over:.2f}",
        f"{100 * over / quota:.2f}",
        f"{most:.4f}" if quota < 10 else f"{most:.2f}",
        f"{100 * most / quota:.1f}",
        f"{figures.burn:.4f}",
        f"{figures.flush:.0f} + {figures.refresh:.0f} + {figures.totals:.0f} + {figures.step:.0f}",
        f"{figures.in_flight:.4f}" if quota < 10 else f"{figures.in_flight:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def head() -> str:
    names = ["load", "sidecars", "quota", "spent", "over", "over %", "bound", "bound %", "burn a second"]
    names += ["flush + refresh + totals + step, s", "in flight"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def worst(outcomes: list[OverspendOutcome]) -> OverspendOutcome:
    return max(outcomes, key=lambda outcome: outcome.overspend)


def simulated_fleets() -> None:
    print(head())
    for load in LOADS:
        for sidecars in FLEETS:
            outcomes = [measure(load, sidecars, seed) for seed in SEEDS]
            assert all(outcome.overspend <= bound(outcome.figures) for outcome in outcomes)
            found = worst(outcomes)
            print(row(load.name, sidecars, QUOTA, found.spent, found.figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, metavar="N", help="real sidecars on this machine instead")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.processes is None:
        simulated_fleets()
        return
    quota, spent, figures = measured_of_processes(arguments.processes)
    print(head())
    print(row("real processes", arguments.processes, quota, spent, figures))


if __name__ == "__main__":
    main()
