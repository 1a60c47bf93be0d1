"""Purses of processes in simulated time, each with its own way to the store, and how a call takes from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from price_keeper.budgets.hard.budget_lease import BudgetLease, BudgetLeases, CostReservation
from price_keeper.ledger.aggregator import read_spent_pico
from price_keeper.ledger.lease_file import BudgetLeaseFile
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import settle
from tests.support.hard_budget_fleet import NAME, DelayedStoreLink, HardBudgetWorld


@asynccontextmanager
async def open_processes(
    world: HardBudgetWorld, number: int
) -> AsyncIterator[list[tuple[BudgetLeases, DelayedStoreLink]]]:
    """Each with its own way to the store, as they have it while they run."""
    ulids = world.ulids(world.clock)
    async with Tasks(world.clock) as tasks:
        opened = []
        for _ in range(number):
            link = DelayedStoreLink(world)
            store, lease_file = cast(Store, link), BudgetLeaseFile(world.folder, ulids.new())
            opened.append((BudgetLeases(store, world.clock, tasks, lease_file, partial(read_spent_pico, store)), link))
        yield opened


@asynccontextmanager
async def open_process(world: HardBudgetWorld) -> AsyncIterator[tuple[BudgetLease, BudgetLeases, DelayedStoreLink]]:
    async with open_processes(world, 1) as [(leases, link)]:
        yield leases.get(NAME, world.quota, world.version), leases, link


def read_unleased(world: HardBudgetWorld) -> int:
    bucket = world.bucket()
    assert bucket is not None
    return bucket.unleased


async def reserve_after(
    world: HardBudgetWorld, lease: BudgetLease, cost_ceiling: int, seconds: float = 0
) -> CostReservation | None:
    calling = asyncio.get_running_loop().create_task(lease.reserve(cost_ceiling))
    await world.clock.advance(seconds)
    await settle()
    assert calling.done()
    return calling.result()
