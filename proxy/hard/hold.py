"""What this run of the process holds of one hard budget: taken and given back in the store, each write once at most.

A write whose answer is lost is neither forgotten nor taken for done. What a later one finds in the row tells what
became of it; until then what it would have taken is not spent, and what it would have given back is not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from proxy.errors import ReasonCode, StoreError, StoreUnavailable, TransactionFailed
from proxy.hard import rows
from proxy.hard.rows import Name
from proxy.stores.contract import Item, Store, Write

_log = logging.getLogger("proxy.hard")


class Moved(Exception):
    """An earlier write had arrived after all, and counts now; this one did not happen."""


class Lacking(Exception):
    """The bucket has not as much, or is not there; carries its item."""

    def __init__(self, bucket: Item | None) -> None:
        self.bucket = bucket


class Closed(Exception):
    """Somebody brought this journal to the store as that of a process that is no more: nothing may be spent of it."""


class OwnHold:
    """One write at a time. `gained` hears of what may be spent from now on."""

    def __init__(self, store: Store, name: Name, holder: str, gained: Callable[[int], None]) -> None:
        self._store = store
        self._name = name
        self._holder = holder
        self._gained = gained
        self._number = 0  # of the last write that is known to be in the store
        self._out = 0  # as of that
        self._claimed = 0  # of it: what was handed to `gained`, less what is being given back
        self.is_closed = False

    async def take(self, pico: int, least: int) -> None:
        """Raises Moved, Lacking, Closed and StoreError."""
        await self._write(rows.taken(self._name, self._holder, self._number, pico, least), pico)

    async def give_back(self, pico: int) -> None:
        """To be asked for by who has already let go of it. Raises as `take`; what certainly is not given is gained."""
        self._claimed -= pico
        try:
            await self._write(rows.given_back(self._name, self._holder, self._number, pico), -pico)
        except (Lacking, StoreError) as failure:
            if not (isinstance(failure, StoreUnavailable) and failure.maybe_applied):
                self._claimed += pico
                self._gained(pico)
            raise

    async def _write(self, writes: Sequence[Write], out: int) -> None:
        if self.is_closed:
            raise Closed
        try:
            await self._store.transact(writes)
        except TransactionFailed as failure:
            of_hold, of_bucket = failure.reasons
            if of_hold.code is ReasonCode.CONDITION_FAILED:
                self._find(of_hold.item)
                raise Moved from None
            if of_bucket.code is ReasonCode.CONDITION_FAILED:
                raise Lacking(of_bucket.item) from None
            raise
        self._moved_to(self._out + out)

    def _moved_to(self, out: int) -> None:
        """All that was sent with this number has arrived now or never will."""
        gained = out - self._claimed
        self._number += 1
        self._out = self._claimed = out
        if gained:
            self._gained(gained)

    def _find(self, item: Item | None) -> None:
        """Raises Closed."""
        found = rows.Hold.of(item)
        if found.number != self._number + 1:
            self.is_closed = True
            _log.error("the hold of %s on %s %s is closed", self._holder, self._name.label, self._name.period)
            raise Closed from None
        self._moved_to(found.out)
