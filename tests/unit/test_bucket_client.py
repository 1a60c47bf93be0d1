"""Each way of writing to a bucket, and each way in which it may fail, with the item before and after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from price_keeper.errors import StoreThrottled, TransactionFailed
from price_keeper.rates.token_bucket import MAX_AHEAD_MS, RateBucket, RateLimit
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Delete
from price_keeper.stores.sqlite import SqliteStore

from tests.support.bucket_harness import CONFLICT, NOW, RPM, THROTTLED, TPM, BucketHarness, bucket, rpm_item


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[BucketHarness]:
    store = await SqliteStore(tmp_path / "store.db", lambda: NOW / 1000).open()
    yield BucketHarness(store)
    await store.close()


async def test_create_writes_bucket_with_first_take(rig: BucketHarness) -> None:
    assert await rig.take(3_000) == ("create", 1)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 7_000, "rpm_tc": 3_000}


async def test_create_losing_race_continues_from_existing_item(rig: BucketHarness) -> None:
    rig.set_faults(lambda: rig.put_item({"rpm_tk": 4_000, "rpm_tc": 6_000, "rf": NOW - 2_000}))
    assert await rig.take(5_000) == ("normal", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 1_000, "rpm_tc": 11_000}


async def test_normal_take_refills_and_subtracts(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 4_000, "rpm_tc": 6_000, "rpm_rem": 999, "rf": NOW - 1_501})
    assert await rig.take(5_000) == ("normal", 1)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 501, "rpm_tc": 11_000, "rpm_rem": 999}


async def test_normal_take_with_indivisible_rate_keeps_remainder(rig: BucketHarness) -> None:
    odd = RateLimit("rpm", 10_000, 7, 3)
    rig.bucket = bucket(odd)
    await rig.put_item({"rpm_tk": 0, "rpm_rem": 2, "rf": NOW - 600}, limit=odd)
    assert await rig.take(100) == ("normal", 1)  # 600 ms at 7 in 3 ms are 1400, and 2 thirds are left as they were
    item = await rig.get_item()
    assert item is not None
    assert (item["rpm_tk"], item["rpm_rem"]) == (1_300, 2)


async def test_normal_take_at_capacity_drops_remainder(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 9_000, "rpm_rem": 5, "rf": NOW - 60_000})
    assert await rig.take(10_000) == ("normal", 1)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 0, "rpm_tc": 10_000}


async def test_normal_take_losing_refill_race_continues_from_newer_item(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rf": NOW - 5_000})
    other = rig.new_client()
    rig.set_faults(lambda: rig.take(1_000, other))
    assert await rig.take(2_000) == ("retry", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_000, "rpm_tc": 3_000}


async def test_normal_take_beyond_balance_is_refused(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rf": NOW - 2_000})
    rig.set_faults(lambda: rig.add_concurrently(rpm_tk=-500))
    assert await rig.take(3_000) == ("refused", 1)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 500, "rf": NOW - 2_000}


async def test_normal_take_at_capacity_keeps_refill_of_concurrent_takes(rig: BucketHarness) -> None:
    await rig.put_item({"rf": NOW - 5_000})
    rig.set_faults(lambda: rig.add_concurrently(rpm_tk=-5_000))
    assert await rig.take(1_000) == ("normal", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 9_000, "rpm_tc": 1_000}


async def test_normal_take_losing_races_at_capacity_gives_up_refill(rig: BucketHarness) -> None:
    await rig.put_item({"rf": NOW - 5_000})
    rig.set_faults(*[lambda: rig.add_concurrently(rpm_tk=-1_000)] * 4)
    assert await rig.take(1_000) == ("normal", 4)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 8_000, "rpm_tc": 1_000}


async def test_normal_take_with_concurrent_return_does_not_overflow(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rf": NOW - 5_000})
    rig.set_faults(lambda: rig.add_concurrently(rpm_tk=8_000))
    assert await rig.take(1_000) == ("normal", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 9_000, "rpm_tc": 1_000}


async def test_normal_take_of_expired_item_creates_it(rig: BucketHarness) -> None:
    await rig.put_item({"rf": NOW - 5_000, "rpm_tk": 5_000})
    rig.set_faults(lambda: rig.store.store.delete(Delete(rig.bucket.key)))
    assert await rig.take(1_000) == ("create", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 9_000, "rpm_tc": 1_000}


async def test_retry_takes_without_refill(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 4_000, "rf": NOW - 400, "rpm_rem": 3})
    assert await rig.take(4_000) == ("retry", 1)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 0, "rpm_tc": 4_000, "rf": NOW - 400, "rpm_rem": 3}


async def test_retry_beyond_balance_is_refused(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 4_000, "rf": NOW - 400})
    rig.set_faults(lambda: rig.add_concurrently(rpm_tk=-3_999))
    grant = await rig.client.acquire([rig.bucket], {"rpm": 3_000})
    assert grant == ({}, 2_599, {"rpm": 401}, "refused", 1, f"{rig.bucket.scope}/rpm")
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 1, "rf": NOW - 400}


async def test_retry_is_impossible_on_old_refill(rig: BucketHarness) -> None:
    """Its refill would be taken twice: once as consumed now, once as never lost at the brim."""
    await rig.put_item({"rf": NOW - 400})
    rig.set_faults(lambda: rig.add_concurrently(rf=-601))
    assert await rig.take(2_000) == ("normal", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 8_000, "rpm_tc": 2_000}
    await rig.put_item({"rf": NOW - 400})
    rig.set_faults(lambda: rig.add_concurrently(rf=-600))
    assert await rig.take(2_000, rig.new_client()) == ("retry", 1)


async def test_retry_ignores_implausible_refill_time(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 4_000, "rf": NOW - 400})
    rig.set_faults(lambda: rig.add_concurrently(rf=MAX_AHEAD_MS + 401))
    assert await rig.take(1_000) == ("normal", 2)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_000, "rpm_tc": 1_000}


async def test_refusal_states_wait_in_milliseconds_and_writes_nothing(rig: BucketHarness) -> None:
    before = {"rpm_tk": 1_000, "rf": NOW - 700}
    await rig.put_item(before)
    grant = await rig.client.acquire([rig.bucket], {"rpm": 3_500})
    assert grant == ({}, 1_800, {"rpm": 1_700}, "refused", 0, f"{rig.bucket.scope}/rpm")
    rig.now.ms = NOW + 1_799
    assert await rig.take(3_500) == ("refused", 0)
    assert await rig.get_item() == rpm_item() | before
    rig.now.ms = NOW + 1_800
    assert await rig.take(3_500) == ("normal", 1)


async def test_take_above_capacity_is_refused_without_wait(rig: BucketHarness) -> None:
    grant = await rig.client.acquire([rig.bucket], {"rpm": 10_001})
    assert (grant.path, grant.wait_ms) == ("refused", None)
    assert await rig.get_item() is None


async def test_stale_item_refuses_nothing(rig: BucketHarness) -> None:
    never = RateLimit("rpm", 10_000, 0, 1)
    rig.bucket = bucket(never)
    assert await rig.take(10_000) == ("create", 1)
    assert await rig.take(1_000) == ("refused", 0)
    await rig.new_client().adjust([rig.bucket], {"rpm": -1_000}, {})
    rig.now.ms += 501
    assert await rig.take(1_000) == ("normal", 1)


async def test_take_covers_all_levels_or_none(rig: BucketHarness) -> None:
    app, org = rig.bucket, bucket(RateLimit("rpm", 5_000, 1_000, 1_000), TPM)
    grant = await rig.client.acquire([app, org], {"rpm": 4_000, "tpm": 100, "unknown": 9})
    assert grant == ({"rpm": 4_000, "tpm": 100, "unknown": 9}, 0, {"rpm": 1_000, "tpm": 499_900}, "create", 1, "")
    grant = await rig.client.acquire([app, org], {"rpm": 2_000})
    assert (grant.is_refused, grant.wait_ms, grant.limiting) == (True, 1_000, f"{org.scope}/rpm")
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 6_000, "rpm_tc": 4_000}


async def test_limit_not_requested_refuses_nothing_and_is_refilled(rig: BucketHarness) -> None:
    both = bucket(RPM, TPM)
    await rig.client.adjust([both], {"tpm": 600_000}, {})
    rig.now.ms += 3_000
    grant = await rig.client.acquire([both], {"rpm": 1_000})
    assert (grant.path, grant.remaining["tpm"]) == ("normal", -93_000)


async def test_lease_is_bounded_by_share_and_need(rig: BucketHarness) -> None:
    both = bucket(RPM, TPM)
    used = {"rpm": 77}
    grant = await rig.client.lease([both], {"rpm": 9_000, "tpm": 100}, {"rpm": 1_000}, used)
    assert grant.taken == {"rpm": 5_000, "tpm": 100}
    grant = await rig.client.lease([both], {"rpm": 9_000, "tpm": 100}, {"rpm": 4_000}, used, (1, 4))
    assert grant.taken == {"rpm": 4_000, "tpm": 100}
    grant = await rig.client.lease([both], {"rpm": 9_000, "tpm": 100}, {"rpm": 1_001}, used)
    assert (grant.is_refused, grant.wait_ms) == (True, 1)
    item = await rig.get_item(both)
    assert item is not None
    assert (item["rpm_tc"], item["tpm_tc"], item["rpm_tk"]) == (154, 0, 1_000)


async def test_contended_bucket_is_written_without_read(rig: BucketHarness) -> None:
    """The fleet's usual case: one write for each lease, though what is known is old."""
    other = rig.new_client()
    for _ in range(3):  # both see that they are not alone
        for limiter in (other, rig.client):
            rig.now.ms += 300
            await limiter.lease([rig.bucket], {"rpm": 100}, {"rpm": 100}, {})
    reads = rig.store.reads
    for _ in range(4):
        rig.now.ms += 600
        await rig.add_concurrently(rf=600)
        grant = await rig.client.lease([rig.bucket], {"rpm": 100}, {"rpm": 100}, {})
        assert (grant.path, grant.writes, rig.store.reads) == ("retry", 1, reads)
    rig.now.ms += 3_000  # and when the others have stopped, that costs one write
    assert await rig.take(100) == ("normal", 2)


