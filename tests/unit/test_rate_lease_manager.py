"""The manager of rate leases: which calls wait for the store, what happens while it is away, and what is returned."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from price_keeper.errors import Busy, StoreThrottled, StoreUnavailable
from price_keeper.rates.bucket_client import NORMAL, RETRY, BucketClient, Grant
from price_keeper.rates.rate_lease_manager import STORE_TIMEOUT_SECONDS, RateLeaseManager
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores.contract import Key, Store
from price_keeper.tasks import Tasks

from tests.support.rate_lease_manager import (
    BUCKETS,
    COSTS,
    LeaseManagerHarness,
    make_buckets,
    refuse_all,
    run_simulated,
)
from tests.support.rate_limit_fleet import BusyStore, LeapingLoop, LoopClock, run_leaping


def test_first_call_waits_and_next_do_not() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        assert (await desk.admit()).decided_by == "waited"
        assert desk.lease_manager.try_admit("web", BUCKETS, COSTS) is not None
        assert len(desk.client.requests) == 1
        assert (desk.lease_manager.counts.waited, desk.lease_manager.counts.local) == (1, 1)

    run_simulated(work)


def test_concurrent_waiters_share_one_request() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        found = await asyncio.gather(*(desk.admit() for _ in range(6)))
        assert all(admission.is_admitted for admission in found)
        assert len(desk.client.requests) == 1

    run_simulated(work)


def test_waiter_left_without_tokens_asks_again() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        found = await asyncio.gather(*(desk.admit() for _ in range(40)))
        assert all(admission.is_admitted for admission in found)
        assert 2 <= len(desk.client.requests) <= 10

    run_simulated(work)


def test_background_top_up_prevents_waiting() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        for number in range(400):
            desk.lease_manager.settle(await desk.admit(), None)
            await asyncio.sleep(0.05)
            if number == 100:
                waited = desk.lease_manager.counts.waited
        assert desk.lease_manager.counts.waited == waited
        assert desk.lease_manager.counts.top_ups[NORMAL] == len(desk.client.requests) < 40

    run_simulated(work)


def test_store_refusal_applies_locally_until_wait_is_over() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.grant_for = refuse_all
        first = await desk.admit()
        second = await desk.admit()
        assert not first.is_admitted
        assert not second.is_admitted
        assert len(desk.client.requests) == 1
        assert (desk.lease_manager.counts.refused_by_store, desk.lease_manager.counts.refused_locally) == (1, 1)
        assert first.wait_ms is not None
        assert first.wait_ms >= 700
        desk.client.grant_for = None
        await asyncio.sleep(first.wait_ms / 1000)
        assert (await desk.admit()).is_admitted

    run_simulated(work)


def test_call_above_capacity_is_refused_without_request() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        found = await desk.lease_manager.admit("web", BUCKETS, {"rpm": 2_000_000})
        assert (found.is_admitted, found.wait_ms) == (False, None)
        assert desk.client.requests == []

    run_simulated(work)


def test_throttled_store_refuses_with_short_wait() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = StoreThrottled("busy")
        admission = await desk.admit()
        assert admission.decided_by == "refused"
        assert admission.wait_ms is not None
        assert admission.wait_ms < 1000

    run_simulated(work)


def test_only_read_balance_counts_as_level() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        await desk.admit()
        (holder,) = desk.lease_manager._holders.values()
        seen: list[bool] = []
        for part, path in ((1, NORMAL), (1, RETRY), (2, RETRY)):
            desk.client.grant_for = lambda wants, part=part, path=path: Grant(
                {name: amount // part for name, amount in wants.items()}, 0, dict.fromkeys(wants, 10**9), path, 1
            )
            holder.lease.held, before = [0, 0], holder.lease._level_at
            await desk.admit()
            seen.append(holder.lease._level_at > before)
            await asyncio.sleep(1)
        assert seen == [True, False, True]

    run_simulated(work)


def test_surplus_is_returned() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        await desk.admit()
        (holder,) = desk.lease_manager._holders.values()
        holder.lease.held = [900_000, 900_000_000]
        await desk.lease_manager.sweep()
        ((taken, _),) = desk.client.adjusted
        assert -900_000 < taken["rpm"] < -800_000
        assert desk.lease_manager.held_by_limit()["rpm"] == 900_000 + taken["rpm"]

    run_simulated(work)


# Settling.


def test_actual_usage_is_reported_once_with_next_write() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.lease_manager.settle(await desk.admit(), {"tpm": 300_000})
        desk.lease_manager.settle(await desk.admit(), None)
        desk.lease_manager.settle(await desk.admit(), {"rpm": 0, "tpm": 0})
        await asyncio.sleep(10)
        await desk.lease_manager.sweep()
        await desk.lease_manager.sweep()
        assert desk.client.used == {"rpm": 2000, "tpm": 800_000}
        ((taken, _),) = desk.client.adjusted
        assert taken["rpm"] == 2000 - desk.client.requests[0][1]["rpm"]
        assert taken["tpm"] == 800_000 - desk.client.requests[0][1]["tpm"]

    run_simulated(work)


def test_failed_write_keeps_usage_for_next() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.lease_manager.settle(await desk.admit(), None)
        desk.client.failure = StoreThrottled("busy")
        while not desk.lease_manager.counts.failed:
            desk.lease_manager.settle(await desk.admit(), {"rpm": 0, "tpm": 0})
            if desk.lease_manager.held_by_limit()["rpm"] > 0:
                desk.lease_manager._holders["web"].lease.held = [0, 0]
        desk.client.failure = None
        await asyncio.sleep(20)
        await desk.admit()
        assert desk.client.used["rpm"] == 1000

    run_simulated(work)


def test_idle_leases_are_returned_and_dropped() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        admission = await desk.admit()
        await asyncio.sleep(10)
        await desk.lease_manager.sweep()
        assert desk.lease_manager.held_by_limit()["rpm"] == 0
        assert desk.lease_manager.counts.given_back == 1
        await asyncio.sleep(100)
        await desk.lease_manager.sweep()
        assert len(desk.lease_manager) == 1  # its call is still under way
        desk.lease_manager.settle(admission, None)
        await desk.lease_manager.sweep()
        assert desk.client.used == {"rpm": 1000, "tpm": 500_000}
        await desk.lease_manager.sweep()
        assert len(desk.lease_manager) == 0

    run_simulated(work)


def test_unsent_adjustments_are_sent_by_sweep() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        await desk.lease_manager.sweep()
        assert desk.client.flushes == 0
        desk.client.pending = 1
        await desk.lease_manager.sweep()
        assert desk.client.flushes == 1

    run_simulated(work)


def test_close_returns_everything_including_late_settlements() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        late = await desk.admit()
        desk.lease_manager.settle(await desk.admit(), None)
        desk.client.latency = 1.0
        waiting = asyncio.ensure_future(desk.admit("other"))
        await asyncio.sleep(0.1)
        await desk.lease_manager.stop()
        await waiting
        assert desk.lease_manager.held_by_limit() == {"rpm": 0, "tpm": 0}
        desk.lease_manager.settle(late, {"tpm": 0})
        desk.lease_manager.settle(waiting.result(), {"rpm": 0, "tpm": 0})
        exact = await desk.admit()
        assert exact.decided_by == "exact"
        desk.lease_manager.settle(exact, None)
        await asyncio.sleep(1)
        given = sum(wants["rpm"] for _, wants in desk.client.requests) + sum(t["rpm"] for t, _ in desk.client.adjusted)
        assert given == desk.client.used["rpm"] == 3000
        assert desk.client.used["tpm"] == 1_000_000

    run_simulated(work)


def test_close_flushes_pending_and_reports_last_usage() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        exact = await desk.admit(is_exact=True)
        desk.client.pending = 1
        desk.lease_manager.settle(exact, {"rpm": 0, "tpm": 0})
        await desk.lease_manager.stop()
        assert desk.client.used == {"rpm": 0, "tpm": 0}
        assert (desk.client.flushes, desk.client.pending) == (1, 0)

    run_simulated(work)


# The store is away.


def test_store_outage_serves_from_local_bucket() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = StoreUnavailable("away")
        found = [await desk.admit() for _ in range(1300)]
        served = sum(admission.is_admitted for admission in found)
        assert {admission.decided_by for admission in found} == {"alone", "refused"}
        assert served == pytest.approx(1200, abs=3)  # the whole limit, once
        assert desk.lease_manager.counts.alone == served
        assert len(desk.client.requests) == 1  # the others did not wait
        assert found[-1].wait_ms is not None
        await asyncio.sleep(found[-1].wait_ms / 1000)
        admission = await desk.admit()
        assert admission.decided_by == "alone"
        assert (await desk.admit()).decided_by == "refused"
        desk.lease_manager.settle(admission, {"rpm": 0, "tpm": 0})
        assert (await desk.admit()).decided_by == "alone"
        await asyncio.sleep(600)
        assert sum([(await desk.admit()).is_admitted for _ in range(1300)]) == pytest.approx(1200, abs=3)
        desk.client.failure = None
        await asyncio.sleep(2)
        assert (await desk.admit()).decided_by == "waited"

    run_simulated(work)


def test_failed_top_ups_are_logged_once_a_minute_with_caller_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = StoreUnavailable("the store is away")
        for _ in range(4):
            await desk.admit("web", make_buckets(scope="ORG#a#APP#web"))
            await desk.admit("shop", make_buckets(scope="ORG#a#APP#shop"))
            await asyncio.sleep(20)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2
        assert "the rate lease of ORG#a#APP#web (" in lines[0]
        assert ": the store is away; " in lines[0]

    run_simulated(work)


def test_offline_usage_is_reported_but_not_taken() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = StoreUnavailable("away")
        admission = await desk.admit()
        desk.lease_manager.settle(admission, {"tpm": 100_000})
        assert desk.lease_manager.held_by_limit() == {"rpm": 0, "tpm": 0}
        desk.client.failure = None
        await asyncio.sleep(2)
        await desk.admit()
        assert desk.client.used == {"rpm": 1000, "tpm": 100_000}

    run_simulated(work)


def test_store_outage_with_refuse_policy_refuses() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = StoreUnavailable("away")
        with pytest.raises(Busy):
            await desk.admit(serves_offline=False)
        with pytest.raises(Busy):
            await desk.admit(serves_offline=False, is_exact=True)

    run_simulated(work)


def test_slow_top_up_delays_calls_briefly_and_is_kept() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.latency = 5.0
        began = asyncio.get_running_loop().time()
        assert (await desk.admit()).decided_by == "alone"
        assert asyncio.get_running_loop().time() - began == pytest.approx(STORE_TIMEOUT_SECONDS)
        assert (await desk.admit()).decided_by == "alone"
        assert asyncio.get_running_loop().time() - began == pytest.approx(STORE_TIMEOUT_SECONDS)
        await asyncio.sleep(4)
        assert (await desk.admit()).decided_by == "local"

    run_simulated(work)


def test_internal_error_does_not_retry_forever() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.failure = KeyError("a mistake")
        assert (await desk.admit()).decided_by == "alone"
        assert len(desk.client.requests) == 1

    run_simulated(work)


# Exactly.


def test_exact_mode_writes_once_per_call_and_once_per_difference() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        for actual in (None, {"tpm": 500_000}, {"tpm": 200_000}):
            admission = await desk.admit(is_exact=True)
            assert admission.decided_by == "exact"
            desk.lease_manager.settle(admission, actual)
        await asyncio.sleep(1)
        assert [what for what, _ in desk.client.requests] == ["acquire"] * 3
        assert desk.client.adjusted == [({"tpm": -300_000}, {"tpm": -300_000})]
        assert desk.client.used == {"rpm": 3000, "tpm": 1_200_000}
        desk.client.grant_for = refuse_all
        refused = await desk.admit(is_exact=True)
        assert (refused.is_admitted, refused.wait_ms) == (False, 700)

    run_simulated(work)


def test_late_acquire_is_returned() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.client.latency = 5.0
        assert (await desk.admit(is_exact=True)).decided_by == "alone"
        await asyncio.sleep(5)
        assert desk.client.adjusted == [({"rpm": -1000, "tpm": -500_000}, {"rpm": -1000, "tpm": -500_000})]

    run_simulated(work)


# Who is there.


def test_new_settings_apply_to_next_call_and_cap_balance() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        await desk.admit()
        assert desk.lease_manager.held_by_limit()["rpm"] > 3000
        lower = make_buckets(rpm=3)
        assert (await desk.admit(of=lower)).is_admitted
        assert desk.lease_manager.held_by_limit()["rpm"] <= 3000
        same = make_buckets(rpm=3)
        assert (await desk.admit(of=same)).is_admitted
        assert len(desk.client.requests) <= 2

    run_simulated(work)


def test_settlement_after_settings_change_goes_to_store() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        admission = await desk.admit()
        await desk.admit(of=make_buckets(images=5))
        desk.lease_manager.settle(admission, {"tpm": 100_000})
        await asyncio.sleep(1)
        assert ({"rpm": 0, "tpm": -400_000}, {"rpm": 1000, "tpm": 100_000}) in desk.client.adjusted

    run_simulated(work)


def test_changed_buckets_return_what_was_theirs() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        desk.lease_manager.settle(await desk.admit(), None)
        desk.lease_manager._start_top_up(desk.lease_manager._holders["web"], None)  # and more is under way
        await desk.admit(of=make_buckets(scope="another"))
        await asyncio.sleep(1)
        ((taken, _),) = desk.client.adjusted
        assert desk.client.used["rpm"] == 1000
        *before, _ = desk.client.requests
        assert -taken["rpm"] == sum(wants["rpm"] for _, wants in before) - 1000
        assert len(before) == 2

    run_simulated(work)


def test_full_registry_evicts_least_recently_used_caller() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        for name in ("one", "two", "three"):
            desk.lease_manager.settle(await desk.admit(name), None)
            await asyncio.sleep(1)
        desk.lease_manager.settle(await desk.admit("one"), None)
        desk.lease_manager.settle(await desk.admit("four"), None)
        assert set(desk.lease_manager._holders) == {"one", "three", "four"}
        await asyncio.sleep(1)
        assert len(desk.client.adjusted) == 1

    run_simulated(work, max_callers=3)


def test_full_registry_of_busy_callers_serves_new_one_exactly() -> None:
    async def work(desk: LeaseManagerHarness) -> None:
        await desk.admit("one")
        assert (await desk.admit("two")).decided_by == "exact"

    run_simulated(work, max_callers=1)


@pytest.mark.parametrize("used", [900_000, 2_000_000])
def test_call_above_capacity_does_not_block_caller_forever(used: int) -> None:
    """Although calls keep coming, so that the overdraft is never returned as for an idle caller."""
    of = [RateBucket(Key("rate-buckets", "app", "BUCKET#RATE"), (RateLimit("tpm", 500_000, 6_000_000, 60_000),), 1)]
    costs, overdraft = {"tpm": 250_000}, used - 500_000

    async def work(loop: LeapingLoop) -> None:
        clock, chance = LoopClock(loop), random.Random(1)
        async with Tasks(clock) as tasks:
            store = cast(Store, BusyStore(clock, chance))
            limiter = BucketClient(store, lambda: round(clock.now() * 1000), clock, chance.uniform)
            leasing = RateLeaseManager(limiter, clock, tasks, chance.random)
            leasing.settle(await leasing.admit("web", of, costs), {"tpm": used})
            began = loop.time()
            while not (await leasing.admit("web", of, costs)).is_admitted:
                assert loop.time() < began + overdraft / 100_000 + 15
                await asyncio.sleep(1)
            assert loop.time() >= began + overdraft / 100_000

    run_leaping(work)
