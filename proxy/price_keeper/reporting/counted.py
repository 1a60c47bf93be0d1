"""Counters as they stand in the store, exact as of the last flush.

A total that is known to hold everything is taken as it is; otherwise the shards are read, consistently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from price_keeper.model import Scope
from price_keeper.recording.aggregator import MAX_CLOCK_SKEW_SECONDS, AS_OF_ATTRIBUTE, ActiveCounter, build_shard_keys, sum_items, build_total_key
from price_keeper.recording.entries import Counter, UsageCounts
from price_keeper.recording.flush import COST_ATTRIBUTE, to_pico
from price_keeper.reporting.days import find_utc_day_end
from price_keeper.stores.contract import Store

READ_AT_ONCE = 500  # counters, or as many as one org has, so that what is held of their shards stays small


class Wanted(NamedTuple):
    """A counter, and the moment after which a total of it holds everything."""

    counter: Counter
    complete_after: float


@dataclass(slots=True)
class Read:
    counts: dict[Counter, UsageCounts] = field(default_factory=dict)
    is_final: bool = True  # nothing had to be read from shards


def wanted(found: ActiveCounter, day_end: float) -> Wanted:
    """Whoever flushed later would have listed the counter on a later day, if the clocks differ as little as allowed."""
    return Wanted(found.counter, max(day_end, find_utc_day_end(found.last_written) + MAX_CLOCK_SKEW_SECONDS))


async def read(store: Store, counters: Iterable[Wanted], now: float) -> Read:
    done = Read()
    for batch in _batches(counters):
        totals = await store.get_many([build_total_key(each.counter) for each in batch])
        known = dict(zip(batch, totals, strict=True))
        done.counts.update({each.counter: _counts(total) for each, total in known.items() if total is not None})
        unsure = [each.counter for each, total in known.items() if not _is_complete(total, each.complete_after, now)]
        done.is_final = done.is_final and not unsure
        # An org before its apps, so that what is flushed in between is not taken for spend of callers without an app.
        for of_apps in (False, True):
            some = [counter for counter in unsure if (_scope(counter).app is not None) is of_apps]
            for counter, counts in (await _from_shards(store, some)).items():
                # Counters never go down; a shard that is gone already leaves what the total knew.
                done.counts[counter] = UsageCounts._make(map(max, counts, done.counts.get(counter, UsageCounts())))
    return done


def _batches(counters: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """What one org has is read at one time."""
    batch: list[Wanted] = []
    ordered = sorted(counters, key=lambda each: each.counter)
    for _, group in groupby(ordered, key=lambda each: _scope(each.counter).org):
        batch += group
        if len(batch) >= READ_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _scope(counter: Counter) -> Scope:
    return Scope.from_key(counter.scope)


async def _from_shards(store: Store, counters: Sequence[Counter]) -> dict[Counter, UsageCounts]:
    keys = [key for counter in counters for key in build_shard_keys(counter)]
    items = iter(await store.get_many(keys, consistent=True))
    found = {}
    for counter in counters:
        own = [next(items) for _ in range(counter.shards)]
        found[counter] = _counts(sum_items(item for item in own if item is not None))
    return found


def _is_complete(total: Mapping[str, Any] | None, complete_after: float, now: float) -> bool:
    """A stamp in the future is somebody's wrong clock, and proves nothing."""
    return total is not None and complete_after <= float(total.get(AS_OF_ATTRIBUTE, 0)) <= now


def _counts(item: Mapping[str, Any]) -> UsageCounts:
    numbers = [int(item.get(name, 0)) for name in UsageCounts._fields[:-1]]
    return UsageCounts._make([*numbers, to_pico(item.get(COST_ATTRIBUTE, 0))])
