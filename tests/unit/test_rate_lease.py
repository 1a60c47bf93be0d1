"""What one sidecar holds: when it lets through, asks, refuses and gives back, and how much it asks for."""

from __future__ import annotations

import pytest
from price_keeper.rates.rate_lease import (
    FIRST_HORIZON,
    MAX_BACKOFF,
    MAX_HORIZON,
    MIN_HORIZON,
    NEEDS_TOP_UP,
    TAKEN,
    TAKEN_BUT_LOW,
    RateLease,
    TopUpPlan,
    select_slowest_refill,
)
from price_keeper.rates.token_bucket import RateLimit

from tests.support.rate_leases import APP, CALL, FULL, make_bucket, make_lease, make_limit, take_steadily, top_up

# Taking.


def test_who_holds_nothing_asks() -> None:
    assert make_lease().take(CALL, 0.0) == NEEDS_TOP_UP


def test_what_is_held_is_taken_of_every_limit_at_once() -> None:
    found = make_lease(held=(5_000, 900_000))
    assert found.take(CALL, 0.0) != NEEDS_TOP_UP
    assert found.held == [4_000, 400_000]
    assert found.take(CALL, 0.0) == NEEDS_TOP_UP
    assert found.held == [4_000, 400_000]


def test_a_call_that_costs_nothing_of_a_limit_is_let_through_though_that_one_owes() -> None:
    found = make_lease(held=(2_000, -10))
    assert found.take((1000, 0), 0.0) != NEEDS_TOP_UP
    assert found.take((1000, 1), 0.0) == NEEDS_TOP_UP


def test_more_is_asked_for_before_it_is_used_up() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    top_up(found, 1.0, 5.0)
    answers = []
    while (answer := found.take(CALL, 5.0)) != NEEDS_TOP_UP:
        answers.append(answer)
    low = answers.index(TAKEN_BUT_LOW)
    assert set(answers[low:]) == {TAKEN_BUT_LOW}
    assert 0.2 < 1 - low / len(answers) < 0.35


def test_a_slow_store_is_asked_earlier() -> None:
    def left_when_asked(took: float) -> int:
        found = make_lease()
        take_steadily(found, 5.0)
        top_up(found, 1.0, 5.0, took=took)
        found.horizon = MIN_HORIZON  # apart from that it grows
        found._update_low_water()
        while found.take(CALL, 5.0) == TAKEN:
            pass
        return found.held[0]

    assert left_when_asked(0.3) > 1.5 * left_when_asked(0.01)


# How much.


def test_a_chunk_is_the_demand_of_a_horizon_less_what_is_held() -> None:
    found = make_lease()
    take_steadily(found, 20.0)
    found.horizon = 4.0
    found.held = [30_000, 0]
    wants = found.plan_top_up(20.0).wants
    assert wants["rpm"] == pytest.approx(80_000 - 30_000, rel=0.08)
    assert wants["tpm"] == pytest.approx(80 * 500_000, rel=0.08)


def test_refused_calls_are_demand_too_and_those_that_waited_count_once() -> None:
    found, other = make_lease(held=(FULL, FULL)), make_lease()
    take_steadily(found, 10.0)
    take_steadily(other, 10.0)
    for _ in range(100):
        other.retake(CALL, 10.0)
    assert found.plan_top_up(10.0).wants["rpm"] == 0
    found.held = [0, 0]
    assert found.plan_top_up(10.0).wants == other.plan_top_up(10.0).wants


def test_a_chunk_is_at_most_a_fourth_of_the_bucket_but_never_less_than_what_a_call_waits_for() -> None:
    found = make_lease(make_bucket(make_limit("rpm", 1200, 40), make_limit("tpm", 1_200_000)))
    take_steadily(found, 10.0)
    assert found.plan_top_up(10.0).wants["rpm"] == 10_000
    assert found.plan_top_up(10.0, (25_000, 0)).wants["rpm"] == 25_000


def test_thin_traffic_asks_for_some_calls_at_once() -> None:
    found = make_lease()
    take_steadily(found, 60.0, interval=2.0)
    found.horizon = MIN_HORIZON
    assert 5_000 <= found.plan_top_up(60.0).wants["rpm"] <= 9_000


