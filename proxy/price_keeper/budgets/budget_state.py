"""The budget of one scope in one period: effective settings, active label, and spend. It decides which label serves.

Nothing here waits or reads the store. `BudgetRefresher` applies what was read, and the ledger reports what this
process spends at the moment it happens.

`SpendTracker` holds what is known to be spent of one quota:

    spent      =  others' spend + own spend
    committed  =  spent + the expected cost of the calls in flight

A sum that is read from the store holds what others flushed and possibly some of our own spend. So everything of
ours that was ever sent is subtracted from it, and the highest result holds: a lower bound, as spend never
decreases. If no flush is in progress or in doubt while the shards are read, the result is exact. No clock takes
part in this.

`RefreshSchedule` decides how soon the store is read again, by how fast the remaining quota is being used.
`RefreshState` keeps what was read for a budget, and when it has to be read again.
"""

from __future__ import annotations

import logging
from asyncio import Event
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from price_keeper.budgets import label_policy
from price_keeper.budgets.active_label import Override
from price_keeper.budgets.effective_settings import EffectiveSettings
from price_keeper.budgets.label_policy import Mode
from price_keeper.config.config_sections import LabelConfig
from price_keeper.domain import Scope
from price_keeper.errors import InvalidRequest, QuotaExceeded, TooManyRequests
from price_keeper.ledger.ledger_entries import PICO_PER_USD
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores.contract import Item
from price_keeper.usage.inference_profiles import NO_PROFILES, AppProfiles

NEVER: Final = float("inf")


class SpendTracker:
    """`alarm` is what has to be known to be spent before somebody has to look again, and is told of that by `ring`."""

    __slots__ = (
        "_acknowledged_own",
        "_on_threshold",
        "_sent_own",
        "exact_at",
        "in_flight",
        "own_spent",
        "spent",
        "threshold",
    )

    def __init__(self, unflushed: int = 0, in_doubt: int = 0, on_threshold: Callable[[], None] = lambda: None) -> None:
        """`unflushed` is what of ours was recorded before and is not acknowledged yet; what is `in_doubt` of it is, or
        may be, in the store all the same."""
        self._on_threshold = on_threshold
        self.spent = unflushed
        self.own_spent = unflushed
        self._sent_own = in_doubt  # of our own, and perhaps in the store; all of the rest is certainly not
        self._acknowledged_own = 0  # of that, what certainly is
        self.in_flight = 0
        self.threshold: float = NEVER
        self.exact_at: float = -NEVER  # when the last exact read began, by the monotonic clock

    @property
    def committed(self) -> int:
        return self.spent + self.in_flight

    @property
    def is_flush_certain(self) -> bool:
        """Nothing of ours is under way to the store, or of unknown outcome."""
        return self._sent_own == self._acknowledged_own

    @property
    def stored_and_pending(self) -> tuple[int, int]:
        """What is known: so much of it is in the store, and so much of ours is still in the journal."""
        pending = self.own_spent - self._acknowledged_own
        return self.spent - pending, pending

    def restore(self, stored: int, pending: int, *, is_own: bool) -> None:
        """`parts` as they were noted, until the store can be asked. What waited then is in the store by now, or still
        in the journal and our own. What another process noted may hold any of our own."""
        self._raise_others_to(
            stored + max(0, pending - self.own_spent) if is_own else stored + pending - self.own_spent
        )

    # What this process does.

    def on_call_started(self, expected_pico: int) -> None:
        self.in_flight += expected_pico

    def on_call_ended(self, expected_pico: int, pico: int) -> None:
        self.in_flight -= expected_pico
        self.own_spent += pico
        self._add_spent(pico)

    def add_sent(self, pico: int) -> None:
        """From now on it may be in the store. What was recorded before this quota was known shows by now at the latest
        that it is our own."""
        self._sent_own += pico
        if self._sent_own > self.own_spent:
            unseen, self.own_spent = self._sent_own - self.own_spent, self._sent_own
            self._add_spent(unseen)

    def remove_sent(self, pico: int) -> None:
        """What was being sent is certainly not in the store, and nothing brings it there but sending it again."""
        self._sent_own -= pico

    def add_acknowledged(self, pico: int) -> None:
        """It is in the store, and in the journal no more."""
        self._acknowledged_own += pico

    def _add_spent(self, pico: int) -> None:
        self.spent += pico
        if self.spent >= self.threshold:
            self.threshold = NEVER
            self._on_threshold()

    # What the store says.

    def apply_lower_bound(self, pico: int) -> None:
        """A sum that is no newer than this moment; some of what was sent may be in it."""
        self._raise_others_to(pico - self._sent_own)

    def apply_exact_sum(self, pico: int, read_began_at: float) -> None:
        """The shards, while all was certain: what was sent is in them."""
        self.spent = self.own_spent + pico - self._sent_own
        self.exact_at = read_began_at

    def _raise_others_to(self, pico: int) -> None:
        self.spent = max(self.spent, self.own_spent + pico)


