"""What DynamoDB charges for the state that a fleet reads: computed from the product's intervals, and counted.

Run as: python -m bench.state_units           the table of docs/cost.md
        python -m bench.state_units --count    and hours of two sidecars in simulated time, which takes some minutes
        python -m bench.state_units --flip     and how long another sidecar takes to follow the active label
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from pathlib import Path
from typing import NamedTuple, cast

from price_keeper.auth.revocation import REFRESH_AFTER_SECONDS as TOKEN_SECONDS
from price_keeper.budgets.active_label_follower import LOOK_SECONDS
from price_keeper.budgets.budget_refresh import SETTINGS_REFRESH_SECONDS
from price_keeper.config import Config
from price_keeper.ledger.aggregator import EARLIEST_LOOK, LATEST_LOOK
from price_keeper.ledger.total_sweep import SWEEP_SECONDS
from price_keeper.rates.rate_limiter import REFRESH_AFTER_SECONDS as LIMITS_SECONDS
from price_keeper.stores.contract import Store

from bench.write_units import FLEETS, MONTH_SECONDS
from tests.support.budget_fleet import USD, new_caller, put_budget
from tests.support.state_readers import new_callers, open_state_readers

USD_A_MILLION_UNITS = 0.125  # of reads, on demand, us-east-1
SETTINGS_ITEMS = 3  # the org's, the app's, and the sticky state
LIMITS_ITEMS = 2  # the org's and the app's
SHARDS = 8
COUNTERS = (1, 220, 2000)
HOUR = 3600
FLIPS, CALL_SECONDS = 50, 0.1


class StateUnits(NamedTuple):
    """Read units a second of a fleet whose sidecars all serve one app of one label, without a pause."""

    active_label: float
    settings: float
    limits: float
    tokens: float
    spend: float
    totals: float
    sweeps: float

    @property
    def usd_a_month(self) -> float:
        return sum(self) * MONTH_SECONDS * USD_A_MILLION_UNITS / 1e6


def state_units(sidecars: int) -> StateUnits:
    config = Config.development()
    # Between two refreshes, which read the active label too.
    looks = int(SETTINGS_REFRESH_SECONDS / LOOK_SECONDS)
    interval = config.aggregator.interval_secs * (EARLIEST_LOOK + LATEST_LOOK) / 2
    return StateUnits(
        active_label=sidecars * looks / SETTINGS_REFRESH_SECONDS,
        settings=sidecars * SETTINGS_ITEMS / SETTINGS_REFRESH_SECONDS,
        limits=sidecars * LIMITS_ITEMS / LIMITS_SECONDS,
        tokens=sidecars / TOKEN_SECONDS,
        spend=sidecars * 0.5 / config.defaults.refresh_interval_normal_secs,
        # each sidecar reads the total, and one of them the shards
        totals=(sidecars * 0.5 + SHARDS) / interval,
        # each reads whose turn it is; one of them the list, and what it does not know yet
        sweeps=(sidecars * 2 + 1) / SWEEP_SECONDS,
    )


def table() -> str:
    lines = [
        "| sidecars | active label | settings | limits | tokens | spend | totals | sweeps | USD a month |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for sidecars in FLEETS:
        units = state_units(sidecars)
        kinds = " | ".join(f"{1000 * each / sidecars:,.1f}" for each in units)
        lines.append(f"| {sidecars:,} | {kinds} | {units.usd_a_month:,.2f} |")
    return "\n".join(lines)


async def count_hour(counters: int, *, is_busy: bool) -> str:
    """An hour of two sidecars that both serve so many apps. Idle: nobody has called them for two hours."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_state_readers(Path(folder), 2) as readers:
            callers = await new_callers(readers.store, counters)
            await readers.serve(callers, 120, 5)
            pause = 5 if counters < 1000 else 15
            await (readers.serve(callers, 300, pause) if is_busy else readers.clock.advance(3 * HOUR))
            readers.store.reset()
            seconds = HOUR if counters < 1000 else HOUR / 4
            await (readers.serve(callers, seconds, pause) if is_busy else readers.clock.advance(seconds))
            store, each = readers.store, HOUR / seconds
            kinds = "sticky-state", "config", "daily-total", "usage-agg-sharded", "request-dedup"
            reads = " | ".join(f"{store.reads[kind] * each:,.0f}" for kind in kinds)
            summed = store.writes["daily-total"] * each
            per_interval = summed / counters / 60
            return (
                f"| {counters:,} | {'busy' if is_busy else 'idle'} | {reads} | {summed:,.0f} | {per_interval:.2f} "
                f"| {store.units.reads * each:,.0f} |"
            )


async def count() -> None:
    print("\n| counters | two sidecars | active labels | settings | totals | shards | list | totals written |", end="")
    print(" of each, a minute | read units an hour |\n|---|---|---|---|---|---|---|---|---|---|")
    for counters in COUNTERS:
        for is_busy in (False, True):
            print(await count_hour(counters, is_busy=is_busy), flush=True)


async def measure_flips(flips: int = FLIPS) -> list[float]:
    """Seconds of simulated time from the flush that spends a quota until another sidecar, which serves a call every
    CALL_SECONDS, serves the next label. The flips come at times that are spread over the interval of its reads."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        async with open_state_readers(Path(folder), 2) as readers:
            mover, follower = readers.sidecars
            org = new_caller().org
            await put_budget(cast(Store, readers.store), org, {"premium": 10, "economy": 5})
            for number in range(flips):
                who = new_caller(f"flip-{number}", org)
                for sidecar in readers.sidecars:
                    await sidecar.decide(who)
                for _ in range(round((10 + LOOK_SECONDS * number / flips) / CALL_SECONDS)):
                    assert (await follower.decide(who)).label == "premium"
                    await readers.clock.advance(CALL_SECONDS)
                await mover.spend(who, 10 * USD)
                assert await mover.flusher.flush()
                began = readers.clock.monotonic()
                while (await follower.decide(who)).label == "premium":
                    await readers.clock.advance(CALL_SECONDS)
                took.append(readers.clock.monotonic() - began)
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--flip", action="store_true")
    given = parser.parse_args()
    print(table())
    if given.count:
        asyncio.run(count())
    if given.flip:
        logging.disable(logging.WARNING)
        took = asyncio.run(measure_flips())
        print(f"\na flip is followed after {took[len(took) // 2]:.1f} s (median), {took[-1]:.1f} s at most, of {FLIPS}")


if __name__ == "__main__":
    main()
