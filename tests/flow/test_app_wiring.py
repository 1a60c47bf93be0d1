"""What only `app.run` connects: each part is tested alone elsewhere, and here the effect of their connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

from price_keeper.config import Address
from price_keeper.domain import Scope
from price_keeper.stores import schema

from tests.support.control_harness import API, ORG, SETTINGS
from tests.support.doctor import write_config
from tests.support.running_app import ask, run_app

SECONDS = 30


async def test_app_writes_total_of_submitted_usage_without_any_call_or_report(tmp_path: Path) -> None:
    """The next sweep would find it too, but only minutes later."""
    free = {"data": Address("127.0.0.1", 0), "control": Address("127.0.0.1", 0)}
    async with run_app(write_config(tmp_path, listen=free, aggregator={"interval_secs": 1})) as started:
        url, shop = f"http://{started.control_address}", f"{API}/apps/shop"
        settings = SETTINGS | {"model_ordering": ["economy"], "quotas": {"economy": 1_000_000}}
        await ask(url, "PUT", API, settings, 201)
        await ask(url, "PUT", shop, {"app_name": "shop"}, 201)
        usage = {"request_id": "r-1", "label": "economy", "input_tokens": 1000, "output_tokens": 0}
        counted = await ask(url, "POST", f"{shop}/usage", usage, 201)
        key = schema.total_key(Scope(ORG, "shop"), "economy", f"DAY#{counted['day'].replace('-', '')}")
        async with asyncio.timeout(SECONDS):  # a store knows no events
            while (total := await started.store.get(key, consistent=True)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert (total["requests"], total["cost_usd_micros"]) == (1, counted["cost_usd_micros_whole"]) == (1, 60)