REFRESH_SHARE = 10  # of what is left, or of the time until it is gone, before somebody looks again
MIN_REFRESH_SECONDS = 1.0  # between two looks
SHARE_SAMPLE_SECONDS = 60.0  # over which it is told what share of a fleet's spend is ours
MIN_FLEET_SHARE = 0.001  # of what a fleet spends, that one sidecar is taken to spend


class _ShareSample(NamedTuple):
    """What was spent by then, by all and by us, and which share of it was ours in the while before."""

    at: float
    spent: int
    own_spent: int
    share: float


class RefreshSchedule:
    def __init__(self) -> None:
        self._refreshed_at = -NEVER
        self._rates: dict[str, tuple[int, float]] = {}  # at the last look, by label, and the rate until then
        self._share_samples: dict[str, _ShareSample] = {}

    def plan_next(self, plan: EffectiveSettings, trackers: Mapping[str, SpendTracker], now: float) -> float:
        """Sets the alarms, and says in how many seconds to look again at the latest."""
        elapsed, self._refreshed_at = max(now - self._refreshed_at, MIN_REFRESH_SECONDS), now
        wait = plan.normal_secs
        for label, quota in plan.quotas.items():
            tracker = trackers[label]
            rate, share = self._update_rate(label, tracker, elapsed), self._update_share(label, tracker, now)
            remaining, tight_at = quota - tracker.spent, -(-quota * plan.tight_pct // 100)
            if tracker.spent >= tight_at:
                wait = min(wait, plan.tight_secs)
            if remaining <= 0:
                tracker.threshold = NEVER
                continue
            early_threshold = tracker.spent + int(remaining * share) // REFRESH_SHARE + 1
            tracker.threshold = min(at for at in (tight_at, early_threshold, quota) if at > tracker.spent)
            if rate:
                wait = min(wait, remaining / rate / REFRESH_SHARE)
        return max(MIN_REFRESH_SECONDS, wait)

    def _update_rate(self, label: str, tracker: SpendTracker, elapsed: float) -> float:
        """At which more comes to be spent, by the second. A look that sees nothing new is no proof that nothing is
        spent: what was known before fades by half."""
        last_spent, last_rate = self._rates.get(label, (tracker.spent, 0.0))
        rate = max(max(0, tracker.spent - last_spent) / elapsed, last_rate / 2)
        self._rates[label] = tracker.spent, rate
        return rate

    def _update_share(self, label: str, tracker: SpendTracker, now: float) -> float:
        """How much of what a fleet spends is ours: when we come to spend faster, it is likely that all do. It is told
        over a while, as what others spend is seen only when they have flushed it."""
        sample = self._share_samples.get(label)
        if sample is None:
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, 1.0)
        growth = tracker.spent - sample.spent
        if growth > 0 and now - sample.at >= SHARE_SAMPLE_SECONDS:
            share = min(1.0, max(MIN_FLEET_SHARE, (tracker.own_spent - sample.own_spent) / growth))
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, share)
        return sample.share


IN_FLIGHT_RETRY_SECONDS: Final = 2.0  # what is held by calls under way may be free again then

_UNLIMITED: Final = SpendTracker()  # of labels without a quota; nothing is counted there

_log = logging.getLogger("price_keeper.selection")


