"""Spend history of each counter, and forecasts based on it: spend rate, when a quota is reached, and what-if. Pure.

The store has only one total for each counter and no history, so this history begins with the process and says since
when it has data. Memory is limited: curves are thinned out, and the least recently updated curve is dropped first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from price_keeper.budgets import label_policy
from price_keeper.domain import build_money_record
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.reports import money
from price_keeper.reports.settings_report import format_utc

MAX_CURVES = 3000  # about 15 MB with all their samples
MAX_UNSPENT_CURVES = 1000  # of counters without spend, whose apps need not even exist
MAX_SAMPLES = 240  # per curve; a chart is hardly wider
MIN_SAMPLE_SECONDS = 5.0  # between two samples, before the curve is thinned out
RATE_WINDOW_SECONDS = 3600.0  # over which the spend rate is measured
MIN_RATE_SECONDS = 60.0  # a shorter observation gives no meaningful rate
HOUR_SECONDS = 3600


class SpendSample(NamedTuple):
    """What was spent, in pico-dollars, by a time in epoch seconds."""

    at: float
    pico: int


class SpendCurve:
    """The growth of one counter, interpolated linearly between samples."""

    __slots__ = ("_last_reported", "_min_interval", "last_seen_at", "samples")

    def __init__(self, first: SpendSample) -> None:
        self.samples = [first]
        self.last_seen_at = first.at  # until then the counter is known to have had the last sample's value
        self._min_interval = MIN_SAMPLE_SECONDS
        self._last_reported = 0

    def add_sample(self, at: float, pico: int) -> None:
        """Add a sample. One that is older or lower than the last is ignored, because a counter only grows."""
        last = self.samples[-1]
        if at <= self.last_seen_at or pico < last.pico:
            return
        if pico > last.pico:
            if self.last_seen_at - last.at >= self._min_interval:
                self.samples.append(SpendSample(self.last_seen_at, last.pico))
            self._append(SpendSample(at, pico))
        self.last_seen_at = at

    def _append(self, point: SpendSample) -> None:
        """Append a sample, or replace the last one if the one before is recent enough. The first sample always stays:
        it marks the beginning of the history."""
        if len(self.samples) > 1 and point.at - self.samples[-2].at < self._min_interval:
            self.samples[-1] = point
            return
        self.samples.append(point)
        while len(self.samples) > MAX_SAMPLES:
            self._min_interval *= 2
            self._thin_out()

    def _thin_out(self) -> None:
        first, *inner, last = self.samples
        kept = [first]
        for point in inner:
            if point.at - kept[-1].at >= self._min_interval:
                kept.append(point)
        self.samples = [*kept, last]

    def estimate_at(self, moment: float) -> float:
        """The estimated spend by that time; before the first sample, that sample's value."""
        if moment <= self.samples[0].at:
            return self.samples[0].pico
        index = bisect_left(self.samples, (moment, 0))
        if index == len(self.samples):
            return self.samples[-1].pico
        before, after = self.samples[index - 1], self.samples[index]
        return before.pico + (moment - before.at) / (after.at - before.at) * (after.pico - before.pico)

    def estimate_when_reached(self, pico: int) -> float | None:
        """The estimated time at which the spend reached `pico`; None if that was before the first sample, or never."""
        for before, after in pairwise(self.samples):
            if before.pico < pico <= after.pico:
                return before.at + (after.at - before.at) * (pico - before.pico) / (after.pico - before.pico)
        return None

    def has_unreported_spend(self, reported: int) -> bool:
        """Whether the curve shows more spend than `reported`, and this was not returned for the same value before."""
        latest = self.samples[-1].pico
        if latest <= reported or latest == self._last_reported:
            return False
        self._last_reported = latest
        return True


_CurveKey = tuple[str, str, str]  # a scope, a label, a period


class SpendHistory:
    """The curves of all counters seen by this process, least recently updated first."""

    def __init__(self) -> None:
        self._curves: dict[_CurveKey, SpendCurve] = {}
        self._unspent: dict[_CurveKey, SpendCurve] = {}

    def record(self, counter: Counter, pico: int, at: float) -> None:
        """Add a sample to the counter's curve. A new curve may evict the least recently updated one."""
        key = counter[:3]
        curve = self._curves.pop(key, None) or self._unspent.pop(key, None)
        if curve is None:
            curve = SpendCurve(SpendSample(at, pico))
        else:
            curve.add_sample(at, pico)
        curves, max_curves = (
            (self._curves, MAX_CURVES) if curve.samples[-1].pico else (self._unspent, MAX_UNSPENT_CURVES)
        )
        if len(curves) >= max_curves:
            del curves[next(iter(curves))]
        curves[key] = curve

    def get(self, scope: str, label: str, period: str) -> SpendCurve | None:
        key = scope, label, period
        return self._curves.get(key) or self._unspent.get(key)

    def get_curves(self, scope: str, period: str, labels: Mapping[str, object]) -> dict[str, SpendCurve]:
        curves = ((label, self.get(scope, label, period)) for label in labels)
        return {label: curve for label, curve in curves if curve is not None}


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A snapshot of one scope's budget in its period. Money is in pico-dollars."""

    ordering: Sequence[str]
    quotas: Mapping[str, int]
    spent: Mapping[str, int]  # by label, for labels with a quota
    active: int
    is_sticky: bool
    tight_pct: int
    curves: Mapping[str, SpendCurve]
    now: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class SpendRate:
    pico_per_hour: float
    observed_seconds: float  # length of the observation


def compute_spend_rate(curve: SpendCurve | None, until: float) -> SpendRate | None:
    """The spend rate in the hour before `until`; None if less than MIN_RATE_SECONDS of it are known."""
    if curve is None:
        return None
    start = max(curve.samples[0].at, until - RATE_WINDOW_SECONDS)
    seconds = until - start
    if seconds < MIN_RATE_SECONDS:
        return None
    return SpendRate((curve.estimate_at(until) - curve.estimate_at(start)) * HOUR_SECONDS / seconds, seconds)


def forecast_quota(view: BudgetView, label: str, quota: int, *, is_newly_serving: bool = False) -> dict[str, Any]:
    """When the quota of a label was reached, or will be if spend continues at its present rate. A label that newly
    serves is assumed to continue at its last rate."""
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
    """The first label of the ordering, from index `start` on, with quota left or unlimited; None if there is none."""
    ordering = view.ordering
    if not ordering:
        return None
    label = ordering[label_policy.advance_active_index(start, ordering, view.spent.__getitem__, quotas)]
    return label if label not in quotas or view.spent[label] < quotas[label] else None


def describe_outcome(view: BudgetView, quotas: Mapping[str, int]) -> dict[str, Any]:
    """The outcome if these quotas applied from now on. The active label never moves back before the period ends."""
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
        **money.build_text_record("spent_usd_micros", spent),
        **build_money_record("quota_usd_micros", quota),
        "quota_pct": label_policy.compute_quota_percent(spent, quota),
        "mode": label_policy.compute_mode(spent, quota, view.tight_pct).value,
    }


def simulate_quota(view: BudgetView, label: str, quota: int) -> dict[str, Any]:
    """Compare the present outcome with that of another quota for a label. Changes nothing."""
    return {
        "label": label,
        **build_money_record("quota_usd_micros", quota),
        "as_it_is": describe_outcome(view, view.quotas),
        "as_it_would_be": describe_outcome(view, {**view.quotas, label: quota}),
    }
