"""Builds the writes that bring one part of a sealed segment to the store. Pure.

    marker (only if it is not there yet) + ADD to each counter + entries in the list of active counters

They are one transaction, so a part counts exactly once. Spend of a budget lease is a sum like the others, but belongs
to no total and to no list.

Read `segment_sender` first: it says why the lines of a segment may be counted in several ranges, which is what `start`,
`estimated` and `carried` of a marker are for. Then start with `build_writes`; `CounterListing` decides
which entries are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from math import ceil
from typing import Any, NamedTuple

from price_keeper.domain import PICO_PER_MICRO, Scope
from price_keeper.ledger import lease_rows
from price_keeper.ledger.journal import SegmentPart
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.ledger.ulid import read_created_at
from price_keeper.price_dimensions import UsageCounts
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, ItemMissing, Key, Put, Update, Value, Write

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
SHARD_TTL_SECONDS = 35 * DAY_SECONDS
# no segment is flushed that is older by its name, as its marker might have expired
MARKER_TTL_SECONDS = 35 * DAY_SECONDS
TOTAL_TTL_SECONDS = 400 * DAY_SECONDS  # also of the list of active counters, by which reports find the totals

COST_ATTRIBUTE = "cost_usd_micros"
WRITES_UNTIL_ATTRIBUTE = "writes_until_epoch"
LISTING_SECONDS = 900  # for which a process may add to a counter after it listed it, at least
LISTED_PAUSES = 20  # and as many times the pause before it, up to the next full hour
SHARDS_PREFIX = "shards_"  # with the shard count, the name of an attribute
UNTIL_HOUR_PREFIX = "writes_until_hour_"  # with an hour of the UTC day, 1 to 24, the name of an attribute


_LINES, _DIGEST, _PARTS, _ESTIMATED, _CARRIED = "lines", "digest", "parts", "estimated", "carried"


class SegmentMarker(NamedTuple):
    """What the markers record about lines of a segment that were counted together: the number of lines up to the last
    of them, the digest of all those, and the number of parts.

    `estimated` are calls that these lines leave open and that count already, as estimated. `carried` are calls that the
    next segment counts, for readers that may not have all lines of this segment. `start` is the number of lines that
    had been counted before.
    """

    lines: int
    digest: str
    parts: int
    estimated: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    start: int = 0

    @classmethod
    def from_item(cls, item: Item, start: int = 0) -> SegmentMarker | None:
        """None: an earlier version wrote the marker, for all lines of the segment."""
        if _LINES not in item:
            return None
        found: Any = item
        estimated, carried = (tuple(map(int, found.get(name, ()))) for name in (_ESTIMATED, _CARRIED))
        return cls(int(found[_LINES]), str(found[_DIGEST]), int(found[_PARTS]), estimated, carried, start)

    def is_confirmed_by(self, item: Item) -> bool:
        """Whether the stored marker is this one, or one of an earlier version, which covers all lines."""
        return SegmentMarker.from_item(item, self.start) in (self, None)

    def to_item(self, expires_at: int) -> Item:
        calls = {_ESTIMATED: self.estimated, _CARRIED: self.carried}
        attributes: dict[str, Value] = {
            _LINES: self.lines,
            _DIGEST: self.digest,
            _PARTS: self.parts,
            EXPIRY_ATTRIBUTE: expires_at,
        }
        return attributes | {name: list[Value](numbers) for name, numbers in calls.items() if numbers}


def build_writes(ulid: str, marker: SegmentMarker, number: int, part: SegmentPart, now: float) -> list[Write]:
    """The writes of one transaction; the first of them fails if the part was counted before."""
    # If a clock was set back, segments have names in the future, and their markers must live longer.
    expires_at = int(max(now, read_created_at(ulid))) + MARKER_TTL_SECONDS
    put_marker = Put(schema.segment_marker_key(ulid, number, marker.start), marker.to_item(expires_at), ItemMissing())
    return [put_marker, *(build_addition(ulid, counter, counts, now) for counter, counts in part)]


def read_estimated_calls(markers: Iterable[Item]) -> frozenset[int]:
    """The estimated calls of one segment, by all of its markers."""
    return frozenset(
        number for item in markers if (marker := SegmentMarker.from_item(item)) for number in marker.estimated
    )


class CounterListing:
    """The entries of this process in the list of active counters, by UTC day.

    An entry allows its writer to add to the counter for some time, then it is renewed: so the list tells from when on
    nobody adds to a counter any more. Few flushes write an entry, also where they are far apart. Writers of one entry
    overwrite each other's time. A later writer's is later, except where an earlier one announced more than
    LISTING_SECONDS; that one also adds an attribute for the hour, which stays. So does every shard count that was ever
    used for a counter, so that no shard is missed.
    """

    def __init__(self) -> None:
        self._day = ""
        self._until: dict[Counter, int] = {}  # of the current day
        self._written_at: dict[Counter, float] = {}

    def build_entries(self, counters: Iterable[Counter], now: float) -> list[Update]:
        """The entries that have to be written with these counters, or before them. Call `confirm` when they are."""
        if self._day != format_utc_day(now):
            self._day = format_utc_day(now)
            self._until.clear()
            self._written_at = {key: at for key, at in self._written_at.items() if abs(now - at) < DAY_SECONDS}
        return [self._build_entry(counter, now) for counter in counters if self._is_due(counter, now)]

    def confirm(self, counters: Iterable[Counter], now: float) -> None:
        """The counters were added to, and the entries that were built for this time are stored."""
        for counter in counters:
            if self._is_due(counter, now):
                self._until[counter] = self._compute_until(counter, now)
            self._written_at[counter] = now

    def _is_due(self, counter: Counter, now: float) -> bool:
        return not counter.is_lease and now >= self._until.get(counter, 0)

    def _build_entry(self, counter: Counter, now: float) -> Update:
        key = schema.active_counter_key(
            self._day, Scope.from_key(counter.scope), counter.label, counter.period_or_lease
        )
        until = self._compute_until(counter, now)
        attributes: dict[str, Value] = {
            f"{SHARDS_PREFIX}{counter.shards}": True,
            WRITES_UNTIL_ATTRIBUTE: until,
            EXPIRY_ATTRIBUTE: int(now) + TOTAL_TTL_SECONDS,
        }
        if until > now + LISTING_SECONDS:
            attributes[f"{UNTIL_HOUR_PREFIX}{(until - _find_day_start(now)) // HOUR_SECONDS}"] = True
        return Update(key, set=attributes)

    def _compute_until(self, counter: Counter, now: float) -> int:
        """Not beyond the end of the UTC day, as the next one has a list of its own. A full hour of it if it is longer
        than LISTING_SECONDS."""
        day_start, announced = _find_day_start(now), LISTED_PAUSES * (now - self._written_at.get(counter, now))
        if announced <= LISTING_SECONDS:
            return int(min(now + LISTING_SECONDS, day_start + DAY_SECONDS))
        hours = ceil((now + announced - day_start) / HOUR_SECONDS)
        return day_start + min(hours * HOUR_SECONDS, DAY_SECONDS)


def _find_day_start(now: float) -> int:
    return int(now // DAY_SECONDS) * DAY_SECONDS


def read_writes_until(entry: Mapping[str, Any], day_end: float) -> float:
    """The latest time until which anybody announced to add to the counter of this entry. An earlier version announces
    nothing, and may add until the day ends. Raises ValueError."""
    hours = [int(name.removeprefix(UNTIL_HOUR_PREFIX)) for name in entry if name.startswith(UNTIL_HOUR_PREFIX)]
    from_hours = day_end - DAY_SECONDS + max(hours, default=0) * HOUR_SECONDS
    return max(float(entry.get(WRITES_UNTIL_ATTRIBUTE, day_end)), from_hours)


def read_shard_count(entry: Mapping[str, Any]) -> int:
    """The highest shard count of an entry in the list of active counters."""
    return max(int(name.removeprefix(SHARDS_PREFIX)) for name in entry if name.startswith(SHARDS_PREFIX))


def format_utc_day(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y%m%d")


def build_total_additions(part: SegmentPart, now: float) -> Iterator[Update]:
    """Add directly to the totals, for a segment so old that the shards of its counters may have expired. Then the new
    shards sum to less than the total, and the aggregator, which never lowers a total, would not include them. While the
    shards still exist, the total computed from them is the same."""
    for counter, counts in part:
        if counter.is_lease:
            continue
        key = schema.total_key(Scope.from_key(counter.scope), counter.label, counter.period_or_lease)
        yield _build_increment(key, counts, now, TOTAL_TTL_SECONDS)


def build_addition(ulid: str, counter: Counter, counts: UsageCounts, now: float) -> Update:
    if counter.is_lease:
        holder, period = counter.holder_and_period
        return lease_rows.build_spend(
            lease_rows.HardBudgetKey(counter.scope, counter.label, period), holder, counts.pico
        )
    shard = schema.choose_shard(ulid, counter.shards)
    key = schema.usage_shard_key(Scope.from_key(counter.scope), counter.label, shard, counter.period_or_lease)
    return _build_increment(key, counts, now, SHARD_TTL_SECONDS)


def _build_increment(key: Key, counts: UsageCounts, now: float, keep_seconds: int) -> Update:
    added: dict[str, int | Decimal] = {name: number for name, number in counts.by_name().items() if number}
    added[COST_ATTRIBUTE] = to_micros(counts.pico)
    return Update(key, add=added, set={"updated_at_epoch": int(now), EXPIRY_ATTRIBUTE: int(now) + keep_seconds})


def to_micros(pico: int) -> Decimal:
    return Decimal(pico) / PICO_PER_MICRO


def to_pico(cost_usd_micros: int | Decimal) -> int:
    return int(Decimal(cost_usd_micros) * PICO_PER_MICRO)
