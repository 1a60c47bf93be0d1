"""What the store says of hard budgets, and what Bedrock says that was spent of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import read_spent_pico, sum_shards
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.org_calendar import Period, find_span
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store, Value, iterate_rows

from tests.support.hard_budget_processes import APP, MODELS, PICO, PRICES, ProcessFleet, noon_time_zone


@dataclass
class StoredBudget:
    """What the store says of one label."""

    bucket: HardBudgetBucket
    lease_rows: dict[str, BudgetLeaseRow]
    spent: int
    estimated: int  # calls whose cost was never learned

    @property
    def leased(self) -> int:
        return sum(row.leased for row in self.lease_rows.values())

    @property
    def used(self) -> int:
        return sum(hold.used for hold in self.lease_rows.values())

    def check(self) -> None:
        assert self.bucket.unleased + self.leased + self.bucket.spent_without_lease == self.bucket.quota
        assert self.bucket.unleased >= 0
        assert self.bucket.spent_without_lease >= 0
        assert self.spent <= self.bucket.quota


async def put_hard_budget(store: Store, fleet: ProcessFleet, quotas: dict[str, int]) -> dict[str, HardBudgetKey]:
    """Hard, and for a day that does not end soon; its names by label."""
    item: dict[str, Value] = {
        "timezone": noon_time_zone(),
        "model_ordering": list(quotas),
        "quotas": {label: pico // PICO for label, pico in quotas.items()},
        "enforcement": "hard",
        "version": 1,
    }
    await store.put(Put(schema.org_config_key(fleet.org), item))
    today = find_span(Period.DAY, time.time(), ZoneInfo(noon_time_zone())).key
    return {label: HardBudgetKey(Scope(fleet.org, APP).key, label, today) for label in quotas}


def price_by_hand(entry: dict[str, Any], label: str) -> int:
    """What the simulated Bedrock says, priced by hand."""
    if entry["model"] != MODELS[label] or not entry.get("usage"):
        return 0
    usage, prices = entry["usage"], PRICES[label]
    return sum(usage[f"{kind}_tokens"] * round(price * PICO) for kind, price in prices.items())


async def read_stored_budget(store: Store, name: HardBudgetKey) -> StoredBudget:
    bucket = None
    while bucket != (
        bucket := HardBudgetBucket.from_item(await store.get(name.bucket_key, consistent=True) or {})
    ):  # so nothing moves
        rows = [row async for row in iterate_rows(store, name.lease_query)]
    sums = await sum_shards(store, Counter(*name, max(schema.SHARD_COUNTS)))
    lease_rows = {row.key.sk.rpartition("#")[2]: BudgetLeaseRow.from_item(row.item) for row in rows}
    return StoredBudget(bucket, lease_rows, await read_spent_pico(store, name), int(sums["estimated_requests"]))
