"""Purses of processes in simulated time, each with its own way to the store, and how a call takes from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from price_keeper.hard.holds import BudgetLeaseFile
from price_keeper.hard.purse import CostReservation, BudgetLease
from price_keeper.hard.purses import BudgetLeases
from price_keeper.recording.aggregator import read_spent_pico
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks

from tests.support.clock import settle
from tests.support.hard_fleet import NAME, Wire, World


@asynccontextmanager
async def processes(world: World, number: int) -> AsyncIterator[list[tuple[BudgetLeases, Wire]]]:
    """Each with its own way to the store, as they have it while they run."""
    ulids = world.ulids(world.clock)
    async with Tasks(world.clock) as tasks:
        made = []
        for _ in range(number):
            wire = Wire(world)
            store, holds = cast(Store, wire), BudgetLeaseFile(world.folder, ulids.new())
            made.append((BudgetLeases(store, world.clock, tasks, holds, partial(read_spent_pico, store)), wire))
        yield made


@asynccontextmanager
async def one(world: World) -> AsyncIterator[tuple[BudgetLease, BudgetLeases, Wire]]:
    async with processes(world, 1) as [(purses, wire)]:
        yield purses.get(NAME, world.quota, world.version), purses, wire


def left(world: World) -> int:
    bucket = world.bucket()
    assert bucket is not None
    return bucket.unleased


async def waited(world: World, purse: BudgetLease, worst: int, seconds: float = 0) -> CostReservation | None:
    calling = asyncio.get_running_loop().create_task(purse.reserve(worst))
    await world.clock.advance(seconds)
    await settle()
    assert calling.done()
    return calling.result()
