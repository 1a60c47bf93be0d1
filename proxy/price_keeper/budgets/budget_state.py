"""The budget of one scope in one period: effective settings, active label, and spend. It decides which label serves.

Nothing here waits or reads the store. `BudgetRefresher` applies what was read, and the ledger reports what this process
spends at the moment it happens. Start with `BudgetState.decide`.

`SpendTracker` holds the known spend of one quota:

    spent      =  others' spend + own spend
    committed  =  spent + the expected cost of the calls in flight

A sum that is read from the store holds what other processes flushed and possibly some of this process's own spend. So
all own spend that was ever sent is subtracted from it, and the highest result holds: a lower bound, as spend never
decreases. If no flush is in progress or in doubt while the shards are read, the result is exact. The calculation uses
no clock.

`RefreshSchedule` decides how soon the store is read again, by how fast the remaining quota is being used.
`RefreshState` keeps what was read for a budget, and when it has to be read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from price_keeper.budgets import label_policy
from price_keeper.budgets.active_label import Override
from price_keeper.budgets.effective_settings import EffectiveSettings
from price_keeper.budgets.label_policy import Mode
from price_keeper.config.config_sections import LabelConfig
from price_keeper.domain import Scope, describe_scope, format_dollars
from price_keeper.errors import InvalidRequest, QuotaExceeded, TooManyRequests
from price_keeper.org_calendar import Period, PeriodSpan
from price_keeper.stores.contract import Item
from price_keeper.usage.inference_profiles import NO_APP_LABELS, AppLabels

NEVER: Final = float("inf")
NO_THRESHOLD: Final = 1 << 100  # pico-dollars that nobody has; an int, because money is compared with it
# one part in so many of the remaining quota, or of the time until it is used up, passes before the next read
REFRESH_SHARE = 10
MIN_REFRESH_SECONDS = 1.0  # between two reads
SHARE_SAMPLE_SECONDS = 60.0  # over which this process's share of the fleet's spend is measured
MIN_FLEET_SHARE = 0.001  # of a fleet's spend that one sidecar is assumed to have at least
IN_FLIGHT_RETRY_SECONDS: Final = 2.0  # by then some of the calls in flight have probably ended
_PERIOD_NAMES: Final = {Period.DAY: "today's", Period.WEEK: "this week's", Period.MONTH: "this month's"}
_log = logging.getLogger("price_keeper.selection")


class SpendTracker:
    """The known spend of one quota. When `spent` reaches `threshold`, `on_threshold` is called once: the store has to
    be read again."""

    __slots__ = (
        "_acknowledged_own",
        "_on_threshold",
        "_sent_own",
        "_submitting",
        "exact_at",
        "in_flight",
        "own_spent",
        "spent",
        "threshold",
    )

    def __init__(self, unflushed: int = 0, in_doubt: int = 0, on_threshold: Callable[[], None] = lambda: None) -> None:
        """`unflushed` is own spend that was recorded earlier and is not acknowledged by the store yet. `in_doubt` is
        the part of it that is in the store, or may be, all the same."""
        self._on_threshold = on_threshold
        self.spent = unflushed
        self.own_spent = unflushed
        self._sent_own = in_doubt  # own spend that may be in the store; the rest of own spend certainly is not
        self._acknowledged_own = 0  # the part of it that certainly is in the store
        self._submitting = 0  # submitted usage that may be in the store, and is no own spend before it is acknowledged
        self.in_flight = 0
        self.threshold = NO_THRESHOLD
        self.exact_at: float = -NEVER  # when the last exact read began, on the monotonic clock

    @property
    def committed(self) -> int:
        """Known spend and the expected cost of the calls in flight."""
        return self.spent + self.in_flight

    @property
    def is_flush_certain(self) -> bool:
        """No own spend is on its way to the store or has an unknown outcome."""
        return self._sent_own == self._acknowledged_own and not self._submitting

    @property
    def flush_mark(self) -> int | None:
        """Equal before and after a read if all that was sent until its end was acknowledged before it began."""
        return self._acknowledged_own if self.is_flush_certain else None

    @property
    def stored_and_pending(self) -> tuple[int, int]:
        """`spent` in two parts: what is in the store, and own spend that is still in the journal."""
        pending = self.own_spent - self._acknowledged_own
        return self.spent - pending, pending

    def restore(self, stored: int, pending: int, *, is_own: bool) -> None:
        """Apply `stored_and_pending` of a snapshot until the store can be read. What was pending then is now in the
        store, or still in this process's journal and counted as own spend. The snapshot of another process may include
        any part of this process's own spend, so own spend is not added to it."""
        self._raise_others_to(
            stored + max(0, pending - self.own_spent) if is_own else stored + pending - self.own_spent
        )

    # Spend of this process.

    def on_call_started(self, expected_pico: int) -> None:
        self.in_flight += expected_pico

    def on_call_ended(self, expected_pico: int, pico: int) -> None:
        self.in_flight -= expected_pico
        self.own_spent += pico
        self._add_spent(pico)

    def add_sent(self, pico: int) -> None:
        """This spend may be in the store from now on. If more was sent than is known as own spend, the rest was
        recorded before this tracker existed, and is added to own spend here."""
        self._sent_own += pico
        if self._sent_own > self.own_spent:
            unseen, self.own_spent = self._sent_own - self.own_spent, self._sent_own
            self._add_spent(unseen)

    def remove_sent(self, pico: int) -> None:
        """The spend that was being sent is certainly not in the store, and only a new attempt can bring it there."""
        self._sent_own -= pico

    def add_acknowledged(self, pico: int) -> None:
        """The spend is in the store and no longer in the journal."""
        self._acknowledged_own += pico

    # Usage that clients submit, which no journal holds.

    def begin_submission(self, pico: int) -> None:
        self._submitting += pico

    def confirm_submission(self, pico: int) -> None:
        self._submitting -= pico
        self._sent_own += pico
        self._acknowledged_own += pico
        self.own_spent += pico
        self._add_spent(pico)

    def cancel_submission(self, pico: int) -> None:
        """It failed or its outcome is unknown; if it is in the store, it counts as spend of others."""
        self._submitting -= pico

    def _add_spent(self, pico: int) -> None:
        self.spent += pico
        if self.spent >= self.threshold:
            self.threshold = NO_THRESHOLD
            self._on_threshold()

    # Sums that were read from the store.

    def apply_lower_bound(self, pico: int) -> None:
        """Apply a sum that may be old and may include any part of what was sent."""
        self._raise_others_to(pico - self._sent_own - self._submitting)

    def apply_exact_sum(self, pico: int, read_began_at: float) -> None:
        """Apply the sum of the shards, read while no flush was in progress or in doubt: it includes all that was
        sent."""
        self.spent = self.own_spent + pico - self._sent_own
        self.exact_at = read_began_at

    def _raise_others_to(self, pico: int) -> None:
        self.spent = max(self.spent, self.own_spent + pico)


