"""The bucket of a hard budget, which all processes share: made, kept to its quota, and to what was really spent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import ConditionFailed
from price_keeper.hard import rows
from price_keeper.hard.rows import BudgetLeaseRow, HardBudgetBucket, HardBudgetKey
from price_keeper.stores.contract import Item, Store, iterate_rows

BUCKET_ATTEMPTS = 8  # each lost one means that another process had its way
MIN_RECONCILE_SECONDS = 45  # a look so young is not repeated
RECONCILE_READS = 3

# Pico-dollars by all shards of the scope, label and period, however many there ever were; read consistently.
ReadSpent: TypeAlias = Callable[[HardBudgetKey], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class SharedBudgetBucket:
    """Each raises StoreError."""

    store: Store
    clock: Clock
    key: HardBudgetKey
    read_spent: ReadSpent

    async def read_or_create(self, quota: int, version: int) -> HardBudgetBucket:
        """As it stands, made if it is not there, by these settings or newer ones."""
        item = await self.store.get(self.key.bucket_key, consistent=True)
        for _ in range(BUCKET_ATTEMPTS):
            if item is None:
                item = await self._create(quota, version)
            else:
                bucket = HardBudgetBucket.from_item(item)
                if bucket.version >= version:
                    return bucket
                item = await self._change_quota(bucket, quota, version)
        raise ConditionFailed(item)

    async def _create(self, quota: int, version: int) -> Item | None:
        put = rows.build_bucket(
            self.key, quota, version, await self._read_leases(), await self.read_spent(self.key), self.clock.now()
        )
        try:
            await self.store.put(put)
        except ConditionFailed as failure:
            return failure.item
        return put.item

    async def _change_quota(self, bucket: HardBudgetBucket, quota: int, version: int) -> Item | None:
        try:
            return await self.store.update(rows.build_quota_change(self.key, bucket, quota, version))
        except ConditionFailed as failure:
            return failure.item

    async def reconcile(self, *, ignores_interval: bool = False) -> HardBudgetBucket | None:
        """What was spent without a hold is taken out; by one process for all, and not often. None: no bucket."""
        item = await self.store.get(self.key.bucket_key, consistent=True)
        if item is None:
            return None
        bucket = HardBudgetBucket.from_item(item)
        if (
            not ignores_interval and 0 <= self.clock.now() - bucket.reconciled_at < MIN_RECONCILE_SECONDS
        ):  # one in the future is somebody's wrong clock
            return bucket
        spent_without_lease = await self._measure_spent_without_lease(bucket.spent_without_lease)
        try:
            return HardBudgetBucket.from_item(
                await self.store.update(rows.build_reconcile(self.key, bucket, spent_without_lease, self.clock.now()))
            )
        except ConditionFailed as failure:
            return None if failure.item is None else HardBudgetBucket.from_item(failure.item)

    async def _measure_spent_without_lease(self, known: int) -> int:
        """What is flushed between the two readings is in the second only, and taken for too much: so what comes to more
        than was known is read again, and the least holds. Each was enough when it began, and it only grows."""
        least = None
        for _ in range(RECONCILE_READS):
            leases = await self._read_leases()
            found = rows.compute_spent_without_lease(leases, await self.read_spent(self.key))
            least = found if least is None else min(least, found)
            if least <= known:
                break
        return least or 0

    async def _read_leases(self) -> list[BudgetLeaseRow]:
        return [BudgetLeaseRow.from_item(row.item) async for row in iterate_rows(self.store, self.key.lease_query)]
