"""What `/metrics` tells of quotas: of few scopes, as every one of them is a series for each label it has a quota for.

Orgs and apps are named by whoever makes them, and there may be thousands. So the few that are told are those that come
nearest to the end of a quota, and of how many nothing is told is told as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nlargest
from itertools import islice
from typing import Final

from price_keeper import telemetry as metrics
from price_keeper.selection.policy import Mode
from price_keeper.selection.standing import BudgetState, QuotaUsage
from price_keeper.telemetry import Samples, MetricsRegistry

TOLD: Final = 100  # scopes: with ten labels each they are two thousand lines, and Prometheus keeps them for weeks
LABELS: Final = 32  # of a scope: as many as its chain may have
COMPARED: Final = 2000  # scopes: to compare more of them would hold up calls for longer than 5 ms

_MODES: Final = {Mode.NORMAL: 0, Mode.TIGHT: 1, Mode.EXCEEDED: 2}


class Quotas:
    def __init__(self, standings: Callable[[], Iterable[BudgetState]]) -> None:
        """`standings` are those of this moment's period."""
        self._standings = standings
        self._told: list[BudgetState] = []

    def add_to(self, telemetry: MetricsRegistry) -> None:
        """In this order: the first one says which are told by the others."""
        telemetry.add(metrics.SCOPES_UNTOLD, self._choose)
        telemetry.add(metrics.QUOTA_USED_RATIO, lambda: self._of_each(lambda used: used.ratio))
        telemetry.add(metrics.QUOTA_MODE, lambda: self._of_each(lambda used: _MODES[used.mode]))
        telemetry.add(metrics.ACTIVE_LABEL_INFO, self._active)

    def _choose(self) -> int:
        self._told = nlargest(TOLD, islice(self._standings(), COMPARED), key=_nearest)
        return sum(1 for _ in self._standings()) - len(self._told)

    def _of_each(self, read: Callable[[QuotaUsage], float]) -> Samples:
        return [
            ({**_named(each), "label": used.label}, read(used))
            for each in self._told
            for used in islice(each.quota_usages, LABELS)
        ]

    def _active(self) -> Samples:
        chains = [(each, each.settings.ordering) for each in self._told if each.settings.ordering]
        return [({**_named(each), "label": chain[each.active_index]}, 1) for each, chain in chains]


def _nearest(standing: BudgetState) -> float:
    return max((used.ratio for used in standing.quota_usages), default=0.0)


def _named(standing: BudgetState) -> dict[str, str]:
    """Of a whole org the app is empty, which Prometheus takes for a label that is not there."""
    return {"org": standing.scope.org, "app": standing.scope.app or ""}
