"""Which label serves now, and what is spent of each quota."""

from __future__ import annotations

from typing import Any

from price_keeper.budgets import label_policy
from price_keeper.budgets.active_label import Override
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.config.config_sections import PSEUDO_LABELS
from price_keeper.control.api_errors import invalid_request
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.control_services import ControlServices
from price_keeper.control.overrides import format_override
from price_keeper.domain import Caller, Scope, build_client_id
from price_keeper.ledger.ledger_entries import PICO_PER_MICRO
from price_keeper.reports import money
from price_keeper.reports.settings_report import format_utc
from price_keeper.usage.inference_profiles import AppProfiles

_FLAG_VALUES = {"true": True, "false": False}


async def get_selection(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """As a call of this org or app would be served by this process, whether it was ever heard of or not."""
    org, app = request.path["org"], request.path.get("app")
    caller = Caller(org, app, build_client_id(org, app))
    is_forced = _read_flag(request, "force_check")
    if is_forced:
        services.budgets.app_labels.invalidate(Scope(org, app))
    budget, override = await services.budgets.read_status(caller, forces_read=is_forced)
    own_labels = await services.budgets.app_labels.get(caller)
    return build_cacheable_response(format_selection(budget, override, services.labels, own_labels))


def _read_flag(request: ApiRequest, name: str) -> bool:
    text = request.query.get(name, "false")
    if text not in _FLAG_VALUES:
        raise invalid_request("the query cannot be used", (name, "expected true or false"))
    return _FLAG_VALUES[text]


def format_selection(
    budget: BudgetState, override: Override | None, labels: tuple[str, ...], own_labels: AppProfiles
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
        "active_label": settings.ordering[budget.active_index] if settings.ordering else None,
        "override": format_override(override),
        "is_stale": budget.is_stale,
        "labels": [_format_label(budget, label, own_labels) for label in shown_labels],
    }


def _format_label(budget: BudgetState, label: str, own_labels: AppProfiles) -> dict[str, Any]:
    quota = budget.settings.quotas.get(label)
    spent, in_flight = _get_spend(budget, label)
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
        unset = ("spent_usd_micros", "in_flight_usd_micros", "quota_usd_micros", "quota_pct")
        return {**formatted, **dict.fromkeys(unset), "mode": label_policy.Mode.NORMAL.value}
    return {
        **formatted,
        "spent_usd_micros": money.format_exact_micros(spent),
        "in_flight_usd_micros": money.format_exact_micros(in_flight),
        "quota_usd_micros": quota // PICO_PER_MICRO,
        "quota_pct": label_policy.compute_quota_percent(spent + in_flight, quota),
        "mode": label_policy.compute_mode(spent + in_flight, quota, budget.settings.tight_pct).value,
    }


def _serve_by_itself(label: str, taken: int, quota: int | None) -> str | None:
    """What is in no chain, as no model's label is, is served by no other one."""
    return label if quota is None or taken < quota else None


def _get_spend(budget: BudgetState, label: str) -> tuple[int, int]:
    """What is known to be spent of the label's quota, and what is under way; nothing where it has none."""
    budgets = budget.find_trackers(label)
    return (max(0, budgets[0].spent), max(0, budgets[0].in_flight)) if budgets else (0, 0)


_SELECTION_QUERY = {"force_check": {"type": "string", "enum": ["true", "false"]}}

SELECTION_ROUTES = tuple(
    ApiRoute(
        "GET",
        f"/api/v1/orgs/{{org}}{below}/model-selection",
        who,
        f"get{of}ModelSelection",
        "Which label serves now, and what is spent of each quota; force_check looks at the store first",
        get_selection,
        {200: "Selection"},
        query_schemas=_SELECTION_QUERY,
        group="spend",
    )
    for below, of, who in (("", "Org", AccessLevel.ORG), ("/apps/{app}", "App", AccessLevel.APP))
)
