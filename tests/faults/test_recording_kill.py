"""`kill -9` of a sidecar under load, again and again: the books hold every answer once, exactly, and nothing else.

As many kills as fit into `make test`; `make soak` makes a hundred of each engine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.stores.sqlite import SqliteStore

from tests.support.engines import PREFIX, Engines
from tests.support.sidecar_crashes import (
    MODELS,
    SCOPE,
    JournalContents,
    SidecarSetup,
    check_against_ledger,
    run_crash_loop,
)
from tests.support.simulated import bedrock_process, read_ledger

KILLS = int(os.environ.get("PRICE_KEEPER_KILLS", "6"))


@pytest.mark.parametrize("engine", ["sqlite", "ministack"])
def test_killed_sidecar_records_every_answer_once(engine: str, engines: Engines, tmp_path: Path) -> None:
    store = _store_config(engine, engines)
    file = tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as bedrock:
        lineup = SidecarSetup(tmp_path, bedrock.url, store)
        before = asyncio.run(_counted(lineup, engines))
        load = run_crash_loop(lineup, KILLS, random.Random(20261118), lambda: None)
    books = JournalContents.read(tmp_path / "copies")
    counted = asyncio.run(_counted(lineup, engines))
    check_against_ledger(books, load.complete_requests, {entry["request_id"]: entry for entry in read_ledger(file)})
    assert books.sum_by_label(SCOPE.key) == {label: _minus(counted[label], before[label]) for label in MODELS}
    assert not list(lineup.journal.glob("*.seg")) or _only_an_empty_one(lineup.journal)
    assert len(load.complete_requests) > KILLS
    print(
        f"{KILLS} kills: {len(load.complete_requests)} whole answers, "
        f"{len(books.estimated_receipts)} estimates, {len(books.seals)} segments"
    )


def _store_config(engine: str, engines: Engines) -> dict[str, Any]:
    if engine == "sqlite":
        return {"path": "price-keeper.db"}
    endpoint = engines.endpoints[engine]
    return {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": PREFIX}


async def _counted(lineup: SidecarSetup, engines: Engines) -> dict[str, UsageCounts]:
    store: Store
    if "path" in lineup.store:
        store = await SqliteStore(lineup.folder / "price-keeper.db", time.time).open()
    else:
        async with engines.open("ministack", lineup.folder):
            pass  # the tables are there then
        opened = DynamoStore(
            region="us-east-1", table_prefix=PREFIX, endpoint=lineup.store["endpoint"], sleep=asyncio.sleep
        )
        store = await opened.open()
    try:
        day = time.strftime("DAY#%Y%m%d", time.gmtime())
        sums = {label: await sum_shards(store, Counter(SCOPE.key, label, day, 8)) for label in MODELS}
    finally:
        await store.close()
    return {label: _counts(each) for label, each in sums.items()}


def _counts(sums: dict[str, Any]) -> UsageCounts:
    pico = int(sums.pop("cost_usd_micros") * PICO_PER_MICRO)
    return UsageCounts(**{name: int(number) for name, number in sums.items()}, pico=pico)


def _minus(left: UsageCounts, right: UsageCounts) -> UsageCounts:
    return UsageCounts._make(a - b for a, b in zip(left, right, strict=True))


def _only_an_empty_one(journal: Path) -> bool:
    return all(path.stat().st_size < 200 for path in journal.glob("*.seg"))
