"""What would be if a label had another quota: told of the period so far, and nothing is changed."""

from __future__ import annotations

from collections.abc import Container

from price_keeper.budgets.effective_settings import MAX_QUOTA_MICROS, format_value
from price_keeper.control.api_errors import invalid_request
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.control_services import ControlServices
from price_keeper.control.page.spend_forecast import simulate_quota
from price_keeper.control.page.status_board import build_view, read_budget
from price_keeper.domain import PICO_PER_MICRO

WHAT_IF_QUERY = {
    "label": {"type": "string", "maxLength": 64, "description": "one that has a quota"},
    "quota_usd_micros": {"type": "integer", "minimum": 0, "maximum": MAX_QUOTA_MICROS},
}


async def get_what_if(services: ControlServices, request: ApiRequest) -> ApiResponse:
    budget, _ = await read_budget(services, request.path["org"], request.path.get("app"))
    label, quota = _parse_what_if(request, budget.settings.quotas.keys())
    return ApiResponse(simulate_quota(build_view(services, budget), label, quota * PICO_PER_MICRO))


def _parse_what_if(request: ApiRequest, labels: Container[str]) -> tuple[str, int]:
    """Raises Problem."""
    label, text = request.query.get("label"), request.query.get("quota_usd_micros", "")
    mistakes = []
    if label is None or label not in labels:
        mistakes.append(("label", f"expected a label that has a quota here, found {format_value(label or '')}"))
    if not (
        text.isascii() and text.isdigit() and len(text) <= len(str(MAX_QUOTA_MICROS)) and int(text) <= MAX_QUOTA_MICROS
    ):
        mistakes.append(
            ("quota_usd_micros", f"expected whole micro-USD from 0 to {MAX_QUOTA_MICROS}, found {format_value(text)}")
        )
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    return str(label), int(text)


WHAT_IF_ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/what-if",
        who,
        f"get{of}WhatIf",
        "What would be if a label had another quota from now on; changes nothing",
        get_what_if,
        {200: "WhatIf"},
        query_schemas=WHAT_IF_QUERY,
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
)
