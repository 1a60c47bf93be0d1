"""One transaction on buckets, sent until its outcome is known, as far as that is to be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import StoreError, StoreThrottled, StoreUnavailable, TransactionFailed, is_condition_failure
from price_keeper.stores.contract import Store, Write

MAX_UNANSWERED = 3  # times in one go, of a transaction whose answers get lost
MAX_CONFLICTS = 6  # times in one go, of one that others were in the way of
FIRST_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 0.5

# A store remembers a token for ten minutes; whatever the clocks' and the network's delays, this is within them.
TOKEN_TTL_SECONDS = 570.0

# What is sent, and answered by nobody, may be carried out so much later: long after whoever sent it gave it up.
MAX_IN_FLIGHT_SECONDS = 300.0


@dataclass(slots=True)
class BucketTransaction:
    """Sent again only as it was, under the same token: so it is carried out once, however often it is sent."""

    writes: Sequence[Write]
    idempotency_token: str = field(default_factory=lambda: str(uuid4()))
    first_sent_at: float | None = None  # by the monotonic clock
    attempts: int = 0
    has_unknown_outcome: bool = False  # it was sent, and what becomes of it is not known
    may_arrive_until: float = -inf  # by the monotonic clock: an attempt without an answer may still arrive


class TransactionSender:
    def __init__(self, store: Store, clock: Clock, random_between: Callable[[float, float], float]) -> None:
        self._store, self._clock, self._random_between = store, clock, random_between
        self.conflicts = 0

    def may_arrive(self, transaction: BucketTransaction) -> bool:
        return self._clock.monotonic() < transaction.may_arrive_until

    def is_token_expired(self, transaction: BucketTransaction) -> bool:
        return (
            transaction.first_sent_at is not None
            and self._clock.monotonic() - transaction.first_sent_at > TOKEN_TTL_SECONDS
        )

    async def send(self, transaction: BucketTransaction) -> None:
        """Raises TransactionFailed when a condition does not hold; any other StoreError leaves `is_unsure` right."""
        unanswered = conflicts = 0
        while True:
            try:
                return await self._attempt(transaction)
            except StoreUnavailable as failure:
                unanswered += 1
                if not failure.maybe_applied or unanswered == MAX_UNANSWERED or self.is_token_expired(transaction):
                    raise
            except (StoreThrottled, TransactionFailed) as failure:
                conflicts += 1
                if is_condition_failure(failure) or conflicts == MAX_CONFLICTS or self.is_token_expired(transaction):
                    raise
            await self.back_off(unanswered + conflicts)

    async def _attempt(self, transaction: BucketTransaction) -> None:
        now, was_unknown, may_arrive_before = (
            self._clock.monotonic(),
            transaction.has_unknown_outcome,
            transaction.may_arrive_until,
        )
        if transaction.first_sent_at is None:
            transaction.first_sent_at = now
        transaction.has_unknown_outcome, transaction.may_arrive_until = (
            True,
            now + MAX_IN_FLIGHT_SECONDS,
        )  # also when this is cancelled
        transaction.attempts += 1
        try:
            await self._store.transact(transaction.writes, token=transaction.idempotency_token)
        except StoreError as failure:
            self.conflicts += not is_condition_failure(failure) and isinstance(
                failure, (StoreThrottled, TransactionFailed)
            )
            if not failure.maybe_applied:
                transaction.may_arrive_until = may_arrive_before
            # A token that is remembered is answered with success, so where a condition fails no earlier attempt was
            # carried out: but one may be yet, and then the condition may hold.
            settles = is_condition_failure(failure) and not self.may_arrive(transaction)
            transaction.has_unknown_outcome = failure.maybe_applied or (was_unknown and not settles)
            raise
        transaction.has_unknown_outcome = False

    async def back_off(self, attempts: int) -> None:
        longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**attempts)
        await self._clock.sleep(self._random_between(0, longest))
