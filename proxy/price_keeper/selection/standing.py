"""How one scope stands in one period: its plan, its active label, what is spent. From it a call's label is chosen.

Nothing here waits for anybody. What the store says is learned (`learn`, and each label's `Spent`); what this process
spends is counted as it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from price_keeper.calendar_days import PeriodSpan
from price_keeper.config.keys import LabelConfig
from price_keeper.errors import InvalidRequest, QuotaExceeded, TooManyRequests
from price_keeper.metering.profiles import NOTHING, Own
from price_keeper.model import Scope
from price_keeper.recording.entries import PICO_PER_USD
from price_keeper.selection import policy
from price_keeper.selection.alertness import RefreshSchedule
from price_keeper.selection.plan import EffectiveSettings
from price_keeper.selection.policy import Mode
from price_keeper.selection.spent import SpendTracker

HELD_SECONDS: Final = 2.0  # what is held by calls under way may be free again then

_NO_BUDGET: Final = SpendTracker()  # of labels without a quota; nothing is counted there

_log = logging.getLogger("price_keeper.selection")


class Decision(NamedTuple):
    """`percent` is None where no quota applies. `instead` is what would have served if the budget were enforced."""

    label: str
    mode: Mode
    percent: int | None
    instead: str | None = None


class Outcomes:
    """What became of calls, and how often an active label became another, of all scopes together."""

    __slots__ = ("elsewhere", "flips", "refused")

    def __init__(self) -> None:
        self.elsewhere = self.flips = self.refused = 0


class Used(NamedTuple):
    """Of one label's quota, by what is known to be spent."""

    label: str
    ratio: float
    mode: Mode


class _Step(NamedTuple):
    label: str
    spent: SpendTracker
    quota: int | None


