"""Adjustments that a limiter sends to buckets later, and the fate of writes whose answers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from price_keeper.errors import CancellationReason, ReasonCode, StoreUnavailable, TransactionFailed
from price_keeper.rates.bucket_client import MAX_IN_FLIGHT_SECONDS, BucketTransaction, TransactionSender
from price_keeper.rates.token_bucket import RateBucket
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.sqlite import SqliteStore

from tests.support.bucket_harness import (
    ANSWER_LOST,
    NEVER_ANSWERED,
    NOT_SENT,
    NOW,
    OUTCOME_UNKNOWN,
    RPM,
    TPM,
    BucketHarness,
    rpm_item,
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[BucketHarness]:
    store = await SqliteStore(tmp_path / "store.db", lambda: NOW / 1000).open()
    yield BucketHarness(store)
    await store.close()


async def test_adjust(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rpm_tc": 50, "rf": NOW - 5_000})
    await rig.client.adjust([rig.bucket], {"rpm": 3_000}, {"rpm": 2_000})
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -2_000, "rpm_tc": 2_050, "rf": NOW - 5_000}
    assert (rig.client.paths, rig.client.pending) == ({"adjust": 1}, 0)


async def test_adjust_gives_back_only_as_much_as_fits_and_tells_all_of_it(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 9_000, "rpm_tc": 5_000, "rf": NOW - 400})
    await rig.client.adjust([rig.bucket], {"rpm": -3_000}, {"rpm": -2_500})
    assert await rig.get_item() == rpm_item() | {"rpm_tc": 2_500, "rf": NOW - 400}
    await rig.client.adjust([rig.bucket], {"rpm": -1}, {})
    assert rig.client.pending == 0


async def test_adjust_gives_back_below_the_brim_of_the_item_though_the_settings_have_a_higher_one(
    rig: BucketHarness,
) -> None:
    await rig.put_item({"rpm_tk": 9_000, "rf": NOW - 400})
    higher = RateBucket(rig.bucket.key, (RPM._replace(capacity=50_000),), 2)
    await rig.client.adjust([higher], {"rpm": -3_000}, {})
    assert await rig.get_item() == rpm_item() | {"rf": NOW - 400, EXPIRY_ATTRIBUTE: NOW // 1000 + 50 + 86_400}


async def test_adjust_makes_the_item_or_the_limit_that_is_missing(rig: BucketHarness) -> None:
    await rig.client.adjust([rig.bucket], {"rpm": 12_000}, {"rpm": 1})
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -2_000, "rpm_tc": 1}
    both = RateBucket(rig.bucket.key, (RPM, TPM), 2)
    await rig.client.adjust([both], {"tpm": 600_000, "rpm": 1_000}, {"tpm": 5})
    tpm = {"tpm_tk": -100_000, "tpm_tc": 5, "tpm_rem": 0, "tpm_cp": 500_000, "tpm_ra": 7, "tpm_rp": 3}
    expires = {EXPIRY_ATTRIBUTE: NOW // 1000 + 86_400 + 214}
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -3_000, "rpm_tc": 1, "v": 2} | tpm | expires


async def test_adjust_is_kept_while_the_store_is_away_and_then_sent_summed_up(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(NOT_SENT, NOT_SENT, NOT_SENT)
    await rig.client.adjust([rig.bucket], {"rpm": 1_000}, {"rpm": 1_000})
    await rig.client.adjust([rig.bucket], {"rpm": -200}, {"rpm": 30})
    assert rig.client.pending == 1
    with pytest.raises(StoreUnavailable):
        await rig.client.flush_pending()
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 4_200, "rpm_tc": 1_030}
    assert (rig.client.pending, len(rig.store.sent)) == (0, 4)


@pytest.mark.parametrize("fault", [ANSWER_LOST, OUTCOME_UNKNOWN])
async def test_adjust_whose_answers_get_lost_is_counted_once(rig: BucketHarness, fault: str) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[fault] * 3)
    await rig.client.adjust([rig.bucket], {"rpm": 1_000}, {"rpm": 7})
    await rig.client.adjust([rig.bucket], {"rpm": 100}, {"rpm": 10})  # adjusted alone: the other bucket is unchanged
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_900, "rpm_tc": 17}
    assert len({token for _, token in rig.store.sent[:4]}) == 1


@pytest.mark.parametrize("fault", [ANSWER_LOST, OUTCOME_UNKNOWN])
async def test_an_acquire_whose_answer_is_lost_is_sent_again_and_taken_once(rig: BucketHarness, fault: str) -> None:
    rig.set_faults(fault, fault)
    assert await rig.take(3_000) == ("create", 3)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 7_000, "rpm_tc": 3_000}
    assert len({token for _, token in rig.store.sent}) == 1


@pytest.mark.parametrize("fault", [ANSWER_LOST, OUTCOME_UNKNOWN])
async def test_an_acquire_that_was_told_to_fail_is_undone_if_it_did_not(rig: BucketHarness, fault: str) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[fault] * 3)
    with pytest.raises(StoreUnavailable):
        await rig.take(3_000)
    assert rig.client.pending == 1
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 5_000}
    assert rig.client.pending == 0


async def test_after_ten_minutes_nobody_can_know_and_it_stays_taken(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[ANSWER_LOST] * 3)
    with pytest.raises(StoreUnavailable):
        await rig.take(3_000)
    await rig.clock.advance(600)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 2_000, "rpm_tc": 3_000}
    assert (rig.client.pending, rig.client.dropped, len(rig.store.sent)) == (0, 1, 3)


async def test_an_acquire_whose_caller_goes_away_is_undone(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(NEVER_ANSWERED)
    task = asyncio.create_task(rig.take(3_000))
    await rig.store.silent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 5_000}


async def test_a_condition_that_fails_after_a_lost_answer_says_that_nothing_was_taken_yet(rig: BucketHarness) -> None:
    """Had the first one been carried out, its token would be known. But it may be on its way still."""
    await rig.put_item({"rpm_tk": 5_000, "rf": NOW - 2_000})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rf=1))
    assert await rig.take(3_000) == ("normal", 3)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_999, "rpm_tc": 3_000}
    assert rig.client.pending == 1
    await rig.client.flush_pending()
    assert (rig.client.pending, len(rig.store.sent)) == (1, 3)  # to ask now would tell nothing
    await rig.clock.advance(MAX_IN_FLIGHT_SECONDS)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_999, "rpm_tc": 3_000}
    assert (rig.client.pending, rig.client.dropped, len(rig.store.sent)) == (0, 0, 4)


async def test_an_acquire_that_arrives_after_it_was_refused_is_undone(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000, "rf": NOW - 400})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rpm_tk=-4_000))
    assert (await rig.take(3_000))[0] == "refused"
    await rig.add_concurrently(rpm_tk=4_000)
    await rig.deliver_late(0)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 2_000, "rpm_tc": 3_000, "rf": NOW - 400}
    await rig.clock.advance(MAX_IN_FLIGHT_SECONDS)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 5_000, "rf": NOW - 400}
    assert rig.client.pending == 0


async def test_an_adjustment_that_arrives_after_it_was_refused_is_told_once(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 8_000, "rpm_tc": 5_000})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rpm_tk=1_000))
    await rig.client.adjust([rig.bucket], {"rpm": -2_000}, {"rpm": -2_500})
    assert await rig.get_item() == rpm_item() | {"rpm_tc": 2_500}
    await rig.add_concurrently(rpm_tk=-6_000)
    await rig.deliver_late(0)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 6_000}
    await rig.clock.advance(MAX_IN_FLIGHT_SECONDS)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 4_000, "rpm_tc": 2_500}
    assert rig.client.pending == 0


@pytest.mark.parametrize("has_arrived", [False, True])
async def test_who_stops_does_not_wait_for_what_may_arrive(rig: BucketHarness, has_arrived: bool) -> None:
    await rig.put_item({"rpm_tk": 5_000, "rf": NOW - 400})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rpm_tk=-4_000))
    assert (await rig.take(3_000))[0] == "refused"
    if has_arrived:
        await rig.add_concurrently(rpm_tk=4_000)
        await rig.deliver_late(0)
        await rig.add_concurrently(rpm_tk=-4_000)
    await rig.client.flush_pending(is_last=True)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 1_000, "rf": NOW - 400}
    assert rig.client.pending == 0


async def test_a_refusal_of_what_an_engine_sent_before_settles_nothing_either(rig: BucketHarness) -> None:
    async def refused() -> None:
        raise TransactionFailed([CancellationReason(ReasonCode.CONDITION_FAILED)], maybe_applied=True)

    await rig.put_item({"rpm_tk": 9_000, "rf": NOW - 400})
    rig.set_faults(refused)
    assert (await rig.take(3_000))[0] == "retry"
    await rig.deliver_late(0)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_000, "rpm_tc": 6_000, "rf": NOW - 400}
    await rig.clock.advance(MAX_IN_FLIGHT_SECONDS)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 6_000, "rpm_tc": 3_000, "rf": NOW - 400}


async def test_what_waits_is_looked_at_once_and_not_in_each_round(
    rig: BucketHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of them, and each adjustment comes by."""
    await rig.put_item({"rpm_tk": 5_000, "rf": NOW - 400})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rpm_tk=-4_000))
    assert (await rig.take(3_000))[0] == "refused"
    looks: list[BucketTransaction] = []
    monkeypatch.setattr(TransactionSender, "may_arrive", lambda _, each: looks.append(each) or True)
    await rig.client.flush_pending()
    assert (len(looks), rig.client.pending) == (1, 1)
