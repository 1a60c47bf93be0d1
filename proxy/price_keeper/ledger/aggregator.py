"""Sums the shards of each counter into one total, which budgets and reports read.

Any number of processes may do it at the same time: a conditional write never lowers a total, and a fresh total is left
alone. Start with `Aggregator.run`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.ledger.counter_writes import (
    COST_ATTRIBUTE,
    DAY_SECONDS,
    SHARD_TTL_SECONDS,
    TOTAL_TTL_SECONDS,
    read_shard_count,
    to_pico,
)
from price_keeper.ledger.lease_rows import HardBudgetKey
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.org_calendar import format_day
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    Condition,
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

MAX_TRIES: Final = 3
MAX_CLOCK_SKEW_SECONDS: Final = 3600  # after the end of a day its list of active counters may still grow for this long
AS_OF_ATTRIBUTE: Final = "as_of_epoch"
TOTAL_ATTRIBUTES: Final = (*UsageCounts._fields[:-1], COST_ATTRIBUTE)

_log = logging.getLogger("price_keeper.recording")


class Aggregator:
    """Brings the totals up to date."""

    def __init__(self, store: Store, clock: Clock, interval_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._interval = interval_seconds
        self._has_looked_back = False
        self._above_shards: set[Counter] = set()  # totals that are higher than the sum of their shards; logged once
        self.totals_written = self.totals_fresh = 0
        self._on_total: list[Callable[[Counter, int, float], None]] = []
        # when all totals were last up to date; before that, the start of this process
        self.completed_at = clock.monotonic()

    def subscribe(self, on_total: Callable[[Counter, int, float], None]) -> None:
        """Call `on_total` with each total that is up to date: its counter, pico-dollars, and the time of the total."""
        self._on_total.append(on_total)

    async def run(self) -> None:
        """Once: bring the totals of all counters up to date that were active yesterday, today or, by another clock,
        tomorrow.

        The first run goes back as far as shards live, as no aggregator may have run for a long time.
        """
        now = self._clock.now()
        since = -1 if self._has_looked_back else -SHARD_TTL_SECONDS // DAY_SECONDS
        today = datetime.fromtimestamp(now, UTC).date()
        days = [today + timedelta(days=offset) for offset in range(since, 2)]
        try:
            active = await list_active_counters(self._store, days)
        except StoreError as failure:
            _log.warning("totals are not brought up to date; the next run tries again: %s", failure)
            return
        self._above_shards &= {active_counter.counter for active_counter in active}
        for active_counter in active:
            midnight = datetime.combine(active_counter.last_written, time(), UTC)
            await self._update(active_counter.counter, midnight.timestamp() + DAY_SECONDS)
        self._has_looked_back = True
        self.completed_at = self._clock.monotonic()

    async def _update(self, counter: Counter, day_end: float) -> None:
        try:
            for _ in range(MAX_TRIES):
                if await self._try_update(counter, day_end):
                    return
            # A forced replay adds to totals directly, and such a total stays higher for as long as it is kept.
            if counter not in self._above_shards:
                _log.warning(
                    "the total of %s %s is higher than its shards, as after a replay with --force or when shards have "
                    "expired; it stays, because totals are never lowered",
                    counter.scope,
                    counter.label,
                )
            self._above_shards.add(counter)
        except StoreError as failure:
            _log.warning(
                "the total of %s %s is not brought up to date; the next run tries again: %s",
                counter.scope,
                counter.label,
                failure,
            )

    async def _try_update(self, counter: Counter, day_end: float) -> bool:
        key = build_total_key(counter)
        began = self._clock.now()
        item = await self._store.get(key)
        as_of = _read_as_of(item)
        # A time in the future comes from a wrong clock.
        if 0 <= began - as_of < self._interval / 2 or day_end + MAX_CLOCK_SKEW_SECONDS < as_of <= began:
            self.totals_fresh += 1
            self._notify(counter, item, as_of)
            return True
        totals = await sum_shards(self._store, counter)
        written: dict[str, Value] = {AS_OF_ATTRIBUTE: Decimal(str(round(began, 3))), "updated_at_epoch": int(began)}
        written[EXPIRY_ATTRIBUTE] = int(began) + TOTAL_TTL_SECONDS
        try:
            await self._store.put(Put(key, {**totals, **written}, _build_never_lower(totals)))
        except ConditionFailed:
            return False  # another process wrote a later total, so read again
        self.totals_written += 1
        self._notify(counter, totals, began)
        return True

    def _notify(self, counter: Counter, total: Mapping[str, Any] | None, as_of: float) -> None:
        for on_total in self._on_total:
            on_total(counter, to_pico((total or {}).get(COST_ATTRIBUTE, 0)), as_of)


class ActiveCounter(NamedTuple):
    """A counter, and the last UTC day on which it was written to."""

    counter: Counter
    last_written: date


async def list_active_counters(
    store: Store, utc_days: Iterable[date], org: str | None = None, app: str | None = None, *, consistent: bool = False
) -> list[ActiveCounter]:
    """The counters that were written to on these UTC days: of one app, of one org with its apps, or of all."""
    by_name: dict[tuple[str, str, str], ActiveCounter] = {}
    sort = Prefix(f"{Scope(org, app).key}#") if org is not None else None
    for day in utc_days:
        query = Query(
            schema.ACTIVE_COUNTERS_TABLE, schema.active_counters_partition(format_day(day)), sort, consistent=consistent
        )
        async for row in iterate_rows(store, query):
            try:
                counter = parse_counter(row.key.sk, read_shard_count(row.item))
            except ValueError:
                _log.warning(
                    "a malformed entry in the list of active counters is skipped; its spend is in no total: %s",
                    row.key.sk,
                )
                continue
            earlier = by_name.get(counter[:3])
            # Entries differ in the shard count only if it was changed; then the highest one is read.
            shards = max(counter.shards, earlier.counter.shards) if earlier else counter.shards
            by_name[counter[:3]] = ActiveCounter(counter._replace(shards=shards), day)
    return list(by_name.values())


def build_shard_keys(counter: Counter) -> list[Key]:
    scope = Scope.from_key(counter.scope)
    return [
        schema.usage_shard_key(scope, counter.label, shard, counter.period_or_lease) for shard in range(counter.shards)
    ]


async def sum_shards(store: Store, counter: Counter) -> dict[str, int | Decimal]:
    """The sum of all that was flushed, read consistently."""
    items = await store.get_many(build_shard_keys(counter), consistent=True)
    return sum_items(item for item in items if item is not None)


async def read_spent_pico(store: Store, name: HardBudgetKey) -> int:
    """The spend of a hard budget in pico-dollars, over all shards that can exist."""
    all_shards = Counter(*name, max(schema.SHARD_COUNTS))
    return to_pico((await sum_shards(store, all_shards))[COST_ATTRIBUTE])


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


def _read_as_of(total: Mapping[str, Any] | None) -> float:
    return float(total[AS_OF_ATTRIBUTE]) if total is not None and AS_OF_ATTRIBUTE in total else 0.0


def _build_never_lower(totals: Mapping[str, int | Decimal]) -> Condition:
    not_lower = (any_of(AttributeMissing(name), at_most(name, number)) for name, number in totals.items())
    return any_of(ItemMissing(), all_of(*not_lower))
