"""Who pays for a caller's calls on one day, and from which budget. Pure."""

from __future__ import annotations

from typing import Final

from price_keeper.calendar_days import Period, PeriodSpan, find_span
from price_keeper.model import Caller, Scope
from price_keeper.recording.entries import Account, Counter
from price_keeper.selection.plan import EffectiveSettings
from price_keeper.selection.spent import NEVER
from price_keeper.selection.standing import BudgetState

MOST_ACCOUNTS: Final = 1000  # of one payer: labels, but models without one come as callers name them

_Charged = tuple[str, str, int]  # a scope, a period, and over how many items its counters are spread


class Payer:
    """A caller's org and app, on one day: where what it spends is counted."""

    __slots__ = ("_accounts", "_charged", "_generation", "end", "good_until", "standing", "start")

    def __init__(self, caller: Caller, standing: BudgetState, day: PeriodSpan) -> None:
        plan = standing.settings
        self.standing = standing
        self.start = max(day.start, standing.span.start)
        self.end = min(day.end, standing.span.end)
        self._charged = _charged(caller, plan, day, standing.span)
        self._accounts: dict[str | Counter, Account] = {}  # by label, or by what is held for calls of it
        self._generation = standing.quota_generation
        self.good_until = NEVER  # by the monotonic clock; of one who pays by default alone

    def account(self, label: str, hold: Counter | None = None) -> Account:
        """`hold` is what the call is paid from under a hard budget, and is charged with it too."""
        if self._generation != self.standing.quota_generation:  # other labels have a quota
            self._accounts.clear()
            self._generation = self.standing.quota_generation
        key = label if hold is None else hold
        found = self._accounts.get(key)
        if found is None:
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._accounts.clear()
            counters = _counters(self._charged, label)
            if hold is not None:
                counters.append(hold)
            found = self._accounts[key] = Account.of(counters, self.standing.find_trackers(label))
        return found


def counters_at(caller: Caller, plan: EffectiveSettings, label: str, at: float) -> list[Counter]:
    """What is charged with a call that started then, wherever it was made."""
    day, period = find_span(Period.DAY, at, plan.zone), find_span(plan.period, at, plan.zone)
    return _counters(_charged(caller, plan, day, period), label)


def budget_scope(caller: Caller, plan: EffectiveSettings) -> Scope:
    """Whose quotas a caller's calls are paid from."""
    return Scope(caller.org, caller.app if plan.quota_scope == "APP" else None)


def _counters(charged: list[_Charged], label: str) -> list[Counter]:
    return [Counter(scope, label, period, shards) for scope, period, shards in charged]


def _charged(caller: Caller, plan: EffectiveSettings, day: PeriodSpan, period: PeriodSpan) -> list[_Charged]:
    """Each scope by day, for reports, and that of the budget by its own period."""
    charged = [(scope.key, day.key, plan.shards) for scope in _scopes(caller, plan)]
    if period.key != day.key:
        charged.append((budget_scope(caller, plan).key, period.key, plan.shards))
    return charged


def _scopes(caller: Caller, plan: EffectiveSettings) -> list[Scope]:
    """An org's total is the sum over its apps, unless its quotas are its own."""
    whole = Scope(caller.org)
    if caller.app is None:
        return [whole]
    app = Scope(caller.org, caller.app)
    return [app] if plan.quota_scope == "APP" else [whole, app]