def test_what_is_needed_is_what_the_call_that_waits_costs_and_what_is_owed() -> None:
    found = make_lease(held=(-3_000, 0))
    take_steadily(found, 5.0)
    plan = found.plan_top_up(5.0, CALL)
    assert plan.needs == {"rpm": 4_000, "tpm": 500_000}
    assert plan.wants["rpm"] >= 4_000


def test_the_tightest_of_a_limit_on_all_levels_decides_its_size() -> None:
    org = make_bucket(make_limit("rpm", 600, 20), name="org")
    found = make_lease(APP, org)
    take_steadily(found, 10.0)
    assert found.plan_top_up(10.0).wants["rpm"] == 5_000


def test_many_calls_in_one_moment_are_asked_for_together() -> None:
    found = make_lease()
    for _ in range(50):
        found.take(CALL, 0.0)
    assert found.plan_top_up(0.0, CALL).wants["rpm"] >= 49_000


def test_the_slowest_of_a_limit_on_all_levels_is_what_a_share_is_fair_by() -> None:
    slow, fast = RateLimit("rpm", 10**6, 10**5, 60_000), RateLimit("rpm", 10**6, 10**6, 30_000)
    for limits in ((slow, fast), (fast, slow)):
        assert select_slowest_refill([make_bucket(each) for each in limits]) == {"rpm": slow}


def test_a_burst_is_forgotten() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    much = found.plan_top_up(5.0).wants["rpm"]
    take_steadily(found, 40.0, interval=1.0, since=5.0)
    assert found.plan_top_up(40.0).wants["rpm"] < much / 3


# Where there is not enough.


def test_where_there_is_not_enough_nobody_is_asked_before_a_horizon_is_over() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    top_up(found, 0.1, 5.0)
    top_up(found, 0.1, 5.0)
    while found.take(CALL, 5.0) == TAKEN:  # and never: low
        pass
    wait = found.take(CALL, 5.0)
    assert wait > 0
    assert found.take(CALL, found.not_before - 0.001) > 0
    assert found.take(CALL, found.not_before) == NEEDS_TOP_UP
    assert MIN_HORIZON * 0.8 < found.not_before - 5.0 < FIRST_HORIZON * 1.2


def test_a_small_bucket_is_asked_before_it_runs_over() -> None:
    found = make_lease(make_bucket(make_limit("rpm", 1200, 40), make_limit("tpm", 10**9)))
    now = 0.0
    for _ in range(20):
        take_steadily(found, now + 0.5, interval=0.01, since=now)
        now += 0.5
        found.on_granted(found.plan_top_up(now), {"rpm": 8_000, "tpm": FULL}, {"rpm": 0, "tpm": FULL}, now)
    assert 0.2 < found.not_before - now < 1.5 < found._chunk_seconds()


def test_a_wait_tells_when_there_will_be_enough_for_this_call_too() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    top_up(found, 0.1, 4.9)
    top_up(found, 0.1, 5.0)
    found.held = [0, 0]
    soonest = found.not_before - 5.0
    waits = [found.retake(CALL, 5.0) for _ in range(200)]
    assert waits[0] == pytest.approx(1000 * soonest, abs=50)
    assert waits == sorted(waits)
    assert waits[-1] > waits[0] + 1000


def test_the_fair_share_rises_with_what_is_there_and_is_a_half_at_most() -> None:
    def share(level: int) -> float:
        found = make_lease()
        for number in range(1, 30):
            take_steadily(found, number * 2.0, interval=0.02, since=number * 2.0 - 2.0)
            plan = found.plan_top_up(number * 2.0)
            taken = dict.fromkeys(plan.wants, 10)
            found.on_granted(plan, taken, {"rpm": level, "tpm": FULL}, number * 2.0)
        part, whole = found.plan_top_up(60.0).share
        return part / whole

    shares = [share(level * 1000) for level in (5, 20, 60, 120)]
    assert shares == sorted(shares)
    assert shares[0] < 0.02
    assert shares[-1] <= 0.5


