"""Usage submitted in batches, with repeats, mistakes and a store that fails: each counts once, as if sent alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.domain import Scope
from price_keeper.errors import (
    CancellationReason,
    ReasonCode,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
)
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.ledger.usage_submissions import (
    MAX_SUBMISSIONS_PER_TRANSACTION,
    ChargedSubmission,
    RequestIdConflict,
    SubmissionRecorder,
    UsageSubmission,
)
from price_keeper.stores.contract import Write

from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.memory_store import MemoryStore

ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
COUNTERS = [Counter(Scope(ORG, "shop").key, label, "DAY#20261118", 8) for label in ("premium", "economy")]


class Clock(ManualClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Failing(MemoryStore):
    """Each transaction meets the next of these: None is carried out, and an answer that is lost as well."""

    def __init__(self, failures: Sequence[StoreError | None] = ()) -> None:
        super().__init__()
        self.failures = list(failures)
        self.transactions = 0

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        self.transactions += 1
        await asyncio.sleep(0)
        failure = self.failures.pop(0) if self.failures else None
        is_lost = isinstance(failure, StoreUnavailable) and failure.maybe_applied
        if failure is None or is_lost:
            await super().transact(writes, token=token)
        if isinstance(failure, TransactionFailed):
            raise TransactionFailed([CancellationReason(ReasonCode.CONFLICT)] * len(writes))
        if failure is not None:
            raise failure


def charged(number: int, tokens: int = 1, counters: Sequence[Counter] = COUNTERS[:1]) -> ChargedSubmission:
    """A different usage under the same request id is a mistake."""
    about = {"label": counters[0].label, "day": "2026-11-18", "cost_usd_micros": tokens}
    counts = UsageCounts(requests=1, input_tokens=tokens, pico=tokens * 10**6)
    digest = f"{tokens} for {[counter.label for counter in counters]}"
    return UsageSubmission(ORG, "shop", f"r-{number}", digest, counts, about), counters


async def requests_of(store: MemoryStore, counter: Counter = COUNTERS[0]) -> int:
    return int((await sum_shards(store, counter)).get("requests", 0))


FAILURES = st.sampled_from(
    [
        None,
        None,
        StoreUnavailable("lost", maybe_applied=True),
        StoreUnavailable("away"),
        StoreThrottled("too much"),
        TransactionFailed([CancellationReason(ReasonCode.CONFLICT)]),
    ]
)
SUBMISSIONS = st.builds(
    charged, st.integers(0, 12), st.sampled_from([1, 1, 1, 2]), st.sampled_from([COUNTERS[:1], COUNTERS[1:], COUNTERS])
)


@settings(max_examples=tries(100))
@given(
    st.lists(st.lists(SUBMISSIONS, min_size=1, max_size=20), min_size=1, max_size=4), st.lists(FAILURES, max_size=12)
)
def test_each_submission_counts_once_despite_failures(
    batches: list[list[ChargedSubmission]], failures: list[StoreError | None]
) -> None:
    asyncio.run(_counts_once(batches, failures))


async def _counts_once(batches: list[list[ChargedSubmission]], failures: list[StoreError | None]) -> None:
    store, clock = Failing(failures), Clock()
    submissions, batches_left = SubmissionRecorder(store, clock), list(batches)
    outcomes = await asyncio.gather(*(submissions.submit_all(batch) for batch in batches_left))
    store.failures = []
    again = [await submissions.submit_all(batch) for batch in batches_left]  # as a client does that got no answer
    first: dict[str, ChargedSubmission] = {}
    for batch, found, repeated in zip(batches_left, outcomes, again, strict=True):
        for each, outcome, answer in zip(batch, found, repeated, strict=True):
            if isinstance(answer, tuple):
                first.setdefault(each[0].request_id, each)
                assert answer[0]["payload_hash"] == each[0].digest
            else:
                assert isinstance(answer, RequestIdConflict)
                assert not isinstance(outcome, tuple), "what was counted is not refused later"
    news = [each[0].request_id for run in (outcomes, again) for each in _new(batches_left, run)]
    assert len(news) == len(set(news)), "only one client is answered as the first"
    for counter in COUNTERS:
        wanted = [what.counts for what, counters in first.values() if counter in counters]
        sums = await sum_shards(store, counter)
        assert int(sums.get("requests", 0)) == len(wanted)
        assert int(sums.get("input_tokens", 0)) == sum(each.input_tokens for each in wanted)


def _new(batches: Sequence[Sequence[ChargedSubmission]], outcomes: Sequence[Sequence[Any]]) -> list[ChargedSubmission]:
    return [
        each
        for batch, found in zip(batches, outcomes, strict=True)
        for each, outcome in zip(batch, found, strict=True)
        if isinstance(outcome, tuple) and outcome[1]
    ]


async def test_batch_takes_few_transactions_and_repeat_counts_nothing() -> None:
    store = Failing()
    submissions, batch = SubmissionRecorder(store, Clock()), [charged(number) for number in range(100)]
    assert all(outcome[1] for outcome in await submissions.submit_all(batch) if isinstance(outcome, tuple))
    assert (store.transactions, await requests_of(store)) == (100 // MAX_SUBMISSIONS_PER_TRANSACTION, 100)
    found = await submissions.submit_all([*batch[:99], charged(200)])
    assert [isinstance(outcome, tuple) and outcome[1] for outcome in found] == [False] * 99 + [True]
    assert await requests_of(store) == 101


async def test_repeated_submission_does_not_split_batch() -> None:
    store = Failing()
    submissions = SubmissionRecorder(store, Clock())
    await submissions.submit(*charged(3))
    before = store.transactions
    found = await submissions.submit_all([charged(number, 2 if number == 4 else 1) for number in range(10)])
    assert [isinstance(outcome, tuple) and outcome[1] for outcome in found] == [True] * 3 + [False] + [True] * 6
    assert store.transactions - before == 3  # together in vain, together without it, and it by itself


async def test_duplicate_in_batch_counts_once() -> None:
    store = Failing()
    found = await SubmissionRecorder(store, Clock()).submit_all([charged(1), charged(1), charged(1, 2), charged(2)])
    assert [outcome[1] if isinstance(outcome, tuple) else type(outcome) for outcome in found] == [
        True,
        False,
        RequestIdConflict,
        True,
    ]
    assert await requests_of(store) == 2


@pytest.mark.parametrize("away", [StoreUnavailable("away"), StoreThrottled("too much")])
async def test_store_outage_is_reported_for_each_submission(away: StoreError) -> None:
    store = Failing([away])
    found = await SubmissionRecorder(store, Clock()).submit_all(
        [charged(number) for number in range(MAX_SUBMISSIONS_PER_TRANSACTION + 2)]
    )
    assert found[:MAX_SUBMISSIONS_PER_TRANSACTION] == [away] * MAX_SUBMISSIONS_PER_TRANSACTION
    assert await requests_of(store) == 2
