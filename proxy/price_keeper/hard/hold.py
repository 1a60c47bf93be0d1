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
from price_keeper.hard.rows import HardBudgetKey
from price_keeper.stores.contract import Item, Store, Write

_log = logging.getLogger("price_keeper.hard")


class EarlierWriteApplied(Exception):
    """An earlier write had arrived after all, and counts now; this one did not happen."""


class InsufficientBudget(Exception):
    """The bucket has not as much, or is not there; carries its item. `maybe_applied`: it was sent before, and that may
    still arrive and find enough."""

    def __init__(self, bucket_item: Item | None, *, maybe_applied: bool) -> None:
        self.bucket_item = bucket_item
        self.maybe_applied = maybe_applied


class LeaseClosed(Exception):
    """Somebody brought this journal to the store as that of a process that is no more: nothing may be spent of it."""


class BudgetLeaseWriter:
    """One write at a time. `gained` hears of what may be spent from now on."""

    def __init__(self, store: Store, key: HardBudgetKey, holder: str, on_gained: Callable[[int], None]) -> None:
        self._store = store
        self._key = key
        self._holder = holder
        self._on_gained = on_gained
        self._sequence = 0  # of the last write that is known to be in the store
        self._leased = 0  # as of that
        self._claimed = 0  # of it: what was handed to `gained`, less what is being given back
        self.has_unconfirmed_write = (
            False  # something was sent with the next number, and what becomes of it is not known
        )
        self.is_closed = False

    async def acquire(self, pico: int, minimum: int) -> None:
        """Raises Moved, Lacking, Closed and StoreError."""
        await self._write(rows.build_take(self._key, self._holder, self._sequence, pico, minimum), pico)

    async def release(self, pico: int) -> None:
        """To be asked for by who has already let go of it. Raises as `take`; what certainly is not given is gained."""
        self._claimed -= pico
        try:
            await self._write(rows.build_release(self._key, self._holder, self._sequence, pico), -pico)
        except (InsufficientBudget, StoreError) as failure:
            if not failure.maybe_applied:
                self._claimed += pico
                self._on_gained(pico)
            raise

    async def confirm(self) -> None:
        """Of what was sent and not answered. Raises Closed and StoreError."""
        with suppress(EarlierWriteApplied):
            await self._write(rows.build_sequence_advance(self._key, self._holder, self._sequence), 0)

    async def _write(self, writes: Sequence[Write], change: int) -> None:
        if self.is_closed:
            raise LeaseClosed
        had_unconfirmed_write, self.has_unconfirmed_write = (
            self.has_unconfirmed_write,
            True,
        )  # also when this is cancelled half way
        try:
            await self._store.transact(writes)
        except StoreError as failure:
            self.has_unconfirmed_write = had_unconfirmed_write or failure.maybe_applied
            if isinstance(failure, TransactionFailed):
                self._raise_conflict(failure)
            raise
        self._confirm_sequence(self._leased + change)

    def _raise_conflict(self, failure: TransactionFailed) -> None:
        """Raises Moved, Lacking and Closed."""
        lease_reason, *bucket_reasons = failure.reasons
        if lease_reason.code is ReasonCode.CONDITION_FAILED:
            self._adopt_row(lease_reason.item)
            raise EarlierWriteApplied from None
        if bucket_reasons and bucket_reasons[0].code is ReasonCode.CONDITION_FAILED:
            raise InsufficientBudget(bucket_reasons[0].item, maybe_applied=failure.maybe_applied) from None

    def _confirm_sequence(self, leased: int) -> None:
        """All that was sent with this number has arrived now or never will."""
        gained = leased - self._claimed
        self._sequence += 1
        self.has_unconfirmed_write = False
        self._leased = self._claimed = leased
        if gained:
            self._on_gained(gained)

    def _adopt_row(self, item: Item | None) -> None:
        """Raises Closed."""
        row = rows.BudgetLeaseRow.from_item(item)
        if row.sequence != self._sequence + 1:
            self.is_closed = True
            _log.error("the hold of %s on %s %s is closed", self._holder, self._key.label, self._key.period)
            raise LeaseClosed from None
        self._confirm_sequence(row.leased)