class Decision(NamedTuple):
    """`percent` is None where no quota applies. `instead` is what would have served if the budget were enforced."""

    label: str
    mode: Mode
    percent: int | None
    shadow_label: str | None = None


class DecisionCounters:
    """What became of calls, and how often an active label became another, of all scopes together."""

    __slots__ = ("active_label_changes", "refusals", "served_elsewhere")

    def __init__(self) -> None:
        self.served_elsewhere = self.active_label_changes = self.refusals = 0


class QuotaUsage(NamedTuple):
    """Of one label's quota, by what is known to be spent."""

    label: str
    ratio: float
    mode: Mode


class _FallbackStep(NamedTuple):
    label: str
    tracker: SpendTracker
    quota: int | None


class BudgetState:
    def __init__(
        self,
        scope: Scope,
        span: PeriodSpan,
        settings: EffectiveSettings,
        labels: Mapping[str, LabelConfig],
        read_unflushed: Callable[[], Mapping[str, tuple[int, int]]],
        on_threshold: Callable[[], None] = lambda: None,
        counters: DecisionCounters | None = None,
    ) -> None:
        """`unflushed` tells, by label, what of ours is recorded and not certainly in the store, and how much of that
        may be; `ring` is called when somebody should look at it."""
        self.scope = scope
        self.span = span
        self.settings = settings
        self.active_index = 0
        self.is_stale = False  # the store could not be asked when it was time to
        self._configured_labels = self._labels = labels
        self.app_labels = NO_PROFILES  # labels of the one app whose scope this is
        self._read_unflushed = read_unflushed
        self._on_threshold = on_threshold
        self._counters = counters or DecisionCounters()
        self._trackers: dict[str, SpendTracker] = {}
        self._fallback_routes: dict[tuple[str, bool], tuple[_FallbackStep, ...]] = {}
        self._last_served: dict[tuple[str, bool], str | None] = {}
        self.quota_generation = 0  # moves on when other labels have a quota
        self._refresh_schedule = RefreshSchedule()
        self._add_trackers()

    # What is spent.

    def get_tracker(self, label: str) -> SpendTracker:
        """Of a label that has a quota."""
        return self._trackers[label]

    def find_trackers(self, label: str) -> tuple[SpendTracker, ...]:
        """What a call that this label serves is counted against."""
        tracker = self._trackers.get(label)
        return () if tracker is None else (tracker,)

    def _add_trackers(self) -> None:
        """For each label that has a quota; one that has none any more is kept, as its calls may still be under way."""
        new_labels = [label for label in self.settings.quotas if label not in self._trackers]
        if new_labels:
            unflushed = self._read_unflushed()
            self._trackers |= {
                label: SpendTracker(*unflushed.get(label, (0, 0)), self._on_threshold) for label in new_labels
            }
            self.quota_generation += 1

    @property
    def is_idle(self) -> bool:
        return not any(each.in_flight for each in self._trackers.values())

    # Decisions.

    def decide(self, label: str, is_format_specific: bool) -> Decision:
        """Which label serves a call that asks for this one; `is_specific` is a body that only models of its own format
        understand. Raises QuotaSpent, SlowDown and InvalidRequest."""
        route = self._fallback_routes.get((label, is_format_specific)) or self._build_route(label, is_format_specific)
        for serving, tracker, quota in route:
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            committed = tracker.spent + tracker.in_flight
            if committed < quota:
                return self._record_decision(label, is_format_specific, serving, committed, quota)
        return self._decide_none_left(label, is_format_specific)

    def decide_hard(self, label: str, is_format_specific: bool, insufficient: Collection[str]) -> Decision:
        """As `decide`, of the labels that are not too dry for the call. What is under way is held already."""
        if label not in self._labels:
            return self.decide_hard_without_fallback(label, insufficient)
        route = self._fallback_routes.get((label, is_format_specific)) or self._build_route(label, is_format_specific)
        for serving, tracker, quota in route:
            if serving in insufficient:
                continue
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            if tracker.spent < quota:
                return self._record_decision(label, is_format_specific, serving, tracker.spent, quota)
        if insufficient:  # others may have had room, but not for this call
            raise self._build_spent_error(label, tuple(insufficient))
        return self._decide_none_left(label, is_format_specific)

    def decide_hard_without_fallback(self, label: str, insufficient: Collection[str]) -> Decision:
        """As `allows`."""
        quota = self.settings.quotas.get(label)
        if quota is None:
            return self.decide_without_fallback(label)
        spent = self.get_tracker(label).spent
        if label in insufficient or spent >= quota:
            raise self._build_spent_error(label, (label,))
        return self._build_decision(label, spent, quota)

    def decide_app_label(self, label: str, is_format_specific: bool) -> Decision:
        """As `decide`, of an app's own label. Where apps share a budget theirs may have one name and be of different
        formats, so there they are in no chain, and pay as whatever is not configured does."""
        return (
            self.decide(label, is_format_specific)
            if label in self.app_labels.by_name
            else self.decide_without_fallback(label)
        )

    def has_label(self, label: str) -> bool:
        """As one that a chain may lead to."""
        return label in self._labels

    def find_enforced_label(self, label: str) -> str | None:
        """Which label a call of any format would be served by now if the budget were enforced; nothing is counted."""
        if label not in self._labels:
            return None
        try:
            route = self._fallback_routes.get((label, False)) or self._build_route(label, False)
        except InvalidRequest:
            return None
        return next((step.label for step in route if step.quota is None or step.tracker.committed < step.quota), None)

    def decide_without_fallback(self, label: str) -> Decision:
        """For what is not served by a label that is configured: it is paid from a quota of its own, or from none where
        no chain is set. Raises QuotaSpent, SlowDown and InvalidRequest."""
        quota, is_shadow = self.settings.quotas.get(label), self.settings.enforcement == "shadow"
        if quota is None:
            if not self.settings.ordering:
                return Decision(label, Mode.NORMAL, None)
            if is_shadow:
                return Decision(label, Mode.NORMAL, None, "")
            raise self._build_no_quota_error(label)  # or a budget could be passed by through it
        committed = self.get_tracker(label).committed
        if committed < quota or is_shadow:
            return self._build_decision(label, committed, quota, None if committed < quota else "")
        raise self._build_spent_error(label, (label,))

    def _record_decision(
        self, requested: str, is_format_specific: bool, serving: str, used: int, quota: int
    ) -> Decision:
        if self._last_served.get((requested, is_format_specific), requested) != serving:
            self._log_change(requested, is_format_specific, serving)
        if serving != requested:
            if self.settings.enforcement == "shadow":
                return self._build_shadow_decision(requested, serving)
            self._counters.served_elsewhere += 1
        return self._build_decision(serving, used, quota)

    def _build_decision(self, label: str, used: int, quota: int, shadow_label: str | None = None) -> Decision:
        return Decision(
            label,
            label_policy.compute_mode(used, quota, self.settings.tight_pct),
            label_policy.compute_quota_percent(used, quota),
            shadow_label,
        )

    def _decide_none_left(self, requested: str, is_format_specific: bool) -> Decision:
        if self.settings.enforcement == "shadow" and not self._find_candidates(requested):
            return Decision(requested, Mode.NORMAL, None, "")
        if self._last_served.get((requested, is_format_specific), requested) is not None:
            self._log_change(requested, is_format_specific, None)
        if self.settings.enforcement == "shadow":
            return self._build_shadow_decision(requested, "")
        candidates = self._find_candidates(requested)
        if not candidates:
            raise self._build_no_quota_error(requested)
        self._check_format(requested, candidates)
        raise self._build_spent_error(requested, tuple(each for each in candidates if each in self._labels))

    def _build_shadow_decision(self, requested: str, shadow_label: str) -> Decision:
        quota = self.settings.quotas.get(requested)
        if quota is None:
            return Decision(requested, Mode.NORMAL, None, shadow_label)
        return self._build_decision(requested, self.get_tracker(requested).committed, quota, shadow_label)

    def _build_route(self, label: str, is_format_specific: bool) -> tuple[_FallbackStep, ...]:
        format, quotas = self._labels[label].format, self.settings.quotas
        route = tuple(
            _FallbackStep(each, self._trackers.get(each, _UNLIMITED), quotas.get(each))
            for each in self._find_candidates(label)
            if each in self._labels and (not is_format_specific or self._labels[each].format == format)
        )
        self._fallback_routes[label, is_format_specific] = route
        return route

    def _find_candidates(self, label: str) -> tuple[str, ...]:
        settings = self.settings
        return tuple(label_policy.find_candidates(label, settings.ordering, settings.quotas, self.active_index))

    # Telling.

    def _build_no_quota_error(self, label: str) -> InvalidRequest:
        allowed_labels = ", ".join(dict.fromkeys((*self.settings.ordering, *self.settings.quotas)))
        return InvalidRequest(
            f"{label} is not among the labels that {self.scope.key} has a quota for: {allowed_labels}"
        )

    def _check_format(self, requested: str, candidates: tuple[str, ...]) -> None:
        """A label that could pay but not read the body is no reason to say that all is spent."""
        with_quota_left = [
            each
            for each in candidates
            if each in self._labels and self.get_tracker(each).committed < self.settings.quotas[each]
        ]
        if with_quota_left:
            format = self._labels[requested].format
            others = ", ".join(f"{each} ({self._labels[each].format})" for each in with_quota_left)
            raise InvalidRequest(
                f"no label with a body in the format {format} has quota left; Converse would be served by {others}"
            )

    def _build_spent_error(self, requested: str, candidates: tuple[str, ...]) -> QuotaExceeded | TooManyRequests:
        """What is only taken by calls under way may be left over when they end."""
        self._counters.refusals += 1
        quotas, ordering = self.settings.quotas, self.settings.ordering
        in_flight_only = [label for label in candidates if self.get_tracker(label).spent < quotas[label]]
        if in_flight_only:
            expected = f"calls under way are expected to use what is left of the quota of {self.scope.key}"
            message = f"{expected}: {self.format_amounts(in_flight_only)} spent"
            return TooManyRequests(message, retry_after=IN_FLIGHT_RETRY_SECONDS)
        chain = ordering[ordering.index(requested) :] if requested in ordering else (requested,)
        shown_labels = [
            label for label in chain if label in candidates or self.get_tracker(label).spent >= quotas[label]
        ]
        return QuotaExceeded(
            f"the quota of {self.scope.key} for {self.span.key} is spent: {self.format_amounts(shown_labels)}; {self.reset_message}"
        )

    @property
    def reset_message(self) -> str:
        resets = datetime.fromtimestamp(self.span.end, UTC).astimezone(self.settings.zone).isoformat()
        return f"it resets at {resets}"

    def format_amounts(self, labels: Iterable[str]) -> str:
        return ", ".join(f"{label} {self._format_amount(label)}" for label in labels)

    def _format_amount(self, label: str) -> str:
        return f"{_format_usd(self.get_tracker(label).spent)} of {_format_usd(self.settings.quotas[label])} USD"

    def _log_change(self, requested: str, is_format_specific: bool, serving: str | None) -> None:
        """Once: what is under way may come to cost less, so it changes nothing for good."""
        before, settings = self._last_served.get((requested, is_format_specific), requested), self.settings
        route = self._fallback_routes[requested, is_format_specific]
        by_spend_alone = (step.label for step in route if step.quota is None or step.tracker.spent < step.quota)
        if next(by_spend_alone, None) != serving:
            return
        self._last_served[requested, is_format_specific] = serving
        amounts = self.format_amounts(settings.ordering or settings.quotas)
        _log.warning(
            "decision changed: scope=%s period=%s asked=%s serving=%s before=%s active=%s enforcement=%s spent=%r",
            self.scope.key,
            self.span.key,
            requested,
            serving or "none",
            before or "none",
            settings.ordering[self.active_index] if settings.ordering else "none",
            settings.enforcement,
            amounts,
        )

    # Learning.

    def change_calendar(self, span: PeriodSpan, settings: EffectiveSettings) -> None:
        """The org turns out to have another calendar. What was spent in the period of this name still counts."""
        self.span, self.settings = span, settings
        self._fallback_routes.clear()
        self._add_trackers()

    def apply_settings(self, settings: EffectiveSettings, active: int) -> None:
        """The calendar stays as it is until the period is over, whatever the plan says."""
        settings, active = settings.with_calendar_of(self.settings), min(active, max(0, len(settings.ordering) - 1))
        if settings != self.settings or active != self.active_index:
            self._counters.active_label_changes += active != self.active_index
            self.settings, self.active_index = settings, active
            self._fallback_routes.clear()
            self._add_trackers()

    def apply_app_labels(self, app_labels: AppProfiles | None) -> None:
        """None: they could not be read, and what is known holds."""
        if app_labels is not None and app_labels is not self.app_labels:
            self.app_labels = app_labels
            self._rebuild_labels()

    def apply_config(self, labels: Mapping[str, LabelConfig]) -> None:
        """Those of another configuration. What is spent, and how far the chain is gone down, stays."""
        self._configured_labels = labels
        self._rebuild_labels()

    def _rebuild_labels(self) -> None:
        app_labels, configured = self.app_labels.by_name, self._configured_labels
        self._labels = (
            {name: profile.label for name, profile in app_labels.items()} | dict(configured)
            if app_labels
            else configured
        )
        self._fallback_routes.clear()

    def schedule_refresh(self, now: float) -> float:
        """After each look at the store: sets the alarms, and says in how many seconds to look again at the latest."""
        return self._refresh_schedule.plan_next(self.settings, self._trackers, now)

    @property
    def is_nearly_spent(self) -> bool:
        """Some label is nearly spent, or spent."""
        return any(mode is not Mode.NORMAL for mode in self._compute_modes())

    @property
    def is_tight(self) -> bool:
        """Some label is nearly spent, but not yet: all that is flushed now is of use to others."""
        return any(mode is Mode.TIGHT for mode in self._compute_modes())

    @property
    def quota_usages(self) -> Iterator[QuotaUsage]:
        """Of each label that has a quota."""
        for label, quota in self.settings.quotas.items():
            spent = self.get_tracker(label).spent
            yield QuotaUsage(
                label, spent / quota if quota else 1.0, label_policy.compute_mode(spent, quota, self.settings.tight_pct)
            )

    def _compute_modes(self) -> Iterator[Mode]:
        for label, quota in self.settings.quotas.items():
            if quota:  # what never has any room is nothing to look after
                yield label_policy.compute_mode(self.get_tracker(label).spent, quota, self.settings.tight_pct)

    def find_next_active(self, sticky_index: int) -> int | None:
        """To which label the active one moves on, for good; None if it stays. What is under way does not count: it may
        cost less than it is taken for."""
        settings = self.settings
        if not settings.ordering or not settings.is_sticky or settings.enforcement == "shadow":
            return None
        index = label_policy.advance_active_index(
            sticky_index, settings.ordering, lambda label: self.get_tracker(label).spent, settings.quotas
        )
        return index if index > sticky_index else None


