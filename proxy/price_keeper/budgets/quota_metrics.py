"""Quota metrics for `/metrics`, limited to few scopes, as each scope is a series for every label with a quota.

There may be thousands of orgs and apps. The scopes nearest to the end of a quota are reported, and the number of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nlargest
from itertools import islice
from typing import Final

from price_keeper.budgets.budget_state import BudgetState, QuotaUsage
from price_keeper.budgets.label_policy import Mode
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry, Samples

MAX_REPORTED_SCOPES: Final = 100  # with ten labels each they are 2,000 series, and Prometheus keeps them for weeks
MAX_REPORTED_LABELS: Final = 32  # of one scope: as many as its fallback chain may have
MAX_COMPARED_SCOPES: Final = 2000  # comparing more of them would block the event loop for more than 5 ms

_MODE_VALUES: Final = {Mode.NORMAL: 0, Mode.TIGHT: 1, Mode.EXCEEDED: 2}


class QuotaMetrics:
    """Samples the quotas of the scopes that are nearest to the end of one."""

    def __init__(self, iterate_budgets: Callable[[], Iterable[BudgetState]]) -> None:
        """`iterate_budgets` returns the budgets of current periods."""
        self._iterate_budgets = iterate_budgets
        self._reported: list[BudgetState] = []

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        """The order matters: the first metric selects the scopes that the others report."""
        telemetry.add(metrics.SCOPES_UNTOLD, self._select_reported)
        telemetry.add(metrics.QUOTA_USED_RATIO, lambda: self._sample_each(lambda usage: usage.ratio))
        telemetry.add(metrics.QUOTA_MODE, lambda: self._sample_each(lambda usage: _MODE_VALUES[usage.mode]))
        telemetry.add(metrics.ACTIVE_LABEL_INFO, self._sample_active_labels)

    def _select_reported(self) -> int:
        self._reported = nlargest(
            MAX_REPORTED_SCOPES, islice(self._iterate_budgets(), MAX_COMPARED_SCOPES), key=_find_highest_ratio
        )
        return sum(1 for _ in self._iterate_budgets()) - len(self._reported)

    def _sample_each(self, read: Callable[[QuotaUsage], float]) -> Samples:
        return [
            ({**_build_scope_labels(budget), "label": usage.label}, read(usage))
            for budget in self._reported
            for usage in islice(budget.quota_usages, MAX_REPORTED_LABELS)
        ]

    def _sample_active_labels(self) -> Samples:
        chains = [(budget, budget.settings.ordering) for budget in self._reported if budget.settings.ordering]
        return [({**_build_scope_labels(budget), "label": chain[budget.active_index]}, 1) for budget, chain in chains]


def _find_highest_ratio(budget: BudgetState) -> float:
    return max((usage.ratio for usage in budget.quota_usages), default=0.0)


def _build_scope_labels(budget: BudgetState) -> dict[str, str]:
    """The app of an org's budget is empty, which Prometheus treats like a missing label."""
    return {"org": budget.scope.org, "app": budget.scope.app or ""}
