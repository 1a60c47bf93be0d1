"""The keeper of leases: who waits for the store, what becomes of calls while it is away, and what goes back when."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from price_keeper.errors import Busy, StoreUnavailable, StoreThrottled
from price_keeper.limits.bucket import RateBucket, RateLimit
from price_keeper.limits.leasing import STORE_TIMEOUT_SECONDS, RateLeaseManager
from price_keeper.limits.limiter import NORMAL, RETRY, Grant, BucketClient
from price_keeper.stores.contract import Key, Store
from price_keeper.tasks import Tasks

from tests.support.leasing import BUCKETS, COSTS, Desk, buckets, no, run
from tests.support.limits import BusyStore, LeapingLoop, LoopClock, leaping


def test_the_first_call_waits_and_the_next_ones_do_not() -> None:
    async def work(desk: Desk) -> None:
        assert (await desk.admit()).decided_by == "waited"
        assert desk.leasing.try_admit("web", BUCKETS, COSTS) is not None
        assert len(desk.limiter.asked) == 1
        assert (desk.leasing.counts.waited, desk.leasing.counts.local) == (1, 1)

    run(work)


def test_all_who_wait_share_one_question() -> None:
    async def work(desk: Desk) -> None:
        found = await asyncio.gather(*(desk.admit() for _ in range(6)))
        assert all(admission.is_admitted for admission in found)
        assert len(desk.limiter.asked) == 1

    run(work)


def test_who_finds_nothing_left_after_the_others_asks_again() -> None:
    async def work(desk: Desk) -> None:
        found = await asyncio.gather(*(desk.admit() for _ in range(40)))
        assert all(admission.is_admitted for admission in found)
        assert 2 <= len(desk.limiter.asked) <= 10

    run(work)


def test_more_is_fetched_before_it_runs_out_so_that_nobody_waits() -> None:
    async def work(desk: Desk) -> None:
        for number in range(400):
            desk.leasing.settle(await desk.admit(), None)
            await asyncio.sleep(0.05)
            if number == 100:
                waited = desk.leasing.counts.waited
        assert desk.leasing.counts.waited == waited
        assert desk.leasing.counts.top_ups[NORMAL] == len(desk.limiter.asked) < 40

    run(work)


def test_where_the_store_refuses_callers_are_refused_here_until_the_wait_is_over() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.gives = no
        first = await desk.admit()
        second = await desk.admit()
        assert not first.is_admitted
        assert not second.is_admitted
        assert len(desk.limiter.asked) == 1
        assert (desk.leasing.counts.refused_by_store, desk.leasing.counts.refused_locally) == (1, 1)
        assert first.wait_ms is not None
        assert first.wait_ms >= 700
        desk.limiter.gives = None
        await asyncio.sleep(first.wait_ms / 1000)
        assert (await desk.admit()).is_admitted

    run(work)


def test_what_can_never_be_let_through_is_refused_without_a_wait_and_without_asking() -> None:
    async def work(desk: Desk) -> None:
        found = await desk.leasing.admit("web", BUCKETS, {"rpm": 2_000_000})
        assert (found.is_admitted, found.wait_ms) == (False, None)
        assert desk.limiter.asked == []

    run(work)


def test_a_store_that_is_too_busy_is_not_away_and_callers_wait_a_little() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.failure = StoreThrottled("busy")
        admission = await desk.admit()
        assert admission.decided_by == "refused"
        assert admission.wait_ms is not None
        assert admission.wait_ms < 1000

    run(work)


def test_only_what_was_seen_counts_as_the_level_of_the_bucket() -> None:
    async def work(desk: Desk) -> None:
        await desk.admit()
        (holder,) = desk.leasing._holders.values()
        seen: list[bool] = []
        for part, path in ((1, NORMAL), (1, RETRY), (2, RETRY)):
            desk.limiter.gives = lambda wants, part=part, path=path: Grant(
                {name: amount // part for name, amount in wants.items()}, 0, dict.fromkeys(wants, 10**9), path, 1
            )
            holder.lease.held, before = [0, 0], holder.lease._level_at
            await desk.admit()
            seen.append(holder.lease._level_at > before)
            await asyncio.sleep(1)
        assert seen == [True, False, True]

    run(work)


def test_what_busier_times_left_goes_back() -> None:
    async def work(desk: Desk) -> None:
        await desk.admit()
        (holder,) = desk.leasing._holders.values()
        holder.lease.held = [900_000, 900_000_000]
        await desk.leasing.sweep()
        ((taken, _),) = desk.limiter.adjusted
        assert -900_000 < taken["rpm"] < -800_000
        assert desk.leasing.held_by_limit()["rpm"] == 900_000 + taken["rpm"]

    run(work)


# Settling.


def test_real_usage_is_told_once_with_the_next_write() -> None:
    async def work(desk: Desk) -> None:
        desk.leasing.settle(await desk.admit(), {"tpm": 300_000})
        desk.leasing.settle(await desk.admit(), None)
        desk.leasing.settle(await desk.admit(), {"rpm": 0, "tpm": 0})
        await asyncio.sleep(10)
        await desk.leasing.sweep()
        await desk.leasing.sweep()
        assert desk.limiter.used == {"rpm": 2000, "tpm": 800_000}
        ((taken, _),) = desk.limiter.adjusted
        assert taken["rpm"] == 2000 - desk.limiter.asked[0][1]["rpm"]
        assert taken["tpm"] == 800_000 - desk.limiter.asked[0][1]["tpm"]

    run(work)


def test_a_failed_question_tells_nothing_and_the_next_one_does() -> None:
    async def work(desk: Desk) -> None:
        desk.leasing.settle(await desk.admit(), None)
        desk.limiter.failure = StoreThrottled("busy")
        while not desk.leasing.counts.failed:
            desk.leasing.settle(await desk.admit(), {"rpm": 0, "tpm": 0})
            if desk.leasing.held_by_limit()["rpm"] > 0:
                desk.leasing._holders["web"].lease.held = [0, 0]
        desk.limiter.failure = None
        await asyncio.sleep(20)
        await desk.admit()
        assert desk.limiter.used["rpm"] == 1000

    run(work)


def test_what_idle_callers_hold_goes_back_and_they_are_forgotten() -> None:
    async def work(desk: Desk) -> None:
        admission = await desk.admit()
        await asyncio.sleep(10)
        await desk.leasing.sweep()
        assert desk.leasing.held_by_limit()["rpm"] == 0
        assert desk.leasing.counts.given_back == 1
        await asyncio.sleep(100)
        await desk.leasing.sweep()
        assert len(desk.leasing) == 1  # its call is still under way
        desk.leasing.settle(admission, None)
        await desk.leasing.sweep()
        assert desk.limiter.used == {"rpm": 1000, "tpm": 500_000}
        await desk.leasing.sweep()
        assert len(desk.leasing) == 0

    run(work)


def test_what_could_not_be_sent_is_sent_with_a_sweep() -> None:
    async def work(desk: Desk) -> None:
        await desk.leasing.sweep()
        assert desk.limiter.settled == 0
        desk.limiter.pending = 1
        await desk.leasing.sweep()
        assert desk.limiter.settled == 1

    run(work)


def test_at_the_end_everything_goes_back_also_what_is_under_way_and_what_is_settled_later() -> None:
    async def work(desk: Desk) -> None:
        late = await desk.admit()
        desk.leasing.settle(await desk.admit(), None)
        desk.limiter.latency = 1.0
        waiting = asyncio.ensure_future(desk.admit("other"))
        await asyncio.sleep(0.1)
        await desk.leasing.stop()
        await waiting
        assert desk.leasing.held_by_limit() == {"rpm": 0, "tpm": 0}
        desk.leasing.settle(late, {"tpm": 0})
        desk.leasing.settle(waiting.result(), {"rpm": 0, "tpm": 0})
        exact = await desk.admit()
        assert exact.decided_by == "exact"
        desk.leasing.settle(exact, None)
        await asyncio.sleep(1)
        given = sum(wants["rpm"] for _, wants in desk.limiter.asked) + sum(t["rpm"] for t, _ in desk.limiter.adjusted)
        assert given == desk.limiter.used["rpm"] == 3000
        assert desk.limiter.used["tpm"] == 1_000_000

    run(work)


def test_at_the_end_what_is_pending_is_settled_and_what_just_ended_is_told() -> None:
    async def work(desk: Desk) -> None:
        exact = await desk.admit(is_exact=True)
        desk.limiter.pending = 1
        desk.leasing.settle(exact, {"rpm": 0, "tpm": 0})
        await desk.leasing.stop()
        assert desk.limiter.used == {"rpm": 0, "tpm": 0}
        assert (desk.limiter.settled, desk.limiter.pending) == (1, 0)

    run(work)


# The store is away.


def test_while_the_store_is_away_calls_are_served_from_a_bucket_of_their_own() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.failure = StoreUnavailable("away")
        found = [await desk.admit() for _ in range(1300)]
        served = sum(admission.is_admitted for admission in found)
        assert {admission.decided_by for admission in found} == {"alone", "refused"}
        assert served == pytest.approx(1200, abs=3)  # the whole limit, once
        assert desk.leasing.counts.alone == served
        assert len(desk.limiter.asked) == 1  # the others did not wait
        assert found[-1].wait_ms is not None
        await asyncio.sleep(found[-1].wait_ms / 1000)
        admission = await desk.admit()
        assert admission.decided_by == "alone"
        assert (await desk.admit()).decided_by == "refused"
        desk.leasing.settle(admission, {"rpm": 0, "tpm": 0})
        assert (await desk.admit()).decided_by == "alone"
        await asyncio.sleep(600)
        assert sum([(await desk.admit()).is_admitted for _ in range(1300)]) == pytest.approx(1200, abs=3)
        desk.limiter.failure = None
        await asyncio.sleep(2)
        assert (await desk.admit()).decided_by == "waited"

    run(work)


def test_what_was_served_alone_is_told_but_not_taken_from_the_store() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.failure = StoreUnavailable("away")
        admission = await desk.admit()
        desk.leasing.settle(admission, {"tpm": 100_000})
        assert desk.leasing.held_by_limit() == {"rpm": 0, "tpm": 0}
        desk.limiter.failure = None
        await asyncio.sleep(2)
        await desk.admit()
        assert desk.limiter.used == {"rpm": 1000, "tpm": 100_000}

    run(work)


def test_or_they_are_refused_if_the_policy_says_so() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.failure = StoreUnavailable("away")
        with pytest.raises(Busy):
            await desk.admit(serves_alone=False)
        with pytest.raises(Busy):
            await desk.admit(serves_alone=False, is_exact=True)

    run(work)


def test_no_call_waits_for_long_and_what_comes_late_is_kept() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.latency = 5.0
        began = asyncio.get_running_loop().time()
        assert (await desk.admit()).decided_by == "alone"
        assert asyncio.get_running_loop().time() - began == pytest.approx(STORE_TIMEOUT_SECONDS)
        assert (await desk.admit()).decided_by == "alone"
        assert asyncio.get_running_loop().time() - began == pytest.approx(STORE_TIMEOUT_SECONDS)
        await asyncio.sleep(4)
        assert (await desk.admit()).decided_by == "local"

    run(work)


def test_a_mistake_of_ours_does_not_make_its_callers_ask_for_ever() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.failure = KeyError("a mistake")
        assert (await desk.admit()).decided_by == "alone"
        assert len(desk.limiter.asked) == 1

    run(work)


# Exactly.


def test_exactly_is_a_write_for_each_call_and_one_for_what_was_otherwise() -> None:
    async def work(desk: Desk) -> None:
        for actual in (None, {"tpm": 500_000}, {"tpm": 200_000}):
            admission = await desk.admit(is_exact=True)
            assert admission.decided_by == "exact"
            desk.leasing.settle(admission, actual)
        await asyncio.sleep(1)
        assert [what for what, _ in desk.limiter.asked] == ["acquire"] * 3
        assert desk.limiter.adjusted == [({"tpm": -300_000}, {"tpm": -300_000})]
        assert desk.limiter.used == {"rpm": 3000, "tpm": 1_200_000}
        desk.limiter.gives = no
        refused = await desk.admit(is_exact=True)
        assert (refused.is_admitted, refused.wait_ms) == (False, 700)

    run(work)


def test_what_is_acquired_too_late_goes_back() -> None:
    async def work(desk: Desk) -> None:
        desk.limiter.latency = 5.0
        assert (await desk.admit(is_exact=True)).decided_by == "alone"
        await asyncio.sleep(5)
        assert desk.limiter.adjusted == [({"rpm": -1000, "tpm": -500_000}, {"rpm": -1000, "tpm": -500_000})]

    run(work)


# Who is there.


def test_new_settings_count_from_the_next_call_and_cap_what_is_held() -> None:
    async def work(desk: Desk) -> None:
        await desk.admit()
        assert desk.leasing.held_by_limit()["rpm"] > 3000
        lower = buckets(rpm=3)
        assert (await desk.admit(of=lower)).is_admitted
        assert desk.leasing.held_by_limit()["rpm"] <= 3000
        same = buckets(rpm=3)
        assert (await desk.admit(of=same)).is_admitted
        assert len(desk.limiter.asked) <= 2

    run(work)


def test_settled_under_other_settings_it_is_told_to_the_store() -> None:
    async def work(desk: Desk) -> None:
        admission = await desk.admit()
        await desk.admit(of=buckets(images=5))
        desk.leasing.settle(admission, {"tpm": 100_000})
        await asyncio.sleep(1)
        assert ({"rpm": 0, "tpm": -400_000}, {"rpm": 1000, "tpm": 100_000}) in desk.limiter.adjusted

    run(work)


def test_other_buckets_of_the_same_caller_get_back_what_is_theirs() -> None:
    async def work(desk: Desk) -> None:
        desk.leasing.settle(await desk.admit(), None)
        desk.leasing._start_top_up(desk.leasing._holders["web"], None)  # and more is under way
        await desk.admit(of=buckets(scope="another"))
        await asyncio.sleep(1)
        ((taken, _),) = desk.limiter.adjusted
        assert desk.limiter.used["rpm"] == 1000
        *before, _ = desk.limiter.asked
        assert -taken["rpm"] == sum(wants["rpm"] for _, wants in before) - 1000
        assert len(before) == 2

    run(work)


def test_there_are_no_more_callers_than_fit_and_the_one_that_called_longest_ago_makes_room() -> None:
    async def work(desk: Desk) -> None:
        for name in ("one", "two", "three"):
            desk.leasing.settle(await desk.admit(name), None)
            await asyncio.sleep(1)
        desk.leasing.settle(await desk.admit("one"), None)
        desk.leasing.settle(await desk.admit("four"), None)
        assert set(desk.leasing._holders) == {"one", "three", "four"}
        await asyncio.sleep(1)
        assert len(desk.limiter.adjusted) == 1

    run(work, most_callers=3)


def test_if_all_have_calls_under_way_a_new_caller_is_served_exactly() -> None:
    async def work(desk: Desk) -> None:
        await desk.admit("one")
        assert (await desk.admit("two")).decided_by == "exact"

    run(work, most_callers=1)


@pytest.mark.parametrize("used", [900_000, 2_000_000])
def test_a_call_that_used_more_than_its_bucket_holds_keeps_nobody_out_for_good(used: int) -> None:
    """Though somebody keeps asking, so that what is owed never goes back as of one who is idle."""
    of = [RateBucket(Key("rate-buckets", "app", "BUCKET#RATE"), (RateLimit("tpm", 500_000, 6_000_000, 60_000),), 1)]
    costs, owed = {"tpm": 250_000}, used - 500_000

    async def work(loop: LeapingLoop) -> None:
        clock, chance = LoopClock(loop), random.Random(1)
        async with Tasks(clock) as tasks:
            store = cast(Store, BusyStore(clock, chance))
            limiter = BucketClient(store, lambda: round(clock.now() * 1000), clock, chance.uniform)
            leasing = RateLeaseManager(limiter, clock, tasks, chance.random)
            leasing.settle(await leasing.admit("web", of, costs), {"tpm": used})
            began = loop.time()
            while not (await leasing.admit("web", of, costs)).is_admitted:
                assert loop.time() < began + owed / 100_000 + 15
                await asyncio.sleep(1)
            assert loop.time() >= began + owed / 100_000

    leaping(work)
