"""How one scope stands in one period: its plan, its active label, what is spent. From it a call's label is chosen.

Nothing here waits for anybody. What the store says is learned (`learn`, `read`); what this process spends is counted by
each label's `Spent` as it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from proxy.calendar_days import Span
from proxy.config.keys import Label
from proxy.config.prices import PSEUDO_LABELS
from proxy.errors import InvalidRequest, QuotaSpent
from proxy.model import Scope
from proxy.recording.entries import PICO_PER_USD
from proxy.selection import policy
from proxy.selection.plan import Plan
from proxy.selection.policy import Mode
from proxy.selection.spent import NEVER, Spent

LOOK_SHARE = 10  # of what is left, or of the time until it is gone, before somebody looks again
LEAST_SECONDS = 1.0  # between two looks

_log = logging.getLogger("proxy.selection")


class Decision(NamedTuple):
    """`percent` is None where no quota applies. `instead` is what would have served if the budget were enforced."""

    label: str
    mode: Mode
    percent: int | None
    instead: str | None = None


class Outcomes:
    """What became of calls, of all scopes together."""

    __slots__ = ("elsewhere", "refused")

    def __init__(self) -> None:
        self.elsewhere = self.refused = 0


class _Step(NamedTuple):
    label: str
    spent: Spent
    quota: int | None


class Standing:
    def __init__(
        self,
        scope: Scope,
        span: Span,
        plan: Plan,
        labels: Mapping[str, Label],
        unflushed: Mapping[str, int],
        ring: Callable[[], None] = lambda: None,
        outcomes: Outcomes | None = None,
    ) -> None:
        """`unflushed` is, by label, what of ours was recorded before this was made; `ring` is called when somebody
        should look at the store."""
        self.scope = scope
        self.span = span
        self.plan = plan
        self.active = 0
        self.is_stale = False  # the store could not be asked when it was time to
        self._labels = labels
        self._unflushed = unflushed
        self._ring = ring
        self._outcomes = outcomes or Outcomes()
        self._spent: dict[str, Spent] = {}
        self._routes: dict[tuple[str, bool], tuple[_Step, ...]] = {}
        self._served: dict[tuple[str, bool], str | None] = {}
        self._known_before: dict[str, int] = {}
        self._looked_at = -NEVER

    # What is spent.

    def spent(self, label: str) -> Spent:
        found = self._spent.get(label)
        if found is None:
            found = self._spent[label] = Spent(self._unflushed.get(label, 0), self._ring)
        return found

    def budgets(self) -> Mapping[str, Spent]:
        """Of the labels that have a quota."""
        return {label: self.spent(label) for label in self.plan.quotas}

    @property
    def is_idle(self) -> bool:
        return not any(each.in_flight for each in self._spent.values())

    # Decisions.

    def decide(self, label: str, is_specific: bool) -> Decision:
        """Which label serves a call that asks for this one; `is_specific` is a body that only models of its own format
        understand. Raises QuotaSpent and InvalidRequest."""
        route = self._routes.get((label, is_specific)) or self._made_route(label, is_specific)
        for serving, spent, quota in route:
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            taken = spent.known + spent.in_flight
            if taken < quota:
                return self._decided(label, is_specific, serving, taken, quota)
        return self._without_one(label, is_specific)

    def allows(self, label: str) -> Decision:
        """For what is no model's label: it is paid from a quota of its own, or from none. Raises QuotaSpent."""
        quota = self.plan.quotas.get(label)
        if quota is None:
            if self.plan.ordering and label in PSEUDO_LABELS:  # or a budget could be passed by through them
                raise self._not_among(label)
            return Decision(label, Mode.NORMAL, None)
        taken = self.spent(label).taken
        if taken < quota or self.plan.enforcement == "shadow":
            return Decision(label, policy.mode(taken, quota, self.plan.tight_pct), policy.percent(taken, quota))
        self._outcomes.refused += 1
        raise QuotaSpent(self._told((label,)))

    def _decided(self, asked: str, is_specific: bool, serving: str, taken: int, quota: int) -> Decision:
        if self._served.get((asked, is_specific)) != serving:
            self._tell_change(asked, is_specific, serving)
        if serving != asked:
            if self.plan.enforcement == "shadow":
                return self._shadow(asked, serving)
            self._outcomes.elsewhere += 1
        tight = policy.mode(taken, quota, self.plan.tight_pct)
        return Decision(serving, tight, policy.percent(taken, quota))

    def _without_one(self, asked: str, is_specific: bool) -> Decision:
        if self._served.get((asked, is_specific), "") is not None:
            self._tell_change(asked, is_specific, None)
        if self.plan.enforcement == "shadow":
            return self._shadow(asked, "")
        self._outcomes.refused += 1
        self._refuse_format(asked, self._may(asked))
        ordering = self.plan.ordering
        chain = ordering[ordering.index(asked) :] if asked in ordering else (asked,)
        raise QuotaSpent(self._told(chain))

    def _shadow(self, asked: str, instead: str) -> Decision:
        taken, quota = self.spent(asked).taken, self.plan.quotas.get(asked)
        if quota is None:
            return Decision(asked, Mode.NORMAL, None, instead)
        return Decision(asked, policy.mode(taken, quota, self.plan.tight_pct), policy.percent(taken, quota), instead)

    def _made_route(self, label: str, is_specific: bool) -> tuple[_Step, ...]:
        format, quotas = self._labels[label].format, self.plan.quotas
        route = tuple(
            _Step(each, self.spent(each), quotas.get(each))
            for each in self._may(label)
            if each in self._labels and (not is_specific or self._labels[each].format == format)
        )
        self._routes[label, is_specific] = route
        return route

    def _may(self, label: str) -> tuple[str, ...]:
        plan = self.plan
        may = policy.candidates(label, plan.ordering, plan.quotas, self.active)
        if not may:
            raise self._not_among(label)
        return tuple(may)

    def _not_among(self, label: str) -> InvalidRequest:
        known = ", ".join(dict.fromkeys((*self.plan.ordering, *self.plan.quotas)))
        return InvalidRequest(f"{label} is not among the labels that {self.scope.key} has a quota for: {known}")

    # Telling.

    def _refuse_format(self, asked: str, may: tuple[str, ...]) -> None:
        """A label that could pay but not read the body is no reason to say that all is spent."""
        left = [each for each in may if each in self._labels and self.spent(each).taken < self.plan.quotas[each]]
        if left:
            format = self._labels[asked].format
            others = ", ".join(f"{each} ({self._labels[each].format})" for each in left)
            raise InvalidRequest(
                f"no label with a body in the format {format} has quota left; Converse would be served by {others}"
            )

    def _told(self, labels: tuple[str, ...]) -> str:
        spent = ", ".join(f"{label} {self._amounts(label)}" for label in labels if label in self.plan.quotas)
        resets = datetime.fromtimestamp(self.span.end, UTC).astimezone(self.plan.zone).isoformat()
        return f"the quota of {self.scope.key} for {self.span.key} is spent: {spent}; it resets at {resets}"

    def _amounts(self, label: str) -> str:
        return f"{_usd(self.spent(label).known)} of {_usd(self.plan.quotas[label])} USD"

    def _tell_change(self, asked: str, is_specific: bool, serving: str | None) -> None:
        before = self._served.get((asked, is_specific), asked)
        self._served[asked, is_specific] = serving
        if serving == before:
            return  # the first call of the period, served as it asks to be
        plan = self.plan
        spent = ", ".join(f"{label} {self._amounts(label)}" for label in plan.ordering or plan.quotas)
        _log.warning(
            "decision changed: scope=%s period=%s asked=%s serving=%s before=%s active=%s enforcement=%s spent=%r",
            self.scope.key,
            self.span.key,
            asked,
            serving or "none",
            before or "none",
            plan.ordering[self.active] if plan.ordering else "none",
            plan.enforcement,
            spent,
        )

    # Learning.

    def renew(self, span: Span, plan: Plan) -> None:
        """The org moved to a zone where the period of this name is another one. What was spent in it still counts."""
        self.span, self.plan = span, plan
        self._routes.clear()

    def learn(self, plan: Plan, active: int) -> None:
        """What an org alone can say stays as it is until the period is over, whatever the plan says."""
        own, active = self.plan, min(active, max(0, len(plan.ordering) - 1))
        plan = replace(plan, zone=own.zone, period=own.period, quota_scope=own.quota_scope, shards=own.shards)
        if plan != self.plan or active != self.active:
            self.plan, self.active = plan, active
            self._routes.clear()

    def looked(self, now: float) -> float:
        """After each look at the store: sets the alarms, and says in how many seconds to look again at the latest."""
        elapsed, self._looked_at = now - self._looked_at, now
        wait = self.plan.normal_secs
        for label, quota in self.plan.quotas.items():
            spent = self.spent(label)
            grown = max(0, spent.known - self._known_before.get(label, spent.known))
            self._known_before[label] = spent.known
            left, tight_at = quota - spent.known, -(-quota * self.plan.tight_pct // 100)
            if spent.known >= tight_at:
                wait = min(wait, self.plan.tight_secs)
            if left <= 0:
                spent.alarm = NEVER
                continue
            spent.alarm = min(at for at in (tight_at, spent.known + left // LOOK_SHARE + 1, quota) if at > spent.known)
            if grown:
                wait = min(wait, left / grown * max(elapsed, LEAST_SECONDS) / LOOK_SHARE)
        return max(LEAST_SECONDS, wait)

    @property
    def is_near(self) -> bool:
        """Some label is nearly spent, or spent."""
        return any(mode is not Mode.NORMAL for mode in self._modes())

    @property
    def is_tight(self) -> bool:
        """Some label is nearly spent, but not yet: all that is flushed now is of use to others."""
        return any(mode is Mode.TIGHT for mode in self._modes())

    def _modes(self) -> Iterator[Mode]:
        for label, quota in self.plan.quotas.items():
            yield policy.mode(self.spent(label).known, quota, self.plan.tight_pct)

    def due_to_move(self, sticky: int) -> int | None:
        """To which label the active one moves on, for good; None if it stays. What is under way does not count: it may
        cost less than it is taken for."""
        plan = self.plan
        if not plan.ordering or not plan.is_sticky or plan.enforcement != "soft":
            return None
        index = policy.moved_on(sticky, plan.ordering, lambda label: self.spent(label).known, plan.quotas)
        return index if index > sticky else None


def _usd(pico: int) -> str:
    return f"{pico / PICO_PER_USD:.6f}".rstrip("0").rstrip(".") or "0"
