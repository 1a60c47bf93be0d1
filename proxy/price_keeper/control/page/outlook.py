"""How fast is spent, when a quota will be reached, and what would be if it were another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from price_keeper.control.page.history import SpendCurve
from price_keeper.recording.entries import PICO_PER_MICRO
from price_keeper.reporting import money
from price_keeper.reporting.settings_shown import utc
from price_keeper.selection import policy

PACE_SECONDS = 3600.0  # over which it is told how fast is spent
LEAST_SECONDS = 60.0  # of less nothing can be told
HOUR = 3600


@dataclass(frozen=True, slots=True)
class View:
    """One scope in its period, at one moment. Money is in pico-dollars."""

    ordering: Sequence[str]
    quotas: Mapping[str, int]
    spent: Mapping[str, int]  # of each label that has a quota
    active: int
    is_sticky: bool
    tight_pct: int
    courses: Mapping[str, SpendCurve]
    now: float
    ends: float


@dataclass(frozen=True, slots=True)
class Pace:
    pico_per_hour: float
    seconds: float  # over which it was seen


def pace(course: SpendCurve | None, until: float) -> Pace | None:
    """In the hour before; None where too little is known of it."""
    if course is None:
        return None
    begin = max(course.samples[0].at, until - PACE_SECONDS)
    seconds = until - begin
    if seconds < LEAST_SECONDS:
        return None
    return Pace((course.estimate_at(until) - course.estimate_at(begin)) * HOUR / seconds, seconds)


def reached(view: View, label: str, quota: int, *, is_new: bool = False) -> dict[str, Any]:
    """When the quota of a label was or will be spent, if calls go on as they do. One that is new to serve goes at the
    pace at which it was last spent."""
    course, spent = view.courses.get(label), view.spent[label]
    if spent >= quota:
        at = None if course is None else course.estimate_when_reached(quota)
        return {"state": "reached", "at": None if at is None else utc(at)}
    found = pace(course, view.now)
    if is_new and course is not None and (found is None or not found.pico_per_hour):
        found = pace(course, course.samples[-1].at)
    if found is None:
        return {"state": "unknown", "at": None}
    if not found.pico_per_hour:
        return {"state": "not_in_this_period", "at": None}
    at = view.now + (quota - spent) / found.pico_per_hour * HOUR
    if at >= view.ends:
        return {"state": "not_in_this_period", "at": None}
    return {"state": "expected", "at": utc(at)}


def serving(view: View, quotas: Mapping[str, int], start: int) -> str | None:
    """The first label from there on with something left."""
    ordering = view.ordering
    if not ordering:
        return None
    label = ordering[policy.advance_active_index(start, ordering, view.spent.__getitem__, quotas)]
    return label if view.spent[label] < quotas[label] else None


def situation(view: View, quotas: Mapping[str, int]) -> dict[str, Any]:
    """With these quotas from now on. A label that was left is not gone back to before the period ends."""
    serves, is_new = serving(view, quotas, view.active), quotas is not view.quotas
    return {
        "serves": serves,
        "would_have_served": serving(view, quotas, 0),
        "labels": [
            {**figures(view, label, quota), "reached": reached(view, label, quota, is_new=is_new and label == serves)}
            for label, quota in quotas.items()
        ],
    }


def figures(view: View, label: str, quota: int) -> dict[str, Any]:
    spent = view.spent[label]
    return {
        "label": label,
        "spent_usd_micros": money.exact_micros(spent),
        "quota_usd_micros": quota // PICO_PER_MICRO,
        "quota_pct": policy.compute_quota_percent(spent, quota),
        "mode": policy.compute_mode(spent, quota, view.tight_pct).value,
    }


def what_if(view: View, label: str, quota: int) -> dict[str, Any]:
    """What is, and what would be if a label had another quota. Nothing is changed."""
    return {
        "label": label,
        "quota_usd_micros": quota // PICO_PER_MICRO,
        "as_it_is": situation(view, view.quotas),
        "as_it_would_be": situation(view, {**view.quotas, label: quota}),
    }
