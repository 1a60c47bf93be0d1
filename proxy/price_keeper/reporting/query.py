"""From the days that are asked for to a report: who spent what, on which day, in which org's zone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from zoneinfo import ZoneInfo

from price_keeper.calendar_days import iterate_day_spans, find_org_date, parse_day
from price_keeper.model import Scope
from price_keeper.recording import aggregator
from price_keeper.recording.entries import Counter, UsageCounts
from price_keeper.reporting import counted
from price_keeper.reporting.attribution import AttributionCaveat, attribute_spend
from price_keeper.reporting.days import ReportPeriod, find_listing_days
from price_keeper.reporting.tenants import Tenant, app_names, tenants
from price_keeper.reporting.totals import Spent
from price_keeper.stores.contract import Store

MOST_DAYS_TOLD = 3


@dataclass(frozen=True, slots=True)
class Report:
    """`first` and `last` are the days meant, in the zones of the orgs it is about; `is_running` if one goes on."""

    as_of: float
    first: date
    last: date
    is_running: bool
    is_final: bool
    spent: list[Spent]
    tenants: Mapping[str, Tenant]
    app_names: Mapping[tuple[str, str], str]
    notes: list[str]


async def report(
    store: Store,
    asked: ReportPeriod,
    org: str | None,
    names: Mapping[str, str | None],
    zone: ZoneInfo,
    now: float,
    app: str | None = None,
) -> Report:
    """Of one org or of all. `names` are those of the registry; `zone` is that of orgs that say nothing of theirs.

    Of one `app` alone nothing else of its org is read: its own counters are exact, whatever those of the org hold.
    """
    listed = await aggregator.list_active_counters(store, find_listing_days(asked, now), org, app, consistent=True)
    orgs = [org] if org is not None else [Scope.from_key(each.counter.scope).org for each in listed]
    known = await tenants(store, orgs, names, zone, now)
    by_zone = {each: _Calendar(each, asked, now) for each in {tenant.zone for tenant in known.values()}}
    calendars = {tenant.org: by_zone[tenant.zone] for tenant in known.values()}
    read = await counted.read_counters(store, _wanted(listed, calendars), now)
    spent, doubts = _attributed(read.counts, known)
    # While calls go on, an org and its apps cannot be read at one moment.
    notes = [
        f"{known[name].title}, {_told(days)}: {doubt.value}."
        for (name, doubt), all_days in doubts.items()
        if (days := calendars[name].over(all_days))
    ]
    apps = await app_names(store, ((each.org, each.app) for each in spent if each.app is not None))
    meant = [calendars[name] for name in {each.org for each in spent} or calendars] or [_Calendar(zone, asked, now)]
    return Report(
        as_of=now,
        first=min(each.first for each in meant),
        last=max(each.last for each in meant),
        is_running=any(each.is_running for each in meant),
        is_final=read.is_final and not any(each.is_running for each in meant),
        spent=spent,
        tenants=known,
        app_names=apps,
        notes=notes,
    )


class _Calendar:
    """The days meant, as they are in one zone. `ends` is when each of them ends, by its period's key."""

    def __init__(self, zone: ZoneInfo, asked: ReportPeriod, now: float) -> None:
        today = find_org_date(now, zone)
        self.first, self.last = asked.resolve(today)
        self.is_running = self.first <= today <= self.last
        self._today = today
        latest = min(self.last, today + timedelta(days=1))  # by somebody's clock it is tomorrow already
        self.ends = {span.key: span.end for span in iterate_day_spans(self.first, latest, zone)}

    def over(self, days: Iterable[date]) -> list[date]:
        return [day for day in days if day < self._today]


def _wanted(listed: Iterable[aggregator.ActiveCounter], calendars: Mapping[str, _Calendar]) -> Iterator[counted.CounterQuery]:
    for each in listed:
        end = calendars[Scope.from_key(each.counter.scope).org].ends.get(each.counter.period)
        if end is not None:
            yield counted.build_counter_query(each, end)


def _attributed(
    counts: Mapping[Counter, UsageCounts], known: Mapping[str, Tenant]
) -> tuple[list[Spent], Mapping[tuple[str, AttributionCaveat], list[date]]]:
    spent: list[Spent] = []
    doubts: defaultdict[tuple[str, AttributionCaveat], list[date]] = defaultdict(list)
    for (org, day), scopes in sorted(_by_org_and_day(counts).items()):
        own = scopes.pop(None, {})
        apps = {app: labels for app, labels in scopes.items() if app is not None}
        found = attribute_spend(own, apps, known[org].quota_scope)
        spent += [Spent(org, share.app, share.label, day, share.counts) for share in found.spend]
        if found.caveat is not None:
            doubts[org, found.caveat].append(day)
    return spent, doubts


def _by_org_and_day(counts: Mapping[Counter, UsageCounts]) -> dict[tuple[str, date], dict[str | None, dict[str, UsageCounts]]]:
    found: dict[tuple[str, date], dict[str | None, dict[str, UsageCounts]]] = {}
    for counter, each in counts.items():
        if any(each):
            scope = Scope.from_key(counter.scope)
            day = parse_day(counter.period.removeprefix("DAY#"))
            found.setdefault((scope.org, day), {}).setdefault(scope.app, {})[counter.label] = each
    return found


def _told(days: list[date]) -> str:
    more = f" and {len(days) - MOST_DAYS_TOLD} more days" if len(days) > MOST_DAYS_TOLD else ""
    return ", ".join(str(day) for day in days[:MOST_DAYS_TOLD]) + more