async def test_blind_write_takes_no_more_than_share(rig: BucketHarness) -> None:
    other = rig.new_client()
    for limiter in (rig.client, other, rig.client):
        rig.now.ms += 600
        await limiter.lease([rig.bucket], {"rpm": 100}, {"rpm": 100}, {})
    rig.now.ms += 600
    await rig.add_concurrently(rf=600, rpm_tk=-5_900)
    grant = await rig.client.lease([rig.bucket], {"rpm": 3_000}, {}, {})
    assert (grant.taken, grant.writes, grant.remaining) == ({"rpm": 2_000}, 2, {"rpm": 2_000})


async def test_rare_contender_reads_before_write_after_lost_race(rig: BucketHarness) -> None:
    other = rig.new_client()
    writes = []
    for _ in range(4):
        for limiter in (other, rig.client):
            rig.now.ms += 10_000
            grant = await limiter.lease([rig.bucket], {"rpm": 100}, {"rpm": 100}, {})
            writes.append(grant.writes)
    assert writes == [1, 1, 2, 2, 1, 1, 1, 1]
    reads = rig.store.reads
    for _ in range(3):  # the other one has gone
        rig.now.ms += 10_000
        assert await rig.take(100) == ("normal", 1)
    assert rig.store.reads == reads + 1


