"""An org of 60 apps with spend of three labels each, before a store that delays each request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.ledger.usage_submissions import SubmissionRecorder, UsageSubmission
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.support.control_harness import ORG, SETTINGS, ControlHarness, TickingClock, open_control_harness
from tests.support.memory_store import MemoryStore
from tests.support.slow_store import SlowStore

APPS, LABELS = 60, ("premium", "economy", "guardrails")
DAY = "DAY#20261118"


@asynccontextmanager
async def open_busy_org(
    tmp_path: Path, shards: int, delay: float = 0.0
) -> AsyncIterator[tuple[ControlHarness, SlowStore]]:
    """An org whose apps have each spent of each label, with totals. The process has just started."""
    memory, clock = MemoryStore(), TickingClock()
    quotas = {"premium": 10_000_000, "economy": 2_000_000, "guardrails": 1_000_000}
    org = SETTINGS | {"quotas": quotas, "agg_shard_count": shards, "version": 1}
    await memory.put(Put(schema.org_config_key(ORG), org))
    charged = []
    for number in range(APPS):
        await memory.put(Put(schema.app_config_key(ORG, f"app-{number}"), {"app_name": f"App {number}"}))
        scope = Scope(ORG, f"app-{number}")
        for label in LABELS:
            counts = UsageCounts(1, input_tokens=10, pico=number * 10**9)
            submission = UsageSubmission(ORG, scope.app, f"{number}-{label}", "", counts, {})
            charged.append((submission, [Counter(scope.key, label, DAY, shards)]))
    assert all(isinstance(each, tuple) for each in await SubmissionRecorder(memory, clock).submit_all(charged))
    assert await TotalSweep(memory, clock, Aggregator(memory, clock, 60.0)).sweep()
    store = SlowStore(memory, delay)  # type: ignore[arg-type]
    async with open_control_harness(store, tmp_path, clock) as api:
        yield api, store
