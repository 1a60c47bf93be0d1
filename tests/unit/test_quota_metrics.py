"""Quota metrics: the scopes that matter most, and a bounded number of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, cast
from uuid import UUID

import pytest
from price_keeper.budgets import quota_metrics
from price_keeper.budgets.budget_state import BudgetState, DecisionCounters
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.budgets.quota_metrics import (
    MAX_COMPARED_SCOPES,
    MAX_REPORTED_LABELS,
    MAX_REPORTED_SCOPES,
    QuotaMetrics,
)
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores.contract import Item
from price_keeper.telemetry.metrics import (
    ACTIVE_LABEL_INFO,
    QUOTA_MODE,
    QUOTA_USED_RATIO,
    SCOPES_UNTOLD,
    MetricsRegistry,
)

from tests.support.observed_sidecar import samples_of

TODAY = find_span(Period.DAY, 1_795_003_200, load_zone("UTC"))
CONFIG = Config.development()
MICRO = 10**6  # in pico


def build_state(number: int, spent: Mapping[str, int], limit: Mapping[str, int], outcomes: Any = None) -> BudgetState:
    """`spent` and `limit` are in micro-dollars."""
    budget: Item = {"model_ordering": cast(Any, list(limit)), "quotas": cast(Any, dict(limit))}
    plan = resolve_settings(budget, None, CONFIG.defaults, (), 0)
    reported = {label: (micros * MICRO, 0) for label, micros in spent.items()}
    scope = Scope(str(UUID(int=number)), "web" if number % 2 else None)
    return BudgetState(scope, TODAY, plan, CONFIG.labels, lambda: reported, counters=outcomes)


class ReportedMetrics:
    def __init__(self, states: list[BudgetState]) -> None:
        self.telemetry = MetricsRegistry()
        QuotaMetrics(lambda: iter(states)).register_metrics(self.telemetry)

    def of(self, metric: Any) -> dict[tuple[str, str, str], float]:
        found = [each for each in samples_of(self.telemetry.render_own()) if each.name == metric.name]
        return {tuple(each.labels.get(name, "") for name in ("org", "app", "label")): each.value for each in found}  # type: ignore[misc]


def test_used_ratio_mode_and_active_label_are_reported() -> None:
    one = build_state(1, {"premium": 50, "economy": 96}, {"premium": 100, "economy": 100, "standard": 0})
    two = build_state(2, {"premium": 150}, {"premium": 100})
    one.apply_settings(one.settings, 1)
    reported = ReportedMetrics([one, two])
    first, second = str(UUID(int=1)), str(UUID(int=2))
    assert reported.of(QUOTA_USED_RATIO) == {
        (first, "web", "premium"): 0.5,
        (first, "web", "economy"): 0.96,
        (first, "web", "standard"): 1.0,  # of nothing all is spent
        (second, "", "premium"): 1.5,
    }
    assert list(reported.of(QUOTA_MODE).values()) == [2, 0, 1, 2]
    assert reported.of(ACTIVE_LABEL_INFO) == {(first, "web", "economy"): 1, (second, "", "premium"): 1}
    assert reported.of(SCOPES_UNTOLD) == {("", "", ""): 0}


def test_scopes_nearest_to_exhaustion_are_reported() -> None:
    many = [build_state(number, {"premium": number}, {"premium": 1000}) for number in range(MAX_REPORTED_SCOPES + 40)]
    reported = ReportedMetrics(many)
    assert sorted(reported.of(QUOTA_USED_RATIO).values()) == [
        number / 1000 for number in range(40, MAX_REPORTED_SCOPES + 40)
    ]
    assert reported.of(SCOPES_UNTOLD) == {("", "", ""): 40}


def test_scope_flood_adds_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_metrics, "MAX_COMPARED_SCOPES", 150)
    compared = 0

    def flood() -> Iterator[BudgetState]:
        nonlocal compared
        for _ in range(5000):
            compared += 1
            yield one

    one, telemetry = build_state(1, {"premium": 1}, {"premium": 100}), MetricsRegistry()
    QuotaMetrics(flood).register_metrics(telemetry)
    assert (
        len([each for each in samples_of(telemetry.render_own()) if each.name == QUOTA_USED_RATIO.name])
        == MAX_REPORTED_SCOPES
    )
    assert compared == 150 + 5000  # and those that are only counted
    assert telemetry.render_own().count("\n") < 4 * MAX_REPORTED_SCOPES


def test_scope_with_many_labels_reports_some() -> None:
    reported = ReportedMetrics(
        [build_state(1, {}, {f"label-{number}": 10 for number in range(3 * MAX_REPORTED_LABELS)})]
    )
    assert len(reported.of(QUOTA_USED_RATIO)) == len(reported.of(QUOTA_MODE)) == MAX_REPORTED_LABELS


def test_rendering_blocks_event_loop_briefly() -> None:
    """At the most that are ever compared; the bound is a hundred times what it takes."""
    limit = dict.fromkeys(("premium", "standard", "economy"), 1000)
    reported = ReportedMetrics(
        [build_state(number, {"premium": number % 1000}, limit) for number in range(MAX_COMPARED_SCOPES)] * 10
    )
    began = time.process_time()
    reported.telemetry.render_own()
    assert time.process_time() - began < 1.5


def test_active_label_changes_are_counted() -> None:
    outcomes = DecisionCounters()
    one = build_state(1, {}, {"premium": 100, "economy": 100}, outcomes)
    for active, flips in ((0, 0), (1, 1), (1, 1), (0, 2)):
        one.apply_settings(one.settings, active)
        assert outcomes.active_label_changes == flips
