"""A taking or a giving whose answer is lost: what became of it is found out, once, and nothing is lost with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from price_keeper.budgets.hard.budget_lease import (
    TOP_UP_TIMEOUT_SECONDS,
    BudgetLeaseWriter,
    InsufficientBudget,
    RefusalReason,
)
from price_keeper.errors import CancellationReason, ReasonCode, TransactionFailed
from price_keeper.stores.contract import Store, Write

from tests.support.budget_leases import open_process, read_unleased, reserve_after
from tests.support.clock import settle
from tests.support.hard_budget_fleet import NAME, HardBudgetWorld, simulated_run
from tests.support.lease_rows import HOLDER


@pytest.mark.parametrize(("fault", "got"), [("lost", 60), ("away", 0)])
@simulated_run(100)
async def test_lost_top_up_answer_is_resolved(world: HardBudgetWorld, fault: str, got: int) -> None:
    async with open_process(world) as (lease, _, wire):
        await lease.reconcile()
        assert world.bucket() is None  # that makes none
        lease.apply_quota(100, 2)
        await settle()
        wire.set_fault(fault, 0)
        assert await reserve_after(world, lease, 60) is None
        assert (lease.free, read_unleased(world), lease.status.reason) == (
            0,
            100 - got,
            RefusalReason.STORE_UNAVAILABLE,
        )
        await world.clock.advance(1)
        assert await reserve_after(world, lease, 60)
        assert (read_unleased(world), lease.free, lease.in_flight) == (40, 0, 60)  # taken once, and none of it lost


@pytest.mark.parametrize(("fault", "back"), [("lost", 60), ("away", 0)])
@simulated_run(100)
async def test_lost_return_answer_is_resolved(world: HardBudgetWorld, fault: str, back: int) -> None:
    async with open_process(world) as (lease, leases, wire):
        held = await reserve_after(world, lease, 60)
        assert held is not None
        held.on_never_sent()
        await leases.tick()
        await world.clock.advance(6)
        wire.set_fault(fault, 0)
        await leases.tick()
        assert read_unleased(world) == 40 + back
        assert lease.free == (0 if back else 60)  # money of unknown outcome is not counted
        await world.clock.advance(1)
        assert await reserve_after(world, lease, 90)
        assert read_unleased(world) + lease.free + lease.in_flight == 100


@simulated_run(100)
async def test_late_write_never_counts_after_next_one(world: HardBudgetWorld) -> None:
    """A write whose client gave up long ago and wrote again."""
    async with open_process(world) as (lease, _, wire):
        lease.apply_quota(100, 2)
        await settle()
        wire.set_fault("late", 0)
        assert await reserve_after(world, lease, 30, TOP_UP_TIMEOUT_SECONDS) is None
        assert lease.status.reason is RefusalReason.STORE_UNAVAILABLE
        assert (
            await reserve_after(world, lease, 30) is None
        )  # no other caller waits for a write that has taken that long
        await world.clock.advance(10)
        await world.clock.advance(1)
        assert await reserve_after(world, lease, 30, 1)
        world.gates.pop().set()
        await settle()
        world.check()
        assert (read_unleased(world), lease.free) == (70, 0)


@pytest.mark.parametrize("fault", ["lost", "late"])
@simulated_run(100)
async def test_lost_top_up_is_returned_without_further_calls(world: HardBudgetWorld, fault: str) -> None:
    """Otherwise others would be refused until the period ends."""
    async with open_process(world) as (lease, leases, wire):
        lease.apply_quota(100, 2)
        await settle()
        wire.set_fault(fault, 0)
        assert await reserve_after(world, lease, 60, TOP_UP_TIMEOUT_SECONDS) is None
        await world.clock.advance(10)
        for gate in world.gates:
            gate.set()
        await settle()
        assert read_unleased(world) == 40
        for _ in range(2):
            await leases.tick()
        assert (read_unleased(world), lease.free) == (100, 0)
        world.check()


@simulated_run(100)
async def test_late_top_up_is_resolved_once(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, leases, wire):
        lease.apply_quota(100, 2)
        await settle()
        wire.set_fault("late", 0)
        assert await reserve_after(world, lease, 60, TOP_UP_TIMEOUT_SECONDS) is None
        await world.clock.advance(10)
        await world.clock.advance(1)
        await leases.tick()
        world.gates.pop().set()
        await settle()
        asked = wire.calls
        await leases.tick()
        assert (read_unleased(world), lease.free, wire.calls) == (100, 0, asked)
        world.check()


@pytest.mark.parametrize("maybe_applied", [False, True])
async def test_refused_return_regains_money_only_if_it_cannot_arrive_later(maybe_applied: bool) -> None:
    class Refusing:
        async def transact(self, writes: Sequence[Write]) -> None:
            reasons = [CancellationReason(ReasonCode.NONE), CancellationReason(ReasonCode.CONDITION_FAILED)]
            raise TransactionFailed(reasons, maybe_applied=maybe_applied)

    gained: list[int] = []
    own = BudgetLeaseWriter(cast(Store, Refusing()), NAME, HOLDER, gained.append)
    with pytest.raises(InsufficientBudget):
        await own.release(5)
    assert (gained, own.has_unconfirmed_write) == ([] if maybe_applied else [5], maybe_applied)
