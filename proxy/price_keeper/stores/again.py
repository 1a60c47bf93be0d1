"""A write that is based on what was read, tried again while others get there first or its answer gets lost."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import uuid4

from price_keeper.clock import Clock
from price_keeper.errors import ReasonCode, StoreUnavailable, TransactionFailed
from price_keeper.stores.contract import Store, Write

ATTEMPTS = 60  # each lost one means that another writer was done, so it takes as many writers at once to fail
LONGEST_WAIT_SECONDS = 0.25
SENT = 3  # times, of one transaction whose answers get lost

T = TypeVar("T")


async def until_nobody_was_faster(clock: Clock, once: Callable[[], Awaitable[T]]) -> T:
    """`once` reads and then writes on the condition that what it read still stands."""
    for attempt in range(ATTEMPTS):
        try:
            return await once()
        except TransactionFailed as failure:
            is_beaten = all(reason.code is not ReasonCode.THROTTLED for reason in failure.reasons)
            if not is_beaten or attempt == ATTEMPTS - 1:
                raise
            await clock.sleep(random.uniform(0, min(LONGEST_WAIT_SECONDS, 0.01 * 2**attempt)))
    raise AssertionError("the last attempt returns or raises")


async def transacted(store: Store, clock: Clock, writes: Sequence[Write]) -> None:
    """Sent again under the same token when its answer is lost: else who made it would be told that somebody else did.

    Raises as `Store.transact` does.
    """
    token = str(uuid4())
    for sent in range(SENT):
        try:
            if sent > 1:  # at once the first time: most often it is the connection alone that was lost
                await clock.sleep(random.uniform(0, LONGEST_WAIT_SECONDS))
            return await store.transact(writes, token=token)
        except StoreUnavailable as failure:
            if not failure.maybe_applied or sent == SENT - 1:
                raise
    raise AssertionError("the last attempt returns or raises")
