"""What was spent, by day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from price_keeper.calendar_days import load_zone
from price_keeper.control.calls import REVALIDATE, ApiResponse, ApiRequest, ApiHandler, ApiRoute, AccessLevel, build_cacheable_response
from price_keeper.control.parts import ControlServices
from price_keeper.control.problems import invalid_request
from price_keeper.reporting.days import Asked, check, parse
from price_keeper.reporting.query import report
from price_keeper.reporting.records import as_json
from price_keeper.reporting.totals import DIMENSIONS, only, rows

MOST_DAYS = 92  # at once, so that what one request reads is bounded
FINAL_SECONDS = 300  # even what is final may be added to, by a journal that turns up late

_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


async def today(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return await _spent(services, request, parse("today"))


async def of_day(services: ControlServices, request: ApiRequest) -> ApiResponse:
    return await _spent(services, request, _asked(services, request.path["day"], request.path["day"], ("day", "day")))


async def of_range(services: ControlServices, request: ApiRequest) -> ApiResponse:
    lacking = [(name, "required, but missing") for name in ("from", "to") if name not in request.query]
    if lacking:
        raise invalid_request("the query cannot be used", *lacking)
    return await _spent(services, request, _asked(services, request.query["from"], request.query["to"], ("from", "to")))


def _asked(services: ControlServices, first: str, last: str, names: tuple[str, str]) -> Asked:
    """Raises Problem."""
    mistakes = [
        (name, "expected a day as 2026-11-18")
        for name, text in zip(names, (first, last), strict=True)
        if not _DAY.fullmatch(text)
    ]
    if mistakes:
        raise invalid_request("these are no days", *dict.fromkeys(mistakes))
    try:
        asked = parse(first if first == last else f"{first}..{last}")
        check(asked, services.clock.now())
    except ValueError as failure:
        raise invalid_request("these days cannot be asked for", (names[0], str(failure))) from None
    if isinstance(asked.first, date) and isinstance(asked.last, date) and (asked.last - asked.first).days >= MOST_DAYS:
        raise invalid_request("these days cannot be asked for", (names[1], f"at most {MOST_DAYS} days at once"))
    return asked


async def _spent(services: ControlServices, request: ApiRequest, asked: Asked) -> ApiResponse:
    """An org or app that nobody has heard of has spent nothing. The answer's Date is what it is as of."""
    org, app, now = request.path["org"], request.path.get("app"), services.clock.now()
    found = await report(services.store, asked, org, {}, load_zone(services.config.defaults.timezone), now, app)
    told = rows(only(found.spent, app, None), DIMENSIONS)
    value = as_json(found, told, DIMENSIONS, {"org": org, "app": app, "label": None}, found.notes)
    del value["as_of"], value["by"], value["filters"]
    cache = f"private, max-age={FINAL_SECONDS}" if found.is_final else REVALIDATE
    return build_cacheable_response({"org": org, "app": app, **value}, cache)


_RANGE = {name: {"type": "string", "format": "date"} for name in ("from", "to")}
_KINDS: tuple[tuple[str, str, str, ApiHandler, Mapping[str, Mapping[str, Any]]], ...] = (
    ("/today", "Today", "of the org's day so far", today, {}),
    ("/{day}", "OfDay", "of one of the org's days", of_day, {}),
    ("", "", f"of some days, at most {MOST_DAYS} at once", of_range, _RANGE),
)

ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/aggregates{path}",
        who,
        f"get{of}Aggregates{name}",
        f"What was spent {summary}, by app, label and day",
        handle,
        {200: "Aggregates"},
        query_schemas=query,
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
    for path, name, summary, handle, query in _KINDS
)
