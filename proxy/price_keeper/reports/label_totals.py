"""Usage of today and quota of each label of a budget, also of labels without usage.

A budget belongs to the org, or to each of its apps, by `quota_scope`. Start with `load_budgets`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from price_keeper.budgets.effective_settings import EffectiveSettings, resolve_settings
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import Scope
from price_keeper.ledger.known_totals import KnownTotals
from price_keeper.ledger.ledger_entries import Counter, UsageCounts
from price_keeper.org_calendar import Period, find_span
from price_keeper.reports.spend_report import CounterQuery, read_counters
from price_keeper.stores import schema
from price_keeper.stores.contract import Between, Item, Query, Store

CounterName = tuple[str, str, str]  # scope, label, period


class ScopeSettings(NamedTuple):
    scope: Scope
    settings: EffectiveSettings


class LabelTotal(NamedTuple):
    """Usage of today, spend of the budget's period in pico-dollars, and the quota; None is unlimited."""

    app: str | None
    label: str
    period: str
    today: UsageCounts
    period_pico: int
    quota: int | None
    tight_pct: int


async def load_budgets(
    store: Store, org: str, app: str | None, defaults: DefaultsConfig, now: float
) -> list[ScopeSettings]:
    """The budgets that pay for calls of an org and its apps, or of one app."""
    org_item, apps = await (_load_org(store, org) if app is None else _load_app(store, org, app))
    settings = resolve_settings(org_item, None, defaults, (), now)
    if settings.quota_scope == "ORG":
        return [ScopeSettings(Scope(org), settings)]
    return [
        ScopeSettings(Scope(org, name), resolve_settings(org_item, item, defaults, (), now))
        for name, item in apps.items()
    ]


async def _load_org(store: Store, org: str) -> tuple[Item | None, dict[str, Item | None]]:
    """The org's item and those of its apps, in one query of its partition."""
    org_key = schema.org_config_key(org)
    rows = (await store.query(Query(org_key.table, org_key.pk, Between(schema.APPS_PREFIX, org_key.sk)))).rows
    items: dict[str, Item] = {row.key.sk: row.item for row in rows}
    org_item = items.pop(org_key.sk, None)
    return org_item, {name.removeprefix(schema.APPS_PREFIX): item for name, item in items.items()}


async def _load_app(store: Store, org: str, app: str) -> tuple[Item | None, dict[str, Item | None]]:
    org_item, app_item = await store.get_many([schema.org_config_key(org), schema.app_config_key(org, app)])
    return org_item, {app: app_item}


async def read_label_totals(
    store: Store,
    budgets: Sequence[ScopeSettings],
    day_counts: Mapping[CounterName, UsageCounts],
    covered_app: str | None,
    now: float,
    known: KnownTotals | None,
) -> list[LabelTotal]:
    """Totals of all labels of these budgets. `day_counts` are the counters of today that the caller has read: all of
    the org or, with `covered_app`, all of that app. The others are read in one batch: from totals with `known`, else
    from the shards, consistently."""
    wanted = [counter for budget in budgets for pair in _iterate_counters(budget, now) for counter in pair]
    missing = [counter for counter in wanted if not _is_covered(counter, covered_app)]
    queries = [CounterQuery(counter, math.inf) for counter in dict.fromkeys(missing)]
    read = (await read_counters(store, queries, now, known=known)).counts if queries else {}
    counts = {**day_counts, **{counter[:3]: each for counter, each in read.items()}}
    return [
        LabelTotal(
            budget.scope.app,
            day.label,
            period.period_or_lease,
            counts.get(day[:3], UsageCounts()),
            counts.get(period[:3], UsageCounts()).pico,
            budget.settings.quotas.get(day.label),
            budget.settings.tight_pct,
        )
        for budget in budgets
        for day, period in _iterate_counters(budget, now)
    ]


def _iterate_counters(budget: ScopeSettings, now: float) -> Iterator[tuple[Counter, Counter]]:
    """For each label, the counters of today and of the budget's period, which may be the same."""
    settings = budget.settings
    day, period = (find_span(each, now, settings.zone).key for each in (Period.DAY, settings.period))
    for label in dict.fromkeys((*settings.ordering, *settings.quotas)):
        counter = Counter(budget.scope.key, label, day, settings.shards)
        yield counter, counter._replace(period_or_lease=period)


def _is_covered(counter: Counter, covered_app: str | None) -> bool:
    return counter.period_or_lease.startswith("DAY#") and (
        covered_app is None or Scope.from_key(counter.scope).app == covered_app
    )
