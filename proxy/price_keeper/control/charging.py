"""Where usage of one app is counted: worked out once for each day, as most of a batch is of the same. Pure."""

from __future__ import annotations

from price_keeper.calendar_days import Period, PeriodSpan, find_org_date, find_span
from price_keeper.model import Caller
from price_keeper.recording.entries import Counter
from price_keeper.selection.payer import list_counters_at
from price_keeper.selection.plan import EffectiveSettings


class Day:
    def __init__(self, caller: Caller, plan: EffectiveSettings, at: float) -> None:
        self.span: PeriodSpan = find_span(Period.DAY, at, plan.zone)
        self.date = find_org_date(at, plan.zone).isoformat()
        self._caller = caller
        self._plan = plan
        self._at = at
        self._counters: dict[str, list[Counter]] = {}

    def counters(self, label: str) -> list[Counter]:
        """The same whenever on that day, since weeks and months are of whole days."""
        found = self._counters.get(label)
        if found is None:
            found = self._counters[label] = list_counters_at(self._caller, self._plan, label, self._at)
        return found


class Charging:
    def __init__(self, caller: Caller, plan: EffectiveSettings) -> None:
        self.caller = caller
        self._plan = plan
        self._days: list[Day] = []

    def day(self, at: float) -> Day:
        for day in self._days:
            if day.span.covers(at):
                return day
        self._days.insert(0, Day(self.caller, self._plan, at))
        return self._days[0]
