"""Counts usage that happened elsewhere and was submitted to the control API: once per request id.

One transaction puts a marker under the request id, if there is none, and adds to each counter. Several submissions
share a transaction; one that was counted before is answered by itself, and the others are counted without it. The
marker keeps a hash of the submission, so that the same request id for other usage is an error, and its result, so that
a repeat gets the first answer. Start with `SubmissionRecorder.submit_all`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from price_keeper.clock import Clock
from price_keeper.errors import InvalidStoreRequest, PriceKeeperError, ReasonCode, StoreError, TransactionFailed
from price_keeper.ledger import counter_writes
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.conflict_retry import retry_on_conflict
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    MAX_TRANSACTION_WRITES,
    Item,
    Key,
    Put,
    Store,
    ignore_expired,
    missing_or_expired,
)

SUBMISSION_TTL_SECONDS = counter_writes.MARKER_TTL_SECONDS
# Older usage could be submitted again after its marker has expired, and count twice.
MAX_SUBMISSION_AGE_SECONDS = SUBMISSION_TTL_SECONDS - 5 * counter_writes.DAY_SECONDS

MAX_SUBMISSIONS_PER_TRANSACTION = 50  # leaves as much room for counters
MAX_CONCURRENT_SUBMISSIONS = 8  # of those that cannot share a transaction


class RequestIdConflict(PriceKeeperError):
    """Other usage was counted under this request id."""


@dataclass(frozen=True, slots=True)
class UsageSubmission:
    """Usage of one request of an app or, with None, of the org's own client. `digest` is the hash of the submitted
    usage; `about` is kept in the marker for repeats."""

    org: str
    app: str | None
    request_id: str
    digest: str
    counts: UsageCounts
    about: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return schema.request_marker_key(self.org, self.app, self.request_id)

    def build_marker(self, now: float) -> Item:
        return {**self.about, "payload_hash": self.digest, EXPIRY_ATTRIBUTE: int(now) + SUBMISSION_TTL_SECONDS}


class PendingSubmission(Protocol):
    """What a listener of submissions knows of one that is being sent. Exactly one of the two is called."""

    def confirm(self) -> None:
        """The store has acknowledged it."""

    def cancel(self) -> None:
        """It failed, or its outcome is unknown: if it was stored, it counts as usage of another process."""


class SubmissionListener(Protocol):
    def begin_submission(self, sums: Mapping[Counter, UsageCounts]) -> PendingSubmission:
        """Notified before anything is sent: from now on these sums may be in the store."""


ChargedSubmission: TypeAlias = tuple[UsageSubmission, Sequence[Counter]]
SubmissionOutcome: TypeAlias = "tuple[Item, bool] | Exception"


class _AlreadyCounted(Exception):
    """Some of a group were counted before, or are being counted by another process; `positions` says which."""

    def __init__(self, positions: Collection[int]) -> None:
        self.positions = positions
        super().__init__()


class SubmissionRecorder:
    """Counts submissions exactly once."""

    def __init__(self, store: Store, clock: Clock, listeners: Sequence[SubmissionListener] = ()) -> None:
        self._store = store
        self._clock = clock
        self._listeners = listeners
        self._listing = counter_writes.CounterListing()
        self._on_written: list[Callable[[Counter], None]] = []

    def subscribe(self, on_written: Callable[[Counter], None]) -> None:
        """Call `on_written` with each counter that was added to."""
        self._on_written.append(on_written)

    async def submit(self, submission: UsageSubmission, counters: Sequence[Counter]) -> tuple[Item, bool]:
        """The result that is stored, and whether it was counted now. Idempotent. Raises RequestIdConflict and
        StoreError."""
        key = submission.key

        async def attempt() -> tuple[Item, bool]:
            now = self._clock.now()
            marker = submission.build_marker(now)
            additions = [counter_writes.build_addition(key.pk, counter, submission.counts, now) for counter in counters]
            await self._list_counters(counters, now)
            try:
                with self._notify(dict.fromkeys(counters, submission.counts)):
                    await self._store.transact([Put(key, marker, missing_or_expired(now)), *additions])
            except TransactionFailed as failure:
                if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                    raise
                before = ignore_expired(await self._store.get(key, consistent=True), now)
                if before is None:  # it has just expired, so the retry can put a new one
                    raise
                self._notify_written(counters)  # perhaps by this process, which did not get the answer
                return _check_digest(before, submission), False
            self._notify_written(counters)
            return marker, True

        return await retry_on_conflict(self._clock, attempt)

    async def submit_all(self, submissions: Sequence[ChargedSubmission]) -> list[SubmissionOutcome]:
        """Like `submit` for each; a failure of one does not affect the others, and stands in its place."""
        outcomes: dict[int, SubmissionOutcome] = {}
        for group in _group_by_transaction(submissions):
            outcomes |= await self._submit_together({place: submissions[place] for place in group})
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_SUBMISSIONS)

        async def submit_one(place: int) -> None:
            async with semaphore:
                try:
                    outcomes[place] = await self.submit(*submissions[place])
                except Exception as failure:
                    outcomes[place] = failure

        await asyncio.gather(*(submit_one(place) for place in range(len(submissions)) if place not in outcomes))
        return [outcomes[place] for place in range(len(submissions))]

    async def _submit_together(self, group: Mapping[int, ChargedSubmission]) -> dict[int, SubmissionOutcome]:
        """The outcomes of a group that was counted in one transaction; those missing have to be submitted one by
        one."""
        remaining = dict(group)
        for _ in range(2):  # the second attempt leaves out those that were counted before
            if len(remaining) < 2:
                break
            try:
                now = await self._count_together(list(remaining.values()))
            except _AlreadyCounted as conflict:
                remaining = {
                    place: charged
                    for number, (place, charged) in enumerate(remaining.items())
                    if number not in conflict.positions
                }
            except StoreError as failure:
                if isinstance(failure, InvalidStoreRequest):  # perhaps one of them alone is invalid
                    break
                return dict.fromkeys(remaining, failure)
            else:
                return {place: (submission.build_marker(now), True) for place, (submission, _) in remaining.items()}
        return {}

    async def _count_together(self, group: Sequence[ChargedSubmission]) -> float:
        """Count all or none, and return the time. Raises _AlreadyCounted, and submission the store raises."""
        sums: dict[Counter, UsageCounts] = {}
        for submission, counters in group:
            for counter in counters:
                sums[counter] = sums[counter].plus(submission.counts) if counter in sums else submission.counts
        name = group[0][0].key.pk  # any of them: it only spreads the writes over the shards

        async def attempt() -> float:
            now = self._clock.now()
            markers = [
                Put(submission.key, submission.build_marker(now), missing_or_expired(now)) for submission, _ in group
            ]
            additions = [counter_writes.build_addition(name, counter, counts, now) for counter, counts in sums.items()]
            await self._list_counters(list(sums), now)
            try:
                with self._notify(sums):
                    await self._store.transact([*markers, *additions])
            except TransactionFailed as failure:
                codes = [reason.code for reason in failure.reasons[: len(markers)]]
                counted_positions = {number for number, code in enumerate(codes) if code is ReasonCode.CONDITION_FAILED}
                if counted_positions:
                    raise _AlreadyCounted(counted_positions) from None
                raise
            self._notify_written(sums)
            return now

        return await retry_on_conflict(self._clock, attempt)

    @contextmanager
    def _notify(self, sums: Mapping[Counter, UsageCounts]) -> Iterator[None]:
        """Notify the listeners before these sums are sent, and of the outcome."""
        pending = [listener.begin_submission(sums) for listener in self._listeners]
        try:
            yield
        except BaseException:
            for each in pending:
                each.cancel()
            raise
        for each in pending:
            each.confirm()

    async def _list_counters(self, counters: Sequence[Counter], now: float) -> None:
        """List the counters before anything is counted, so that reports find everything that is counted."""
        await asyncio.gather(*(self._store.update(entry) for entry in self._listing.build_entries(counters, now)))
        self._listing.confirm(counters, now)

    def _notify_written(self, counters: Iterable[Counter]) -> None:
        for counter in counters:
            for on_written in self._on_written:
                on_written(counter)


def _group_by_transaction(submissions: Sequence[ChargedSubmission]) -> list[list[int]]:
    """Groups of positions, each as large as one transaction allows. The second of two equal request ids is in no
    group."""
    groups: list[list[int]] = []
    seen: set[str] = set()
    counters: set[Counter] = set()
    for place, (submission, charged) in enumerate(submissions):
        if submission.request_id in seen:
            continue
        seen.add(submission.request_id)
        counters |= set(charged)
        size = len(groups[-1]) if groups else MAX_SUBMISSIONS_PER_TRANSACTION
        if size == MAX_SUBMISSIONS_PER_TRANSACTION or size + 1 + len(counters) > MAX_TRANSACTION_WRITES:
            groups.append([])
            counters = set(charged)
        groups[-1].append(place)
    return groups


def _check_digest(existing: Item, submission: UsageSubmission) -> Item:
    if existing.get("payload_hash") != submission.digest:
        raise RequestIdConflict(f"{submission.request_id} was used for another usage")
    return existing
