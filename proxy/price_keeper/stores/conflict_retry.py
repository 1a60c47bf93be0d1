"""Retries around conditional writes.

`retry_on_conflict` repeats an optimistic read-modify-write while another writer is faster: its condition no longer
holds, or the store reports `ReasonCode.CONFLICT`. `transact_with_retry` resends one transaction, under the same
idempotency token, when its response is lost. `rates.bucket_client` has a sender of its own, as it must know afterwards
whether an attempt may still be applied, to give its tokens back.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import ReasonCode, StoreUnavailable, TransactionFailed
from price_keeper.stores.contract import Store, Write

MAX_ATTEMPTS = 60  # a conflict means that another writer succeeded, so only 60 concurrent writers can exhaust these
MAX_BACKOFF_SECONDS = 0.25
MAX_SENDS = 3  # of one transaction whose responses are lost

T = TypeVar("T")


async def retry_on_conflict(clock: Clock, attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat `attempt`, with jittered backoff, while another writer is faster.

    `attempt` reads items and writes them under the condition that they have not changed since. Raises TransactionFailed
    after `MAX_ATTEMPTS`, or at once when the store was throttled.
    """
    for attempt_number in range(MAX_ATTEMPTS):
        try:
            return await attempt()
        except TransactionFailed as failure:
            was_throttled = any(reason.code is ReasonCode.THROTTLED for reason in failure.reasons)
            if was_throttled or attempt_number == MAX_ATTEMPTS - 1:
                raise
            await clock.sleep(random.uniform(0, min(MAX_BACKOFF_SECONDS, 0.01 * 2**attempt_number)))
    raise AssertionError("the last attempt returns or raises")


async def transact_with_retry(store: Store, clock: Clock, writes: Sequence[Write]) -> None:
    """Run a transaction, and resend it under the same idempotency token when its response is lost.

    Without the token, a resend of an applied transaction would fail its own conditions and look like a conflict with
    another writer. Raises what `Store.transact` raises.
    """
    token = str(uuid4())
    for sends in range(MAX_SENDS):
        try:
            if sends > 1:  # the first resend is immediate: most often only the connection was lost
                await clock.sleep(random.uniform(0, MAX_BACKOFF_SECONDS))
            return await store.transact(writes, token=token)
        except StoreUnavailable as failure:
            if not failure.maybe_applied or sends == MAX_SENDS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")
