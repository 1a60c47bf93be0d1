"""How often a request to the control API waits for the store.

With 8 ms for each request to the store the schema document allows 20 ms for a token check, 120 for model selection,
75 for submitted usage, 220 for today's aggregates and 100 for the retrieval of a secret: 2, 15, 9, 27 and 12 requests
one after the other, if nothing else took any time. The first request of each is for the token, new to the process.
`python -m bench.store_waits` measures the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.busy_org import APPS, LABELS, open_busy_org
from tests.support.control_harness import API, ORG, ControlHarness
from tests.support.slow_store import SlowStore


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


@pytest.mark.parametrize("path", [f"{API}/apps/app-1/model-selection", f"/status/board?org={ORG}&app=app-1"])
async def test_first_look_at_a_budget_reads_the_same_whatever_the_shards(tmp_path: Path, path: str) -> None:
    items = set()
    for shards in (1, 64):
        async with open_busy_org(tmp_path / str(shards), shards) as (api, store):
            items.add((await measure(api, store, "GET", path))[1])
    assert len(items) == 1


async def test_usage_and_model_selection_wait_for_few_requests_to_the_store(tmp_path: Path) -> None:
    usage = {"request_id": "r-1", "label": "premium", "input_tokens": 1, "output_tokens": 1}
    async with open_busy_org(tmp_path, 64, delay=0.05) as (api, store):
        path = f"{API}/apps/app-1"
        cold, _, _ = await measure(api, store, "GET", f"{path}/model-selection")
        warm, _, _ = await measure(api, store, "GET", f"{path}/model-selection")
        forced, _, _ = await measure(api, store, "GET", f"{path}/model-selection?force_check=true")
        assert (cold, warm, forced) == (5, 1, 4)  # cold: first of all, whether the app exists
        first, _, _ = await measure(api, store, "POST", f"{path}/usage", usage)
        second, items, _ = await measure(api, store, "POST", f"{path}/usage", usage | {"request_id": "r-2"})
        assert (first, second, items) == (5, 4, 4)  # settings and total are read; its counters are listed once a day
        batch = {"items": [usage | {"request_id": f"b-{number}"} for number in range(50)]}
        assert (await measure(api, store, "POST", f"{path}/usage/batch", batch))[0] == 4
        cold, _, _ = await measure(api, store, "POST", f"{API}/apps/app-2/usage", usage | {"request_id": "r-3"})
        assert cold <= 7


async def test_token_check_and_secret_retrieval_wait_for_few_requests_to_the_store(tmp_path: Path) -> None:
    async with open_busy_org(tmp_path, 64, delay=0.05) as (api, store):
        store.reset()
        other = await api.ask("GET", f"{API}/apps/app-2/model-selection", who=(ORG, "app-1"))
        assert (other.status, store.rounds) == (403, 1)
        made = await api.ask("PUT", f"{API}/apps/new", {"app_name": "New"})
        token = {"X-Retrieval-Token": made.body["secret_retrieval_token"]}
        store.reset()
        secret = await api.ask("GET", f"{API}/apps/new/credentials/secret", who=None, headers=token)
        assert (secret.status, store.rounds) == (200, 3)  # the row, the client's item, and the row's use