async def test_newer_settings_apply_to_holders_of_older_ones_at_next_refill(rig: BucketHarness) -> None:
    old, new = bucket(RPM, TPM), RateLimit("rpm", 4_000, 500, 1_000)
    await rig.client.acquire([old], {"rpm": 1_000, "tpm": 10})
    rig.now.ms += 100
    changed = RateBucket(old.key, (new, RateLimit("rph", 60_000, 1, 60)), 2)
    grant = await rig.new_client().acquire([changed], {"rpm": 1_000, "rph": 1_000})
    assert (grant.path, grant.remaining) == ("normal", {"rpm": 3_000, "rph": 59_000})
    expected = rpm_item(new) | {"rf": NOW + 100, "v": 2, "rpm_tk": 3_000, "rpm_tc": 2_000}
    rph = {"rph_tk": 59_000, "rph_tc": 1_000, "rph_rem": 0, "rph_cp": 60_000, "rph_ra": 1, "rph_rp": 60}
    expires = {EXPIRY_ATTRIBUTE: (NOW + 100 + 3_600_000) // 1000 + 86_400}
    assert await rig.get_item(old) == expected | rph | expires
    grant = await rig.client.acquire([old], {"rpm": 3_500, "tpm": 10})
    assert (grant.is_refused, grant.wait_ms) == (True, 1_000)
    sent = len(rig.store.sent)
    await rig.client.adjust([old], {"rpm": -1_000}, {})
    assert len(rig.store.sent) == sent + 1


async def test_newer_settings_written_concurrently_are_checked(rig: BucketHarness) -> None:
    await rig.put_item({"rf": NOW - 400})
    newer = RateBucket(rig.bucket.key, (RPM, RateLimit("rph", 3_000, 1, 60)), 2)
    rig.set_faults(lambda: rig.new_client().acquire([newer], {}))
    grant = await rig.client.acquire([rig.bucket], {"rpm": 1_000, "rph": 1_000})
    assert (grant.path, grant.writes, grant.remaining) == ("retry", 2, {"rpm": 9_000, "rph": 2_000})


async def test_settings_do_not_go_back_when_refill_time_stays(rig: BucketHarness) -> None:
    await rig.put_item({"rf": NOW + 100})
    second, third = (RateBucket(rig.bucket.key, (RPM._replace(capacity=each * 10_000),), each) for each in (2, 3))
    rig.set_faults(lambda: rig.new_client().acquire([third], {}))
    grant = await rig.client.acquire([second], {"rpm": 1_000})
    assert (grant.writes, grant.remaining) == (2, {"rpm": 9_000})
    item = await rig.get_item()
    assert item is not None
    assert (item["v"], item["rpm_cp"], item["rf"]) == (3, 30_000, NOW + 100)


async def test_refill_time_in_far_future_is_corrected_by_refused_take(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 0, "rf": NOW + MAX_AHEAD_MS + 1})
    grant = await rig.client.acquire([rig.bucket], {"rpm": 1_000})
    assert (grant.is_refused, grant.wait_ms) == (True, 1_000)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 0}
    rig.now.ms += 1_000
    assert await rig.take(1_000) == ("normal", 1)


