"""Quota metrics for `/metrics`, limited to few scopes, as each scope is a series for every label with a quota.

There may be thousands of orgs and apps. Reported are the scopes that are nearest to the end of a quota, and how
many are not reported.
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

MAX_REPORTED_SCOPES: Final = (
    100  # scopes: with ten labels each they are two thousand lines, and Prometheus keeps them for weeks
)
MAX_REPORTED_LABELS: Final = 32  # of a scope: as many as its chain may have
MAX_COMPARED_SCOPES: Final = 2000  # scopes: to compare more of them would hold up calls for longer than 5 ms

_MODE_VALUES: Final = {Mode.NORMAL: 0, Mode.TIGHT: 1, Mode.EXCEEDED: 2}


class QuotaMetrics:
    def __init__(self, iterate_budgets: Callable[[], Iterable[BudgetState]]) -> None:
        """`standings` are those of this moment's period."""
        self._iterate_budgets = iterate_budgets
        self._reported: list[BudgetState] = []

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        """In this order: the first one says which are told by the others."""
        telemetry.add(metrics.SCOPES_UNTOLD, self._select_reported)
        telemetry.add(metrics.QUOTA_USED_RATIO, lambda: self._sample_each(lambda used: used.ratio))
        telemetry.add(metrics.QUOTA_MODE, lambda: self._sample_each(lambda used: _MODE_VALUES[used.mode]))
        telemetry.add(metrics.ACTIVE_LABEL_INFO, self._sample_active_labels)

    def _select_reported(self) -> int:
        self._reported = nlargest(
            MAX_REPORTED_SCOPES, islice(self._iterate_budgets(), MAX_COMPARED_SCOPES), key=_find_highest_ratio
        )
        return sum(1 for _ in self._iterate_budgets()) - len(self._reported)

    def _sample_each(self, read: Callable[[QuotaUsage], float]) -> Samples:
        return [
            ({**_build_scope_labels(each), "label": used.label}, read(used))
            for each in self._reported
            for used in islice(each.quota_usages, MAX_REPORTED_LABELS)
        ]

    def _sample_active_labels(self) -> Samples:
        chains = [(each, each.settings.ordering) for each in self._reported if each.settings.ordering]
        return [({**_build_scope_labels(each), "label": chain[each.active_index]}, 1) for each, chain in chains]


def _find_highest_ratio(budget: BudgetState) -> float:
    return max((used.ratio for used in budget.quota_usages), default=0.0)


def _build_scope_labels(budget: BudgetState) -> dict[str, str]:
    """Of a whole org the app is empty, which Prometheus takes for a label that is not there."""
    return {"org": budget.scope.org, "app": budget.scope.app or ""}
