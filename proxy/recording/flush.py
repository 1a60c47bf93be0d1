"""From a sealed segment to what is written to the store. Pure.

part of a segment -> marker (if it is not there yet) + ADD of each sum + entries in the list of active counters

What was spent of a hold on a hard budget is a sum like the others, but belongs to no total and no list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from proxy.hard import rows
from proxy.model import Scope
from proxy.recording.entries import PICO_PER_MICRO, Counter, Counts
from proxy.recording.seal import Part
from proxy.recording.ulid import made_at
from proxy.stores import schema
from proxy.stores.contract import EXPIRY, ItemMissing, Key, Put, Update, Write

DAY_SECONDS = 86_400
KEEP_SHARDS_SECONDS = 35 * DAY_SECONDS
KEEP_MARKERS_SECONDS = 35 * DAY_SECONDS  # no segment is flushed that is older by its name, or its marker might be gone
KEEP_TOTALS_SECONDS = 400 * DAY_SECONDS  # and the list of what was active, by which reports find them

COST = "cost_usd_micros"
SHARDS = "shards_"  # and how many, as the name of an attribute
_COUNTED = Counts._fields[:-1]  # all but the money, by the names they have in the store


def writes(ulid: str, number: int, part: Part, now: float) -> list[Write]:
    """One transaction, whose first write fails if it was done before."""
    # A clock that was set back left names in the future, which stay young for longer.
    kept_until = int(max(now, made_at(ulid))) + KEEP_MARKERS_SECONDS
    marker = Put(schema.segment_marker(ulid, number), {EXPIRY: kept_until}, ItemMissing())
    return [marker, *(addition(ulid, counter, counts, now) for counter, counts in part)]


def active_entries(part: Part, utc_day: str, known: set[Counter], now: float) -> Iterator[Update]:
    """Of the counters that nobody here has listed yet on this day. Each number of shards that anybody ever used for
    one stays there beside the others, so that no shard is overlooked."""
    for counter, _ in part:
        if counter not in known and not counter.is_hold:
            key = schema.active_counter(utc_day, Scope.of_key(counter.scope), counter.label, counter.period)
            kept = {f"{SHARDS}{counter.shards}": True, EXPIRY: int(now) + KEEP_TOTALS_SECONDS}
            yield Update(key, set=kept)


def shards_of(entry: Mapping[str, Any]) -> int:
    """Of an entry in the list of active counters: the most that anybody used."""
    return max(int(name.removeprefix(SHARDS)) for name in entry if name.startswith(SHARDS))


def utc_day_of(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y%m%d")


def additions_to_totals(part: Part, now: float) -> Iterator[Update]:
    """For a segment so old that the shards of its counters may be gone, and the total says more than what they come to
    from then on: so it would never be raised. While they are still there, the next total from them is the same."""
    for counter, counts in part:
        if counter.is_hold:
            continue
        key = schema.daily_total(Scope.of_key(counter.scope), counter.label, counter.period)
        yield _added(key, counts, now, KEEP_TOTALS_SECONDS)


def addition(ulid: str, counter: Counter, counts: Counts, now: float) -> Update:
    if counter.is_hold:
        holder, period = counter.holder_and_period
        return rows.spent(rows.Name(counter.scope, counter.label, period), holder, counts.pico)
    shard = schema.shard_of(ulid, counter.shards)
    key = schema.usage_shard(Scope.of_key(counter.scope), counter.label, shard, counter.period)
    return _added(key, counts, now, KEEP_SHARDS_SECONDS)


def _added(key: Key, counts: Counts, now: float, keep_seconds: int) -> Update:
    added: dict[str, int | Decimal] = {name: number for name, number in zip(_COUNTED, counts, strict=False) if number}
    added[COST] = micros(counts.pico)
    return Update(key, add=added, set={"updated_at_epoch": int(now), EXPIRY: int(now) + keep_seconds})


def micros(pico: int) -> Decimal:
    return Decimal(pico) / PICO_PER_MICRO


def pico_of(cost_usd_micros: int | Decimal) -> int:
    return int(Decimal(cost_usd_micros) * PICO_PER_MICRO)
