"""Usage that others tell us of, counted once.

    usage -> one transaction: its marker, if nobody put it there before, and the ADD to each counter

The marker keeps a hash of what was told, so that the same name for something else is noticed, and what it came to, so
that a repeat is answered as the first one was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.clock import Clock
from proxy.errors import PriceKeeperError, ReasonCode, TransactionFailed
from proxy.recording import flush
from proxy.recording.entries import Counter, Counts
from proxy.stores import schema
from proxy.stores.again import until_nobody_was_faster
from proxy.stores.contract import EXPIRY, Item, Put, Store, live, missing_or_expired

KEEP_SECONDS = flush.KEEP_MARKERS_SECONDS
# Usage that is older could come again after its marker is gone, and count twice.
OLDEST_SECONDS = KEEP_SECONDS - 5 * flush.DAY_SECONDS


class NameTaken(PriceKeeperError):
    """Something else was counted under this name."""


@dataclass(frozen=True, slots=True)
class Submission:
    """`digest` is that of what was told; `about` is kept with the marker for repeats."""

    org: str
    app: str
    request_id: str
    digest: str
    counts: Counts
    about: Mapping[str, Any]


class Submissions:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._day = ""
        self._listed: set[Counter] = set()  # on this day

    async def submit(self, what: Submission, counters: Sequence[Counter]) -> tuple[Item, bool]:
        """What was kept of it, and whether it was counted now. Safe to do again. Raises NameTaken and StoreError."""
        key = schema.request_marker(what.org, what.app, what.request_id)
        name = key.pk

        async def once() -> tuple[Item, bool]:
            now = self._clock.now()
            marker: Item = {**what.about, "payload_hash": what.digest, EXPIRY: int(now) + KEEP_SECONDS}
            additions = [flush.addition(name, counter, what.counts, now) for counter in counters]
            await self._list(counters, now)
            try:
                await self._store.transact([Put(key, marker, missing_or_expired(now)), *additions])
            except TransactionFailed as failure:
                if failure.reasons[0].code is not ReasonCode.CONDITION_FAILED:
                    raise
                before = live(await self._store.get(key, consistent=True), now)
                if before is None:  # it has just gone, so there is room for ours
                    raise
                return _checked(before, what), False
            return marker, True

        return await until_nobody_was_faster(self._clock, once)

    async def _list(self, counters: Sequence[Counter], now: float) -> None:
        """Before anything is counted, so that nothing is that no report would find."""
        day = flush.utc_day_of(now)
        if day != self._day:
            self._day = day
            self._listed.clear()
        part = tuple((counter, Counts()) for counter in counters)
        for entry in flush.active_entries(part, day, self._listed, now):
            await self._store.update(entry)
        self._listed.update(counters)


def _checked(before: Item, what: Submission) -> Item:
    if before.get("payload_hash") != what.digest:
        raise NameTaken(f"{what.request_id} was used for another usage")
    return before
