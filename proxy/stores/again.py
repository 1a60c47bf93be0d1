"""A write that is based on what was read, tried again while others get there first."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from proxy.clock import Clock
from proxy.errors import ReasonCode, TransactionFailed

ATTEMPTS = 60  # each lost one means that another writer was done, so it takes as many writers at once to fail
LONGEST_WAIT_SECONDS = 0.25

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
