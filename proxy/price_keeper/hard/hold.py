"""What this run of the process holds of one hard budget: taken and given back in the store, each write once at most.

A write whose answer is lost is neither forgotten nor taken for done. What a later one finds in the row tells what
became of it; until then what it would have taken is not spent, and what it would have given back is not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from price_keeper.errors import ReasonCode, StoreError, TransactionFailed
from price_keeper.hard import rows
from price_keeper.hard.rows import Name
from price_keeper.stores.contract import Item, Store, Write

_log = logging.getLogger("price_keeper.hard")


class Moved(Exception):
    """An earlier write had arrived after all, and counts now; this one did not happen."""


class Lacking(Exception):
    """The bucket has not as much, or is not there; carries its item. `maybe_applied`: it was sent before, and that may
    still arrive and find enough."""

    def __init__(self, bucket: Item | None, *, maybe_applied: bool) -> None:
        self.bucket = bucket
        self.maybe_applied = maybe_applied


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
        self.is_unsure = False  # something was sent with the next number, and what becomes of it is not known
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
            if not failure.maybe_applied:
                self._claimed += pico
                self._gained(pico)
            raise

    async def make_sure(self) -> None:
        """Of what was sent and not answered. Raises Closed and StoreError."""
        with suppress(Moved):
            await self._write(rows.moved_on(self._name, self._holder, self._number), 0)

    async def _write(self, writes: Sequence[Write], out: int) -> None:
        if self.is_closed:
            raise Closed
        was_unsure, self.is_unsure = self.is_unsure, True  # also when this is cancelled half way
        try:
            await self._store.transact(writes)
        except StoreError as failure:
            self.is_unsure = was_unsure or failure.maybe_applied
            if isinstance(failure, TransactionFailed):
                self._refused(failure)
            raise
        self._moved_to(self._out + out)

    def _refused(self, failure: TransactionFailed) -> None:
        """Raises Moved, Lacking and Closed."""
        of_hold, *of_bucket = failure.reasons
        if of_hold.code is ReasonCode.CONDITION_FAILED:
            self._find(of_hold.item)
            raise Moved from None
        if of_bucket and of_bucket[0].code is ReasonCode.CONDITION_FAILED:
            raise Lacking(of_bucket[0].item, maybe_applied=failure.maybe_applied) from None

    def _moved_to(self, out: int) -> None:
        """All that was sent with this number has arrived now or never will."""
        gained = out - self._claimed
        self._number += 1
        self.is_unsure = False
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
