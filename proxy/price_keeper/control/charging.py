"""Where usage of one app is counted: worked out once for each day, as most of a batch is of the same. Pure."""

from __future__ import annotations

from price_keeper.budgets.budget_registry import list_counters_at
from price_keeper.budgets.effective_settings import EffectiveSettings
from price_keeper.domain import Caller
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.org_calendar import Period, PeriodSpan, find_org_date, find_span


class ChargedDay:
    def __init__(self, caller: Caller, settings: EffectiveSettings, at: float) -> None:
        self.span: PeriodSpan = find_span(Period.DAY, at, settings.zone)
        self.date = find_org_date(at, settings.zone).isoformat()
        self._caller = caller
        self._settings = settings
        self._at = at
        self._counters_by_label: dict[str, list[Counter]] = {}

    def get_counters(self, label: str) -> list[Counter]:
        """The same whenever on that day, since weeks and months are of whole days."""
        counters = self._counters_by_label.get(label)
        if counters is None:
            counters = self._counters_by_label[label] = list_counters_at(self._caller, self._settings, label, self._at)
        return counters


class UsageCharging:
    def __init__(self, caller: Caller, settings: EffectiveSettings) -> None:
        self.caller = caller
        self._settings = settings
        self._days: list[ChargedDay] = []

    def get_day(self, at: float) -> ChargedDay:
        for day in self._days:
            if day.span.covers(at):
                return day
        self._days.insert(0, ChargedDay(self.caller, self._settings, at))
        return self._days[0]
