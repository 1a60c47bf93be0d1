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


def test_empty_lease_needs_top_up() -> None:
    assert make_lease().take(CALL, 0.0) == NEEDS_TOP_UP


def test_take_subtracts_from_every_limit() -> None:
    found = make_lease(held=(5_000, 900_000))
    assert found.take(CALL, 0.0) != NEEDS_TOP_UP
    assert found.held == [4_000, 400_000]
    assert found.take(CALL, 0.0) == NEEDS_TOP_UP
    assert found.held == [4_000, 400_000]


def test_zero_cost_on_overdrawn_limit_is_allowed() -> None:
    found = make_lease(held=(2_000, -10))
    assert found.take((1000, 0), 0.0) != NEEDS_TOP_UP
    assert found.take((1000, 1), 0.0) == NEEDS_TOP_UP


def test_top_up_is_requested_before_lease_is_empty() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    top_up(found, 1.0, 5.0)
    answers = []
    while (answer := found.take(CALL, 5.0)) != NEEDS_TOP_UP:
        answers.append(answer)
    low = answers.index(TAKEN_BUT_LOW)
    assert set(answers[low:]) == {TAKEN_BUT_LOW}
    assert 0.2 < 1 - low / len(answers) < 0.35


def test_slow_store_is_asked_earlier() -> None:
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


def test_top_up_is_demand_of_horizon_minus_held() -> None:
    found = make_lease()
    take_steadily(found, 20.0)
    found.horizon = 4.0
    found.held = [30_000, 0]
    wants = found.plan_top_up(20.0).wants
    assert wants["rpm"] == pytest.approx(80_000 - 30_000, rel=0.08)
    assert wants["tpm"] == pytest.approx(80 * 500_000, rel=0.08)


def test_refused_calls_count_as_demand_and_waiting_ones_once() -> None:
    found, other = make_lease(held=(FULL, FULL)), make_lease()
    take_steadily(found, 10.0)
    take_steadily(other, 10.0)
    for _ in range(100):
        other.take(CALL, 10.0, is_counted=True)
    assert found.plan_top_up(10.0).wants["rpm"] == 0
    found.held = [0, 0]
    assert found.plan_top_up(10.0).wants == other.plan_top_up(10.0).wants


def test_top_up_is_at_most_a_quarter_of_capacity_but_covers_waiting_call() -> None:
    found = make_lease(make_bucket(make_limit("rpm", 1200, 40), make_limit("tpm", 1_200_000)))
    take_steadily(found, 10.0)
    assert found.plan_top_up(10.0).wants["rpm"] == 10_000
    assert found.plan_top_up(10.0, (25_000, 0)).wants["rpm"] == 25_000


def test_rare_calls_request_several_at_once() -> None:
    found = make_lease()
    take_steadily(found, 60.0, interval=2.0)
    found.horizon = MIN_HORIZON
    assert 5_000 <= found.plan_top_up(60.0).wants["rpm"] <= 9_000


def test_need_is_waiting_call_plus_overdraft() -> None:
    found = make_lease(held=(-3_000, 0))
    take_steadily(found, 5.0)
    plan = found.plan_top_up(5.0, CALL)
    assert plan.needs == {"rpm": 4_000, "tpm": 500_000}
    assert plan.wants["rpm"] >= 4_000


def test_tightest_level_of_limit_decides_top_up_size() -> None:
    org = make_bucket(make_limit("rpm", 600, 20), name="org")
    found = make_lease(APP, org)
    take_steadily(found, 10.0)
    assert found.plan_top_up(10.0).wants["rpm"] == 5_000


def test_burst_of_calls_is_requested_together() -> None:
    found = make_lease()
    for _ in range(50):
        found.take(CALL, 0.0)
    assert found.plan_top_up(0.0, CALL).wants["rpm"] >= 49_000


def test_slowest_level_of_limit_decides_fair_share() -> None:
    slow, fast = RateLimit("rpm", 10**6, 10**5, 60_000), RateLimit("rpm", 10**6, 10**6, 30_000)
    for limits in ((slow, fast), (fast, slow)):
        assert select_slowest_refill([make_bucket(each) for each in limits]) == {"rpm": slow}


def test_burst_demand_decays() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    much = found.plan_top_up(5.0).wants["rpm"]
    take_steadily(found, 40.0, interval=1.0, since=5.0)
    assert found.plan_top_up(40.0).wants["rpm"] < much / 3


# Where there is not enough.


def test_refusal_delays_next_request_by_a_horizon() -> None:
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


def test_small_bucket_is_asked_before_it_overflows() -> None:
    found = make_lease(make_bucket(make_limit("rpm", 1200, 40), make_limit("tpm", 10**9)))
    now = 0.0
    for _ in range(20):
        take_steadily(found, now + 0.5, interval=0.01, since=now)
        now += 0.5
        found.on_granted(found.plan_top_up(now), {"rpm": 8_000, "tpm": FULL}, {"rpm": 0, "tpm": FULL}, now)
    assert 0.2 < found.not_before - now < 1.5 < found._chunk_seconds()


def test_wait_covers_cost_of_this_call() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    top_up(found, 0.1, 4.9)
    top_up(found, 0.1, 5.0)
    found.held = [0, 0]
    soonest = found.not_before - 5.0
    waits = [found.take(CALL, 5.0, is_counted=True) for _ in range(200)]
    assert waits[0] == pytest.approx(1000 * soonest, abs=50)
    assert waits == sorted(waits)
    assert waits[-1] > waits[0] + 1000


def test_fair_share_rises_with_balance_up_to_half() -> None:
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