class _ShareSample(NamedTuple):
    """What all processes and this one had spent by a time, and this process's share of the growth before it."""

    at: float
    spent: int
    own_spent: int
    share: float


class RefreshSchedule:
    """Decides when a budget is read from the store again, and sets the thresholds of its trackers."""

    def __init__(self) -> None:
        self._refreshed_at = -NEVER
        self._rates: dict[str, tuple[int, float]] = {}  # by label: spend at the last read, and the rate until then
        self._share_samples: dict[str, _ShareSample] = {}

    def plan_next(self, settings: EffectiveSettings, trackers: Mapping[str, SpendTracker], now: float) -> float:
        """Set the thresholds, and return the seconds after which the store has to be read again at the latest."""
        elapsed, self._refreshed_at = max(now - self._refreshed_at, MIN_REFRESH_SECONDS), now
        wait = settings.normal_secs
        for label, quota in settings.quotas.items():
            tracker = trackers[label]
            rate, share = self._update_rate(label, tracker, elapsed), self._update_share(label, tracker, now)
            remaining, tight_at = quota - tracker.spent, -(-quota * settings.tight_pct // 100)
            if tracker.spent >= tight_at:
                wait = min(wait, settings.tight_secs)
            if remaining <= 0:
                tracker.threshold = NO_THRESHOLD
                continue
            early_threshold = tracker.spent + int(remaining * share) // REFRESH_SHARE + 1
            tracker.threshold = min(at for at in (tight_at, early_threshold, quota) if at > tracker.spent)
            if rate:
                wait = min(wait, remaining / rate / REFRESH_SHARE)
        return max(MIN_REFRESH_SECONDS, wait)

    def _update_rate(self, label: str, tracker: SpendTracker, elapsed: float) -> float:
        """The rate of spend per second. A read that finds nothing new does not prove that nothing is spent, so the last
        rate decays by half."""
        last_spent, last_rate = self._rates.get(label, (tracker.spent, 0.0))
        rate = max(max(0, tracker.spent - last_spent) / elapsed, last_rate / 2)
        self._rates[label] = tracker.spent, rate
        return rate

    def _update_share(self, label: str, tracker: SpendTracker, now: float) -> float:
        """This process's share of the fleet's spend: when this process spends faster, probably all do. The share is
        measured over SHARE_SAMPLE_SECONDS, as the spend of others shows only when they have flushed it."""
        sample = self._share_samples.get(label)
        if sample is None:
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, 1.0)
        growth = tracker.spent - sample.spent
        if growth > 0 and now - sample.at >= SHARE_SAMPLE_SECONDS:
            share = min(1.0, max(MIN_FLEET_SHARE, (tracker.own_spent - sample.own_spent) / growth))
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, share)
        return sample.share


