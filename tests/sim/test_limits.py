"""Fleets that lease a limit keep to it, use it up and share it out, whatever goes wrong between them and the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache

import pytest
from price_keeper.rates.rate_lease import IDLE_SECONDS, MAX_IDLE_SECONDS
from price_keeper.rates.token_bucket import MILLI, RateBucket, RateLimit
from price_keeper.tasks import Tasks

from tests.support.effort import seeds
from tests.support.rate_limit_fleet import (
    RPM,
    TPM,
    FleetSetup,
    LeapingLoop,
    LoopClock,
    RateLimitedFleet,
    measure,
    run_leaping,
)

SEEDS = seeds(1)
found = cache(measure)


def played(setup: FleetSetup, work: Callable[[RateLimitedFleet], Awaitable[None]]) -> None:
    async def within(loop: LeapingLoop) -> None:
        async with Tasks(LoopClock(loop)) as tasks:
            await work(RateLimitedFleet(setup, loop, tasks))

    run_leaping(within)


def holds(fleet: RateLimitedFleet) -> None:
    for ledger in fleet.ledgers.values():
        assert ledger.over_bound <= 1e-6
        assert not ledger.is_overdrawn


# The figures.


@pytest.mark.parametrize("sidecars", [1, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_load_below_limit_never_waits_and_writes_rarely(sidecars: int, seed: int) -> None:
    outcome = found(FleetSetup(sidecars, 0.8, seconds=40, warm_up=30, retries=True, seed=seed))
    assert outcome.refused <= 0.01 * outcome.calls
    assert outcome.waited <= 0.02 * outcome.calls
    assert outcome.items <= 0.15 * outcome.admitted
    assert outcome.transactions <= 0.08 * outcome.admitted
    assert outcome.ledger.over_bound <= 0


@pytest.mark.parametrize("sidecars", [1, 8])
@pytest.mark.parametrize("load", [1.5, 3.0])
def test_load_above_limit_uses_all_of_it(sidecars: int, load: float) -> None:
    outcome = found(FleetSetup(sidecars, load, seconds=40, warm_up=60))
    assert 0.97 <= outcome.utilisation <= 1.05
    assert outcome.waited <= 0.05 * outcome.calls
    assert outcome.items <= 0.15 * outcome.admitted
    assert outcome.ledger.over_bound <= 0
    assert not outcome.ledger.is_overdrawn


def test_grants_are_nearly_equal_over_minutes() -> None:
    least, most = found(FleetSetup(8, 1.5, seconds=200, warm_up=60)).fairness
    assert least >= 0.8
    assert most <= 1.2


def test_demand_below_share_is_met() -> None:
    setup = FleetSetup(8, 1.5, seconds=100, warm_up=60, demands=(0.3, 0.7), seed=3)
    outcome = found(setup)
    for got, share in zip(outcome.admitted_by_sidecar, setup.demands, strict=False):
        assert got >= 0.95 * share * setup.share * setup.seconds * 0.9  # Poisson: a tenth more or less came
    assert min(outcome.admitted_by_sidecar[2:]) > max(outcome.admitted_by_sidecar[:2])


def test_retry_after_stated_wait_is_admitted() -> None:
    outcome = found(FleetSetup(8, 1.0, burst=2.0, seconds=120, warm_up=60, retries=True, seed=2))
    assert outcome.admitted_on_retry >= 0.8 * outcome.retried


# The bound.


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("is_unsure", [False, True])
def test_bound_holds_whatever_fails(is_unsure: bool, seed: int) -> None:
    """Sidecars crash, stand still, lose answers and their store; new ones come."""

    async def work(fleet: RateLimitedFleet) -> None:
        fleet.start()
        for number in range(12):
            await asyncio.sleep(fleet.chance.uniform(1, 4))
            victim = fleet.sidecars[number % len(fleet.sidecars)]
            match number % 4:
                case 0:
                    victim.is_dead = True
                case 1:
                    victim.is_paused = not victim.is_paused
                case 2:
                    victim.link.lost_answers = 5
                case 3:
                    victim.link.is_away = not victim.link.is_away
        holds(fleet)
        assert fleet.outcome.admitted > 500

    played(FleetSetup(6, 2.0, burst=2.0, has_late_usage=is_unsure, seed=seed), work)


@pytest.mark.parametrize("burst", [2.0, 5.0])
def test_bound_from_full_bucket_holds_and_is_nearly_reached(burst: float) -> None:
    outcome = found(FleetSetup(8, 3.0, share=0.5, burst=burst, seconds=60, warm_up=0))
    assert outcome.ledger.over_bound <= 0
    assert outcome.ledger.over_capacity >= 0


def test_bound_is_broken_without_bucket() -> None:
    """Sidecars that do not go by the bucket break it, and that is seen."""

    async def work(fleet: RateLimitedFleet) -> None:
        fleet.start()
        await asyncio.sleep(10)
        for sidecar in fleet.sidecars:
            for holder in sidecar.lease_manager._holders.values():
                holder.lease.held = [held + 500 * MILLI for held in holder.lease.held]
        await asyncio.sleep(10)
        assert fleet.ledgers[RPM].over_bound > 0
        assert fleet.ledgers[RPM].is_overdrawn

    played(FleetSetup(4, 3.0, burst=2.0), work)


def test_idle_sidecars_hold_nothing_for_long() -> None:
    async def work(fleet: RateLimitedFleet) -> None:
        await fleet.warm_up()
        for sidecar in fleet.sidecars:
            sidecar.starts += 1  # and no further calls
        assert any(sidecar.held for sidecar in fleet.sidecars)
        await asyncio.sleep(IDLE_SECONDS + 2)
        assert all(sidecar.held == 0 for sidecar in fleet.sidecars)

    played(FleetSetup(4, 0.8), work)
    assert MAX_IDLE_SECONDS <= 20


# Nothing is lost or counted twice. What never refills shows that to the thousandth.


def _without_refill(fleet: RateLimitedFleet) -> None:
    def still(bucket: RateBucket) -> RateBucket:
        limits = tuple(RateLimit(limit.name, 10**6 * limit.capacity, 0, 60_000) for limit in bucket.limits)
        return replace(bucket, limits=limits)

    fleet.buckets = [still(bucket) for bucket in fleet.buckets]
    fleet.ledgers.clear()


def _books(fleet: RateLimitedFleet) -> dict[str, tuple[int, int]]:
    """By limit: what was taken from the app's bucket, and what was reported as used."""
    (bucket, _) = fleet.buckets
    item = fleet.store.memory.items[bucket.key]
    return {
        limit.name: (limit.capacity - int(str(item[f"{limit.name}_tk"])), int(str(item[f"{limit.name}_tc"])))
        for limit in bucket.limits
    }


