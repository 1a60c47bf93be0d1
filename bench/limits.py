"""How well leases share a limit: how much of it is used, how evenly, at what price, and how far it is passed.

Fleets of sidecars in simulated time, each with the real leases and the real limiter, on a store in memory that refuses
transactions as DynamoDB does. Writes its tables into docs/limits.md.

Run as: python -m bench.limits [--fleets 1 8 100] [--print]
"""

from __future__ import annotations

import argparse
import logging
import re
import timeit
from pathlib import Path
from typing import Any, cast

from price_keeper.clock import SystemClock
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.rate_lease import RateLease
from price_keeper.rates.rate_lease_manager import RateLeaseManager
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores.contract import Key
from price_keeper.tasks import Tasks

from tests.support.rate_limit_fleet import FleetOutcome, FleetSetup, measure

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FLEETS = (1, 8, 100, 1000)
LOADS = (0.5, 0.8, 1.0, 1.5, 3.0)
SHARES = (20.0, 0.5)
WARM_UP, SECONDS = 120.0, 180.0
TIMES, REPEATS = 100_000, 5
NAMES = (
    "sidecars", "load", "used %", "share least - most", "waited %", "refused %", "came in again %",
    "transactions a call", "items a call", "conflicts %", "horizon s", "held s", "over s", "of the bound s",
)  # fmt: skip


def row(outcome: FleetOutcome) -> str:
    setup, ledger = outcome.setup, outcome.ledger
    least, most = outcome.fairness
    calls, let_in = max(1, outcome.calls), max(1, outcome.admitted)
    again = f"{100 * outcome.admitted_on_retry / outcome.retried:.0f}" if outcome.retried >= 20 else "-"
    cells = [
        str(setup.sidecars),
        f"{setup.load:g}",
        f"{100 * outcome.utilisation:.1f}",
        f"{least:.2f} - {most:.2f}",
        f"{100 * outcome.waited / calls:.2f}",
        f"{100 * outcome.refused / calls:.1f}",
        again,
        f"{outcome.transactions / let_in:.3f}",
        f"{outcome.items / let_in:.3f}",
        f"{100 * outcome.conflicts / max(1, outcome.transactions):.0f}",
        f"{outcome.horizon:.0f}",
        f"{ledger.max_held / ledger.rate:.1f}",
        f"{max(0.0, ledger.over_capacity) / ledger.rate:.2f}",
        f"{outcome.bound / ledger.rate:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(share: float, fleets: list[int]) -> str:
    head = f"{share:g} requests a second for each sidecar:"
    lines = [head, "", f"| {' | '.join(NAMES)} |", "|---" * len(NAMES) + "|"]
    for sidecars in fleets:
        for load in LOADS:
            outcome = measure(
                FleetSetup(sidecars, load, share, seconds=SECONDS, warm_up=WARM_UP, starts=30.0, retries=load <= 1)
            )
            assert outcome.ledger.over_bound <= 0, "the bound does not hold"
            assert not outcome.ledger.is_overdrawn
            lines.append(row(outcome))
            print(lines[-1], flush=True)
    return "\n".join(lines)


class _NoTasks:
    def spawn(self, work: Any) -> None:
        work.close()


def local_decisions() -> str:
    """What one costs on this machine, the limits being two."""
    names = ("rpm", "tpm")
    limits = tuple(RateLimit(name, 10**15, 10**15, 60_000) for name in names)
    buckets = [RateBucket(Key("rate-buckets", scope, "BUCKET#RATE"), limits, 1) for scope in ("app", "org")]
    clock = SystemClock()
    lease = RateLease(buckets, clock.monotonic(), lambda: 0.5)
    lease.held = [10**15, 10**15]
    leasing = RateLeaseManager(cast(BucketClient, None), clock, cast(Tasks, _NoTasks()))
    holder = leasing._find_or_create_holder("caller", None, buckets, clock.monotonic())
    assert holder is not None
    holder.lease.held, holder.store_away_until = [10**15, 10**15], float("inf")
    costs, actual = {"rpm": 1000, "tpm": 500_000}, {"tpm": 300_000}
    amounts = (1000, 500_000)

    def both() -> None:
        admission = leasing.try_admit("caller", buckets, costs)
        assert admission is not None
        leasing.settle(admission, actual)

    poor = RateLease(buckets, clock.monotonic(), lambda: 0.5)
    poor.not_before = float("1e12")
    lines = ["| local decision, two limits | microseconds |", "|---|---|"]
    for name, work in (
        ("`Lease.take`, taken", lambda: lease.take(amounts, clock.monotonic())),
        ("`Lease.take`, refused with a wait", lambda: poor.take(amounts, clock.monotonic())),
        ("`Leasing.at_once`", lambda: leasing.try_admit("caller", buckets, costs)),
        ("`Leasing.at_once` and `settle`", both),
    ):
        lines.append(f"| {name} | {min(timeit.repeat(work, number=TIMES, repeat=REPEATS)) / TIMES * 1e6:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, nargs="+", default=list(FLEETS), metavar="SIDECARS")
    parser.add_argument("--print", action="store_true", help="and leave docs/limits.md alone")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = "\n\n".join([local_decisions(), *(table(share, arguments.fleets) for share in SHARES)])
    if arguments.print:
        print(found)
    else:
        text = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{found}\n{END}", PAGE.read_text(), flags=re.DOTALL)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