_UNLIMITED: Final = SpendTracker()  # for labels without a quota; nothing is counted in it


class Decision(NamedTuple):
    """The label that serves. `percent` is None where no quota applies. `shadow_label` is the label that would serve if
    the budget were enforced."""

    label: str
    mode: Mode
    percent: int | None
    shadow_label: str | None = None


class DecisionCounters:
    """Counts, over all scopes, refused calls, calls served by another label than requested, and changes of an active
    label."""

    __slots__ = ("active_label_changes", "refusals", "served_elsewhere")

    def __init__(self) -> None:
        self.served_elsewhere = self.active_label_changes = self.refusals = 0


class QuotaUsage(NamedTuple):
    """Used share and mode of one label's quota, by known spend."""

    label: str
    ratio: float
    mode: Mode


class _FallbackStep(NamedTuple):
    label: str
    tracker: SpendTracker
    quota: int | None


class BudgetState:
    """Decides which label serves, by the settings, the active label and the spend of one scope in one period."""

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
        """`read_unflushed` returns, by label, own spend that is recorded and not acknowledged by the store, and how
        much of it may be in the store. `on_threshold` is called when the store should be read again."""
        self.scope = scope
        self.span = span
        self.settings = settings
        self.active_index = 0
        self.is_stale = False  # the store did not answer when a read was due
        self._configured_labels = self._labels = labels
        self.app_labels = NO_APP_LABELS  # labels that the app defined itself; only where the scope is one app
        self._read_unflushed = read_unflushed
        self._on_threshold = on_threshold
        self._counters = counters or DecisionCounters()
        self._trackers: dict[str, SpendTracker] = {}
        self._fallback_routes: dict[tuple[str, bool], tuple[_FallbackStep, ...]] = {}
        self._last_served: dict[tuple[str, bool], str | None] = {}
        self._first_active_index: int | None = None  # as it was found; a fallback to it was logged by another process
        self.quota_generation = 0  # increases when another label gets a quota
        self._refresh_schedule = RefreshSchedule()
        self._add_trackers()

    # Spend.

    def get_tracker(self, label: str) -> SpendTracker:
        """The tracker of a label that has a quota; KeyError for any other label."""
        return self._trackers[label]

    def find_trackers(self, label: str) -> tuple[SpendTracker, ...]:
        """The trackers that a call served by this label is counted in: one, or none without a quota."""
        tracker = self._trackers.get(label)
        return () if tracker is None else (tracker,)

    def _add_trackers(self) -> None:
        """Add a tracker for each label that has got a quota. The tracker of a label that lost its quota is kept, as its
        calls may still be in flight."""
        new_labels = [label for label in self.settings.quotas if label not in self._trackers]
        if new_labels:
            unflushed = self._read_unflushed()
            self._trackers |= {
                label: SpendTracker(*unflushed.get(label, (0, 0)), self._on_threshold) for label in new_labels
            }
            self.quota_generation += 1

    @property
    def is_idle(self) -> bool:
        return not any(tracker.in_flight for tracker in self._trackers.values())

    # Decisions.

    def decide(self, label: str, is_format_specific: bool) -> Decision:
        """Which label serves a call that requests `label`. `is_format_specific`: only models of one format understand
        the body. Raises QuotaExceeded, TooManyRequests and InvalidRequest."""
        route = self._fallback_routes.get((label, is_format_specific)) or self._build_route(label, is_format_specific)
        for serving, tracker, quota in route:
            if quota is None:
                return Decision(serving, Mode.NORMAL, None)
            committed = tracker.spent + tracker.in_flight
            if committed < quota:
                return self._record_decision(label, is_format_specific, serving, committed, quota)
        return self._decide_none_left(label, is_format_specific)

    def decide_hard(self, label: str, is_format_specific: bool, insufficient: Collection[str]) -> Decision:
        """Like `decide`, without the labels whose budget is insufficient for this call. Calls in flight do not count,
        as their cost is reserved already."""
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
        if insufficient:  # other labels may have had quota left, but not enough for this call
            raise self._build_spent_error(label, tuple(insufficient))
        return self._decide_none_left(label, is_format_specific)

    def decide_hard_without_fallback(self, label: str, insufficient: Collection[str]) -> Decision:
        """Like `decide_without_fallback`, under a hard budget."""
        quota = self.settings.quotas.get(label)
        if quota is None:
            return self.decide_without_fallback(label)
        spent = self.get_tracker(label).spent
        if label in insufficient or spent >= quota:
            raise self._build_spent_error(label, (label,))
        return self._build_decision(label, spent, quota)

    def decide_app_label(self, label: str, is_format_specific: bool) -> Decision:
        """Like `decide`, for a label that the app defined itself. Apps that share a budget may use one name for labels
        of different formats, so there such labels are in no fallback chain and are paid like any label that is not
        configured."""
        return (
            self.decide(label, is_format_specific)
            if label in self.app_labels.by_name
            else self.decide_without_fallback(label)
        )

    def has_label(self, label: str) -> bool:
        """Whether a fallback chain may lead to this label."""
        return label in self._labels

    def find_enforced_label(self, label: str) -> str | None:
        """Which label would now serve a call of any format if the budget were enforced. Counts nothing."""
        if label not in self._labels:
            return None
        try:
            route = self._fallback_routes.get((label, False)) or self._build_route(label, False)
        except InvalidRequest:
            return None
        return next((step.label for step in route if step.quota is None or step.tracker.committed < step.quota), None)

    def decide_without_fallback(self, label: str) -> Decision:
        """Decide for a label that is not configured: it is paid from its own quota, or from none if the scope has no
        chain. Raises QuotaExceeded, TooManyRequests and InvalidRequest."""
        quota, is_shadow = self.settings.quotas.get(label), self.settings.enforcement == "shadow"
        if quota is None:
            if not self.settings.ordering:
                return Decision(label, Mode.NORMAL, None)
            if is_shadow:
                return Decision(label, Mode.NORMAL, None, "")
            raise self._build_no_quota_error(label)  # without this refusal the label would be a way around the budget
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
            _FallbackStep(each, self._find_tracker(each), quotas.get(each))
            for each in self._find_candidates(label)
            if each in self._labels and (not is_format_specific or self._labels[each].format == format)
        )
        self._fallback_routes[label, is_format_specific] = route
        return route

    def _find_candidates(self, label: str) -> tuple[str, ...]:
        settings = self.settings
        return tuple(label_policy.find_candidates(label, settings.ordering, settings.quotas, self.active_index))

    # Messages.

    def _build_no_quota_error(self, label: str) -> InvalidRequest:
        allowed_labels = ", ".join(dict.fromkeys((*self.settings.ordering, *self.settings.quotas)))
        return InvalidRequest(
            f"{label} is not among the labels that {self.display_name} has a quota for: {allowed_labels}",
            details=self.refusal_details,
        )

    def _check_format(self, requested: str, candidates: tuple[str, ...]) -> None:
        """Refuse with InvalidRequest if labels with quota left cannot read the body: the quota is not spent then."""
        with_quota_left = [
            each
            for each in candidates
            if each in self._labels and self._has_quota_left(each, self._find_tracker(each).committed)
        ]
        if with_quota_left:
            format = self._labels[requested].format
            others = ", ".join(f"{each} ({self._labels[each].format})" for each in with_quota_left)
            raise InvalidRequest(
                f"no label with a body in the format {format} has quota left; Converse would be served by {others}"
            )

    def _build_spent_error(self, requested: str, candidates: tuple[str, ...]) -> QuotaExceeded | TooManyRequests:
        """TooManyRequests if calls in flight only reserve the rest, as they may cost less in the end; else
        QuotaExceeded."""
        self._counters.refusals += 1
        ordering = self.settings.ordering
        in_flight_only = [label for label in candidates if self._has_quota_left(label, self._find_tracker(label).spent)]
        if in_flight_only:
            expected = f"calls in flight are expected to use what is left of the budget of {self.display_name}"
            message = f"{expected}: {self.format_amounts(in_flight_only)} spent"
            return TooManyRequests(message, retry_after=IN_FLIGHT_RETRY_SECONDS, details=self.refusal_details)
        chain = ordering[ordering.index(requested) :] if requested in ordering else (requested,)
        shown_labels = [
            label
            for label in chain
            if label in candidates or not self._has_quota_left(label, self._find_tracker(label).spent)
        ]
        whose = _PERIOD_NAMES[self.settings.period]
        if len(shown_labels) == 1 and shown_labels[0] in self.settings.quotas:
            (label,) = shown_labels
            used = f"{whose} {label} budget of {format_dollars(self.settings.quotas[label])}"
        else:
            used = f"{whose} budget: {self.format_amounts(shown_labels)}"
        return QuotaExceeded(f"{self.display_name} has used {used}; {self.reset_message}", details=self.refusal_details)

    @property
    def display_name(self) -> str:
        """The org or app, for people."""
        return describe_scope(self.scope, self.settings.org_name, self.settings.app_name)

    @property
    def refusal_details(self) -> Mapping[str, str | None]:
        """What identifies the budget, for programs."""
        return {
            "org": self.scope.org,
            "app": self.scope.app,
            "period": self.span.key,
            "resets_at": datetime.fromtimestamp(self.span.end, UTC).isoformat().replace("+00:00", "Z"),
        }

    @property
    def reset_message(self) -> str:
        resets = datetime.fromtimestamp(self.span.end, UTC).astimezone(self.settings.zone)
        day = "" if self.settings.period is Period.DAY else f"on {resets:%Y-%m-%d} "
        return f"it resets {day}at {resets:%H:%M} {self.settings.zone.key}"

    def format_amounts(self, labels: Iterable[str]) -> str:
        return ", ".join(f"{label} {self._format_amount(label)}" for label in labels)

    def _find_tracker(self, label: str) -> SpendTracker:
        return self._trackers.get(label, _UNLIMITED)

    def _has_quota_left(self, label: str, used: int) -> bool:
        quota = self.settings.quotas.get(label)
        return quota is None or used < quota

    def _format_amount(self, label: str) -> str:
        if label not in self.settings.quotas:
            return "unlimited"
        return f"{format_dollars(self.get_tracker(label).spent)} of {format_dollars(self.settings.quotas[label])}"

    def _log_change(self, requested: str, is_format_specific: bool, serving: str | None) -> None:
        """Log that another label serves, once per change. A change due to calls in flight alone is not logged, as they
        may cost less than expected, and neither is a fallback that this process found when it started."""
        is_first = (requested, is_format_specific) not in self._last_served
        before, settings = self._last_served.get((requested, is_format_specific), requested), self.settings
        route = self._fallback_routes[requested, is_format_specific]
        by_spend_alone = (step.label for step in route if step.quota is None or step.tracker.spent < step.quota)
        if next(by_spend_alone, None) != serving:
            return
        self._last_served[requested, is_format_specific] = serving
        found = self._first_active_index or 0
        if is_first and 0 < found == self.active_index and serving == settings.ordering[found]:
            return
        amounts = self.format_amounts(settings.ordering or settings.quotas)
        _log.warning(
            "calls of %s for %s %s %s now (before: %s): spent %s in %s; active label %s, enforcement %s",
            self.scope.key,
            requested,
            "would be" if settings.enforcement == "shadow" else "are",
            _describe_service(serving),
            _describe_service(before),
            amounts,
            self.span.key,
            settings.ordering[self.active_index] if settings.ordering else "none",
            settings.enforcement,
        )

    # Applying what was read.

    def change_calendar(self, span: PeriodSpan, settings: EffectiveSettings) -> None:
        """Apply another calendar of the org. Spend already counted in the period of this name still counts."""
        self.span, self.settings = span, settings
        self._fallback_routes.clear()
        self._add_trackers()

    def apply_settings(self, settings: EffectiveSettings, active: int) -> None:
        """Apply settings and active label. The calendar stays until the period is over, whatever the settings say."""
        settings, active = settings.with_calendar_of(self.settings), min(active, max(0, len(settings.ordering) - 1))
        if self._first_active_index is None:
            self._first_active_index = active
        if settings != self.settings or active != self.active_index:
            self._counters.active_label_changes += active != self.active_index
            self.settings, self.active_index = settings, active
            self._fallback_routes.clear()
            self._add_trackers()

    def apply_app_labels(self, app_labels: AppLabels | None) -> None:
        """Apply the labels of the app. None: they could not be read, and the last known ones hold."""
        if app_labels is not None and app_labels is not self.app_labels:
            self.app_labels = app_labels
            self._rebuild_labels()

    def apply_config(self, labels: Mapping[str, LabelConfig]) -> None:
        """Apply the labels of a reloaded configuration. Spend and active label stay."""
        self._configured_labels = labels
        self._rebuild_labels()

    def _rebuild_labels(self) -> None:
        app_labels, configured = self.app_labels.by_name, self._configured_labels
        self._labels = (
            {name: profile.label_config for name, profile in app_labels.items()} | dict(configured)
            if app_labels
            else configured
        )
        self._fallback_routes.clear()

    def schedule_refresh(self, now: float) -> float:
        """Call it after each read of the store: sets the thresholds, and returns the seconds until the next read at the
        latest."""
        return self._refresh_schedule.plan_next(self.settings, self._trackers, now)

    @property
    def is_nearly_spent(self) -> bool:
        """Some label's quota is nearly spent, or spent."""
        return any(mode is not Mode.NORMAL for mode in self._compute_modes())

    @property
    def is_tight(self) -> bool:
        """Some label's quota is nearly spent, but not spent: a flush now helps other processes to decide."""
        return any(mode is Mode.TIGHT for mode in self._compute_modes())

    @property
    def quota_usages(self) -> Iterator[QuotaUsage]:
        """Usage of each label that has a quota."""
        for label, quota in self.settings.quotas.items():
            spent = self.get_tracker(label).spent
            yield QuotaUsage(
                label, spent / quota if quota else 1.0, label_policy.compute_mode(spent, quota, self.settings.tight_pct)
            )

    def _compute_modes(self) -> Iterator[Mode]:
        for label, quota in self.settings.quotas.items():
            if quota:  # a quota of zero never changes its mode
                yield label_policy.compute_mode(self.get_tracker(label).spent, quota, self.settings.tight_pct)

    def find_next_active(self, sticky_index: int) -> int | None:
        """The index that the active label advances to for the rest of the period; None if it stays. Calls in flight do
        not count, as they may cost less than expected."""
        settings = self.settings
        if not settings.ordering or not settings.is_sticky or settings.enforcement == "shadow":
            return None
        index = label_policy.advance_active_index(
            sticky_index, settings.ordering, lambda label: self.get_tracker(label).spent, settings.quotas
        )
        return index if index > sticky_index else None


