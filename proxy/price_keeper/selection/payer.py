"""Who pays for a caller's calls on one day, and from which budget. Pure."""

from __future__ import annotations

from typing import Final

from price_keeper.budgets.budget_state import NEVER, BudgetState
from price_keeper.domain import Caller, Scope
from price_keeper.org_calendar import Period, PeriodSpan, find_span
from price_keeper.recording.entries import ChargedCounters, Counter
from price_keeper.selection.plan import EffectiveSettings

MAX_CACHED_COUNTERS: Final = 1000  # of one payer: labels, but models without one come as callers name them

_ChargeKey = tuple[str, str, int]  # a scope, a period, and over how many items its counters are spread


class CallerDay:
    """A caller's org and app, on one day: where what it spends is counted."""

    __slots__ = ("_charge_keys", "_charged_by_label", "_generation", "budget", "end", "start", "valid_until")

    def __init__(self, caller: Caller, budget: BudgetState, day: PeriodSpan) -> None:
        settings = budget.settings
        self.budget = budget
        self.start = max(day.start, budget.span.start)
        self.end = min(day.end, budget.span.end)
        self._charge_keys = _charge_keys(caller, settings, day, budget.span)
        self._charged_by_label: dict[
            str | Counter, ChargedCounters
        ] = {}  # by label, or by what is held for calls of it
        self._generation = budget.quota_generation
        self.valid_until = NEVER  # by the monotonic clock; of one who pays by default alone

    def get_charged_counters(self, label: str, lease_counter: Counter | None = None) -> ChargedCounters:
        """`hold` is what the call is paid from under a hard budget, and is charged with it too."""
        if self._generation != self.budget.quota_generation:  # other labels have a quota
            self._charged_by_label.clear()
            self._generation = self.budget.quota_generation
        key = label if lease_counter is None else lease_counter
        found = self._charged_by_label.get(key)
        if found is None:
            if len(self._charged_by_label) >= MAX_CACHED_COUNTERS:
                self._charged_by_label.clear()
            counters = _build_charged_counters(self._charge_keys, label)
            if lease_counter is not None:
                counters.append(lease_counter)
            found = self._charged_by_label[key] = ChargedCounters.from_counters(
                counters, self.budget.find_trackers(label)
            )
        return found


def list_counters_at(caller: Caller, settings: EffectiveSettings, label: str, at: float) -> list[Counter]:
    """What is charged with a call that started then, wherever it was made."""
    day, period = find_span(Period.DAY, at, settings.zone), find_span(settings.period, at, settings.zone)
    return _build_charged_counters(_charge_keys(caller, settings, day, period), label)


def find_budget_scope(caller: Caller, settings: EffectiveSettings) -> Scope:
    """Whose quotas a caller's calls are paid from."""
    return Scope(caller.org, caller.app if settings.quota_scope == "APP" else None)


def _build_charged_counters(charge_keys: list[_ChargeKey], label: str) -> list[Counter]:
    return [Counter(scope, label, period, shards) for scope, period, shards in charge_keys]


def _charge_keys(caller: Caller, settings: EffectiveSettings, day: PeriodSpan, period: PeriodSpan) -> list[_ChargeKey]:
    """Each scope by day, for reports, and that of the budget by its own period."""
    charge_keys = [(scope.key, day.key, settings.shards) for scope in _list_day_scopes(caller, settings)]
    if period.key != day.key:
        charge_keys.append((find_budget_scope(caller, settings).key, period.key, settings.shards))
    return charge_keys


def _list_day_scopes(caller: Caller, settings: EffectiveSettings) -> list[Scope]:
    """An org's total is the sum over its apps, unless its quotas are its own."""
    org_scope = Scope(caller.org)
    if caller.app is None:
        return [org_scope]
    app = Scope(caller.org, caller.app)
    return [app] if settings.quota_scope == "APP" else [org_scope, app]
