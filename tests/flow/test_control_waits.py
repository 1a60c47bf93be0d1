"""How often a request to the control API waits for the store.

With 8 ms for each request to the store the schema document allows 120 ms for model selection, 75 for submitted usage
and 220 for today's aggregates: 15, 9 and 27 requests one after the other, if nothing else took any time. The first
request of each is for the token, which is new to the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.ledger.usage_submissions import SubmissionRecorder, UsageSubmission
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.support.control_harness import API, ORG, SETTINGS, ControlHarness, TickingClock, open_control_harness
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


async def measure(
    api: ControlHarness, store: SlowStore, method: str, path: str, body: Any = None
) -> tuple[int, int, Any]:
    """The rounds, the items, and the answer."""
    store.reset()
    app = path.split("/apps/")[1].split("/")[0] if "/apps/" in path else None
    answer = await api.ask(method, path, body, who=(ORG, app))
    assert answer.status in (200, 201, 207), answer.body
    return store.rounds, store.items, answer.body


@pytest.mark.parametrize("shards", [8, 64])
async def test_aggregates_of_today_wait_and_read_the_same_whatever_the_shards(tmp_path: Path, shards: int) -> None:
    async with open_busy_org(tmp_path, shards) as (api, store):
        rounds, items, body = await measure(api, store, "GET", f"{API}/aggregates/today")
        assert rounds <= 9
        assert items <= 1 + 1 + 1 + 2 * APPS + 2 * APPS * len(LABELS)  # token, org twice, names, list and totals
        assert len(body["labels"]) == APPS * len(LABELS)
        last = body["labels"][-1]
        assert (body["rows"][0]["cost_usd_micros"], last["quota_usd_micros"], last["requests"]) == (
            "59000",
            1_000_000,
            1,
        )
        exact, exact_items, same = await measure(api, store, "GET", f"{API}/aggregates/today?consistent=true")
        assert exact_items - items == APPS * len(LABELS) * shards
        assert same == body
        assert exact > rounds


async def test_usage_and_model_selection_wait_for_few_requests_to_the_store(tmp_path: Path) -> None:
    usage = {"request_id": "r-1", "label": "premium", "input_tokens": 1, "output_tokens": 1}
    async with open_busy_org(tmp_path, 64, delay=0.05) as (api, store):
        path = f"{API}/apps/app-1"
        cold, _, _ = await measure(api, store, "GET", f"{path}/model-selection")
        warm, _, _ = await measure(api, store, "GET", f"{path}/model-selection")
        forced, _, _ = await measure(api, store, "GET", f"{path}/model-selection?force_check=true")
        assert (cold, warm, forced) == (5, 1, 4)
        first, _, _ = await measure(api, store, "POST", f"{path}/usage", usage)
        second, items, _ = await measure(api, store, "POST", f"{path}/usage", usage | {"request_id": "r-2"})
        assert (first, second, items) == (5, 4, 4)  # settings and total are read; its counters are listed once a day
        batch = {"items": [usage | {"request_id": f"b-{number}"} for number in range(50)]}
        assert (await measure(api, store, "POST", f"{path}/usage/batch", batch))[0] == 4
        cold, _, _ = await measure(api, store, "POST", f"{API}/apps/app-2/usage", usage | {"request_id": "r-3"})
        assert cold <= 7
