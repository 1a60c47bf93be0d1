"""What one sidecar holds, overdraws, has used and returns, and how changed settings affect it."""

from __future__ import annotations

from price_keeper.rates.rate_lease import IDLE_SECONDS, TAKEN

from tests.support.rate_leases import CALL, make_bucket, make_lease, make_limit, take_steadily

# Truth, debt and giving back.


def test_unused_cost_is_returned_and_usage_reported_once() -> None:
    found = make_lease(held=(5_000, 900_000))
    found.take(CALL, 0.0)
    found.settle(CALL, (1000, 300_000))
    assert found.held == [4_000, 600_000]
    assert found.plan_top_up(1.0).used == {"rpm": 1000, "tpm": 300_000}
    assert found.plan_top_up(1.0).used == {"rpm": 0, "tpm": 0}


def test_overused_call_leaves_debt_for_next_top_up() -> None:
    found = make_lease(held=(5_000, 500_000))
    found.take(CALL, 0.0)
    found.settle(CALL, (1000, 2_000_000))
    assert found.held[1] == -1_500_000
    plan = found.plan_top_up(1.0, CALL)
    assert plan.needs["tpm"] == 2_000_000
    found.on_granted(plan, plan.wants, {}, 1.0)
    assert found.held[1] >= 500_000


def test_frequent_caller_becomes_idle_sooner() -> None:
    often, seldom = make_lease(), make_lease()
    take_steadily(often, 10.0)
    take_steadily(seldom, 20.0, interval=2.0)
    seldom.plan_top_up(20.0)
    often.plan_top_up(10.0)
    assert not often.is_idle(often.last_call + IDLE_SECONDS - 0.01)
    assert often.is_idle(often.last_call + IDLE_SECONDS)
    assert not seldom.is_idle(seldom.last_call + IDLE_SECONDS)
    assert seldom.is_idle(seldom.last_call + 20.0)


def test_balance_above_demand_is_surplus() -> None:
    found = make_lease(held=(200_000, 0))
    take_steadily(found, 10.0)
    assert found.find_surplus(10.0)[0] == 0
    take_steadily(found, 60.0, interval=1.0, since=10.0)
    held = found.held[0]
    surplus = found.find_surplus(60.0)
    assert 0 < surplus[0] < held
    given, _ = found.take_out(surplus)
    assert found.held[0] == held - given["rpm"] > 0


def test_take_out_returns_everything() -> None:
    found = make_lease(held=(3_000, -70))
    found.used = [1, 2]
    assert found.take_out() == ({"rpm": 3_000, "tpm": -70}, {"rpm": 1, "tpm": 2})
    assert found.is_empty


# Settings that change.


def test_balance_is_capped_by_new_capacity() -> None:
    found = make_lease(held=(500_000, 400_000))
    found.used = [5, 6]
    found.apply_buckets([make_bucket(make_limit("tpm", 1_200_000), make_limit("rpm", 60, 30))])
    assert found.names == ("tpm", "rpm")
    assert found.held == [400_000, 30_000]
    assert found.used == [6, 5]


def test_new_limit_starts_empty_and_removed_limit_is_dropped() -> None:
    found = make_lease(held=(500_000, 400_000))
    found.apply_buckets([make_bucket(make_limit("rpm", 1200), make_limit("images", 10))])
    assert found.names == ("rpm", "images")
    assert found.held == [500_000, 0]
    assert found.take((1000, 0), 1.0) == TAKEN


def test_call_above_capacity_never_fits() -> None:
    assert make_lease().exceeds_capacity((1_200_001, 0))
    assert not make_lease().exceeds_capacity((1_200_000, 0))
