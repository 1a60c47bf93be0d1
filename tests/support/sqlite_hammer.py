"""A process that writes to a SQLite store as fast as it can and tells each acknowledged write on its standard output.

Run as: python -m tests.support.sqlite_hammer FILE NAME
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count
from pathlib import Path
from time import time

from price_keeper.stores.contract import ItemMissing, Key, Put, Update
from price_keeper.stores.sqlite import SqliteStore

CALLERS = 20
LONGEST_SECONDS = 60  # should nothing kill it
PARTITION = "HAMMER"
COUNTER = Key("usage-agg-sharded", PARTITION, "DAY#20261118")


async def _call(store: SqliteStore, prefix: str) -> None:
    for number in count():
        name = f"{prefix}-{number}"
        entry = Put(Key("audit", PARTITION, name), {"text": "x" * 200}, ItemMissing())
        await store.transact([entry, Update(COUNTER, add={"requests": 1})])
        os.write(1, f"{name}\n".encode())


async def main(path: Path, name: str) -> None:
    store = await SqliteStore(path, time).open()
    os.write(1, b"ready\n")
    async with asyncio.timeout(LONGEST_SECONDS):
        await asyncio.gather(*(_call(store, f"{name}-{caller}") for caller in range(CALLERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
