"""Finds totals that no process looks after any more, and brings them up to date.

A process that ends may leave additions that are in no total: it was killed, or it only replayed a journal. One process
of the fleet goes through the list of active counters every SWEEP_SECONDS. It sums a counter that has no total; each
counter once after the time for which anybody has announced to add to it (`CounterListing`); once more when even a
process whose clock is wrong has stopped; and once after its day, for processes of an earlier version. So it reads no
shards of a counter in use, nor of one that was swept.

Start with `TotalSweep.run`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from price_keeper.clock import Clock
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.ledger.aggregator import (
    COUNTERS_PER_BATCH,
    MAX_CLOCK_SKEW_SECONDS,
    ActiveCounter,
    Aggregator,
    CounterName,
    build_total_key,
    list_active_counters,
    read_as_of,
    read_counter_rows,
)
from price_keeper.ledger.counter_writes import SHARD_TTL_SECONDS
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    Condition,
    ItemMissing,
    Query,
    Store,
    Update,
    Value,
    equals,
)

SWEEP_SECONDS: Final = 600.0  # between two sweeps of the fleet
SETTLE_SECONDS: Final = 300.0  # after which an announced addition has arrived, unless a clock is wrong by more
_BEGAN, _COMPLETED = "began_at_epoch", "completed_at_epoch"
_TIMES = (_BEGAN, _COMPLETED)

_log = logging.getLogger("price_keeper.recording")


class _LastSweep(NamedTuple):
    """The row of the fleet's last sweep, without what is no number: when the sweep began, and when the last one began
    that came to its end."""

    has_row: bool = False
    began_at: int | Decimal | None = None
    completed_at: int | Decimal = 0


class TotalSweep:
    """Sweeps the totals in turn with the other processes of the fleet."""

    def __init__(self, store: Store, clock: Clock, aggregator: Aggregator) -> None:
        self._store = store
        self._clock = clock
        self._aggregator = aggregator
        self._known_as_of: dict[CounterName, float] = {}  # so that a total is not read again for nothing

    async def run(self) -> None:
        """Once: sweep, unless another process has done so in the last SWEEP_SECONDS."""
        try:
            last = await self._read_last()
            began = self._clock.now()
            if 0 <= began - float(last.began_at or 0) < SWEEP_SECONDS:
                return
            await self._store.update(_build_claim(last, began))
            if await self.sweep(float(last.completed_at)):
                await self._store.update(_build_completion(began))
        except ConditionFailed:
            return  # another process was faster
        except StoreError as failure:
            _log.warning("totals of ended processes are not swept; the next sweep tries again: %s", failure)

    async def _read_last(self) -> _LastSweep:
        key = schema.totals_sweep_key()
        page = await self._store.query(Query(key.table, key.pk, limit=1, consistent=True))
        if not page.rows:
            return _LastSweep()
        item: Any = {_COMPLETED: 0, **page.rows[0].item}
        began, completed = (item[name] if type(item.get(name)) in (int, Decimal) else None for name in _TIMES)
        if began is None or completed is None:
            _log.warning("%s or %s is no number in the row %s of %s; a sweep replaces it", *_TIMES, key[1:], key.table)
        return _LastSweep(True, began, completed or 0)

    async def sweep(self, completed_at: float = 0.0) -> bool:
        """Bring the totals up to date of all counters that were left behind since an earlier sweep, which came to its
        end. Returns whether this one does too. Raises StoreError."""
        active = await list_active_counters(self._store, self._list_days(completed_at))
        names = {each.counter[:3] for each in active}
        self._known_as_of = {name: as_of for name, as_of in self._known_as_of.items() if name in names}
        left = [each for each in active if self._is_left(each, self._known_as_of.get(each.counter[:3], 0.0))]
        failed = 0
        for start in range(0, len(left), COUNTERS_PER_BATCH):
            failed += await self._sweep_batch(left[start : start + COUNTERS_PER_BATCH])
        if failed:
            _log.warning("%d totals are not brought up to date; the next sweep tries again", failed)
        return not failed

    def _list_days(self, completed_at: float) -> list[Any]:
        """The UTC days on which a counter may have been listed that the earlier sweep did not settle. A time in the
        future comes from a wrong clock."""
        now = self._clock.now()
        if not 0 < completed_at <= now:
            completed_at = now - SHARD_TTL_SECONDS
        first = completed_at - MAX_CLOCK_SKEW_SECONDS - SETTLE_SECONDS
        day, last = (datetime.fromtimestamp(at, UTC).date() for at in (first, now + MAX_CLOCK_SKEW_SECONDS))
        return [day + timedelta(days=number) for number in range((last - day).days + 1)]

    def _is_left(self, listed: ActiveCounter, as_of: float) -> bool:
        now, until = self._clock.now(), listed.writes_until
        # An earlier version adds under an announcement of others, also when that is over, until the day ends.
        limits = (until + SETTLE_SECONDS, until + MAX_CLOCK_SKEW_SECONDS, listed.day_end + MAX_CLOCK_SKEW_SECONDS)
        return not as_of or any(as_of <= limit < now for limit in limits)

    async def _sweep_batch(self, batch: Sequence[ActiveCounter]) -> int:
        """The number of totals that the store failed to bring up to date."""
        totals = await read_counter_rows(self._store, [build_total_key(each.counter) for each in batch])
        now = self._clock.now()
        for each, total in zip(batch, totals, strict=True):
            self._known_as_of[each.counter[:3]] = as_of = read_as_of(total, now)
            self._aggregator.notify(each.counter, total, as_of)
        left = [each.counter for each in batch if self._is_left(each, self._known_as_of[each.counter[:3]])]
        _, failures = await self._aggregator.write_totals(left)
        for counter in left:
            self._known_as_of[counter[:3]] = 0.0 if counter in failures else now
        return len(failures)


def _build_claim(last: _LastSweep, now: float) -> Update:
    values: dict[str, Value] = {_BEGAN: int(now), EXPIRY_ATTRIBUTE: int(now) + SHARD_TTL_SECONDS}
    unchanged: Condition | None = None if last.has_row else ItemMissing()
    if last.began_at is not None:
        unchanged = equals(_BEGAN, last.began_at)
    return Update(schema.totals_sweep_key(), set=values, condition=unchanged)


def _build_completion(began: float) -> Update:
    return Update(schema.totals_sweep_key(), set={_COMPLETED: int(began)}, condition=equals(_BEGAN, int(began)))
