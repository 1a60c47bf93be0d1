"""One transaction on buckets, sent until its outcome is known, as far as that is to be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import StoreError, StoreUnavailable, StoreThrottled, TransactionFailed, is_condition_failure
from price_keeper.stores.contract import Store, Write

SENT = 3  # times in one go, of a transaction whose answers get lost
IN_THE_WAY = 6  # times in one go, of one that others were in the way of
FIRST_WAIT_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 0.5

# A store remembers a token for ten minutes; whatever the clocks' and the network's delays, this is within them.
TOKEN_SECONDS = 570.0

# What is sent, and answered by nobody, may be carried out so much later: long after whoever sent it gave it up.
LINGERS_SECONDS = 300.0


@dataclass(slots=True)
class Transaction:
    """Sent again only as it was, under the same token: so it is carried out once, however often it is sent."""

    writes: Sequence[Write]
    token: str = field(default_factory=lambda: str(uuid4()))
    began: float | None = None  # by the monotonic clock
    times: int = 0
    is_unsure: bool = False  # it was sent, and what becomes of it is not known
    lingers_until: float = -inf  # by the monotonic clock: an attempt without an answer may still arrive


class Sending:
    def __init__(self, store: Store, clock: Clock, uniform: Callable[[float, float], float]) -> None:
        self._store, self._clock, self._uniform = store, clock, uniform
        self.conflicts = 0

    def may_arrive(self, transaction: Transaction) -> bool:
        return self._clock.monotonic() < transaction.lingers_until

    def is_too_old(self, transaction: Transaction) -> bool:
        return transaction.began is not None and self._clock.monotonic() - transaction.began > TOKEN_SECONDS

    async def send(self, transaction: Transaction) -> None:
        """Raises TransactionFailed when a condition does not hold; any other StoreError leaves `is_unsure` right."""
        unanswered = beaten = 0
        while True:
            try:
                return await self._once(transaction)
            except StoreUnavailable as failure:
                unanswered += 1
                if not failure.maybe_applied or unanswered == SENT or self.is_too_old(transaction):
                    raise
            except (StoreThrottled, TransactionFailed) as failure:
                beaten += 1
                if is_condition_failure(failure) or beaten == IN_THE_WAY or self.is_too_old(transaction):
                    raise
            await self.pause(unanswered + beaten)

    async def _once(self, transaction: Transaction) -> None:
        now, was_unsure, lingered = self._clock.monotonic(), transaction.is_unsure, transaction.lingers_until
        if transaction.began is None:
            transaction.began = now
        transaction.is_unsure, transaction.lingers_until = True, now + LINGERS_SECONDS  # also when this is cancelled
        transaction.times += 1
        try:
            await self._store.transact(transaction.writes, token=transaction.token)
        except StoreError as failure:
            self.conflicts += not is_condition_failure(failure) and isinstance(failure, (StoreThrottled, TransactionFailed))
            if not failure.maybe_applied:
                transaction.lingers_until = lingered
            # A token that is remembered is answered with success, so where a condition fails no earlier attempt was
            # carried out: but one may be yet, and then the condition may hold.
            settles = is_condition_failure(failure) and not self.may_arrive(transaction)
            transaction.is_unsure = failure.maybe_applied or (was_unsure and not settles)
            raise
        transaction.is_unsure = False

    async def pause(self, times: int) -> None:
        longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**times)
        await self._clock.sleep(self._uniform(0, longest))