@pytest.mark.parametrize("is_unsure", [False, True])
def test_stopped_fleet_reported_usage_exactly(is_unsure: bool) -> None:
    async def work(fleet: RateLimitedFleet) -> None:
        _without_refill(fleet)
        fleet.start()
        for number in range(8):
            await asyncio.sleep(2)
            fleet.sidecars[number % 3].link.lost_answers = number % 4
            fleet.sidecars[(number + 1) % 3].link.is_away = number % 2 == 0
        for sidecar in fleet.sidecars:
            sidecar.link.is_away, sidecar.link.lost_answers = False, 0
            sidecar.starts += 1
            await sidecar.lease_manager.stop()
        await asyncio.sleep(60)  # the last calls end, and what was unsure is settled
        assert [sidecar.client.pending for sidecar in fleet.sidecars] == [0, 0, 0]
        gone = _books(fleet)
        assert gone[RPM] == (fleet.outcome.admitted * MILLI, fleet.outcome.admitted * MILLI)
        assert gone[TPM][0] == gone[TPM][1] == fleet.actual_usage[TPM]

    played(FleetSetup(3, 1.0, has_late_usage=is_unsure), work)


def test_crash_loses_only_what_was_held() -> None:
    async def work(fleet: RateLimitedFleet) -> None:
        _without_refill(fleet)
        fleet.start()
        await asyncio.sleep(15.3)
        victim, *others = fleet.sidecars
        for holder in victim.lease_manager._holders.values():
            await victim.lease_manager._top_ups.wait(holder)
        victim.is_dead = True
        held = victim.lease_manager.held_by_limit()[RPM]
        for sidecar in others:
            sidecar.starts += 1
            await sidecar.lease_manager.stop()
        await asyncio.sleep(5)
        gone, reported = _books(fleet)[RPM]
        assert gone == fleet.outcome.admitted * MILLI + held
        assert reported <= fleet.outcome.admitted * MILLI
        assert 0 < held <= 40 * fleet.setup.share * MILLI

    played(FleetSetup(3, 1.0), work)


def test_lost_tokens_return_with_refill() -> None:
    async def work(fleet: RateLimitedFleet) -> None:
        await fleet.warm_up()
        for sidecar in fleet.sidecars[:4]:
            sidecar.is_dead = True
        await asyncio.sleep(20)
        fleet.reset_counts()
        await asyncio.sleep(40)
        used = fleet.collect_outcome().admitted / (fleet.rate * 40)
        assert used == pytest.approx(1.0, abs=0.05)  # four of eight that want three times their share each

    played(FleetSetup(8, 3.0), work)