def _format_usd(pico: int) -> str:
    return f"{pico / PICO_PER_USD:.6f}".rstrip("0").rstrip(".") or "0"


@dataclass(slots=True)
class RefreshState:
    """Times are by the monotonic clock, but for `override_ends`."""

    budget: BudgetState
    is_registered: bool  # the settings are those of an org that somebody put
    due_at: float = -NEVER
    spend_due_at: float = -NEVER  # when not only the settings are to be looked at
    spend_stale_at: float = -NEVER  # when what is known to be spent is too old to go by
    stale_at: float = -NEVER  # from then on a call waits for a look: for money, or for own labels
    spend_read_at: float = -NEVER
    grace_seconds: float = 0.0  # from when a look for money is due until what is known is old
    sticky_item: Item | None = None  # of the active label and the override, as it was read
    has_spend: bool = False  # it was looked at, or recalled
    sticky_index: int = 0  # the active label, but for an override
    override: Override | None = None
    override_ends_at: float = NEVER
    warned_problems: tuple[str, ...] = ()
    refresh_done: Event | None = None
    is_refresh_slow: bool = False  # somebody has waited in vain for the look that is under way

    def expire(self) -> None:
        """The next call waits for a look at everything."""
        self.spend_due_at = self.spend_stale_at = self.stale_at = -NEVER
