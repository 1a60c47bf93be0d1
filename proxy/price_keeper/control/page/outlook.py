"""How fast is spent, when a quota will be reached, and what would be if it were another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from price_keeper.budgets import label_policy
from price_keeper.control.page.history import SpendCurve
from price_keeper.ledger.ledger_entries import PICO_PER_MICRO
from price_keeper.reports import money
from price_keeper.reports.settings_report import format_utc

RATE_WINDOW_SECONDS = 3600.0  # over which it is told how fast is spent
MIN_RATE_SECONDS = 60.0  # of less nothing can be told
HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class BudgetView:
    """One scope in its period, at one moment. Money is in pico-dollars."""

    ordering: Sequence[str]
    quotas: Mapping[str, int]
    spent: Mapping[str, int]  # of each label that has a quota
    active: int
    is_sticky: bool
    tight_pct: int
    curves: Mapping[str, SpendCurve]
    now: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class SpendRate:
    pico_per_hour: float
    observed_seconds: float  # over which it was seen


def compute_spend_rate(curve: SpendCurve | None, until: float) -> SpendRate | None:
    """In the hour before; None where too little is known of it."""
    if curve is None:
        return None
    start = max(curve.samples[0].at, until - RATE_WINDOW_SECONDS)
    seconds = until - start
    if seconds < MIN_RATE_SECONDS:
        return None
    return SpendRate((curve.estimate_at(until) - curve.estimate_at(start)) * HOUR_SECONDS / seconds, seconds)


def forecast_quota(view: BudgetView, label: str, quota: int, *, is_newly_serving: bool = False) -> dict[str, Any]:
    """When the quota of a label was or will be spent, if calls go on as they do. One that is new to serve goes at the
    pace at which it was last spent."""
    curve, spent = view.curves.get(label), view.spent[label]
    if spent >= quota:
        at = None if curve is None else curve.estimate_when_reached(quota)
        return {"state": "reached", "at": None if at is None else format_utc(at)}
    rate = compute_spend_rate(curve, view.now)
    if is_newly_serving and curve is not None and (rate is None or not rate.pico_per_hour):
        rate = compute_spend_rate(curve, curve.samples[-1].at)
    if rate is None:
        return {"state": "unknown", "at": None}
    if not rate.pico_per_hour:
        return {"state": "not_in_this_period", "at": None}
    at = view.now + (quota - spent) / rate.pico_per_hour * HOUR_SECONDS
    if at >= view.ends_at:
        return {"state": "not_in_this_period", "at": None}
    return {"state": "expected", "at": format_utc(at)}


def find_serving_label(view: BudgetView, quotas: Mapping[str, int], start: int) -> str | None:
    """The first label from there on with something left."""
    ordering = view.ordering
    if not ordering:
        return None
    label = ordering[label_policy.advance_active_index(start, ordering, view.spent.__getitem__, quotas)]
    return label if view.spent[label] < quotas[label] else None


def describe_outcome(view: BudgetView, quotas: Mapping[str, int]) -> dict[str, Any]:
    """With these quotas from now on. A label that was left is not gone back to before the period ends."""
    serves, are_quotas_new = find_serving_label(view, quotas, view.active), quotas is not view.quotas
    return {
        "serves": serves,
        "would_have_served": find_serving_label(view, quotas, 0),
        "labels": [
            {
                **format_quota_usage(view, label, quota),
                "reached": forecast_quota(view, label, quota, is_newly_serving=are_quotas_new and label == serves),
            }
            for label, quota in quotas.items()
        ],
    }


def format_quota_usage(view: BudgetView, label: str, quota: int) -> dict[str, Any]:
    spent = view.spent[label]
    return {
        "label": label,
        "spent_usd_micros": money.format_exact_micros(spent),
        "quota_usd_micros": quota // PICO_PER_MICRO,
        "quota_pct": label_policy.compute_quota_percent(spent, quota),
        "mode": label_policy.compute_mode(spent, quota, view.tight_pct).value,
    }


def simulate_quota(view: BudgetView, label: str, quota: int) -> dict[str, Any]:
    """What is, and what would be if a label had another quota. Nothing is changed."""
    return {
        "label": label,
        "quota_usd_micros": quota // PICO_PER_MICRO,
        "as_it_is": describe_outcome(view, view.quotas),
        "as_it_would_be": describe_outcome(view, {**view.quotas, label: quota}),
    }