class Standing:
    def __init__(
        self,
        scope: Scope,
        span: PeriodSpan,
        plan: EffectiveSettings,
        labels: Mapping[str, LabelConfig],
        unflushed: Callable[[], Mapping[str, tuple[int, int]]],
        ring: Callable[[], None] = lambda: None,
        outcomes: Outcomes | None = None,
    ) -> None:
        """`unflushed` tells, by label, what of ours is recorded and not certainly in the store, and how much of that
        may be; `ring` is called when somebody should look at it."""
        self.scope = scope
        self.span = span
        self.plan = plan
        self.active = 0
        self.is_stale = False  # the store could not be asked when it was time to
        self._configured = self._labels = labels
        self.own = NOTHING  # labels of the one app whose scope this is
        self._unflushed = unflushed
        self._ring = ring
        self._outcomes = outcomes or Outcomes()
        self._spent: dict[str, SpendTracker] = {}
        self._routes: dict[tuple[str, bool], tuple[_Step, ...]] = {}
        self._served: dict[tuple[str, bool], str | None] = {}
        self.generation = 0  # moves on when other labels have a quota
        self._alertness = RefreshSchedule()
        self._make_spent()

    # What is spent.

    def spent(self, label: str) -> SpendTracker:
        """Of a label that has a quota."""
        return self._spent[label]

    def budgets_of(self, label: str) -> tuple[SpendTracker, ...]:
        """What a call that this label serves is counted against."""
        found = self._spent.get(label)
        return () if found is None else (found,)

    def _make_spent(self) -> None:
        """For each label that has a quota; one that has none any more is kept, as its calls may still be under way."""
        new = [label for label in self.plan.quotas if label not in self._spent]
        if new:
            unflushed = self._unflushed()
            self._spent |= {label: SpendTracker(*unflushed.get(label, (0, 0)), self._ring) for label in new}
            self.generation += 1

    @property
    def is_idle(self) -> bool:
        return not any(each.in_flight for each in self._spent.values())

    # Decisions.

    def decide(self, label: str, is_specific: bool) -> Decision:
        """Which label serves a call that asks for this one; `is_specific` is a body that only models of its own format
        understand. Raises QuotaSpent, SlowDown and InvalidRequest."""
        route = self._routes.get((label, is_specific)) or self._made_route(label, is_specific)
        for serving, spent, quota in route:
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            taken = spent.spent + spent.in_flight
            if taken < quota:
                return self._decided(label, is_specific, serving, taken, quota)
        return self._without_one(label, is_specific)

    def decide_hard(self, label: str, is_specific: bool, dry: Collection[str]) -> Decision:
        """As `decide`, of the labels that are not too dry for the call. What is under way is held already."""
        if label not in self._labels:
            return self.allows_hard(label, dry)
        route = self._routes.get((label, is_specific)) or self._made_route(label, is_specific)
        for serving, spent, quota in route:
            if serving in dry:
                continue
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            if spent.spent < quota:
                return self._decided(label, is_specific, serving, spent.spent, quota)
        if dry:  # others may have had room, but not for this call
            raise self._spent_all(label, tuple(dry))
        return self._without_one(label, is_specific)

    def allows_hard(self, label: str, dry: Collection[str]) -> Decision:
        """As `allows`."""
        quota = self.plan.quotas.get(label)
        if quota is None:
            return self.allows(label)
        known = self.spent(label).spent
        if label in dry or known >= quota:
            raise self._spent_all(label, (label,))
        return self._by_quota(label, known, quota)

    def decide_own(self, label: str, is_specific: bool) -> Decision:
        """As `decide`, of an app's own label. Where apps share a budget theirs may have one name and be of different
        formats, so there they are in no chain, and pay as whatever is not configured does."""
        return self.decide(label, is_specific) if label in self.own.by_name else self.allows(label)

    def knows(self, label: str) -> bool:
        """As one that a chain may lead to."""
        return label in self._labels

    def would_serve(self, label: str) -> str | None:
        """Which label a call of any format would be served by now if the budget were enforced; nothing is counted."""
        if label not in self._labels:
            return None
        try:
            route = self._routes.get((label, False)) or self._made_route(label, False)
        except InvalidRequest:
            return None
        return next((step.label for step in route if step.quota is None or step.spent.committed < step.quota), None)

    def allows(self, label: str) -> Decision:
        """For what is not served by a label that is configured: it is paid from a quota of its own, or from none where
        no chain is set. Raises QuotaSpent, SlowDown and InvalidRequest."""
        quota, is_shadow = self.plan.quotas.get(label), self.plan.enforcement == "shadow"
        if quota is None:
            if not self.plan.ordering:
                return Decision(label, Mode.NORMAL, None)
            if is_shadow:
                return Decision(label, Mode.NORMAL, None, "")
            raise self._not_among(label)  # or a budget could be passed by through it
        taken = self.spent(label).committed
        if taken < quota or is_shadow:
            return self._by_quota(label, taken, quota, None if taken < quota else "")
        raise self._spent_all(label, (label,))

    def _decided(self, asked: str, is_specific: bool, serving: str, taken: int, quota: int) -> Decision:
        if self._served.get((asked, is_specific), asked) != serving:
            self._tell_change(asked, is_specific, serving)
        if serving != asked:
            if self.plan.enforcement == "shadow":
                return self._shadow(asked, serving)
            self._outcomes.elsewhere += 1
        return self._by_quota(serving, taken, quota)

    def _by_quota(self, label: str, taken: int, quota: int, instead: str | None = None) -> Decision:
        return Decision(label, policy.compute_mode(taken, quota, self.plan.tight_pct), policy.compute_quota_percent(taken, quota), instead)

    def _without_one(self, asked: str, is_specific: bool) -> Decision:
        if self.plan.enforcement == "shadow" and not self._may(asked):
            return Decision(asked, Mode.NORMAL, None, "")
        if self._served.get((asked, is_specific), asked) is not None:
            self._tell_change(asked, is_specific, None)
        if self.plan.enforcement == "shadow":
            return self._shadow(asked, "")
        may = self._may(asked)
        if not may:
            raise self._not_among(asked)
        self._refuse_format(asked, may)
        raise self._spent_all(asked, tuple(each for each in may if each in self._labels))

    def _shadow(self, asked: str, instead: str) -> Decision:
        quota = self.plan.quotas.get(asked)
        if quota is None:
            return Decision(asked, Mode.NORMAL, None, instead)
        return self._by_quota(asked, self.spent(asked).committed, quota, instead)

    def _made_route(self, label: str, is_specific: bool) -> tuple[_Step, ...]:
        format, quotas = self._labels[label].format, self.plan.quotas
        route = tuple(
            _Step(each, self._spent.get(each, _NO_BUDGET), quotas.get(each))
            for each in self._may(label)
            if each in self._labels and (not is_specific or self._labels[each].format == format)
        )
        self._routes[label, is_specific] = route
        return route

    def _may(self, label: str) -> tuple[str, ...]:
        plan = self.plan
        return tuple(policy.find_candidates(label, plan.ordering, plan.quotas, self.active))

    # Telling.

    def _not_among(self, label: str) -> InvalidRequest:
        known = ", ".join(dict.fromkeys((*self.plan.ordering, *self.plan.quotas)))
        return InvalidRequest(f"{label} is not among the labels that {self.scope.key} has a quota for: {known}")

    def _refuse_format(self, asked: str, may: tuple[str, ...]) -> None:
        """A label that could pay but not read the body is no reason to say that all is spent."""
        left = [each for each in may if each in self._labels and self.spent(each).committed < self.plan.quotas[each]]
        if left:
            format = self._labels[asked].format
            others = ", ".join(f"{each} ({self._labels[each].format})" for each in left)
            raise InvalidRequest(
                f"no label with a body in the format {format} has quota left; Converse would be served by {others}"
            )

    def _spent_all(self, asked: str, may: tuple[str, ...]) -> QuotaExceeded | TooManyRequests:
        """What is only taken by calls under way may be left over when they end."""
        self._outcomes.refused += 1
        quotas, ordering = self.plan.quotas, self.plan.ordering
        held = [label for label in may if self.spent(label).spent < quotas[label]]
        if held:
            expected = f"calls under way are expected to use what is left of the quota of {self.scope.key}"
            what = f"{expected}: {self.amounts(held)} spent"
            return TooManyRequests(what, retry_after=HELD_SECONDS)
        chain = ordering[ordering.index(asked) :] if asked in ordering else (asked,)
        told = [label for label in chain if label in may or self.spent(label).spent >= quotas[label]]
        return QuotaExceeded(
            f"the quota of {self.scope.key} for {self.span.key} is spent: {self.amounts(told)}; {self.reset_told}"
        )

    @property
    def reset_told(self) -> str:
        resets = datetime.fromtimestamp(self.span.end, UTC).astimezone(self.plan.zone).isoformat()
        return f"it resets at {resets}"

    def amounts(self, labels: Iterable[str]) -> str:
        return ", ".join(f"{label} {self._amounts(label)}" for label in labels)

    def _amounts(self, label: str) -> str:
        return f"{_usd(self.spent(label).spent)} of {_usd(self.plan.quotas[label])} USD"

    def _tell_change(self, asked: str, is_specific: bool, serving: str | None) -> None:
        """Once: what is under way may come to cost less, so it changes nothing for good."""
        before, plan = self._served.get((asked, is_specific), asked), self.plan
        route = self._routes[asked, is_specific]
        for_good = (step.label for step in route if step.quota is None or step.spent.spent < step.quota)
        if next(for_good, None) != serving:
            return
        self._served[asked, is_specific] = serving
        spent = self.amounts(plan.ordering or plan.quotas)
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

    def renew(self, span: PeriodSpan, plan: EffectiveSettings) -> None:
        """The org turns out to have another calendar. What was spent in the period of this name still counts."""
        self.span, self.plan = span, plan
        self._routes.clear()
        self._make_spent()

    def learn(self, plan: EffectiveSettings, active: int) -> None:
        """The calendar stays as it is until the period is over, whatever the plan says."""
        plan, active = plan.with_calendar_of(self.plan), min(active, max(0, len(plan.ordering) - 1))
        if plan != self.plan or active != self.active:
            self._outcomes.flips += active != self.active
            self.plan, self.active = plan, active
            self._routes.clear()
            self._make_spent()

    def learn_own(self, own: Own | None) -> None:
        """None: they could not be read, and what is known holds."""
        if own is not None and own is not self.own:
            self.own = own
            self._take_labels()

    def take_on(self, labels: Mapping[str, LabelConfig]) -> None:
        """Those of another configuration. What is spent, and how far the chain is gone down, stays."""
        self._configured = labels
        self._take_labels()

    def _take_labels(self) -> None:
        own, configured = self.own.by_name, self._configured
        self._labels = {name: profile.label for name, profile in own.items()} | dict(configured) if own else configured
        self._routes.clear()

    def looked(self, now: float) -> float:
        """After each look at the store: sets the alarms, and says in how many seconds to look again at the latest."""
        return self._alertness.plan_next(self.plan, self._spent, now)

    @property
    def is_near(self) -> bool:
        """Some label is nearly spent, or spent."""
        return any(mode is not Mode.NORMAL for mode in self._modes())

    @property
    def is_tight(self) -> bool:
        """Some label is nearly spent, but not yet: all that is flushed now is of use to others."""
        return any(mode is Mode.TIGHT for mode in self._modes())

    @property
    def used(self) -> Iterator[Used]:
        """Of each label that has a quota."""
        for label, quota in self.plan.quotas.items():
            known = self.spent(label).spent
            yield Used(label, known / quota if quota else 1.0, policy.compute_mode(known, quota, self.plan.tight_pct))

    def _modes(self) -> Iterator[Mode]:
        for label, quota in self.plan.quotas.items():
            if quota:  # what never has any room is nothing to look after
                yield policy.compute_mode(self.spent(label).spent, quota, self.plan.tight_pct)

    def due_to_move(self, sticky: int) -> int | None:
        """To which label the active one moves on, for good; None if it stays. What is under way does not count: it may
        cost less than it is taken for."""
        plan = self.plan
        if not plan.ordering or not plan.is_sticky or plan.enforcement == "shadow":
            return None
        index = policy.advance_active_index(sticky, plan.ordering, lambda label: self.spent(label).spent, plan.quotas)
        return index if index > sticky else None


def _usd(pico: int) -> str:
    return f"{pico / PICO_PER_USD:.6f}".rstrip("0").rstrip(".") or "0"
