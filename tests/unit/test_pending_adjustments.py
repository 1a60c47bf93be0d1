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


async def test_adjustment_is_written(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 1_000, "rpm_tc": 50, "rf": NOW - 5_000})
    await rig.client.adjust([rig.bucket], {"rpm": 3_000}, {"rpm": 2_000})
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -2_000, "rpm_tc": 2_050, "rf": NOW - 5_000}
    assert (rig.client.paths, rig.client.pending) == ({"adjust": 1}, 0)


async def test_adjustment_returns_only_what_fits_and_reports_all_usage(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 9_000, "rpm_tc": 5_000, "rf": NOW - 400})
    await rig.client.adjust([rig.bucket], {"rpm": -3_000}, {"rpm": -2_500})
    assert await rig.get_item() == rpm_item() | {"rpm_tc": 2_500, "rf": NOW - 400}
    await rig.client.adjust([rig.bucket], {"rpm": -1}, {})
    assert rig.client.pending == 0


async def test_adjustment_returns_up_to_capacity_of_item(
    rig: BucketHarness,
) -> None:
    await rig.put_item({"rpm_tk": 9_000, "rf": NOW - 400})
    higher = RateBucket(rig.bucket.key, (RPM._replace(capacity=50_000),), 2)
    await rig.client.adjust([higher], {"rpm": -3_000}, {})
    assert await rig.get_item() == rpm_item() | {"rf": NOW - 400, EXPIRY_ATTRIBUTE: NOW // 1000 + 50 + 86_400}


async def test_adjustment_creates_missing_item_or_limit(rig: BucketHarness) -> None:
    await rig.client.adjust([rig.bucket], {"rpm": 12_000}, {"rpm": 1})
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -2_000, "rpm_tc": 1}
    both = RateBucket(rig.bucket.key, (RPM, TPM), 2)
    await rig.client.adjust([both], {"tpm": 600_000, "rpm": 1_000}, {"tpm": 5})
    tpm = {"tpm_tk": -100_000, "tpm_tc": 5, "tpm_rem": 0, "tpm_cp": 500_000, "tpm_ra": 7, "tpm_rp": 3}
    expires = {EXPIRY_ATTRIBUTE: NOW // 1000 + 86_400 + 214}
    assert await rig.get_item() == rpm_item() | {"rpm_tk": -3_000, "rpm_tc": 1, "v": 2} | tpm | expires


async def test_adjustments_during_store_outage_are_summed_and_sent_later(rig: BucketHarness) -> None:
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
async def test_adjustment_with_lost_answers_counts_once(rig: BucketHarness, fault: str) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[fault] * 3)
    await rig.client.adjust([rig.bucket], {"rpm": 1_000}, {"rpm": 7})
    await rig.client.adjust([rig.bucket], {"rpm": 100}, {"rpm": 10})  # adjusted alone: the other bucket is unchanged
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 3_900, "rpm_tc": 17}
    assert len({token for _, token in rig.store.sent[:4]}) == 1


@pytest.mark.parametrize("fault", [ANSWER_LOST, OUTCOME_UNKNOWN])
async def test_acquire_with_lost_answer_is_retried_and_taken_once(rig: BucketHarness, fault: str) -> None:
    rig.set_faults(fault, fault)
    assert await rig.take(3_000) == ("create", 3)
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 7_000, "rpm_tc": 3_000}
    assert len({token for _, token in rig.store.sent}) == 1


@pytest.mark.parametrize("fault", [ANSWER_LOST, OUTCOME_UNKNOWN])
async def test_failed_acquire_that_arrived_is_undone(rig: BucketHarness, fault: str) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[fault] * 3)
    with pytest.raises(StoreUnavailable):
        await rig.take(3_000)
    assert rig.client.pending == 1
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 5_000}
    assert rig.client.pending == 0


async def test_acquire_of_unknown_outcome_stays_taken_after_ten_minutes(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(*[ANSWER_LOST] * 3)
    with pytest.raises(StoreUnavailable):
        await rig.take(3_000)
    await rig.clock.advance(600)
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 2_000, "rpm_tc": 3_000}
    assert (rig.client.pending, rig.client.dropped, len(rig.store.sent)) == (0, 1, 3)


async def test_cancelled_acquire_is_undone(rig: BucketHarness) -> None:
    await rig.put_item({"rpm_tk": 5_000})
    rig.set_faults(NEVER_ANSWERED)
    task = asyncio.create_task(rig.take(3_000))
    await rig.store.silent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.client.flush_pending()
    assert await rig.get_item() == rpm_item() | {"rpm_tk": 5_000}


async def test_failed_condition_after_lost_answer_does_not_settle_first_write(rig: BucketHarness) -> None:
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


async def test_acquire_arriving_after_refusal_is_undone(rig: BucketHarness) -> None:
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


async def test_adjustment_arriving_after_refusal_counts_once(rig: BucketHarness) -> None:
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
async def test_close_does_not_wait_for_writes_that_may_arrive(rig: BucketHarness, has_arrived: bool) -> None:
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


async def test_refusal_to_engine_retry_settles_nothing(rig: BucketHarness) -> None:
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


async def test_pending_writes_are_checked_once_per_round(rig: BucketHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a thousand of them, and each adjustment comes by."""
    await rig.put_item({"rpm_tk": 5_000, "rf": NOW - 400})
    rig.set_faults(OUTCOME_UNKNOWN, lambda: rig.add_concurrently(rpm_tk=-4_000))
    assert (await rig.take(3_000))[0] == "refused"
    reads: list[BucketTransaction] = []
    monkeypatch.setattr(TransactionSender, "may_arrive", lambda _, each: reads.append(each) or True)
    await rig.client.flush_pending()
    assert (len(reads), rig.client.pending) == (1, 1)
