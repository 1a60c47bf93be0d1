"""What a process holds of a hard budget: enough, not too much, and nothing that is not taken."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from price_keeper.budgets.hard.budget_lease import RECONCILE_SECONDS, CostReservation, RefusalReason
from price_keeper.errors import StoreUnavailable
from price_keeper.ledger.ledger_entries import Receipt, UsageCounts

from tests.support.budget_leases import open_process, open_processes, read_unleased, reserve_after
from tests.support.clock import settle
from tests.support.hard_budget_fleet import NAME, HardBudgetWorld, simulated_run


@simulated_run(1000)
async def test_first_call_creates_bucket_and_next_calls_read_nothing(world: HardBudgetWorld) -> None:
    await world.spend_elsewhere(300)
    async with open_process(world) as (lease, _, wire):
        calls = [asyncio.create_task(lease.reserve(5)) for _ in range(10)]
        await settle()
        assert all(call.done() and call.result() for call in calls)
        asked = wire.calls
        assert lease.top_ups == 1  # they shared it
        assert (read_unleased(world), lease.free, lease.in_flight) == (650, 0, 50)
        for call in calls:
            held = call.result()
            assert held is not None
            held.on_completed(Receipt(UsageCounts(1, pico=1)))
            held.on_completed(Receipt(UsageCounts(1, pico=1)))
            held.on_never_sent()  # twice is once
        assert (lease.free, lease.in_flight) == (40, 0)
        assert all(lease.try_reserve(8) for _ in range(5))
        assert not lease.try_reserve(1)
        assert wire.calls == asked
        assert lease.status[:2] == (650, 1000)


@simulated_run(1000)
async def test_top_up_takes_at_most_one_share(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, _, _wire):
        for _ in range(12):
            assert await reserve_after(world, lease, 2)
        assert lease.top_ups < 6  # each takes twice as much as the one before
        assert 1000 // 8 >= lease.free >= 0
        assert read_unleased(world) + lease.free + lease.in_flight == 1000
        assert await reserve_after(world, lease, 700)  # a call that needs more gets it


@simulated_run(100)
async def test_empty_bucket_refuses_without_further_reads(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, _, wire):
        first = await reserve_after(world, lease, 60)
        assert first is not None
        assert await reserve_after(world, lease, 60) is None
        assert lease.status.reason is RefusalReason.INSUFFICIENT
        assert lease.status.unleased == 40
        assert 0 < lease.status.retry_after <= 1
        asked = wire.calls
        assert await reserve_after(world, lease, 60) is None
        assert wire.calls == asked
        assert await reserve_after(world, lease, 30)  # there is enough
        first.on_completed(None)
        assert await reserve_after(world, lease, 60)  # our own money came back
        waits = []
        for _ in range(8):
            assert await reserve_after(world, lease, 60) is None
            waits.append(lease.status.retry_after)
            await world.clock.advance(lease.status.retry_after)
        assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
        assert lease.refusals == 10


@simulated_run(100)
async def test_small_remainders_of_processes_are_pooled(world: HardBudgetWorld) -> None:
    async with open_processes(world, 2) as made:
        mine, theirs = (leases.get(NAME, 100, 1) for leases, _ in made)
        for lease in (mine, theirs):
            held = await reserve_after(world, lease, 45)
            assert held is not None
            held.on_never_sent()
        assert (mine.free, theirs.free, read_unleased(world)) == (45, 45, 10)
        assert await reserve_after(world, mine, 90) is None
        assert (mine.free, read_unleased(world)) == (0, 55)
        assert await reserve_after(world, theirs, 90)
        assert read_unleased(world) == 10


@simulated_run(1000)
async def test_idle_lease_is_returned(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, leases, _):
        held = await reserve_after(world, lease, 100)
        assert held is not None
        held.on_completed(Receipt(UsageCounts(1, pico=10)))
        for _ in range(4):
            await leases.tick()
            await world.clock.advance(1)
        assert lease.free > 0
        for _ in range(4):
            await world.clock.advance(1)
            await leases.tick()
        assert (lease.free, read_unleased(world)) == (0, 990)


@simulated_run(100_000)
async def test_lease_after_burst_is_returned(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, leases, _):
        burst = [asyncio.create_task(lease.reserve(500)) for _ in range(190)]
        await settle()
        for call in burst:
            held = call.result()
            assert held is not None
            held.on_never_sent()
        assert lease.free >= 95_000
        for _ in range(30):
            await world.clock.advance(1)
            held = await reserve_after(world, lease, 500)
            assert held is not None
            held.on_never_sent()
            await leases.tick()
        assert lease.free < 20_000
        assert read_unleased(world) + lease.free == 100_000


@simulated_run(100)
async def test_store_outage_refuses_all_but_leased_money(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, _, wire):
        held = await reserve_after(world, lease, 30)
        assert held is not None
        held.on_never_sent()
        wire.is_away = True
        assert await reserve_after(world, lease, 30)
        assert await reserve_after(world, lease, 30) is None
        assert (lease.status.reason, lease.status.unleased) == (RefusalReason.STORE_UNAVAILABLE, 70)
        wire.is_away = False
        assert await reserve_after(world, lease, 30) is None  # for a second
        await world.clock.advance(1)
        assert await reserve_after(world, lease, 30)
        assert lease.status.reason is None


@simulated_run(100)
async def test_failing_top_up_is_not_retried_endlessly(
    world: HardBudgetWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async with open_process(world) as (lease, _, wire):
        monkeypatch.setattr(world.store, "get", broken)
        assert await reserve_after(world, lease, 30) is None
        assert await reserve_after(world, lease, 30) is None
        assert (wire.calls, lease.status.reason) == (1, RefusalReason.STORE_UNAVAILABLE)
        assert "ZeroDivisionError" in caplog.text


@simulated_run(100)
async def test_cancelled_first_read_is_repeated(world: HardBudgetWorld) -> None:
    async with open_processes(world, 2) as made:
        mine, theirs = (leases.get(NAME, 100, 1) for leases, _ in made)
        assert await reserve_after(world, mine, 10)
        await world.clock.advance(60)
        await world.spend_elsewhere(80)
        reads = 0

        async def read(*_: object) -> int:
            nonlocal reads
            reads += 1
            raise StoreUnavailable("away")

        spent, theirs._shared_bucket = theirs._shared_bucket, replace(theirs._shared_bucket, read_spent=read)
        assert await reserve_after(world, theirs, 20) is None
        assert reads == 1
        theirs._shared_bucket = spent
        await world.clock.advance(10)
        assert await reserve_after(world, theirs, 20) is None
        assert theirs.status.reason is RefusalReason.INSUFFICIENT


@simulated_run(100)
async def test_bucket_follows_newest_settings_once(world: HardBudgetWorld) -> None:
    async with open_processes(world, 3) as made:
        old, new, newer = (leases.get(NAME, quota, version) for (leases, _), quota, version in
                           zip(made, (100, 300, 50), (1, 2, 3), strict=True))  # fmt: skip
        assert await reserve_after(world, old, 40)
        held = await reserve_after(world, new, 150)
        assert read_unleased(world) == 110
        assert await reserve_after(world, newer, 10) is None
        assert read_unleased(world) == -140  # 190 of 50 are taken
        assert await reserve_after(world, old, 1, 30) is None
        assert await reserve_after(world, new, 1, 30) is None
        assert read_unleased(world) == -140
        assert old.status.quota == 50
        assert held is not None
        held.on_never_sent()
        await made[1][0].tick()  # where a quota is exceeded already, no process keeps the rest
        assert (new.free, read_unleased(world)) == (0, 10)
        made[1][0].get(NAME, 80, 4)
        await settle()
        assert read_unleased(world) + new.free == 40
        new.apply_quota(1000, 3)
        assert new.quota == 80


@simulated_run(100)
async def test_quota_change_seen_by_all_is_applied_once(world: HardBudgetWorld) -> None:
    async with open_processes(world, 5) as made:
        for leases, _ in made:
            assert await reserve_after(world, leases.get(NAME, 100, 1), 1)
        for leases, _ in made:
            leases.get(NAME, 900, 2)
        await settle()
        assert read_unleased(world) + sum(leases.leased_pico for leases, _ in made) == 900


@simulated_run(1000)
async def test_concurrent_first_reads_deduct_unleased_spend_once(world: HardBudgetWorld) -> None:
    async with open_processes(world, 5) as made:
        all_of_them = [leases.get(NAME, 1000, 1) for leases, _ in made]
        assert await reserve_after(world, all_of_them[0], 100)
        await world.spend_elsewhere(300)
        await world.clock.advance(60)
        await asyncio.gather(*(lease.reconcile() for lease in all_of_them))
        assert read_unleased(world) + all_of_them[0].free == 600
        world.check()


@simulated_run(1000)
async def test_first_call_counts_spend_before_bucket_existed(world: HardBudgetWorld) -> None:
    """As when a budget was soft for a while."""
    async with open_processes(world, 2) as made:
        mine, theirs = (leases.get(NAME, 1000, 1) for leases, _ in made)
        assert await reserve_after(world, mine, 100)
        await world.clock.advance(60)
        await world.spend_elsewhere(800)
        assert await reserve_after(world, theirs, 150) is None
        assert theirs.status[:2] == (read_unleased(world), 1000)


@simulated_run(10_000)
async def test_top_up_is_bounded_by_remaining_share(world: HardBudgetWorld) -> None:
    """Whatever was there when this process last looked."""
    async with open_processes(world, 2) as made:
        mine, theirs = (leases.get(NAME, 10_000, 1) for leases, _ in made)
        assert await reserve_after(world, mine, 100)
        assert await reserve_after(world, theirs, 9600)
        before = read_unleased(world) + mine.free
        calls = [asyncio.create_task(mine.reserve(30)) for _ in range(5)]
        await settle()
        assert [call.result() is not None for call in calls] == [True] * 5
        assert mine.free < 30
        assert read_unleased(world) + mine.free == before - 150


@simulated_run(1000)
async def test_unleased_spend_is_deducted_once_for_all(world: HardBudgetWorld) -> None:
    async with open_processes(world, 2) as made:
        mine, theirs = (leases.get(NAME, 1000, 1) for leases, _ in made)
        assert await reserve_after(world, mine, 10)
        assert await reserve_after(world, theirs, 10)
        await world.spend_elsewhere(300)
        await mine.reconcile()
        assert read_unleased(world) == 980  # it was read just now
        made[0][0].note_spend_elsewhere(NAME)
        await world.clock.advance(RECONCILE_SECONDS)
        await made[0][0].tick()
        assert read_unleased(world) + mine.free == 980 - 300 + (mine.free)
        seen = world.bucket()
        await theirs.reconcile()
        assert world.bucket() == seen
        assert theirs.status.unleased == read_unleased(world)


@simulated_run(1000)
async def test_recreated_bucket_excludes_leased_money(world: HardBudgetWorld) -> None:
    async with open_process(world) as (lease, _, _wire):
        assert await reserve_after(world, lease, 400)
        del world.store.items[NAME.bucket_key]
        assert await reserve_after(world, lease, 10)
        world.check()
        assert read_unleased(world) + lease.free == 590


@simulated_run(1000)
async def test_call_above_cost_ceiling_is_logged_and_paid(
    world: HardBudgetWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_process(world) as (lease, _, _wire):
        for _ in range(2):
            held = await reserve_after(world, lease, 10)
            assert held is not None
            held.on_completed(Receipt(UsageCounts(1, pico=400)))
            assert lease.free < 0
        assert caplog.text.count("cost 0.000000000400 USD") == 1
        assert await reserve_after(world, lease, 10)
        assert lease.free >= 0
        assert await reserve_after(world, lease, 900) is None


@simulated_run(1000)
async def test_failing_lease_file_prevents_top_up(world: HardBudgetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async with open_process(world) as (lease, _, _wire):
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", no_room)
            assert await reserve_after(world, lease, 10) is None
        assert lease.status.reason is RefusalReason.DISK_FAILED
        assert read_unleased(world) == 1000
        await world.clock.advance(1)
        assert await reserve_after(world, lease, 10)


@simulated_run(300_000)
async def test_eight_processes_exhaust_quota_with_few_writes(world: HardBudgetWorld) -> None:
    chance, calls, spent = random.Random(7), 0, 0
    async with open_processes(world, 8) as made:
        leases = [each.get(NAME, world.quota, 1) for each, _ in made]
        under_way: list[tuple[float, CostReservation, int]] = []
        for _ in range(1200):  # twenty a second, each for five seconds, of a third of a per mille at most
            for lease in leases:
                held = CostReservation(lease, 100) if lease.try_reserve(100) else await lease.reserve(100)
                if held is not None:
                    calls, cost = calls + 1, chance.randrange(100)
                    under_way.append((world.clock.monotonic() + 5, held, cost))
            await world.clock.advance(0.05)
            while under_way and under_way[0][0] <= world.clock.monotonic():
                _, held, cost = under_way.pop(0)
                held.on_completed(Receipt(UsageCounts(1, pico=cost)))
                spent += cost
            if round(world.clock.monotonic() * 20) % 20 == 0:
                for each, _ in made:
                    await each.tick()
        spent += sum(cost for _, _, cost in under_way)
        assert 0.97 * world.quota <= spent <= world.quota
        assert sum(lease.top_ups for lease in leases) < calls / 20
        print(f"{spent / world.quota:.4%}, {calls} calls, {sum(wire.calls for _, wire in made)} store calls")
