"""Counters as they stand in the store, exact as of the last flush.

A total that is known to hold everything is taken as it is; otherwise the shards are read, consistently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from price_keeper.model import Scope
from price_keeper.recording.aggregator import (
    AS_OF_ATTRIBUTE,
    MAX_CLOCK_SKEW_SECONDS,
    ActiveCounter,
    build_shard_keys,
    build_total_key,
    sum_items,
)
from price_keeper.recording.entries import Counter, UsageCounts
from price_keeper.recording.flush import COST_ATTRIBUTE, to_pico
from price_keeper.reports.report_period import find_utc_day_end
from price_keeper.stores.contract import Store

COUNTERS_PER_READ = 500  # counters, or as many as one org has, so that what is held of their shards stays small


class CounterQuery(NamedTuple):
    """A counter, and the moment after which a total of it holds everything."""

    counter: Counter
    complete_after: float


@dataclass(slots=True)
class CounterValues:
    counts: dict[Counter, UsageCounts] = field(default_factory=dict)
    is_final: bool = True  # nothing had to be read from shards


def build_counter_query(listed: ActiveCounter, day_end: float) -> CounterQuery:
    """Whoever flushed later would have listed the counter on a later day, if the clocks differ as little as allowed."""
    return CounterQuery(listed.counter, max(day_end, find_utc_day_end(listed.last_written) + MAX_CLOCK_SKEW_SECONDS))


async def read_counters(store: Store, queries: Iterable[CounterQuery], now: float) -> CounterValues:
    values = CounterValues()
    for batch in _iterate_batches(queries):
        totals = await store.get_many([build_total_key(each.counter) for each in batch])
        totals_by_query = dict(zip(batch, totals, strict=True))
        values.counts.update(
            {each.counter: _parse_counts(total) for each, total in totals_by_query.items() if total is not None}
        )
        incomplete = [
            each.counter for each, total in totals_by_query.items() if not _is_complete(total, each.complete_after, now)
        ]
        values.is_final = values.is_final and not incomplete
        # An org before its apps, so that what is flushed in between is not taken for spend of callers without an app.
        for of_apps in (False, True):
            selected = [counter for counter in incomplete if (_parse_scope(counter).app is not None) is of_apps]
            for counter, counts in (await _read_shards(store, selected)).items():
                # Counters never go down; a shard that is gone already leaves what the total knew.
                values.counts[counter] = UsageCounts._make(map(max, counts, values.counts.get(counter, UsageCounts())))
    return values


def _iterate_batches(queries: Iterable[CounterQuery]) -> Iterator[list[CounterQuery]]:
    """What one org has is read at one time."""
    batch: list[CounterQuery] = []
    ordered = sorted(queries, key=lambda each: each.counter)
    for _, group in groupby(ordered, key=lambda each: _parse_scope(each.counter).org):
        batch += group
        if len(batch) >= COUNTERS_PER_READ:
            yield batch
            batch = []
    if batch:
        yield batch


def _parse_scope(counter: Counter) -> Scope:
    return Scope.from_key(counter.scope)


async def _read_shards(store: Store, counters: Sequence[Counter]) -> dict[Counter, UsageCounts]:
    keys = [key for counter in counters for key in build_shard_keys(counter)]
    items = iter(await store.get_many(keys, consistent=True))
    counts_by_counter = {}
    for counter in counters:
        shard_items = [next(items) for _ in range(counter.shards)]
        counts_by_counter[counter] = _parse_counts(sum_items(item for item in shard_items if item is not None))
    return counts_by_counter


def _is_complete(total: Mapping[str, Any] | None, complete_after: float, now: float) -> bool:
    """A stamp in the future is somebody's wrong clock, and proves nothing."""
    return total is not None and complete_after <= float(total.get(AS_OF_ATTRIBUTE, 0)) <= now


def _parse_counts(item: Mapping[str, Any]) -> UsageCounts:
    numbers = [int(item.get(name, 0)) for name in UsageCounts._fields[:-1]]
    return UsageCounts._make([*numbers, to_pico(item.get(COST_ATTRIBUTE, 0))])
