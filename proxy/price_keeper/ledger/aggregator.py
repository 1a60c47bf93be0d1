"""Sums the shards of each counter into one total, which budgets and reports read.

A process that adds to a counter looks after its total: some time later it reads the total, and unless another process
has written one since that includes the addition, it sums the shards. So a fleet sums each counter about once an
interval, and an unchanged counter costs nothing. A conditional write never lowers a total.

`total_sweep` finds what a process added that has ended before it summed it. Start with `Aggregator.run`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from datetime import time as day_time
from decimal import Decimal
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.ledger.counter_writes import (
    COST_ATTRIBUTE,
    DAY_SECONDS,
    TOTAL_TTL_SECONDS,
    read_shard_count,
    read_writes_until,
    to_pico,
)
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.org_calendar import format_day
from price_keeper.price_dimensions import COUNT_FIELDS
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    Condition,
    Item,
    ItemMissing,
    Key,
    Prefix,
    Put,
    Query,
    Store,
    Value,
    all_of,
    any_of,
    at_most,
    iterate_rows,
)
from price_keeper.telemetry.incident import Incident
from price_keeper.telemetry.request_stats import BucketBounds, Distribution

MAX_TRIES: Final = 3
CLOCK_MARGIN_SECONDS: Final = 5.0  # by which the clocks of a fleet may differ
MAX_CLOCK_SKEW_SECONDS: Final = 3600  # by which a wrong clock may be behind; later nothing is missed for good
# of the interval, after an addition: when its process looks at the total
EARLIEST_LOOK, LATEST_LOOK = 0.75, 0.85
FRESH_SHARE = 0.5  # of the interval: a total as young is left alone
MAX_TICK_SECONDS: Final = 3.0  # between two runs
COUNTERS_PER_BATCH: Final = 12  # of 8 shards each, which one request reads
MAX_CONCURRENT_BATCHES: Final = 2
MAX_ABOVE_SHARDS: Final = 1000
AS_OF_ATTRIBUTE: Final = "as_of_epoch"
TOTAL_ATTRIBUTES: Final = (*COUNT_FIELDS, COST_ATTRIBUTE)
_NUMBERS: Final = (*TOTAL_ATTRIBUTES, AS_OF_ATTRIBUTE)
LAG_BOUNDS: Final[BucketBounds] = (1, 5, 10, 20, 30, 45, 60, 90, 120, 300, 600, 1800)

_log = logging.getLogger("price_keeper.recording")
malformed_rows = Incident(_log, time.monotonic)

CounterName: TypeAlias = "tuple[str, str, str]"  # scope, label and period


@dataclass(slots=True)
class _PendingTotal:
    """Additions of this process that a counter's total may not include: when the first and the last of them were
    acknowledged, and when to look at the total, on the monotonic clock."""

    counter: Counter
    first_at: float
    last_at: float
    look_at: float

    def add(self, counter: Counter, at: float) -> None:
        self.counter, self.last_at = max(self.counter, counter), at  # that with more shards


class Aggregator:
    """Brings totals up to date."""

    def __init__(
        self, store: Store, clock: Clock, interval_seconds: float, chance: Callable[[], float] = random.random
    ) -> None:
        """`chance` returns a number in [0, 1), used for jitter."""
        self._store = store
        self._clock = clock
        self._interval = interval_seconds
        self._chance = chance
        self._pending: dict[CounterName, _PendingTotal] = {}
        self._above_shards: set[CounterName] = set()  # totals that are higher than the sum of their shards; logged once
        self._lag_counts, self._lag_seconds = [0] * (len(LAG_BOUNDS) + 1), 0.0
        self._incident = Incident(_log, clock.monotonic)
        self.totals_written = self.totals_fresh = 0
        self._on_total: list[Callable[[Counter, int, float], None]] = []
        # when all totals that were due were last up to date; before that, the start of this process
        self.completed_at = clock.monotonic()

    def subscribe(self, on_total: Callable[[Counter, int, float], None]) -> None:
        """Call `on_total` with each total that is up to date: its counter, pico-dollars, and the time of the total."""
        self._on_total.append(on_total)

    @property
    def tick_seconds(self) -> float:
        """How often to call `run`, so that no look is much too late."""
        return min(MAX_TICK_SECONDS, self._interval / 20)

    @property
    def lag(self) -> Distribution:
        """The seconds from the acknowledgement of an addition to the total that includes it; of additions that one
        total is the first to include, those of the oldest."""
        return Distribution(LAG_BOUNDS, tuple(self._lag_counts), self._lag_seconds)

    def note_written(self, counter: Counter) -> None:
        """This process added to the counter, and the store has acknowledged it."""
        now, pending = self._clock.now(), self._pending.get(counter[:3])
        if pending is None:
            self._pending[counter[:3]] = _PendingTotal(counter, now, now, self._choose_look_at(0.0))
        else:
            pending.add(counter, now)

    def _choose_look_at(self, age: float) -> float:
        share = EARLIEST_LOOK + (LATEST_LOOK - EARLIEST_LOOK) * self._chance()
        return self._clock.monotonic() + self._interval * share - age

    async def run(self, *, is_last: bool = False) -> None:
        """Once: look at the totals that are due. `is_last`: at all that may lack an addition, and leave none to another
        look."""
        moment = math.inf if is_last else self._clock.monotonic()
        due = [pending for pending in self._pending.values() if pending.look_at <= moment]
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_BATCHES)

        async def look(batch: Sequence[_PendingTotal]) -> list[StoreError]:
            async with semaphore:
                return await self._look(batch, is_last)

        failures = [failure for each in await asyncio.gather(*map(look, _iterate_batches(due))) for failure in each]
        if failures:
            message = "%d totals are not brought up to date; the next run tries again: %s"
            self._incident.report(message, len(failures), failures[0])
        else:
            self._incident.end("totals are brought up to date again")
            self.completed_at = self._clock.monotonic()

    async def _look(self, batch: Sequence[_PendingTotal], is_last: bool) -> list[StoreError]:
        for pending in batch:
            del self._pending[pending.counter[:3]]  # what is added from now on may not be in what is read
        try:
            return await self._bring_up_to_date(batch, is_last)
        except BaseException as failure:  # also when it is cancelled
            for pending in batch:
                self._put_back(pending)
            if not isinstance(failure, StoreError):
                raise
            return [failure] * len(batch)

    async def _bring_up_to_date(self, batch: Sequence[_PendingTotal], is_last: bool) -> list[StoreError]:
        totals = await read_counter_rows(self._store, [build_total_key(pending.counter) for pending in batch])
        now = self._clock.now()
        stale = [
            pending
            for pending, total in zip(batch, totals, strict=True)
            if self._is_stale(pending, total, now, is_last=is_last)
        ]
        written, failures = await self.write_totals([pending.counter for pending in stale])
        for pending in stale:
            if pending.counter in written:
                self._count_lag(self._clock.now() - pending.first_at)
            elif pending.counter in failures:
                self._put_back(pending)
        return list(failures.values())

    def _is_stale(self, pending: _PendingTotal, total: Item | None, now: float, *, is_last: bool) -> bool:
        """Whether this process has to write the total. If another one has just done it, look again later, unless that
        total includes everything."""
        as_of = read_as_of(total, now)
        includes_first, includes_last = (
            as_of > at + CLOCK_MARGIN_SECONDS for at in (pending.first_at, pending.last_at)
        )
        if includes_first:
            self._count_lag(as_of - pending.first_at)
            pending.first_at = as_of
        if not includes_last:
            if is_last or now - as_of >= self._interval * (EARLIEST_LOOK if includes_first else FRESH_SHARE):
                return True
            pending.look_at = self._choose_look_at(now - as_of)
            self._put_back(pending)
        self.totals_fresh += 1
        self.notify(pending.counter, total, as_of)
        return False

    def _put_back(self, pending: _PendingTotal) -> None:
        later = self._pending.get(pending.counter[:3])
        if later is not None:
            pending.add(later.counter, later.last_at)
        self._pending[pending.counter[:3]] = pending

    def _count_lag(self, seconds: float) -> None:
        seconds = max(0.0, seconds)  # the clock may have been set back
        self._lag_counts[bisect_left(LAG_BOUNDS, seconds)] += 1
        self._lag_seconds += seconds

    # Writing, also for `total_sweep`.

    async def write_totals(self, counters: Sequence[Counter]) -> tuple[set[Counter], dict[Counter, StoreError]]:
        """Sum counters and write their totals. Returns those that were written, and those where the store failed; the
        totals of the others are higher than their shards."""
        written, failures, remaining = set[Counter](), dict[Counter, StoreError](), {each: each for each in counters}
        for tries_left in reversed(range(MAX_TRIES)):
            if not remaining:
                break
            outcomes = await self._try_write([*remaining.values()])
            for name, outcome in zip(tuple(remaining), outcomes, strict=True):
                if isinstance(outcome, ConditionFailed):  # another process wrote a later total in between
                    if tries_left == 1:  # or one of more shards
                        remaining[name] = name._replace(shards=max(schema.SHARD_COUNTS))
                    continue
                del remaining[name]
                if isinstance(outcome, StoreError):
                    failures[name] = outcome
                else:
                    written.add(name)
        for counter in remaining:
            self._warn_above_shards(counter)
        return written, failures

    async def _try_write(self, counters: Sequence[Counter]) -> list[StoreError | None]:
        began = self._clock.now()
        try:
            sums = await sum_counters(self._store, counters)
        except StoreError as failure:
            return [failure] * len(counters)
        return await asyncio.gather(
            *(self._put_total(counter, totals, began) for counter, totals in zip(counters, sums, strict=True))
        )

    async def _put_total(self, counter: Counter, totals: dict[str, int | Decimal], began: float) -> StoreError | None:
        written: dict[str, Value] = {AS_OF_ATTRIBUTE: Decimal(str(round(began, 3))), "updated_at_epoch": int(began)}
        written[EXPIRY_ATTRIBUTE] = int(began) + TOTAL_TTL_SECONDS
        try:
            await self._store.put(Put(build_total_key(counter), {**totals, **written}, _build_never_lower(totals)))
        except StoreError as failure:
            return failure
        self.totals_written += 1
        self.notify(counter, totals, began)
        return None

    def _warn_above_shards(self, counter: Counter) -> None:
        """A forced replay adds to totals directly, and such a total stays higher for as long as it is kept."""
        if len(self._above_shards) >= MAX_ABOVE_SHARDS:
            self._above_shards.clear()
        if counter[:3] not in self._above_shards:
            _log.warning(
                "the total of %s %s %s is higher than its shards, as after a replay with --force or when shards have "
                "expired; it stays, because totals are never lowered",
                *counter[:3],
            )
        self._above_shards.add(counter[:3])

    def notify(self, counter: Counter, total: Mapping[str, Any] | None, as_of: float) -> None:
        """Tell the subscribers of a total that was read or written."""
        for on_total in self._on_total:
            on_total(counter, to_pico((total or {}).get(COST_ATTRIBUTE, 0)), as_of)


def _iterate_batches(pending: Sequence[_PendingTotal]) -> Iterable[Sequence[_PendingTotal]]:
    return (pending[start : start + COUNTERS_PER_BATCH] for start in range(0, len(pending), COUNTERS_PER_BATCH))


class ActiveCounter(NamedTuple):
    """A counter, until when a process has announced to add to it, and when its last UTC day in the list ends."""

    counter: Counter
    writes_until: float
    day_end: float


async def list_active_counters(
    store: Store, utc_days: Iterable[date], org: str | None = None, app: str | None = None, *, consistent: bool = False
) -> list[ActiveCounter]:
    """The counters that were written to on these UTC days: of one app, of one org with its apps, or of all."""
    by_name: dict[tuple[str, str, str], ActiveCounter] = {}
    sort = Prefix(f"{Scope(org, app).key}#") if org is not None else None
    for day in utc_days:
        day_end = datetime.combine(day, day_time(), UTC).timestamp() + DAY_SECONDS
        query = Query(
            schema.ACTIVE_COUNTERS_TABLE, schema.active_counters_partition(format_day(day)), sort, consistent=consistent
        )
        async for row in iterate_rows(store, query):
            try:
                counter = parse_counter(row.key.sk, read_shard_count(row.item))
                writes_until = read_writes_until(row.item, day_end)
            except (TypeError, ValueError):
                _log.warning(
                    "a malformed entry in the list of active counters is skipped; its spend is in no total: %s",
                    row.key.sk,
                )
                continue
            earlier = by_name.get(counter[:3]) or ActiveCounter(counter, 0, 0)
            # Entries differ in the shard count only if it was changed; then the highest one is read.
            by_name[counter[:3]] = ActiveCounter(
                max(counter, earlier.counter),
                max(writes_until, earlier.writes_until),
                max(day_end, earlier.day_end),
            )
    return list(by_name.values())


def build_shard_keys(counter: Counter) -> list[Key]:
    scope = Scope.from_key(counter.scope)
    return [
        schema.usage_shard_key(scope, counter.label, shard, counter.period_or_lease) for shard in range(counter.shards)
    ]


async def sum_shards(store: Store, counter: Counter) -> dict[str, int | Decimal]:
    """The sum of all that was flushed, read consistently."""
    (totals,) = await sum_counters(store, [counter])
    return totals


async def sum_counters(store: Store, counters: Sequence[Counter]) -> list[dict[str, int | Decimal]]:
    """Like `sum_shards`, for several counters at once."""
    keys = [key for counter in counters for key in build_shard_keys(counter)]
    items = iter(await read_counter_rows(store, keys, consistent=True))
    return [sum_items(item for item in islice(items, counter.shards) if item is not None) for counter in counters]


async def read_spent_pico(store: Store, name: HardBudgetKey) -> int:
    """The spend of a hard budget in pico-dollars, over all shards that can exist."""
    all_shards = Counter(*name, max(schema.SHARD_COUNTS))
    return to_pico((await sum_shards(store, all_shards))[COST_ATTRIBUTE])


async def read_counter_rows(store: Store, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
    """Read shards or totals. An attribute that should be a number and is none, as in a row that was edited by hand, is
    left out, and the log names its row."""
    items = await store.get_many(keys, consistent=consistent)
    return [None if item is None else _drop_malformed(key, item) for key, item in zip(keys, items, strict=True)]


def _drop_malformed(key: Key, item: Item) -> Item:
    malformed = [name for name in _NUMBERS if name in item and type(item[name]) not in (int, Decimal)]
    if not malformed:
        return item
    message = "%s is no number in the row %s of %s; it counts as 0 until the row is corrected"
    malformed_rows.report(message, ", ".join(malformed), key[1:], key.table)
    return {name: value for name, value in item.items() if name not in malformed}


def sum_items(items: Iterable[Mapping[str, Any]]) -> dict[str, int | Decimal]:
    totals: dict[str, int | Decimal] = dict.fromkeys(TOTAL_ATTRIBUTES, 0)
    for item in items:
        for name in TOTAL_ATTRIBUTES:
            totals[name] += item.get(name, 0)
    return totals


def build_total_key(counter: Counter) -> Key:
    return schema.total_key(Scope.from_key(counter.scope), counter.label, counter.period_or_lease)


def parse_counter(entry: str, shards: int) -> Counter:
    """The counter of an entry in the list of active counters, by its sort key. Raises ValueError."""
    scope, _, rest = entry.partition("#LABEL#")
    label, _, period = rest.partition("#")
    counter = Counter(scope, label, period, shards)
    build_total_key(counter)  # raises ValueError if these are not the parts of a counter
    return counter


def read_as_of(total: Mapping[str, Any] | None, now: float) -> float:
    """When a total was read from its shards; 0 if it is not known, as where a wrong clock says that it will be."""
    as_of = float(total[AS_OF_ATTRIBUTE]) if total is not None and AS_OF_ATTRIBUTE in total else 0.0
    return as_of if as_of <= now + CLOCK_MARGIN_SECONDS else 0.0


def _build_never_lower(totals: Mapping[str, int | Decimal]) -> Condition:
    not_lower = (any_of(AttributeMissing(name), at_most(name, number)) for name, number in totals.items())
    return any_of(ItemMissing(), all_of(*not_lower))
