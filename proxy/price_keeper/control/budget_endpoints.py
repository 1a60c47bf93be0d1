"""Endpoints for the state of a budget: which label serves, what is spent of each quota, and overrides by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from price_keeper.budgets import label_policy
from price_keeper.budgets.active_label import (
    MAX_REASON_LENGTH,
    MAX_WHO_LENGTH,
    Override,
    audit_override,
    clear_override,
    set_override,
)
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request, not_found
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.body_fields import TIMESTAMP_FIELD, BodyFields, free_text_field, pattern_field
from price_keeper.control.control_requests import SMALL_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.control.org_endpoints import load_app, load_org
from price_keeper.domain import Caller, Scope, build_client_id, build_money_record
from price_keeper.org_calendar import PeriodSpan, find_span
from price_keeper.reports import money
from price_keeper.reports.settings_report import SettingsReport, format_utc
from price_keeper.stores import schema
from price_keeper.usage.inference_profiles import AppLabels

LABEL_FIELD = pattern_field(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", 64, "a label")
OVERRIDE_BODY = BodyFields(
    {
        "label": LABEL_FIELD,
        "reason": free_text_field(MAX_REASON_LENGTH),
        "until": TIMESTAMP_FIELD,
        "who": free_text_field(MAX_WHO_LENGTH),
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
    """The scope of the path, its period and its settings. Raises ApiError (404), or 409 if the org's quotas apply to
    another scope than the path names."""
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
            AccessLevel.ORG_ADMIN,
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
        method, path, AccessLevel.ORG_ADMIN, operation_id, summary, delete_override, {200: "Overridden"}, (404, 409)
    )


OVERRIDE_ROUTES = tuple(
    _build_override_route(method, f"/api/v1/orgs/{{org}}{below}/override", of)
    for below, of in (("", "Org"), ("/apps/{app}", "App"))
    for method in ("PUT", "DELETE")
)


_FLAG_VALUES = {"true": True, "false": False}
FLAG_SCHEMA = {"type": "string", "enum": ["true", "false"]}


async def is_known_app(services: ControlServices, org: str, app: str | None) -> bool:
    """Whether the app exists; orgs are not checked. Call it before reading an app's budget: what was read stays in
    memory and in the snapshot, where invented apps would evict budgets of other orgs. Raises StoreError."""
    if app is None or services.budgets.is_known(Caller(org, app, build_client_id(org, app))):
        return True
    return await services.store.get(schema.app_config_key(org, app), consistent=True) is not None


async def check_known_app(services: ControlServices, org: str, app: str | None) -> None:
    """Raises ApiError (404), and StoreError."""
    if not await is_known_app(services, org, app):
        raise not_found(f"there is no app {app} of an org {org}")


async def get_selection(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Report how this process would serve a call of this org or app now. The org need not exist."""
    org, app = request.path["org"], request.path.get("app")
    await check_known_app(services, org, app)
    caller = Caller(org, app, build_client_id(org, app))
    is_forced = read_flag(request, "force_check")
    if is_forced:
        services.budgets.app_labels.invalidate(Scope(org, app))
    budget, override = await services.budgets.read_status(caller, forces_read=is_forced)
    own_labels = await services.budgets.app_labels.get(caller)
    return build_cacheable_response(format_selection(budget, override, services.labels_and_pseudo_labels, own_labels))


def read_flag(request: ApiRequest, name: str) -> bool:
    text = request.query.get(name, "false")
    if text not in _FLAG_VALUES:
        raise invalid_request("the query cannot be used", (name, "expected true or false"))
    return _FLAG_VALUES[text]


def format_selection(
    budget: BudgetState, override: Override | None, labels: tuple[str, ...], own_labels: AppLabels
) -> dict[str, Any]:
    settings, scope = budget.settings, budget.scope
    all_labels = (*labels, *own_labels.by_name)
    shown_labels = dict.fromkeys(
        (*settings.ordering, *settings.quotas) if settings.ordering or settings.quotas else all_labels
    )
    return {
        "scope": {"org": scope.org, "app": scope.app},
        "period": budget.span.key,
        "resets_at": format_utc(budget.span.end),
        "enforcement": settings.enforcement,
        "active_label": get_active_label(budget),
        "override": format_override(override),
        "is_stale": budget.is_stale,
        "labels": [_format_label(budget, label, own_labels) for label in shown_labels],
    }


def get_active_label(budget: BudgetState) -> str | None:
    """None if the scope has no chain."""
    ordering = budget.settings.ordering
    return ordering[budget.active_index] if ordering else None


def _format_label(budget: BudgetState, label: str, own_labels: AppLabels) -> dict[str, Any]:
    quota = budget.settings.quotas.get(label)
    spent, in_flight = get_spend(budget, label)
    is_outside_ordering = label in PSEUDO_LABELS or (label in own_labels.by_name and not budget.has_label(label))
    serves = (
        _serve_by_itself(label, spent + in_flight, quota) if is_outside_ordering else budget.find_enforced_label(label)
    )
    formatted = {
        "label": label,
        "served_by": label if budget.settings.enforcement == "shadow" else serves,
        "would_be_served_by": serves,
    }
    if quota is None:
        return {
            **formatted,
            **_format_amounts(None, None, None),
            "quota_pct": None,
            "mode": label_policy.Mode.NORMAL.value,
        }
    return {
        **formatted,
        **_format_amounts(spent, in_flight, quota),
        "quota_pct": label_policy.compute_quota_percent(spent + in_flight, quota),
        "mode": label_policy.compute_mode(spent + in_flight, quota, budget.settings.tight_pct).value,
    }


def _format_amounts(spent: int | None, in_flight: int | None, quota: int | None) -> dict[str, Any]:
    return {
        **money.build_text_record("spent_usd_micros", spent),
        **money.build_text_record("in_flight_usd_micros", in_flight),
        **build_money_record("quota_usd_micros", quota),
    }


def _serve_by_itself(label: str, taken: int, quota: int | None) -> str | None:
    """The label itself while it has quota left. A label outside the ordering is never replaced by another one."""
    return label if quota is None or taken < quota else None


def get_spend(budget: BudgetState, label: str) -> tuple[int, int]:
    """What is spent of the label's quota, and what calls in flight may add; zeros if it has no quota."""
    trackers = budget.find_trackers(label)
    return (max(0, trackers[0].spent), max(0, trackers[0].in_flight)) if trackers else (0, 0)


_SELECTION_QUERY = {"force_check": FLAG_SCHEMA}

SELECTION_ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/model-selection",
        who,
        f"get{of}ModelSelection",
        "Which label serves now, and what is spent of each quota; force_check looks at the store first",
        get_selection,
        {200: "Selection"},
        () if of == "Org" else (404,),
        query_schemas=_SELECTION_QUERY,
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
)
