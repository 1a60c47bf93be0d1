"""A process whose journal was replayed as if it were dead: its lease is no longer its own."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from typing import cast

from price_keeper.budgets.hard.budget_lease import BudgetLease, BudgetLeases, CostReservation, RefusalReason
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.lease_file import BudgetLeaseFile, release_former_leases
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import settle
from tests.support.hard_budget_fleet import NAME, DelayedStoreLink, HardBudgetWorld, simulated_run


@simulated_run(1000)
async def test_closed_lease_spends_nothing_more(world: HardBudgetWorld) -> None:
    async with Tasks(world.clock) as tasks:
        store, folder = cast(Store, DelayedStoreLink(world)), world.folder / "own"
        folder.mkdir()
        holds = BudgetLeaseFile(folder, world.ulids(world.clock).new())
        leases = BudgetLeases(store, world.clock, tasks, holds, partial(read_spent_pico, store))
        lease = leases.get(NAME, world.quota, world.version)
        held = await _held(lease, 100)
        assert held is not None
        held.on_never_sent()
        shutil.copytree(folder, world.folder / "copy")
        assert await release_former_leases(store, world.clock, world.folder / "copy") == 100
        assert await _held(lease, 200) is None
        assert lease.status.reason is RefusalReason.LEASE_CLOSED
        assert lease.free > 0
        assert await _held(lease, 1) is None
        bucket = world.bucket()
        assert bucket is not None
        assert bucket.unleased == 1000


async def _held(lease: BudgetLease, worst: int) -> CostReservation | None:
    asking = asyncio.get_running_loop().create_task(lease.reserve(worst))
    await settle()
    return asking.result()