def test_who_has_not_seen_the_bucket_of_late_is_not_kept_waiting_for_having_got_little() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    plan = top_up(found, 0.1, 5.0)
    assert plan.enough_share == 0
    assert found.not_before == 0.0
    assert top_up(found, 0.1, 6.0).enough_share == 1 / 8
    assert found.not_before > 6.0


def test_what_was_not_seen_lowers_the_level_and_never_raises_it() -> None:
    found = make_lease()
    found.on_granted(found.plan_top_up(1.0), {}, {"rpm": 50_000, "tpm": FULL}, 1.0)
    found.on_granted(found.plan_top_up(2.0), {}, {"rpm": 900_000, "tpm": FULL}, 2.0, is_level_exact=False)
    assert found._mean_level[0] == 50_000
    found.on_granted(found.plan_top_up(3.0), {}, {"rpm": 40_000, "tpm": FULL}, 3.0, is_level_exact=False)
    assert found._mean_level[0] < 50_000


def test_after_a_burst_the_level_is_soon_believed_to_be_low() -> None:
    found = make_lease()
    for level, at_most in ((1_200_000, 1_200_000), (100_000, 500_000), (1_000_000, 600_000)):
        found.on_granted(found.plan_top_up(1.0), {}, {"rpm": level, "tpm": FULL}, 1.0)
        assert found._mean_level[0] <= at_most  # but not high because of one look


def test_no_more_than_a_little_over_what_is_wanted_must_be_there() -> None:
    """So that it is taken without looking as long as the bucket is about as full as it was."""
    found = make_lease()
    take_steadily(found, 5.0)
    found.on_granted(found.plan_top_up(5.0), {}, {"rpm": 1_200_000, "tpm": 1_200_000_000}, 5.0)
    plan = found.plan_top_up(5.0)
    part, whole = plan.share
    assert part / whole == pytest.approx(1.5 * plan.wants["rpm"] / 1_200_000, rel=0.01)


