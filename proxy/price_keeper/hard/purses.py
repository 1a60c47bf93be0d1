"""A purse for each hard budget that is called for, and the work that they all need in the background."""

from __future__ import annotations

import logging
import random
from contextlib import suppress

from price_keeper.clock import Clock
from price_keeper.errors import StoreError
from price_keeper.hard.hold import LeaseClosed
from price_keeper.hard.holds import BudgetLeaseFile
from price_keeper.hard.purse import BudgetLease
from price_keeper.hard.rows import HardBudgetKey
from price_keeper.hard.shared import ReadSpent
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

TICK_SECONDS = 1.0
JITTER = 0.2
RECONCILE_SECONDS = 60.0

_log = logging.getLogger("price_keeper.hard")


class BudgetLeases:
    """`holds` are those of this run; `spent` reads what a budget's shards say."""

    def __init__(
        self, store: Store, clock: Clock, tasks: Tasks, lease_file: BudgetLeaseFile, read_spent: ReadSpent
    ) -> None:
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._lease_file = lease_file
        self._read_spent = read_spent
        self._leases: dict[HardBudgetKey, BudgetLease] = {}
        self._reconcile_due_at: dict[HardBudgetKey, float] = {}  # to be reconciled, by the monotonic clock
        self._changed_keys: set[HardBudgetKey] = (
            set()
        )  # of other settings than before: there may have been no quota for a while

    @property
    def holder(self) -> str:
        """The name that accounts of calls give to what is spent here."""
        return self._lease_file.holder

    def get(self, key: HardBudgetKey, quota: int, version: int) -> BudgetLease:
        """By the newest settings that anybody named."""
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = BudgetLease(
                self._store, self._clock, self._tasks, key, self._lease_file, self._read_spent, quota, version
            )
            self._schedule_reconcile(key, random.uniform(0, RECONCILE_SECONDS))
        elif version > lease.version:
            lease.apply_quota(quota, version)
            self._changed_keys.add(key)
            self._reconcile_due_at[key] = self._clock.monotonic()
        return lease

    @property
    def leased_pico(self) -> int:
        """Taken from buckets, and not spent as far as is known here."""
        return sum(lease.free + lease.in_flight for lease in self._leases.values())

    @property
    def top_ups(self) -> int:
        return sum(lease.top_ups for lease in self._leases.values())

    @property
    def refusals(self) -> int:
        return sum(lease.refusals for lease in self._leases.values())

    def start(self) -> None:
        self._tasks.run_every("hard budgets", TICK_SECONDS, self.tick, jitter=JITTER)

    async def tick(self) -> None:
        """What nobody needs goes back, what was spent without a hold is looked for, and what is over is forgotten."""
        for key, lease in tuple(self._leases.items()):
            if key.is_long_past(self._clock.now()) and not lease.in_flight:
                del self._leases[key], self._reconcile_due_at[key]
                self._changed_keys.discard(key)
                continue
            with suppress(StoreError, LeaseClosed):  # whoever needs money is told
                await lease.tick()
            await self._reconcile_if_due(key, lease)

    async def _reconcile_if_due(self, key: HardBudgetKey, lease: BudgetLease) -> None:
        if self._clock.monotonic() < self._reconcile_due_at[key]:
            return
        self._schedule_reconcile(key, RECONCILE_SECONDS * random.uniform(1 - JITTER, 1 + JITTER))
        try:
            await lease.reconcile(ignores_interval=key in self._changed_keys)
            self._changed_keys.discard(key)
        except StoreError as failure:
            _log.warning("what is spent of the hard budget %s is not known: %s", " ".join(key), failure)

    def _schedule_reconcile(self, key: HardBudgetKey, seconds: float) -> None:
        self._reconcile_due_at[key] = self._clock.monotonic() + seconds

    def note_spend_elsewhere(self, key: HardBudgetKey) -> None:
        """Something was counted that nobody held: the next tick looks for it."""
        if key in self._reconcile_due_at:
            self._reconcile_due_at[key] = self._clock.monotonic()
