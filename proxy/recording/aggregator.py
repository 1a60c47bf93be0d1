"""Folds the shards of a counter into one total, which everybody reads.

Any number of instances may do it at any time: what they write never lowers a total, and a fresh one is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from proxy.clock import Clock
from proxy.errors import ConditionFailed, StoreError
from proxy.model import Scope
from proxy.recording.entries import Counter, Counts
from proxy.recording.flush import COST, DAY_SECONDS, KEEP_SHARDS_SECONDS, KEEP_TOTALS_SECONDS, shards_of, utc_day_of
from proxy.stores import schema
from proxy.stores.contract import (
    EXPIRY,
    Condition,
    ItemMissing,
    Key,
    Missing,
    Put,
    Query,
    Store,
    Value,
    all_of,
    any_of,
    at_most,
    every_row,
)

TRIES = 3
CLOCKS_DIFFER_SECONDS = 3600  # at most: so long after a day's end its list of active counters may still grow
STAMP = "as_of_epoch"
COUNTED = (*Counts._fields[:-1], COST)

_log = logging.getLogger("proxy.recording")


class Aggregator:
    def __init__(self, store: Store, clock: Clock, interval_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._interval = interval_seconds
        self._has_looked_back = False
        self.written = self.left_alone = 0

    async def run(self) -> None:
        """Once over all that was active yesterday, today or, by somebody's clock, tomorrow.

        The first time also over what was active long ago: perhaps nobody was there since.
        """
        now = self._clock.now()
        since = -1 if self._has_looked_back else -KEEP_SHARDS_SECONDS // DAY_SECONDS
        latest: dict[Counter, float] = {}  # for each, when the last day ends on which it was active
        for offset in range(since, 2):
            at = now + offset * DAY_SECONDS
            async for row in every_row(self._store, Query("request-dedup", schema.active_counters(utc_day_of(at)))):
                try:
                    counter = counter_of(row.key.sk, shards_of(row.item))
                except ValueError:
                    _log.warning("an entry in the list of active counters is none: %s", row.key.sk)
                    continue
                latest[counter] = at - at % DAY_SECONDS + DAY_SECONDS
        for counter, day_end in latest.items():
            await self._update(counter, day_end)
        self._has_looked_back = True

    async def _update(self, counter: Counter, day_end: float) -> None:
        try:
            for _ in range(TRIES):
                if await self._is_done(counter, day_end):
                    return
            _log.warning("the total of %s %s is higher than its shards; it stays", counter.scope, counter.label)
        except StoreError as failure:
            _log.warning("the total of %s %s is not brought up to date: %s", counter.scope, counter.label, failure)

    async def _is_done(self, counter: Counter, day_end: float) -> bool:
        key = total_key(counter)
        began = self._clock.now()
        stamp = _stamp(await self._store.get(key))
        # A stamp in the future is somebody's wrong clock.
        if 0 <= began - stamp < self._interval / 2 or day_end + CLOCKS_DIFFER_SECONDS < stamp <= began:
            self.left_alone += 1
            return True
        totals = await sum_of_shards(self._store, counter)
        item: dict[str, Value] = {STAMP: Decimal(str(round(began, 3))), "updated_at_epoch": int(began)}
        item[EXPIRY] = int(began) + KEEP_TOTALS_SECONDS
        try:
            await self._store.put(Put(key, {**totals, **item}, _lowers_none(totals)))
        except ConditionFailed:
            return False  # somebody read later than we did, so we read again
        self.written += 1
        return True


async def sum_of_shards(store: Store, counter: Counter) -> dict[str, int | Decimal]:
    """What was flushed, all of it: read consistently."""
    scope = Scope.of_key(counter.scope)
    keys = [schema.usage_shard(scope, counter.label, shard, counter.period) for shard in range(counter.shards)]
    found = await store.get_many(keys, consistent=True)
    return summed(item for item in found if item is not None)


def summed(items: Iterable[Mapping[str, Any]]) -> dict[str, int | Decimal]:
    totals: dict[str, int | Decimal] = dict.fromkeys(COUNTED, 0)
    for item in items:
        for name in COUNTED:
            totals[name] += item.get(name, 0)
    return totals


def total_key(counter: Counter) -> Key:
    return schema.daily_total(Scope.of_key(counter.scope), counter.label, counter.period)


def counter_of(entry: str, shards: int) -> Counter:
    """From the sort key of an entry in the list of active counters."""
    scope, _, rest = entry.partition("#LABEL#")
    label, _, period = rest.partition("#")
    counter = Counter(scope, label, period, shards)
    total_key(counter)  # raises ValueError for what can be no counter's
    return counter


def _stamp(total: Mapping[str, Any] | None) -> float:
    return float(total[STAMP]) if total is not None and STAMP in total else 0.0


def _lowers_none(totals: Mapping[str, int | Decimal]) -> Condition:
    not_lower = (any_of(Missing(name), at_most(name, number)) for name, number in totals.items())
    return any_of(ItemMissing(), all_of(*not_lower))