def test_unseen_balance_does_not_delay_after_small_grant() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    plan = top_up(found, 0.1, 5.0)
    assert plan.enough_share == 0
    assert found.not_before == 0.0
    assert top_up(found, 0.1, 6.0).enough_share == 1 / 8
    assert found.not_before > 6.0


def test_unseen_balance_lowers_level_and_never_raises_it() -> None:
    found = make_lease()
    found.on_granted(found.plan_top_up(1.0), {}, {"rpm": 50_000, "tpm": FULL}, 1.0)
    found.on_granted(found.plan_top_up(2.0), {}, {"rpm": 900_000, "tpm": FULL}, 2.0, is_level_exact=False)
    assert found._mean_level[0] == 50_000
    found.on_granted(found.plan_top_up(3.0), {}, {"rpm": 40_000, "tpm": FULL}, 3.0, is_level_exact=False)
    assert found._mean_level[0] < 50_000


def test_level_falls_quickly_after_burst() -> None:
    found = make_lease()
    for level, at_most in ((1_200_000, 1_200_000), (100_000, 500_000), (1_000_000, 600_000)):
        found.on_granted(found.plan_top_up(1.0), {}, {"rpm": level, "tpm": FULL}, 1.0)
        assert found._mean_level[0] <= at_most  # but not high because of one look


def test_required_balance_is_slightly_above_request() -> None:
    """So that it is taken without looking as long as the bucket is about as full as it was."""
    found = make_lease()
    take_steadily(found, 5.0)
    found.on_granted(found.plan_top_up(5.0), {}, {"rpm": 1_200_000, "tpm": 1_200_000_000}, 5.0)
    plan = found.plan_top_up(5.0)
    part, whole = plan.share
    assert part / whole == pytest.approx(1.5 * plan.wants["rpm"] / 1_200_000, rel=0.01)


def test_bucket_full_for_long_may_be_drained_by_halves() -> None:
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


def test_repeatedly_limited_process_has_no_burst() -> None:
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


def test_partial_grant_in_burst_allows_immediate_request() -> None:
    plan = rationed(make_lease(), 5.0)
    assert plan.share == (1, 2)
    assert plan.enough_share == 1 / 8
    found = make_lease()
    rationed(found, 5.0)
    assert rationed(found, 7.0).enough_share == 1


def test_contention_prevents_burst() -> None:
    found = make_lease()
    found.horizon = 2 * FIRST_HORIZON
    plan = rationed(found, 5.0)
    assert plan.share != (1, 2)
    assert plan.enough_share == 1


def test_refusal_ends_burst() -> None:
    found = make_lease()
    rationed(found, 5.0)
    found.on_refused(found.plan_top_up(5.0, CALL), 100, {"rpm": 0, "tpm": 0}, 5.0)
    assert rationed(found, 5.2).share != (1, 2)


def test_stale_balance_is_read_again() -> None:
    found = make_lease()
    found.on_granted(found.plan_top_up(1.0), {}, {"rpm": 100_000, "tpm": FULL}, 1.0)
    assert found.plan_top_up(2.0).enough_share > 0
    assert found.plan_top_up(1.0 + 4 * MAX_HORIZON).enough_share == 0


def test_expected_grant_rate_starts_at_refill_and_is_capped_by_burst() -> None:
    found = make_lease()
    assert found._grant_rate == [20_000, 20_000_000]
    found.on_granted(found.plan_top_up(1.0), {"rpm": 900_000, "tpm": 1}, {}, 1.0)
    assert found._grant_rate[0] == 20_000
    assert found._grant_rate[1] < 20_000_000


def test_wait_is_bounded() -> None:
    found = make_lease()
    take_steadily(found, 5.0)
    found.on_refused(found.plan_top_up(5.0, CALL), 500, {"rpm": 0, "tpm": 0}, 5.0)
    waits = [found.take(CALL, 5.0) for _ in range(5000)]
    assert waits[-1] == max(waits) < 1000 * (found.not_before - 5.0 + 16)


def test_new_settings_allow_immediate_request() -> None:
    found = make_lease()
    found.not_before = 1e9
    found.apply_buckets([make_bucket(make_limit("rpm", 5000), make_limit("tpm", 1_200_000))])
    assert found.take(CALL, 1.0) == NEEDS_TOP_UP


def test_refusal_sets_wait_and_keeps_usage_for_later() -> None:
    found = make_lease()
    found.used = [7, 8]
    plan = found.plan_top_up(1.0, CALL)
    assert plan.used == {"rpm": 7, "tpm": 8}
    assert found.used == [0, 0]
    found.on_refused(plan, 9_000, {"rpm": 0, "tpm": 0}, 1.0)
    assert found.used == [7, 8]
    assert found.not_before >= 10.0
    assert 8_900 < found.take(CALL, 1.0) < 20_000


def test_refusal_despite_balance_means_contention() -> None:
    found = make_lease()
    before = found.horizon
    found.on_refused(found.plan_top_up(1.0, CALL), 100, {"rpm": FULL, "tpm": FULL}, 1.0)
    assert found.horizon > before
    assert found.not_before < 2.0


# The horizon.


def test_horizon_grows_with_contention_and_shrinks_slowly() -> None:
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


def test_late_answer_counts_as_contention() -> None:
    horizons = []
    for took in (0.01, 0.1, 1.0):
        found = make_lease()
        found.on_granted(found.plan_top_up(1.0), {}, {}, 1.0 + took)
        horizons.append(found.horizon)
    assert horizons[0] < FIRST_HORIZON < horizons[1] < horizons[2]


def test_failure_backoff_grows_to_a_bound() -> None:
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
