"""Builds the report of a period from the counters in the store: who spent what, on which day of the org. Start here.

    list the counters of the period -> read them -> attribute each org's spend to its apps -> SpendReport

A total that is known to be complete is used as it is. What else is read depends on the reader:

    reads_shards   the shards, consistently: exact as of the last flush, at a cost that grows with the number of shards.
                   An org is read before its apps, so that a flush in between is not spend of callers without an app
    known          totals, and what this process itself added beside them
    neither        totals, and the shards of counters that have no total yet
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import groupby
from math import inf
from typing import NamedTuple
from zoneinfo import ZoneInfo

from price_keeper.domain import Scope
from price_keeper.ledger import aggregator
from price_keeper.ledger.aggregator import (
    MAX_CLOCK_SKEW_SECONDS,
    ActiveCounter,
    build_shard_keys,
    build_total_key,
    read_counter_rows,
    sum_items,
)
from price_keeper.ledger.known_totals import KnownTotal, KnownTotals, parse_counts, read_total
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.org_calendar import find_org_date, iterate_day_spans, parse_day
from price_keeper.reports.attribution import AttributionCaveat, attribute_spend
from price_keeper.reports.org_directory import OrgInfo, load_app_names, load_orgs
from price_keeper.reports.report_period import ReportPeriod, find_listing_days
from price_keeper.reports.report_rows import SpendEntry
from price_keeper.stores.contract import Store

MAX_DAYS_LISTED = 3


@dataclass(frozen=True, slots=True)
class SpendReport:
    """`first` and `last` are the days of the period in the zones of its orgs; `is_running` if a day has not ended."""

    as_of: float
    first: date
    last: date
    is_running: bool
    is_final: bool
    spent: list[SpendEntry]
    orgs: Mapping[str, OrgInfo]
    app_names: Mapping[tuple[str, str], str]
    notes: list[str]
    is_exact: bool = True  # as of the last flush
    counts: Mapping[tuple[str, str, str], UsageCounts] = field(default_factory=dict)  # by scope, label and period


async def build_report(
    store: Store,
    period: ReportPeriod,
    org: str | None,
    org_names: Mapping[str, str | None],
    zone: ZoneInfo,
    now: float,
    app: str | None = None,
    known: KnownTotals | None = None,
    *,
    reads_shards: bool = True,
) -> SpendReport:
    """The report of one org, or of all. `org_names` are those of the registry; `zone` is the default time zone.
    `known` is read only without `reads_shards`.

    With `app` only the counters of that app are read: they are exact, whatever the org's own counter holds.
    """
    listed = await aggregator.list_active_counters(store, find_listing_days(period, now), org, app, consistent=True)
    if known is not None and not reads_shards:
        listed = _add_unlisted(listed, known.list_unflushed(), org, app)
    orgs = [org] if org is not None else [Scope.from_key(each.counter.scope).org for each in listed]
    org_infos = await load_orgs(store, orgs, org_names, zone, now)
    by_zone = {each: _ReportCalendar(each, period, now) for each in {tenant.zone for tenant in org_infos.values()}}
    calendars = {tenant.org: by_zone[tenant.zone] for tenant in org_infos.values()}
    queries = _iterate_queries(listed, calendars, now)
    values = await read_counters(store, queries, now, known=known, reads_shards=reads_shards)
    spent, caveats = _attribute_all(values.counts, org_infos)
    # While calls continue, an org and its apps cannot be read at the same moment.
    notes = [
        f"{org_infos[name].title}, {_list_days(days)}: {doubt.value}."
        for (name, doubt), all_days in caveats.items()
        if (days := calendars[name].select_past(all_days))
    ]
    apps = await load_app_names(store, ((each.org, each.app) for each in spent if each.app is not None))
    calendars_used = [calendars[name] for name in {each.org for each in spent} or calendars] or [
        _ReportCalendar(zone, period, now)
    ]
    return SpendReport(
        as_of=now,
        first=min(each.first for each in calendars_used),
        last=max(each.last for each in calendars_used),
        is_running=any(each.is_running for each in calendars_used),
        is_final=values.is_final and not any(each.is_running for each in calendars_used),
        spent=spent,
        orgs=org_infos,
        app_names=apps,
        notes=notes,
        is_exact=values.is_exact,
        counts={counter[:3]: counts for counter, counts in values.counts.items()},
    )


def _add_unlisted(
    listed: list[ActiveCounter], unflushed: Iterable[Counter], org: str | None, app: str | None
) -> list[ActiveCounter]:
    """With counters that only this process's journal has so far."""
    names = {each.counter[:3] for each in listed}
    scopes = ((Scope.from_key(counter.scope), counter) for counter in unflushed if counter[:3] not in names)
    return listed + [
        ActiveCounter(counter, inf, inf)
        for scope, counter in scopes
        if org in (None, scope.org) and app in (None, scope.app)
    ]


class _ReportCalendar:
    """The days of the period in one zone. `ends` maps the period key of each day to the time when it ends."""

    def __init__(self, zone: ZoneInfo, period: ReportPeriod, now: float) -> None:
        today = find_org_date(now, zone)
        self.first, self.last = period.resolve(today)
        self.is_running = self.first <= today <= self.last
        self._today = today
        latest = min(self.last, today + timedelta(days=1))  # a process with a fast clock may have written tomorrow's
        self.ends = {span.key: span.end for span in iterate_day_spans(self.first, latest, zone)}

    def select_past(self, days: Iterable[date]) -> list[date]:
        return [day for day in days if day < self._today]


