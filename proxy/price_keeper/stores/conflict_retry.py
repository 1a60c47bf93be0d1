"""Retries around conditional writes.

`retry_on_conflict` repeats an optimistic read-modify-write until no other writer was faster. `transact_with_retry`
sends one transaction again, under the same idempotency token, when its answer is lost.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import ReasonCode, StoreUnavailable, TransactionFailed
from price_keeper.stores.contract import Store, Write

MAX_ATTEMPTS = 60  # each lost one means that another writer was done, so it takes as many writers at once to fail
MAX_BACKOFF_SECONDS = 0.25
MAX_SENDS = 3  # times, of one transaction whose answers get lost

T = TypeVar("T")


async def retry_on_conflict(clock: Clock, attempt: Callable[[], Awaitable[T]]) -> T:
    """`once` reads and then writes on the condition that what it read still stands."""
    for attempt_number in range(MAX_ATTEMPTS):
        try:
            return await attempt()
        except TransactionFailed as failure:
            is_conflict = all(reason.code is not ReasonCode.THROTTLED for reason in failure.reasons)
            if not is_conflict or attempt_number == MAX_ATTEMPTS - 1:
                raise
            await clock.sleep(random.uniform(0, min(MAX_BACKOFF_SECONDS, 0.01 * 2**attempt_number)))
    raise AssertionError("the last attempt returns or raises")


async def transact_with_retry(store: Store, clock: Clock, writes: Sequence[Write]) -> None:
    """Sent again under the same token when its answer is lost: else who made it would be told that somebody else did.

    Raises as `Store.transact` does.
    """
    token = str(uuid4())
    for sends in range(MAX_SENDS):
        try:
            if sends > 1:  # at once the first time: most often it is the connection alone that was lost
                await clock.sleep(random.uniform(0, MAX_BACKOFF_SECONDS))
            return await store.transact(writes, token=token)
        except StoreUnavailable as failure:
            if not failure.maybe_applied or sends == MAX_SENDS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")
