"""The store is away for a while under load: no call fails, nothing is lost, and the sidecar does not grow.

As long as fits into `make test`; `make soak` makes it a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from price_keeper.domain import PICO_PER_MICRO
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.engines import PREFIX, Engines
from tests.support.gate import Gate
from tests.support.sidecar_crashes import MODELS, SCOPE, CrashLoad, JournalContents, SegmentCopies, SidecarSetup
from tests.support.simulated import bedrock_process, read_ledger

AWAY_SECONDS = float(os.environ.get("PRICE_KEEPER_AWAY_SECONDS", "3"))
GROWTH = 48 * 1024 * 1024  # a process that kept its calls would grow by far more in a minute


def test_store_outage_under_load_fails_no_call_and_loses_nothing(engines: Engines, tmp_path: Path) -> None:
    async def tables_are_there() -> None:
        async with engines.open("ministack", tmp_path):
            pass

    asyncio.run(tables_are_there())
    endpoint, file = engines.endpoints["ministack"], tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as bedrock, Gate(endpoint) as gate:
        store = {"engine": "dynamodb", "endpoint": gate.url, "region": "us-east-1", "table_prefix": PREFIX}
        lineup = SidecarSetup(tmp_path, bedrock.url, store)
        lineup.write_config()
        before = _counted(endpoint)
        with lineup.run_sidecar() as running, SegmentCopies(lineup.journal, tmp_path / "copies"):
            with CrashLoad(lineup, 4, random.Random(20261118)) as load:
                _until(lambda: len(load.complete_requests) > 50)
                gate.shut()
                resident, answered = _resident(running.process.pid), len(load.complete_requests)
                time.sleep(AWAY_SECONDS)
                while_away, grown = len(load.complete_requests) - answered, _resident(running.process.pid) - resident
                gate.open()
            assert running.stop() == 0
            assert "spend cannot be flushed" in running.errors
    assert load.failed_calls == 0
    assert while_away > 20
    assert grown < GROWTH
    ledger = {entry["request_id"]: entry for entry in read_ledger(file)}
    books = JournalContents.read(tmp_path / "copies")
    assert set(books.exact_counts) == set(load.complete_requests) == set(ledger)
    assert not books.estimated_receipts
    after = _counted(endpoint)
    recorded = sum(counts.pico for counts in books.exact_counts.values())
    assert (after[0] - before[0], after[1] - before[1]) == (len(load.complete_requests), recorded)
    print(f"away for {AWAY_SECONDS:g} s: {while_away} calls answered during that time, grown by {grown // 1024} kB")


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _counted(endpoint: str) -> tuple[int, int]:
    """Requests and pico-dollars of all labels, by the store."""

    async def counted() -> tuple[int, int]:
        store = await DynamoStore(
            region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=asyncio.sleep
        ).open()
        day = time.strftime("DAY#%Y%m%d", time.gmtime())
        try:
            sums = [await sum_shards(store, Counter(SCOPE.key, label, day, 8)) for label in MODELS]
        finally:
            await store.close()
        requests = sum(int(each["requests"]) for each in sums)
        return requests, sum(int(each["cost_usd_micros"] * PICO_PER_MICRO) for each in sums)

    return asyncio.run(counted())