def _iterate_queries(
    listed: Iterable[aggregator.ActiveCounter], calendars: Mapping[str, _ReportCalendar], now: float
) -> Iterator[CounterQuery]:
    for each in listed:
        end = calendars[Scope.from_key(each.counter.scope).org].ends.get(each.counter.period_or_lease)
        if end is not None:
            # The total of a day that goes on is never complete, whatever it says.
            yield build_counter_query(each) if end <= now else CounterQuery(each.counter, inf)


def _attribute_all(
    counts: Mapping[Counter, UsageCounts], org_infos: Mapping[str, OrgInfo]
) -> tuple[list[SpendEntry], Mapping[tuple[str, AttributionCaveat], list[date]]]:
    spent: list[SpendEntry] = []
    caveats: defaultdict[tuple[str, AttributionCaveat], list[date]] = defaultdict(list)
    for (org, day), scopes in sorted(_group_by_org_and_day(counts).items()):
        org_counts = scopes.pop(None, {})
        app_counts = {app: labels for app, labels in scopes.items() if app is not None}
        attribution = attribute_spend(org_counts, app_counts, org_infos[org].quota_scope)
        spent += [SpendEntry(org, share.app, share.label, day, share.counts) for share in attribution.spend]
        if attribution.caveat is not None:
            caveats[org, attribution.caveat].append(day)
    return spent, caveats


def _group_by_org_and_day(
    counts: Mapping[Counter, UsageCounts],
) -> dict[tuple[str, date], dict[str | None, dict[str, UsageCounts]]]:
    grouped: dict[tuple[str, date], dict[str | None, dict[str, UsageCounts]]] = {}
    for counter, each in counts.items():
        if any(each):
            scope = Scope.from_key(counter.scope)
            day = parse_day(counter.period_or_lease.removeprefix("DAY#"))
            grouped.setdefault((scope.org, day), {}).setdefault(scope.app, {})[counter.label] = each
    return grouped


def _list_days(days: list[date]) -> str:
    suffix = f" and {len(days) - MAX_DAYS_LISTED} more days" if len(days) > MAX_DAYS_LISTED else ""
    return ", ".join(str(day) for day in days[:MAX_DAYS_LISTED]) + suffix


COUNTERS_PER_READ = 500  # or as many as one org has; bounds the memory for their shards


class CounterQuery(NamedTuple):
    """A counter, and the time from which on its total is complete."""

    counter: Counter
    complete_after: float


@dataclass(slots=True)
class CounterValues:
    counts: dict[Counter, UsageCounts] = field(default_factory=dict)
    is_final: bool = True  # all values come from complete totals, none from shards
    is_exact: bool = True  # none comes from a total that may lack something


def build_counter_query(listed: ActiveCounter) -> CounterQuery:
    """A later flush would have announced itself in the list, if clocks differ no more than is allowed."""
    return CounterQuery(listed.counter, listed.writes_until + MAX_CLOCK_SKEW_SECONDS)


async def read_counters(
    store: Store,
    queries: Iterable[CounterQuery],
    now: float,
    *,
    known: KnownTotals | None = None,
    reads_shards: bool | None = None,
) -> CounterValues:
    """See the top of this file; `reads_shards` is true by default without `known`."""
    reads_shards = known is None if reads_shards is None else reads_shards
    values = CounterValues()
    for batch in _iterate_batches(queries):
        totals = await _read_totals(store, [each.counter for each in batch], None if reads_shards else known)
        values.counts.update({counter: total.counts for counter, total in totals.items()})
        incomplete = [
            each.counter for each in batch if not _is_complete(totals[each.counter].as_of, each.complete_after, now)
        ]
        values.is_final = values.is_final and not incomplete
        if not reads_shards:
            unread = len(incomplete)
            incomplete = [counter for counter in incomplete if known is None and totals[counter].as_of is None]
            values.is_exact = values.is_exact and len(incomplete) == unread
        # An org before its apps, so that a flush in between is not counted as spend of callers without an app.
        for of_apps in (False, True):
            selected = [counter for counter in incomplete if (_parse_scope(counter).app is not None) is of_apps]
            for counter, counts in (await _read_shards(store, selected)).items():
                # Counters never decrease: if a shard has expired already, the total has the higher value.
                values.counts[counter] = UsageCounts._make(map(max, counts, values.counts.get(counter, UsageCounts())))
    return values


def _iterate_batches(queries: Iterable[CounterQuery]) -> Iterator[list[CounterQuery]]:
    """Batches that never split the counters of one org."""
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
    items = iter(await read_counter_rows(store, keys, consistent=True))
    counts_by_counter = {}
    for counter in counters:
        shard_items = [next(items) for _ in range(counter.shards)]
        counts_by_counter[counter] = parse_counts(sum_items(item for item in shard_items if item is not None))
    return counts_by_counter


async def _read_totals(
    store: Store, counters: Sequence[Counter], known: KnownTotals | None
) -> Mapping[Counter, KnownTotal]:
    if known is not None:
        return await known.read(store, counters)
    items = await read_counter_rows(store, [build_total_key(counter) for counter in counters])
    return {counter: read_total(item) for counter, item in zip(counters, items, strict=True)}


def _is_complete(as_of: float | None, complete_after: float, now: float) -> bool:
    """A time stamp in the future comes from a wrong clock and proves nothing."""
    return as_of is not None and complete_after <= as_of <= now
