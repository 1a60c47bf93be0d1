"""Endpoints for what an org or app spent, by app, label and day."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from price_keeper.budgets.label_policy import Mode, compute_mode, compute_quota_percent
from price_keeper.control.api_errors import invalid_request
from price_keeper.control.api_types import (
    REVALIDATE,
    AccessLevel,
    ApiHandler,
    ApiRequest,
    ApiResponse,
    ApiRoute,
    build_cacheable_response,
)
from price_keeper.control.budget_endpoints import FLAG_SCHEMA, read_flag
from price_keeper.control.control_services import ControlServices
from price_keeper.domain import build_money_record
from price_keeper.org_calendar import load_zone
from price_keeper.reports.label_totals import LabelTotal, load_budgets, read_label_totals
from price_keeper.reports.report_formats import build_json_report
from price_keeper.reports.report_period import ReportPeriod, check_report_period, parse_report_period
from price_keeper.reports.report_rows import DIMENSIONS, filter_spend, group_spend
from price_keeper.reports.spend_report import build_report

MAX_DAYS = 92  # in one report, to limit what a request reads from the store
FINAL_MAX_AGE_SECONDS = 300  # cache time of final days; a journal that is recovered late may still add to them

_DAY_PATTERN = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


async def get_today(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return await _report_spend(services, request, parse_report_period("today"), with_labels=True)


async def get_day(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return await _report_spend(
        services, request, _parse_period(services, request.path["day"], request.path["day"], ("day", "day"))
    )


async def get_range(services: ControlServices, request: ApiRequest) -> ApiResponse:
    missing = [(name, "required, but missing") for name in ("from", "to") if name not in request.query]
    if missing:
        raise invalid_request("the query cannot be used", *missing)
    return await _report_spend(
        services, request, _parse_period(services, request.query["from"], request.query["to"], ("from", "to"))
    )


def _parse_period(services: ControlServices, first: str, last: str, names: tuple[str, str]) -> ReportPeriod:
    """The days from first to last; `names` are used in error messages. Raises ApiError."""
    mistakes = [
        (name, "expected a day as 2026-11-18")
        for name, text in zip(names, (first, last), strict=True)
        if not _DAY_PATTERN.fullmatch(text)
    ]
    if mistakes:
        raise invalid_request("the days are invalid", *dict.fromkeys(mistakes))
    try:
        period = parse_report_period(first if first == last else f"{first}..{last}")
        check_report_period(period, services.clock.now())
    except ValueError as failure:
        raise invalid_request("these days cannot be asked for", (names[0], str(failure))) from None
    if (
        isinstance(period.first, date)
        and isinstance(period.last, date)
        and (period.last - period.first).days >= MAX_DAYS
    ):
        raise invalid_request("these days cannot be asked for", (names[1], f"at most {MAX_DAYS} days at once"))
    return period


async def _report_spend(
    services: ControlServices, request: ApiRequest, period: ReportPeriod, *, with_labels: bool = False
) -> ApiResponse:
    """Respond with the spend of an org or app; an unknown one has spent nothing. `as_of` is left out of the body, so
    that the ETag changes only with the figures; the Date header says it."""
    org, app, now = request.path["org"], request.path.get("app"), services.clock.now()
    store, defaults, reads_shards = services.store, services.config.defaults, read_flag(request, "consistent")
    known = None if reads_shards else services.budgets.known_totals
    zone = load_zone(defaults.timezone)
    report = build_report(store, period, org, {}, zone, now, app, known, reads_shards=reads_shards)
    labels = []
    if with_labels:
        spend_report, budgets = await asyncio.gather(report, load_budgets(store, org, app, defaults, now))
        labels = await read_label_totals(store, budgets, spend_report.counts, app, now, known)
    else:
        spend_report = await report
    report_rows = group_spend(filter_spend(spend_report.spent, app, None), DIMENSIONS)
    formatted = build_json_report(
        spend_report, report_rows, DIMENSIONS, {"org": org, "app": app, "label": None}, spend_report.notes
    )
    del formatted["as_of"], formatted["by"], formatted["filters"]
    if with_labels:
        formatted["labels"] = [_format_label(label) for label in labels]
    cache = f"private, max-age={FINAL_MAX_AGE_SECONDS}" if spend_report.is_final else REVALIDATE
    return build_cacheable_response({"org": org, "app": app, **formatted}, cache)


def _format_label(total: LabelTotal) -> dict[str, Any]:
    spent, quota = total.period_pico, total.quota
    mode = Mode.NORMAL if quota is None else compute_mode(spent, quota, total.tight_pct)
    return {
        "app": total.app,
        "label": total.label,
        "period": total.period,
        **total.today.by_name(),
        **build_money_record("daily_total_usd_micros", total.today.pico),
        **build_money_record("period_total_usd_micros", spent),
        **build_money_record("quota_usd_micros", quota),
        "quota_pct": None if quota is None else compute_quota_percent(spent, quota),
        "mode": mode.value,
    }


_CONSISTENT_QUERY = {
    "consistent": {**FLAG_SCHEMA, "description": "true: from the shards, with all that was flushed; else from totals"}
}
_RANGE_QUERY = {name: {"type": "string", "format": "date"} for name in ("from", "to")}
_ENDPOINTS: tuple[tuple[str, str, str, ApiHandler, Mapping[str, Mapping[str, Any]]], ...] = (
    ("/today", "Today", "of the org's day so far", get_today, {}),
    ("/{day}", "OfDay", "of one of the org's days", get_day, {}),
    ("", "", f"of some days, at most {MAX_DAYS} at once", get_range, _RANGE_QUERY),
)

AGGREGATE_ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/aggregates{path}",
        who,
        f"get{of}Aggregates{name}",
        f"What was spent {summary}, by app, label and day",
        handle,
        {200: "Aggregates"},
        query_schemas={**query, **_CONSISTENT_QUERY},
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
    for path, name, summary, handle, query in _ENDPOINTS
)