def test_a_bucket_that_was_full_for_long_may_be_used_up_at_once_by_halves() -> None:
    """Burst by burst: what is rationed afterwards is not what was saved up before."""
    found, there = make_lease(make_bucket(make_limit("rpm", 1200, 400), make_limit("tpm", 10**9))), 400_000
    for _ in range(30):
        found.held = [0, 0]
        for _ in range(100):
            found.take((1000, 0), 1.0)
        if found.not_before:
            break
        plan = found.plan_top_up(1.0, (1000, 0))
        part, whole = plan.share
        got = min(plan.wants["rpm"], there * part // whole)
        there -= got
        found.on_granted(plan, {"rpm": got}, {"rpm": there, "tpm": FULL}, 1.0)
    assert there < 20_000
    assert found.not_before > 1.0


def test_but_who_is_rationed_again_and_again_has_no_burst() -> None:
    found = make_lease()
    shares = []
    for number in range(60):
        now = 1.0 + 2.0 * number
        for _ in range(40):
            found.take(CALL, now)
        plan = found.plan_top_up(now)
        shares.append(plan.share[0] / plan.share[1])
        found.on_granted(plan, {}, {"rpm": 10_000, "tpm": FULL}, now)
    assert 0.5 in shares[:3]
    assert max(shares[3:]) < 0.1


def rationed(found: RateLease, now: float) -> TopUpPlan:
    """It wants a lot of a bucket that it has just seen nearly empty."""
    found.on_granted(found.plan_top_up(now), {}, {"rpm": 10_000, "tpm": FULL}, now)
    for _ in range(200):
        found.take(CALL, now)
    return found.plan_top_up(now)


def test_in_a_burst_less_than_was_wanted_is_enough_to_ask_again_at_once() -> None:
    plan = rationed(make_lease(), 5.0)
    assert plan.share == (1, 2)
    assert plan.enough_share == 1 / 8
    found = make_lease()
    rationed(found, 5.0)
    assert rationed(found, 7.0).enough_share == 1


def test_where_many_are_in_each_others_way_there_is_no_burst() -> None:
    found = make_lease()
    found.horizon = 2 * FIRST_HORIZON
    plan = rationed(found, 5.0)
    assert plan.share != (1, 2)
    assert plan.enough_share == 1


def test_a_refusal_ends_a_burst() -> None:
    found = make_lease()
    rationed(found, 5.0)
    found.on_refused(found.plan_top_up(5.0, CALL), 100, {"rpm": 0, "tpm": 0}, 5.0)
    assert rationed(found, 5.2).share != (1, 2)


def test_what_was_seen_long_ago_is_looked_at_again() -> None:
    found = make_lease()
    found.on_granted(found.plan_top_up(1.0), {}, {"rpm": 100_000, "tpm": FULL}, 1.0)
    assert found.plan_top_up(2.0).enough_share > 0
    assert found.plan_top_up(1.0 + 4 * MAX_HORIZON).enough_share == 0


def test_who_has_got_nothing_yet_expects_the_whole_refill_and_who_got_a_burst_no_more_than_that() -> None:
    found = make_lease()
    assert found._grant_rate == [20_000, 20_000_000]
    found.on_granted(found.plan_top_up(1.0), {"rpm": 900_000, "tpm": 1}, {}, 1.0)
    assert found._grant_rate[0] == 20_000
    assert found._grant_rate[1] < 20_000_000


def test_nobody_is_told_to_wait_for_longer_than_can_be_foreseen() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    found.on_refused(found.plan_top_up(5.0, CALL), 500, {"rpm": 0, "tpm": 0}, 5.0)
    waits = [found.take(CALL, 5.0) for _ in range(5000)]
    assert waits[-1] == max(waits) < 1000 * (found.not_before - 5.0 + 16)


def test_new_settings_may_mean_that_there_is_more() -> None:
    found = make_lease()
    found.not_before = 1e9
    found.apply_buckets([make_bucket(make_limit("rpm", 5000), make_limit("tpm", 1_200_000))])
    assert found.take(CALL, 1.0) == NEEDS_TOP_UP


def test_refused_means_wait_and_nothing_was_told() -> None:
    found = make_lease()
    found.used = [7, 8]
    plan = found.plan_top_up(1.0, CALL)
    assert plan.used == {"rpm": 7, "tpm": 8}
    assert found.used == [0, 0]
    found.on_refused(plan, 9_000, {"rpm": 0, "tpm": 0}, 1.0)
    assert found.used == [7, 8]
    assert found.not_before >= 10.0
    assert 8_900 < found.take(CALL, 1.0) < 20_000


def test_refused_though_there_is_enough_means_that_others_were_faster() -> None:
    found = make_lease()
    before = found.horizon
    found.on_refused(found.plan_top_up(1.0, CALL), 100, {"rpm": FULL, "tpm": FULL}, 1.0)
    assert found.horizon > before
    assert found.not_before < 2.0


# The horizon.


def test_the_horizon_grows_when_others_are_in_the_way_and_shrinks_slowly() -> None:
    found = make_lease()
    now = 0.0
    for _ in range(20):
        now += 1.0
        found.on_granted(found.plan_top_up(now), {}, {}, now, had_conflicts=True)
    assert found.horizon == MAX_HORIZON
    found.on_granted(found.plan_top_up(now), {}, {}, now)
    assert 0.5 * MAX_HORIZON < found.horizon < MAX_HORIZON
    for _ in range(200):
        now += 1.0
        found.on_granted(found.plan_top_up(now), {}, {}, now)
    assert found.horizon == MIN_HORIZON


def test_an_answer_that_is_late_counts_as_others_being_in_the_way() -> None:
    horizons = []
    for took in (0.01, 0.1, 1.0):
        found = make_lease()
        found.on_granted(found.plan_top_up(1.0), {}, {}, 1.0 + took)
        horizons.append(found.horizon)
    assert horizons[0] < FIRST_HORIZON < horizons[1] < horizons[2]


def test_after_failures_the_pauses_get_longer_to_a_bound() -> None:
    found, now, pauses = make_lease(), 0.0, []
    for _ in range(8):
        now += 100
        found.on_failed(found.plan_top_up(now), now, had_conflicts=True)
        pauses.append(found.not_before - now)
    assert pauses == sorted(pauses)
    assert pauses[0] < 1.0
    assert pauses[-1] == MAX_BACKOFF
    found.on_failed(found.plan_top_up(now + 50), now + 50, had_conflicts=False)
    assert found.not_before == now + MAX_BACKOFF
