"""How many counter updates a second the embedded store takes from concurrent callers on one event loop.

Each update adds to the four counters of one shard, as a flusher's would, and is durable (synced) when it is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from decimal import Decimal
from pathlib import Path
from statistics import median
from time import perf_counter, time

from price_keeper.stores.contract import Key, Update
from price_keeper.stores.sqlite import SqliteStore

PERIOD = "DAY#20261118"


async def _caller(store: SqliteStore, number: int, updates: int, items: int) -> None:
    for turn in range(updates):
        key = Key("usage-agg-sharded", f"ORG#bench#LABEL#premium#SH#{(number + turn) % items}", PERIOD)
        counted = {"cost_usd_micros": Decimal("1234.567891"), "input_tokens": 812, "output_tokens": 143, "requests": 1}
        await store.update(Update(key, add=counted, set={"updated_at_epoch": 1_800_000_000}))


async def _round(callers: int, updates: int, items: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        store = await SqliteStore(Path(folder) / "store.db", time).open()
        begun = perf_counter()
        await asyncio.gather(*(_caller(store, number, updates, items) for number in range(callers)))
        took = perf_counter() - begun
        await store.close()
    return callers * updates / took


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--updates", type=int, default=20_000, help="in each round")
    chosen = options.parse_args()
    print("callers  items  updates/s (median of rounds, lowest - highest)")
    for callers, items in ((1, 8), (16, 8), (64, 8), (256, 8), (1000, 8), (1000, 1000)):
        updates = max(1, (chosen.updates if callers > 1 else 500) // callers)
        rates = sorted(asyncio.run(_round(callers, updates, items)) for _ in range(chosen.rounds))
        print(f"{callers:7}  {items:5}  {median(rates):9.0f} ({rates[0]:.0f} - {rates[-1]:.0f})")


if __name__ == "__main__":
    main()
