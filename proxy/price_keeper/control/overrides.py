"""Which label is in force, said by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from price_keeper.budgets.active_label import (
    MAX_REASON_LENGTH,
    MAX_WHO_LENGTH,
    Override,
    audit_override,
    clear_override,
    set_override,
)
from price_keeper.control.api_errors import ERROR_CODES, ApiError
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.body_fields import BodyFields, FreeTextField, PatternField, TimestampField
from price_keeper.control.control_requests import SMALL_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.control.org_endpoints import load_app, load_org
from price_keeper.domain import Scope
from price_keeper.org_calendar import PeriodSpan, find_span
from price_keeper.reports.settings_report import SettingsReport, format_utc

LABEL_FIELD = PatternField(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", 64, "a label")
OVERRIDE_BODY = BodyFields(
    {
        "label": LABEL_FIELD,
        "reason": FreeTextField(MAX_REASON_LENGTH),
        "until": TimestampField(),
        "who": FreeTextField(MAX_WHO_LENGTH),
    },
    ("label", "reason"),
)


async def put_override(services: ControlServices, request: ApiRequest) -> ApiResponse:
    body = OVERRIDE_BODY.parse(request.body)
    scope, period, shown_settings = await _resolve_scope(services, request)
    stored = await set_override(
        services.store,
        services.clock,
        scope,
        period,
        body["label"],
        body["reason"],
        body.get("who", request.principal.name),
        body.get("until"),
        ordering=shown_settings.effective.ordering,
        companions=audit_override(request.actor, "override.set", scope, services.clock),
    )
    return ApiResponse({**_describe_scope(scope, period), "override": format_override(stored)})


async def delete_override(services: ControlServices, request: ApiRequest) -> ApiResponse:
    scope, period, _ = await _resolve_scope(services, request)
    audit_hook = audit_override(request.actor, "override.clear", scope, services.clock)
    is_cleared = await clear_override(services.store, scope, period, services.clock, audit_hook)
    return ApiResponse({**_describe_scope(scope, period), "override": None, "is_cleared": is_cleared})


def format_override(override: Override | None) -> dict[str, Any] | None:
    if override is None:
        return None
    formatted = {"label": override.label, "reason": override.reason, "who": override.who}
    return {**formatted, "until": format_utc(override.until), "version": override.version}


async def _resolve_scope(services: ControlServices, request: ApiRequest) -> tuple[Scope, PeriodSpan, SettingsReport]:
    """The scope to which quotas apply, as the path names it. Raises Problem where they apply to another one."""
    org, app = request.path["org"], request.path.get("app")
    shown_settings = await load_org(services, org) if app is None else await load_app(services, org, app)
    settings = shown_settings.effective
    if (settings.quota_scope == "APP") is (app is None):
        holder = "each app" if app is None else "the org as a whole"
        raise ApiError(409, ERROR_CODES[409], f"the quotas of this org apply to {holder}, and so do overrides")
    return Scope(org, app), find_span(settings.period, shown_settings.now, settings.zone), shown_settings


def _describe_scope(scope: Scope, period: PeriodSpan) -> dict[str, Any]:
    return {"org": scope.org, "app": scope.app, "period": period.key}


def _build_override_route(method: str, path: str, kind: str) -> ApiRoute:
    if method == "PUT":
        summary = "Put a label in force, up or down the ordering, until the period ends"
        operation_id, handle, response_schema, body_schema = (
            f"put{kind}Override",
            put_override,
            "Overridden",
            "Override",
        )
        route = ApiRoute(
            method,
            path,
            AccessLevel.ADMIN,
            operation_id,
            summary,
            handle,
            {200: response_schema},
            (404, 409),
            body_schema=body_schema,
        )
        return replace(route, max_body_bytes=SMALL_BODY_BYTES)
    operation_id, summary = f"delete{kind}Override", "Let the quotas decide again"
    return ApiRoute(
        method, path, AccessLevel.ADMIN, operation_id, summary, delete_override, {200: "Overridden"}, (404, 409)
    )


OVERRIDE_ROUTES = tuple(
    _build_override_route(method, f"/api/v1/orgs/{{org}}{below}/override", of)
    for below, of in (("", "Org"), ("/apps/{app}", "App"))
    for method in ("PUT", "DELETE")
)
