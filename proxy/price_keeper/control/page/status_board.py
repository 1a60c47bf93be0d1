"""The content of the status page as data: the list of budgets, and one budget in detail with its recent events.

Pages with the same query share one result. If the store is unreachable, the board says so and shows what this process
has in memory. Start with `get_board`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from price_keeper.budgets import active_label
from price_keeper.budgets.active_label import Override
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.budgets.effective_settings import is_number
from price_keeper.control.budget_endpoints import format_selection, is_known_app
from price_keeper.control.control_services import ControlServices
from price_keeper.control.page import budget_list
from price_keeper.control.page.budget_list import BudgetEntry
from price_keeper.control.page.spend_forecast import (
    BudgetView,
    SpendCurve,
    compute_spend_rate,
    forecast_quota,
    format_quota_usage,
)
from price_keeper.domain import PICO_PER_MICRO, Caller, build_client_id
from price_keeper.errors import StoreError
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.reports.settings_report import format_utc
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store

MAX_ALERTS = 99  # markers read in one batch with the sticky state, which makes 100 items
MAX_CHART_POINTS = 120  # of a spend curve that is sent to a page
STORE_AWAY_TEXT = "the store is away; what is shown is what this process knows"


async def load_events(store: Store, budget: BudgetState) -> list[dict[str, Any]]:
    """The budget's events in this period, newest first. The store keeps only the last move of the active label. Raises
    StoreError."""
    scope, period, settings = budget.scope, budget.span.key, budget.settings
    thresholds = [(label, pct) for label in settings.quotas for pct in settings.thresholds][:MAX_ALERTS]
    keys = [schema.sticky_state_key(scope, period)]
    keys += [schema.alert_marker_key(scope, label, period, pct) for label, pct in thresholds]
    sticky_item, *markers = await store.get_many(keys)
    moves = (
        [_add_time(sticky_item, "activated_at_epoch", {"kind": "moved", **_format_move(sticky_item)})]
        if sticky_item and active_label.LABEL_ATTRIBUTE in sticky_item
        else []
    )
    alerts = [
        _add_time(marker, "raised_at_epoch", {"kind": "threshold", "label": label, "threshold_pct": pct})
        for (label, pct), marker in zip(thresholds, markers, strict=True)
        if marker is not None
    ]
    return sorted([*moves, *alerts], key=lambda event: event["at"] or "", reverse=True)


def _format_move(item: Item) -> dict[str, Any]:
    return {"label": str(item[active_label.LABEL_ATTRIBUTE]), "before": str(item.get("previous_model_label", ""))}


def _add_time(item: Item, name: str, event: dict[str, Any]) -> dict[str, Any]:
    at = item.get(name)
    return {"at": format_utc(float(cast(int, at))) if is_number(at) else None, **event}


class BoardQuery(NamedTuple):
    """What a page shows. Pages with equal queries share one cached board."""

    org: str | None  # whose budgets are listed; None, for the administrator, lists those of all orgs
    app: str | None
    search: str
    after: str
    selected: tuple[str, str | None] | None  # org and app of the budget that is shown in detail


async def get_board(services: ControlServices, query: BoardQuery) -> dict[str, Any]:
    """The parts of a page. Parts that need the store are missing while it is unreachable."""

    async def build() -> dict[str, Any]:
        return await _build_board(services, query)

    return await services.page.board_cache.get_or_load(query, build)


async def _build_board(services: ControlServices, query: BoardQuery) -> dict[str, Any]:
    content: dict[str, Any] = {"trouble": None}
    try:
        content["list"] = await _build_list(services, query)
        if query.selected is not None and await is_known_app(services, *query.selected):
            content |= await _build_detail(services, *query.selected)
    except StoreError:
        content["trouble"] = STORE_AWAY_TEXT
    return content


async def _build_list(services: ControlServices, query: BoardQuery) -> dict[str, Any]:
    async def load() -> budget_list.BudgetPage:
        if query.org is not None and query.app is not None:
            return budget_list.BudgetPage([await budget_list.load_entry(services, query.org, query.app)], None)
        return await budget_list.list_budgets(services, query.org, query.search, query.after)

    page = await services.page.list_cache.get_or_load(query._replace(selected=None), load)
    rows = await asyncio.gather(*(_build_row(services, place) for place in page.entries))
    return {"rows": rows, "cursor": page.cursor}


async def _build_row(services: ControlServices, entry: BudgetEntry) -> dict[str, Any]:
    budget, override = await read_budget(services, entry.org, entry.app)
    settings, view = budget.settings, build_view(services, budget)
    return {
        **entry._asdict(),
        "active_label": settings.ordering[budget.active_index] if settings.ordering else None,
        "serves": budget.find_enforced_label(settings.ordering[0]) if settings.ordering else None,
        "is_overridden": override is not None,
        "is_stale": budget.is_stale,
        "labels": [format_quota_usage(view, label, quota) for label, quota in view.quotas.items()],
    }


async def _build_detail(services: ControlServices, org: str, app: str | None) -> dict[str, Any]:
    async def load_name() -> BudgetEntry:
        return await budget_list.load_entry(services, org, app)

    entry = await services.page.list_cache.get_or_load((org, app), load_name)
    budget, override = await read_budget(services, org, app)
    view = build_view(services, budget)

    async def load() -> list[dict[str, Any]]:
        return await load_events(services.store, budget)

    scope = await _build_scope(services, entry, budget, override, view)
    charts = {label: _downsample(each) for label, each in view.curves.items()}
    return {
        "scope": scope,
        "course": charts,
        "happened": await services.page.event_cache.get_or_load((budget.scope, budget.span.key), load),
    }


async def _build_scope(
    services: ControlServices, entry: BudgetEntry, budget: BudgetState, override: Override | None, view: BudgetView
) -> dict[str, Any]:
    own_labels = await services.budgets.app_labels.get(_build_caller(entry.org, entry.app))
    settings = budget.settings
    return {
        **entry._asdict(),
        **format_selection(budget, override, services.labels_and_pseudo_labels, own_labels),
        "starts_at": format_utc(budget.span.start),
        "timezone": settings.zone.key,
        "ordering": list(settings.ordering),
        "is_sticky": settings.is_sticky,
        "serves": budget.find_enforced_label(settings.ordering[0]) if settings.ordering else None,
        "known_since": _get_known_since(view),
        "reached": {label: forecast_quota(view, label, quota) for label, quota in view.quotas.items()},
        "pace": {label: _format_spend_rate(view, label) for label in view.quotas},
    }


def _get_known_since(view: BudgetView) -> str | None:
    return format_utc(min(course.samples[0].at for course in view.curves.values())) if view.curves else None


def _format_spend_rate(view: BudgetView, label: str) -> dict[str, int] | None:
    rate = compute_spend_rate(view.curves.get(label), view.now)
    if rate is None:
        return None
    return {
        "usd_micros_per_hour": round(rate.pico_per_hour / PICO_PER_MICRO),
        "over_seconds": round(rate.observed_seconds),
    }


def _downsample(curve: SpendCurve) -> list[tuple[int, int]]:
    """At most MAX_CHART_POINTS samples, and the last value at the time when it was last seen."""
    step = -(-len(curve.samples) // MAX_CHART_POINTS)
    points = [*curve.samples[::step], curve.samples[-1]._replace(at=curve.last_seen_at)]
    return [(round(point.at), point.pico // PICO_PER_MICRO) for point in points]


def _build_caller(org: str, app: str | None) -> Caller:
    return Caller(org, app, build_client_id(org, app))


async def read_budget(services: ControlServices, org: str, app: str | None) -> tuple[BudgetState, Override | None]:
    """The budget by which this process would serve calls of an org or app. If the spend history shows more spend than
    the budget has read, a refresh is scheduled."""
    budget, override = await services.budgets.read_status(_build_caller(org, app), forces_read=False)
    now, history = services.clock.now(), services.page.spend_history
    for label in budget.settings.quotas:
        counter, spent = _build_counter(budget, label), budget.get_tracker(label).spent
        curve = history.get(*counter[:3])
        if curve is not None and curve.has_unreported_spend(spent):
            services.budgets.note_spend_elsewhere(counter)
        history.record(counter, spent, now)
    return budget, override


def _build_counter(budget: BudgetState, label: str) -> Counter:
    return Counter(budget.scope.key, label, budget.span.key, budget.settings.shards)


def build_view(services: ControlServices, budget: BudgetState) -> BudgetView:
    settings = budget.settings
    quotas: Mapping[str, int] = settings.quotas
    return BudgetView(
        ordering=settings.ordering,
        quotas=quotas,
        spent={label: max(0, budget.get_tracker(label).spent) for label in quotas},
        active=budget.active_index,
        is_sticky=settings.is_sticky,
        tight_pct=settings.tight_pct,
        curves=services.page.spend_history.get_curves(budget.scope.key, budget.span.key, quotas),
        now=services.clock.now(),
        ends_at=budget.span.end,
    )