async def test_conflicting_take_waits_and_retries(rig: BucketHarness) -> None:
    rig.set_faults(CONFLICT, THROTTLED, CONFLICT)
    assert await rig.take(1_000) == ("create", 4)
    assert rig.client.conflicts == 3


@pytest.mark.parametrize(("fault", "raised"), [(CONFLICT, TransactionFailed), (THROTTLED, StoreThrottled)])
async def test_endless_conflict_raises_and_takes_nothing(
    rig: BucketHarness, fault: str, raised: type[Exception]
) -> None:
    rig.set_faults(*[fault] * 6)
    with pytest.raises(raised):
        await rig.take(1_000)
    assert (await rig.get_item(), rig.client.pending, len(rig.store.sent)) == (None, 0, 6)


async def test_negative_take_is_rejected(rig: BucketHarness) -> None:
    with pytest.raises(ValueError, match="adjust"):
        await rig.client.acquire([rig.bucket], {"rpm": -1})


async def test_take_losing_every_race_is_refused_with_short_wait(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rf": NOW - 9_000})
    rig.set_faults(*[lambda: rig.add_concurrently(rf=1)] * 8)
    grant = await rig.client.acquire([rig.bucket], {"rpm": 2_000})
    assert grant == ({}, 100, {"rpm": 9_992}, "refused", 8, f"{rig.bucket.scope}/rpm")
