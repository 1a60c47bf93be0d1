"""What is still to be told to buckets: adjustments, and the undoing of writes whose outcome is not known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from price_keeper.errors import (
    InvalidStoreRequest,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
    is_condition_failure,
)
from price_keeper.limits.known import BucketCache
from price_keeper.limits.sending import BucketTransaction, TransactionSender
from price_keeper.rates.bucket_writes import build_adjustment, build_create
from price_keeper.rates.token_bucket import REFILLED_AT, RateBucket, resolve_bucket
from price_keeper.stores.contract import Key, Put, Update

MAX_PENDING_BUCKETS = 10_000
MAX_UNKNOWN_OUTCOMES = 1_000
FLUSH_ROUNDS = 10  # in one go, over what was added in the round before
ADJUST_ATTEMPTS = 8  # at one adjustment, each of which somebody else was faster than

Amounts = Mapping[str, int]


@dataclass(slots=True, eq=False)
class _PendingAdjustment:
    """Of one bucket, summed up. What is in a transaction under way is in it alone."""

    bucket: RateBucket
    taken: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    in_flight: BucketTransaction | None = None
    sent: tuple[Amounts, Amounts] = ({}, {})

    def add(self, taken: Amounts, used: Amounts) -> None:
        for counts, more in ((self.taken, taken), (self.used, used)):
            for name, amount in more.items():
                counts[name] += amount

    @property
    def is_settled(self) -> bool:
        return self.in_flight is None and not any(self.taken.values()) and not any(self.used.values())


@dataclass(slots=True, eq=False)
class _UnknownOutcome:
    transaction: BucketTransaction
    buckets: Sequence[RateBucket]
    taken: Amounts
    used: Amounts
    is_refused: bool  # when it was last sent; what was sent before may be carried out yet


class PendingAdjustments:
    def __init__(self, cache: BucketCache, sender: TransactionSender, now_ms: Callable[[], int]) -> None:
        self._cache, self._sender, self._now_ms = cache, sender, now_ms
        self._adjustments: dict[Key, _PendingAdjustment] = {}
        self._unknown_outcomes: list[_UnknownOutcome] = []
        self._flush_lock = asyncio.Lock()
        self.written = 0
        self.dropped = 0  # for want of room, or since nobody can know any more

    def __len__(self) -> int:
        return len(self._adjustments) + len(self._unknown_outcomes)

    def add(self, buckets: Sequence[RateBucket], taken: Amounts, used: Amounts) -> None:
        for bucket in buckets:
            adjustment = self._adjustments.setdefault(bucket.key, _PendingAdjustment(bucket))
            adjustment.bucket = max(adjustment.bucket, bucket, key=lambda each: each.version)
            adjustment.add(taken, used)
            if adjustment.is_settled:
                del self._adjustments[bucket.key]
        while len(self._adjustments) > MAX_PENDING_BUCKETS:
            del self._adjustments[next(iter(self._adjustments))]
            self.dropped += 1

    def add_unknown_outcome(
        self,
        transaction: BucketTransaction,
        buckets: Sequence[RateBucket],
        taken: Amounts,
        used: Amounts,
        *,
        is_refused: bool,
    ) -> None:
        """Whoever asked for it was told that it failed. If it did not, it is to be undone."""
        self._unknown_outcomes.append(_UnknownOutcome(transaction, buckets, taken, used, is_refused))
        if len(self._unknown_outcomes) > MAX_UNKNOWN_OUTCOMES:
            del self._unknown_outcomes[0]
            self.dropped += 1

    @property
    def is_flushing(self) -> bool:
        return self._flush_lock.locked()

    async def flush(self, *, is_last: bool = False) -> None:
        """Raises a StoreError when something had to be left for later. `is_last`: there is no later, so whatever may
        still be on its way is asked for now."""
        last_error: StoreError | None = None
        postponed: dict[int, _UnknownOutcome | _PendingAdjustment] = {}
        async with self._flush_lock:
            for _ in range(FLUSH_ROUNDS):
                due_outcomes = [each for each in self._unknown_outcomes if is_last or not self._must_wait(each)]
                pending: list[_UnknownOutcome | _PendingAdjustment] = [*due_outcomes, *self._adjustments.values()]
                due = [each for each in pending if id(each) not in postponed]
                if not due:
                    break
                for work in due:
                    try:
                        await (
                            self._undo(work, is_last)
                            if isinstance(work, _UnknownOutcome)
                            else self._write_adjustment(work)
                        )
                    except (StoreUnavailable, StoreThrottled):
                        raise  # the others would fare no better, and each would wait for it
                    except StoreError as failure:
                        last_error, postponed[id(work)] = failure, work
        if last_error is not None:
            raise last_error

    def _must_wait(self, outcome: _UnknownOutcome) -> bool:
        """Nothing is to be done about it before nothing of it can be on its way."""
        return outcome.is_refused and self._sender.may_arrive(outcome.transaction)

    async def _undo(self, outcome: _UnknownOutcome, is_last: bool) -> None:
        if self._sender.is_token_expired(outcome.transaction):
            self.dropped += 1  # it counts as taken
        else:
            try:
                await self._sender.send(outcome.transaction)
            except TransactionFailed as failure:
                if not is_condition_failure(failure):
                    raise
                outcome.is_refused = True
                if self._must_wait(outcome) and not is_last:
                    return
            else:
                self.add(outcome.buckets, _negate(outcome.taken), _negate(outcome.used))
        if outcome in self._unknown_outcomes:
            self._unknown_outcomes.remove(outcome)

    async def _write_adjustment(self, adjustment: _PendingAdjustment) -> None:
        attempts = 0
        while not adjustment.is_settled:
            if adjustment.in_flight is None:
                cached = self._cache.get(adjustment.bucket.key)
                effective = resolve_bucket(adjustment.bucket, cached.state if cached is not None else None)
                self._prepare_write(
                    adjustment, build_adjustment(effective, None, adjustment.taken, adjustment.used, self._now_ms())
                )
            else:
                attempts += 1
                await self._send_in_flight(adjustment, is_last=attempts >= ADJUST_ATTEMPTS)
        if self._adjustments.get(adjustment.bucket.key) is adjustment:
            del self._adjustments[adjustment.bucket.key]

    def _prepare_write(self, adjustment: _PendingAdjustment, write: Put | Update) -> None:
        """Nothing to write: nothing of it fits, or nothing of it is a limit any more."""
        adjustment.in_flight = None if isinstance(write, Update) and not write.add else BucketTransaction([write])
        adjustment.sent, adjustment.taken, adjustment.used = (adjustment.taken, adjustment.used), Counter(), Counter()

    async def _send_in_flight(self, adjustment: _PendingAdjustment, *, is_last: bool) -> None:
        """The transaction under way is done, or another one is to be tried in its place."""
        assert adjustment.in_flight is not None
        if self._sender.is_token_expired(adjustment.in_flight):
            self.dropped += 1
            adjustment.in_flight = None
            return
        try:
            await self._sender.send(adjustment.in_flight)
        except StoreError as failure:
            if adjustment.in_flight.has_unknown_outcome:
                if not is_condition_failure(failure):
                    raise
                # It may still be carried out, beside the next one.
                self.add_unknown_outcome(adjustment.in_flight, [adjustment.bucket], *adjustment.sent, is_refused=True)
            self._restore_sent(adjustment)
            if isinstance(failure, InvalidStoreRequest):
                self._adjustments.pop(adjustment.bucket.key, None)  # it would be rejected for ever
                self.dropped += 1
            if is_last or not is_condition_failure(failure):
                raise
            await self._rebuild_write(adjustment, failure)
        else:
            self._on_written(adjustment)

    def _restore_sent(self, adjustment: _PendingAdjustment) -> None:
        adjustment.in_flight = None
        adjustment.add(*adjustment.sent)

    async def _rebuild_write(self, adjustment: _PendingAdjustment, failure: TransactionFailed) -> None:
        """What stands there now tells how much fits, and whether it is there at all."""
        key = adjustment.bucket.key
        self._cache.update_from_failure(failure, [key])
        cached = self._cache.get(key) or (await self._cache.read([key]))[0]
        if cached.state is None:
            self._prepare_write(
                adjustment, build_create(adjustment.bucket, adjustment.taken, adjustment.used, self._now_ms())
            )
        else:
            self._prepare_write(
                adjustment,
                build_adjustment(adjustment.bucket, cached.state, adjustment.taken, adjustment.used, self._now_ms()),
            )

    def _on_written(self, adjustment: _PendingAdjustment) -> None:
        assert adjustment.in_flight is not None
        (write,) = adjustment.in_flight.writes
        adjustment.in_flight = None
        self.written += 1
        if isinstance(write, Update) and REFILLED_AT not in write.set:
            self._cache.record_take(write)
        else:
            self._cache.forget([write.key])


def _negate(amounts: Amounts) -> dict[str, int]:
    return {name: -amount for name, amount in amounts.items()}