def _describe_service(label: str | None) -> str:
    return "refused" if label is None else f"served by {label}"


@dataclass(slots=True, eq=False)
class RefreshState:
    """What was read for a budget, and when to read it again. Times are on the monotonic clock, except
    `override_ends_at`."""

    budget: BudgetState
    is_registered: bool  # the settings are those of an org that is registered
    due_at: float = -NEVER
    spend_due_at: float = -NEVER  # when spend is read too, and not only the settings
    spend_stale_at: float = -NEVER  # when the known spend is too old for decisions
    stale_at: float = -NEVER  # from then on a call waits for a read, of spend or of the app labels
    report_stale_at: float = -NEVER  # from then on a report waits for a read, of totals
    spend_read_at: float = -NEVER
    # between the time at which a read of spend is due and the time at which the known spend is stale
    grace_seconds: float = 0.0
    sticky_item: Item | None = None  # the item of the active label and the override, as it was read
    sticky_read_at: float = -NEVER  # when the last read of it began
    is_followed: bool = False  # it is read again and again, because the scope serves calls
    has_served: bool = False  # a call since then
    has_spend: bool = False  # spend was read, or restored from a snapshot
    sticky_index: int = 0  # the active label without the override
    override: Override | None = None
    override_ends_at: float = NEVER
    warned_problems: tuple[str, ...] = ()
    is_refresh_slow: bool = False  # a call has waited in vain for the read in progress

    def expire(self) -> None:
        """Make the next call or report wait for a read of settings and spend."""
        self.spend_due_at = self.spend_stale_at = self.stale_at = self.report_stale_at = -NEVER
