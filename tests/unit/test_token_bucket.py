"""The arithmetic of a bucket, against fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from price_keeper.errors import StoreMisconfigured
from price_keeper.rates.bucket_writes import build_adjustment, build_create, build_refill_and_take
from price_keeper.rates.token_bucket import (
    MAX_AHEAD_MS,
    RateBucket,
    RateLimit,
    StoredBucket,
    StoredLimit,
    compute_available,
    compute_levels,
    compute_wait_ms,
    encode_stored_bucket,
    parse_stored_bucket,
    resolve_bucket,
)
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Key
from price_keeper.stores.item_values import apply_update, evaluate_condition

KEY = Key("rate-buckets", "ORG#1", "BUCKET#RATE")
NOW = 1_795_003_200_000

AMOUNTS = st.integers(1, 10**9)
CAPACITIES = st.integers(0, 10**9)
PERIODS = st.integers(1, 10**6)
ELAPSED = st.integers(0, 10**8)


def bucket(*limits: RateLimit, version: int = 1) -> RateBucket:
    return RateBucket(KEY, limits, version)


def kept(limit: RateLimit, tokens: int, remainder: int = 0) -> StoredLimit:
    return StoredLimit(tokens, 0, remainder, limit.capacity, limit.amount, limit.period_ms)


def state(*each: tuple[RateLimit, int, int], version: int = 1) -> StoredBucket:
    return StoredBucket(NOW, version, {limit.name: kept(limit, tokens, rem) for limit, tokens, rem in each})


@given(CAPACITIES, AMOUNTS, PERIODS, ELAPSED, st.data())
def test_level_matches_exact_bucket_rounded_down(
    capacity: int, amount: int, period: int, elapsed: int, data: st.DataObject
) -> None:
    limit = RateLimit("tpm", capacity, amount, period)
    tokens, rem = data.draw(st.integers(-(10**9), capacity)), data.draw(st.integers(0, period - 1))
    real = min(Fraction(capacity), tokens + Fraction(rem, period) + Fraction(elapsed * amount, period))
    level = compute_levels(state((limit, tokens, rem)), bucket(limit), NOW + elapsed)["tpm"]
    assert level.tokens == real // 1
    assert Fraction(level.remainder, period) == real - level.tokens
    assert tokens + level.refill == level.tokens


@pytest.mark.parametrize(("rem", "is_spilling"), [(0, False), (1, True)])
def test_fraction_above_capacity_spills(rem: int, is_spilling: bool) -> None:
    limit = RateLimit("tpm", 10, 1, 1_000)
    assert compute_levels(state((limit, 9, rem)), bucket(limit), NOW + 1_000)["tpm"] == (10, 1, 0, is_spilling)


def test_remainder_is_exact_over_a_million_steps() -> None:
    limit = RateLimit("tpm", 10**15, 999_983, 60_000)
    mine, now, step, taken = bucket(limit), NOW, 1, 0
    known = state((limit, 0, 0))
    for _ in range(1_000_000):
        step = step * 48271 % 2147483647  # steps of any size, the same each time
        now += step % 97
        level = compute_levels(known, mine, now)["tpm"]
        cost = level.tokens // 3
        taken += cost
        stored = StoredLimit(level.tokens - cost, 0, level.remainder, *limit[1:])
        known = StoredBucket(now, 1, {"tpm": stored})
    left = known.limits["tpm"]
    assert (left.tokens + taken) * 60_000 + left.remainder == (now - NOW) * 999_983


@given(CAPACITIES, AMOUNTS, PERIODS, st.integers(1, 10**9), st.integers(-MAX_AHEAD_MS, 10**4), st.data())
def test_wait_is_exact(capacity: int, amount: int, period: int, cost: int, elapsed: int, data: st.DataObject) -> None:
    limit = RateLimit("tpm", capacity, amount, period)
    known = state((limit, data.draw(st.integers(-(10**9), capacity)), data.draw(st.integers(0, period - 1))))
    mine, now = bucket(limit), NOW + elapsed
    wait = compute_wait_ms(known, mine, {"tpm": cost}, now)
    if wait is None:
        assert cost > capacity
        return
    assert compute_available(known, mine, now + wait)["tpm"] >= cost
    if wait:
        assert compute_available(known, mine, now + wait - 1)["tpm"] < cost


def test_wait_is_of_slowest_requested_limit() -> None:
    fast, slow = RateLimit("rpm", 10_000, 1_000, 100), RateLimit("tpm", 10_000, 1_000, 1_000)
    known, mine = state((fast, 0, 0), (slow, 0, 0)), bucket(fast, slow)
    assert compute_wait_ms(known, mine, {"rpm": 1_000, "tpm": 2_000}, NOW) == 2_000
    assert compute_wait_ms(known, mine, {"rpm": 1_000}, NOW) == 100
    assert compute_wait_ms(known, mine, {"rpm": 0, "other": 10**9}, NOW) == 0


def test_limit_without_refill_gives_no_wait() -> None:
    limit = RateLimit("usd", 10_000, 0, 1)
    known, mine = state((limit, 400, 0)), bucket(limit)
    assert compute_available(known, mine, NOW + 10**12) == {"usd": 400}
    assert compute_wait_ms(known, mine, {"usd": 400}, NOW) == 0
    assert compute_wait_ms(known, mine, {"usd": 401}, NOW) is None


@pytest.mark.parametrize(
    ("before", "after", "there"), [(10_000, 15_000, 5_400), (10_000, 9_900, 300), (10_000, 1_000, -8_600)]
)
def test_changed_one_time_amount_keeps_usage(before: int, after: int, there: int) -> None:
    known = state((RateLimit("usd", before, 0, 1), 400, 0))
    assert compute_available(known, bucket(RateLimit("usd", after, 0, 1), version=2), NOW) == {"usd": there}


def test_new_limit_starts_full() -> None:
    old, new = RateLimit("rpm", 5_000, 1_000, 1_000), RateLimit("tpm", 7_000, 1_000, 1_000)
    assert compute_available(state((old, 0, 0)), bucket(old, new), NOW) == {"rpm": 0, "tpm": 7_000}


def test_lowered_capacity_removes_excess() -> None:
    known = state((RateLimit("rpm", 10_000, 1_000, 1_000), 9_000, 5))
    level = compute_levels(known, bucket(RateLimit("rpm", 4_000, 1_000, 1_000), version=2), NOW)["rpm"]
    assert level == (4_000, -5_000, 0, True)


BROUGHT_BACK = [(8_000, 0, True), (8_000, 1, False), (7_999, 1, True), (7_000, 9_000, False)]


@pytest.mark.parametrize(("tokens", "back", "may_be"), BROUGHT_BACK)
def test_lowered_capacity_accounts_for_concurrent_returns(tokens: int, back: int, may_be: bool) -> None:
    known, given = (state((RateLimit("rpm", 20_000, 1_000, 1_000), each, 0)) for each in (tokens, tokens + back))
    write = build_refill_and_take(bucket(RateLimit("rpm", 8_000, 1_000, 1_000), version=2), known, {}, {}, NOW)
    assert evaluate_condition(write.condition, encode_stored_bucket(given)) is may_be


@pytest.mark.parametrize(("taken", "may_be"), [(0, True), (8_000, True), (8_001, False)])
def test_lowered_capacity_removes_no_more_than_available(taken: int, may_be: bool) -> None:
    known, left = (state((RateLimit("rpm", 20_000, 1_000, 1_000), each, 0)) for each in (20_000, 20_000 - taken))
    write = build_refill_and_take(
        bucket(RateLimit("rpm", 8_000, 1_000, 1_000), version=2), known, {}, {}, NOW, is_exact=False
    )
    assert evaluate_condition(write.condition, encode_stored_bucket(left)) is may_be


def test_older_settings_follow_stored_ones() -> None:
    stored, own = RateLimit("tpm", 5_000, 10, 1_000), RateLimit("tpm", 90_000, 1_000, 1)
    known, mine = state((stored, 1_000, 0), version=2), bucket(own, RateLimit("gone", 1, 1, 1), version=1)
    assert compute_available(known, mine, NOW + 100) == {"tpm": 1_001}
    assert resolve_bucket(mine, known) == bucket(stored, version=2)
    assert resolve_bucket(mine, state((stored, 0, 0), version=1)) == mine


def test_zero_rate_item_recovers_with_new_settings() -> None:
    known = state((RateLimit("rpm", 10_000, 0, 1), 0, 0))
    mine = bucket(RateLimit("rpm", 10_000, 1_000, 1_000), version=2)
    assert compute_wait_ms(known, mine, {"rpm": 1_000}, NOW) == 1_000


@given(st.integers(-MAX_AHEAD_MS - 10**7, 0))
@example(-MAX_AHEAD_MS)
@example(-MAX_AHEAD_MS - 1)
def test_future_refill_time_refills_nothing_and_is_bounded(elapsed: int) -> None:
    limit = RateLimit("rpm", 10_000, 1_000, 1_000)
    known, mine, now = state((limit, 300, 7)), bucket(limit), NOW + elapsed
    write = build_refill_and_take(mine, known, {"rpm": 100}, {}, now)
    assert compute_available(known, mine, now) == {"rpm": 300}
    assert write.add["rpm_tk"] == -100
    assert write.set["rpm_rem"] == 7
    assert write.set["rf"] == (NOW if now >= NOW - MAX_AHEAD_MS else now)
    wait = compute_wait_ms(known, mine, {"rpm": 1_300}, now)
    assert wait == 1_000 + (NOW - now if now >= NOW - MAX_AHEAD_MS else 0)


def test_stored_bucket_round_trips() -> None:
    limits = (RateLimit("a_tk", 5_000, 10, 1_000), RateLimit("a", 7_000, 0, 1))
    put = build_create(bucket(*limits), {"a": 7_500, "a_tk": -1}, {"a": 2}, NOW)
    read = parse_stored_bucket(put.item)
    assert read == StoredBucket(
        NOW, 1, {"a_tk": StoredLimit(5_000, 0, 0, *limits[0][1:]), "a": StoredLimit(-500, 2, 0, *limits[1][1:])}
    )
    assert encode_stored_bucket(read) == {name: value for name, value in put.item.items() if name != EXPIRY_ATTRIBUTE}


@pytest.mark.parametrize("corrupted", [{"rf": None}, {"v": "1"}, {"a_cp": None}, {"a_tk": True}])
def test_malformed_item_is_reported(corrupted: dict[str, object]) -> None:
    item = dict(build_create(bucket(RateLimit("a", 1, 1, 1)), {}, {}, NOW).item) | corrupted
    with pytest.raises(StoreMisconfigured, match=f"attribute {next(iter(corrupted))} .* delete the item"):
        parse_stored_bucket({name: value for name, value in item.items() if value is not None})


def test_item_expires_a_day_after_it_would_be_full() -> None:
    minute, week = RateLimit("rpm", 60_000, 60_000, 60_000), RateLimit("week", 1_000, 1_000, 7 * 86_400_000)
    second = NOW // 1000
    assert build_create(bucket(minute), {}, {}, NOW).item[EXPIRY_ATTRIBUTE] == second + 86_400 + 60
    assert build_create(bucket(minute, week), {}, {}, NOW).item[EXPIRY_ATTRIBUTE] == second + 8 * 86_400
    assert EXPIRY_ATTRIBUTE not in build_create(bucket(minute, RateLimit("usd", 1, 0, 1)), {}, {}, NOW).item
    assert build_create(RateBucket(KEY, (minute,), 1, 77), {}, {}, NOW).item[EXPIRY_ATTRIBUTE] == 77


@given(CAPACITIES, st.integers(0, 2 * 10**9), ELAPSED, st.data())
def test_return_never_exceeds_capacity(capacity: int, back: int, elapsed: int, data: st.DataObject) -> None:
    limit = RateLimit("tpm", capacity, 1_000, 1_000)
    mine, tokens = bucket(limit), data.draw(st.integers(-(10**9), capacity))
    known = state((limit, tokens, 0))
    now = NOW + elapsed
    for write in (
        build_adjustment(mine, known, {"tpm": -back}, {"tpm": -3}, now),
        build_refill_and_take(mine, known, {"tpm": -back}, {"tpm": -3}, now, may_overdraw=True),
    ):
        assert evaluate_condition(write.condition, encode_stored_bucket(known))
        after = parse_stored_bucket(apply_update(write, encode_stored_bucket(known)))
        assert after.limits["tpm"].tokens <= capacity
        assert after.limits["tpm"].consumed == -3
        full = min(capacity, compute_available(known, mine, now)["tpm"] + back)
        assert compute_available(after, mine, now)["tpm"] <= full
        if tokens + back <= capacity:
            assert compute_available(after, mine, now)["tpm"] == full
