"""The rows of hard budgets and the files that name them, in a test's hands."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

from price_keeper.ledger import lease_rows
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.ledger.lease_rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.stores.contract import Store

from tests.support.clock import ManualClock

HOLDER = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
OTHER = "01BX5ZZKBKACTAV9WEVGEMMVRZ"


class RealSleepClock(ManualClock):
    """Whose sleeps are real."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def new_budget_key(period: str = "DAY#20261118") -> HardBudgetKey:
    return HardBudgetKey(f"ORG#{uuid4()}", "premium", period)


async def read_bucket(store: Store, name: HardBudgetKey) -> HardBudgetBucket:
    item = await store.get(name.bucket_key, consistent=True)
    assert item is not None
    return HardBudgetBucket.from_item(item)


async def read_lease_row(store: Store, name: HardBudgetKey, holder: str = HOLDER) -> BudgetLeaseRow:
    return BudgetLeaseRow.from_item(await store.get(name.build_lease_key(holder), consistent=True))


async def put_lease_row(store: Store, name: HardBudgetKey, leased: int, used: int, folder: Path | None = None) -> None:
    """Of a budget of 1000; with a file that names it."""
    await store.put(lease_rows.build_bucket(name, 1000, 1, [], 0, 0))
    await store.transact(lease_rows.build_take(name, HOLDER, 0, leased, leased))
    await store.transact([lease_rows.build_spend(name, HOLDER, used)])
    if folder is not None:
        await BudgetLeaseFile(folder, HOLDER).add(name)


def list_lease_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*holds-*"))
