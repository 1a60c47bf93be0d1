"""All budget states of this process, by scope and period, and for each caller the budget that its calls are charged
to.

`cached` answers for known callers without waiting, and starts refreshes in the background. `load` reads the store
once for all concurrent callers and waits for at most LOAD_TIMEOUT_SECONDS; then the last known settings hold, those
of the snapshot, or the defaults, unless `on_store_down: refuse` is set. The number of budgets is bounded; a budget
with calls in flight is never evicted.

What owns what:

    BudgetRegistry
      by caller (org, app)    CallerDay       one day: the counters that its calls are charged to, and its BudgetState
      by scope and period     RefreshState    what was read from the store, and when `BudgetRefresher` reads again
        has one               BudgetState     settings, active label, `span` (the period); decides which label serves
        has one per label     SpendTracker    what is spent and in flight of one quota

Several callers share one BudgetState: all apps of an org whose quotas belong to the org.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.bounded_dict import BoundedDict
from price_keeper.budgets.active_label import Override
from price_keeper.budgets.active_label_follower import TICK_SECONDS, ActiveLabelFollower
from price_keeper.budgets.app_label_cache import AppLabelCache
from price_keeper.budgets.budget_refresh import STORE_RETRY_SECONDS, BudgetRefresher
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.budgets.budget_state import NEVER, BudgetState, DecisionCounters, RefreshState, SpendTracker
from price_keeper.budgets.effective_settings import EffectiveSettings
from price_keeper.budgets.quota_metrics import QuotaMetrics
from price_keeper.budgets.unknown_orgs import UnknownOrgs
from price_keeper.clock import Clock
from price_keeper.config import Config, LabelConfig
from price_keeper.domain import Caller, Scope
from price_keeper.errors import Busy, UnknownOrg
from price_keeper.ledger.flusher import Flusher
from price_keeper.ledger.known_totals import KnownTotals
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, UsageCounts
from price_keeper.org_calendar import Period, PeriodSpan, find_span
from price_keeper.single_flight import SingleFlight
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.logs import log_read_failure
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.usage.inference_profiles import AppLabels

# per caller: by label, but callers may name any model where unlabelled models are allowed
MAX_CACHED_COUNTERS: Final = 1000

_ChargeKey = tuple[str, str, int]  # scope, period, and the number of shards of the counters
MAX_BUDGETS = 20_000
LOAD_TIMEOUT_SECONDS = 2.0  # for which a call of a caller that is not cached waits for the store
RETENTION_SECONDS: Final = 3600  # of a budget after its period: its last calls end and are flushed
_CallerKey = tuple[str, "str | None"]  # org and app
_log = logging.getLogger("price_keeper.selection")


class CallerDay:
    """A caller's org and app on one day: the counters that its calls are charged to. Valid from `start` to `end`."""

    __slots__ = ("_charge_keys", "_charged_by_label", "_generation", "budget", "end", "start", "valid_until")

    def __init__(self, caller: Caller, budget: BudgetState, day: PeriodSpan) -> None:
        settings = budget.settings
        self.budget = budget
        self.start = max(day.start, budget.span.start)
        self.end = min(day.end, budget.span.end)
        self._charge_keys = _charge_keys(caller, settings, day, budget.span)
        # The key is the label, or under a hard budget the counter of the lease that pays.
        self._charged_by_label: BoundedDict[str | Counter, ChargedCounters] = BoundedDict(MAX_CACHED_COUNTERS)
        self._generation = budget.quota_generation
        self.valid_until = NEVER  # on the monotonic clock; finite only where the settings were not read from the store

    def get_charged_counters(self, label: str, lease_counter: Counter | None = None) -> ChargedCounters:
        """The counters of a call that `label` serves. `lease_counter` is that of the lease that pays under a hard
        budget; the call is charged to it too."""
        if self._generation != self.budget.quota_generation:  # another label has got a quota
            self._charged_by_label.clear()
            self._generation = self.budget.quota_generation
        key = label if lease_counter is None else lease_counter
        found = self._charged_by_label.get(key)
        if found is None:
            counters = _build_charged_counters(self._charge_keys, label)
            if lease_counter is not None:
                counters.append(lease_counter)
            found = self._charged_by_label[key] = ChargedCounters.from_counters(
                counters, self.budget.find_trackers(label)
            )
        return found


def list_counters_at(caller: Caller, settings: EffectiveSettings, label: str, at: float) -> list[Counter]:
    """The counters that a call which started at `at` is charged to, wherever it was made."""
    day, period = find_span(Period.DAY, at, settings.zone), find_span(settings.period, at, settings.zone)
    return _build_charged_counters(_charge_keys(caller, settings, day, period), label)


def find_budget_scope(caller: Caller, settings: EffectiveSettings) -> Scope:
    """The scope whose quotas pay for a caller's calls."""
    return Scope(caller.org, caller.app if settings.quota_scope == "APP" else None)


def _build_charged_counters(charge_keys: list[_ChargeKey], label: str) -> list[Counter]:
    return [Counter(scope, label, period, shards) for scope, period, shards in charge_keys]


def _charge_keys(caller: Caller, settings: EffectiveSettings, day: PeriodSpan, period: PeriodSpan) -> list[_ChargeKey]:
    """Each scope by day, for reports, and the budget's scope by its own period."""
    charge_keys = [(scope.key, day.key, settings.shards) for scope in _list_day_scopes(caller, settings)]
    if period.key != day.key:
        charge_keys.append((find_budget_scope(caller, settings).key, period.key, settings.shards))
    return charge_keys


def _list_day_scopes(caller: Caller, settings: EffectiveSettings) -> list[Scope]:
    """The org's total is the sum over its apps, unless the quotas belong to the org."""
    org_scope = Scope(caller.org)
    if caller.app is None:
        return [org_scope]
    app = Scope(caller.org, caller.app)
    return [app] if settings.quota_scope == "APP" else [org_scope, app]


class _SubmittedSpend:
    """Submitted usage on its way to the store, with the trackers that exist when it is sent; a later one reads it."""

    def __init__(self, registry: BudgetRegistry, entries: list[tuple[Counter, SpendTracker, int]]) -> None:
        self._registry = registry
        self._entries = entries
        for _, tracker, pico in entries:
            tracker.begin_submission(pico)

    def confirm(self) -> None:
        for counter, tracker, pico in self._entries:
            tracker.confirm_submission(pico)
            self._registry.mark_spend_changed(counter)

    def cancel(self) -> None:
        for _, tracker, pico in self._entries:
            tracker.cancel_submission(pico)


class BudgetRegistry:
    """All budget states of this process, and the budget of each caller."""

    def __init__(
        self,
        config: Config,
        store: Store,
        flusher: Flusher,
        clock: Clock,
        tasks: Tasks,
        alerts: AlertRaiser | None = None,
        snapshot: BudgetSnapshot | None = None,
        reread_snapshot: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`snapshot` may come from an earlier process; `reread_snapshot` adds what other workers have recorded
        since."""
        self.labels = config.labels
        self.snapshot = snapshot or BudgetSnapshot(clock.now)
        self._totals_seconds = config.aggregator.interval_secs
        self._refuses_unread = config.on_store_down == "refuse"
        self.unknown_orgs = UnknownOrgs(config.unknown_org, clock, self.snapshot)
        self._flusher = flusher
        self._clock = clock
        self._tasks = tasks
        self.app_labels = AppLabelCache(config.labels, store, clock, self._on_app_labels)
        self.refresher = BudgetRefresher(
            config,
            store,
            flusher,
            clock,
            tasks,
            alerts,
            self._forget_org,
            self._may_serve_unregistered,
            self.app_labels,
            self.snapshot,
        )
        self._follower = ActiveLabelFollower(store, clock, self.refresher)
        self._caller_days = BoundedDict[_CallerKey, tuple[CallerDay, RefreshState]](MAX_BUDGETS)
        self._refresh_states: dict[tuple[str, str], RefreshState] = {}  # by scope and period
        # By org: the calendar that it cannot change before its period is over.
        self._frozen_calendars: dict[str, tuple[EffectiveSettings, PeriodSpan]] = {}
        self._loads = SingleFlight[_CallerKey, None]()
        self._swept_at = -NEVER
        self.decision_counters = DecisionCounters()
        self._on_spent_elsewhere: list[Callable[[Counter], None]] = []
        self._reread_snapshot = reread_snapshot
        flusher.sender.subscribe(self)
        self.known_totals = KnownTotals(flusher)
        flusher.sender.subscribe_flushed(self.known_totals.on_flushed)

    def start(self) -> None:
        """Start to follow the active labels that other processes change."""
        self._tasks.run_every("active labels", TICK_SECONDS, self._follower.run)

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.SCOPES, lambda: len(self._refresh_states))
        telemetry.add(metrics.SCOPES_STALE, self._count_stale)
        telemetry.add(metrics.SERVED_BY_ANOTHER_LABEL, lambda: self.decision_counters.served_elsewhere)
        telemetry.add(metrics.QUOTA_REFUSALS, lambda: self.decision_counters.refusals)
        telemetry.add(metrics.ACTIVE_LABEL_FLIPS, lambda: self.decision_counters.active_label_changes)
        QuotaMetrics(self._iterate_current).register_metrics(telemetry)
        self.refresher.register_metrics(telemetry)
        self.unknown_orgs.register_metrics(telemetry)

    def _count_stale(self) -> int:
        return sum(budget.is_stale for budget in self._iterate_current())

    def _iterate_current(self) -> Iterator[BudgetState]:
        now, budgets = self._clock.now(), (refresh.budget for refresh in self._refresh_states.values())
        return (budget for budget in budgets if budget.span.covers(now))

    def apply_config(self, labels: Mapping[str, LabelConfig]) -> None:
        """Replace the labels by those of a reloaded configuration."""
        self.labels = labels
        for refresh in self._refresh_states.values():
            refresh.budget.apply_config(labels)
        self.app_labels.apply_config(labels)

    def find_using_labels(self, labels: Collection[str]) -> dict[str, list[BudgetState]]:
        """The budgets of current periods whose fallback chain has one of these labels, by label."""
        found: dict[str, list[BudgetState]] = {}
        for budget in self._iterate_current():
            for label in budget.settings.ordering:  # the chain is short, however many labels are configured
                if label in labels:
                    found.setdefault(label, []).append(budget)
        return found

    # Calls.

    def cached(self, caller: Caller, *, is_report: bool = False) -> CallerDay | None:
        """The caller's budget without waiting; None if the store has to be read first. Starts the reads that are due in
        the background. `is_report`: no call is decided by it, so totals are enough."""
        found = self._caller_days.get((caller.org, caller.app))
        if found is None:
            return None
        caller_day, refresh = found
        now, moment = self._clock.now(), self._clock.monotonic()
        if not caller_day.start <= now < caller_day.end:
            return None
        if moment >= (refresh.report_stale_at if is_report else refresh.stale_at) and not refresh.is_refresh_slow:
            return None
        self.refresher.end_override_if_over(refresh, now)
        if moment >= caller_day.valid_until:
            self._start_loading(caller)
        if moment >= refresh.due_at:
            self.refresher.refresh(refresh, is_report=is_report)
        self._note_served(refresh)
        return caller_day

    def _note_served(self, refresh: RefreshState) -> None:
        refresh.has_served = True
        if not refresh.is_followed:
            self._follower.follow(refresh)

    async def load(self, caller: Caller, *, is_report: bool = False) -> CallerDay:
        """Read the store, and wait for at most LOAD_TIMEOUT_SECONDS. Until it answers, the last known settings hold, or
        else the defaults. Raises Busy where unread settings are refused, and UnknownOrg if the org is not
        registered."""
        key = (caller.org, caller.app)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                for _ in range(2):  # the first read may find another budget that pays, which has to be read too
                    self.unknown_orgs.raise_if_just_refused(caller.org)
                    if not self._is_loaded_from_store(key):
                        self._start_loading(caller)
                        await self._loads.wait(key)
                    await self._refresh_if_stale(key, is_report)
        if not self._is_loaded(key):
            await self._reread_snapshot_if_new(caller)
        caller_day, refresh = self._get_or_add(caller)
        refresh.is_refresh_slow = self.refresher.is_reading(refresh)
        self.refresher.end_override_if_over(refresh, self._clock.now())  # no read has said so if the store is away
        self._note_served(refresh)
        return caller_day

    async def _refresh_if_stale(self, key: _CallerKey, is_report: bool) -> None:
        found = self._caller_days.get(key)
        if found is None:  # the entry may have been removed meanwhile, because the calendar changed or to make room
            return
        refresh = found[1]
        stale_at = refresh.report_stale_at if is_report else refresh.stale_at
        if self._clock.monotonic() >= stale_at and not (self.refresher.is_reading(refresh) and refresh.is_refresh_slow):
            await self.refresher.refresh_now(refresh, is_report=is_report)

    def _get_or_add(self, caller: Caller) -> tuple[CallerDay, RefreshState]:
        """The entry of the caller. If there is none, a temporary one is added, by the last known settings."""
        key = (caller.org, caller.app)
        if not self._is_loaded(key):
            self._add_offline(caller)
        if key not in self._caller_days:
            if self.unknown_orgs.is_refused_by_snapshot(caller.org):
                raise self.unknown_orgs.build_refusal(caller.org)
            message = "the budget of this caller is not known here, and the store does not answer; retry later"
            raise Busy(message, retry_after=STORE_RETRY_SECONDS)
        return self._caller_days[key]

    def _is_loaded(self, key: _CallerKey) -> bool:
        found = self._caller_days.get(key)
        return found is not None and found[0].start <= self._clock.now() < found[0].end

    def _is_loaded_from_store(self, key: _CallerKey) -> bool:
        """Loaded, and not only by defaults or a snapshot, which hold for STORE_RETRY_SECONDS."""
        return self._is_loaded(key) and self._clock.monotonic() < self._caller_days[key][0].valid_until

    # Reports.

    async def read_status(self, caller: Caller, *, forces_read: bool) -> tuple[BudgetState, Override | None]:
        """The budget of the caller's scope, and the override in force. What is spent is a lower bound by totals, exact
        where a quota is nearly spent. `forces_read` reads the shards now; if the store does not answer soon, the budget
        is marked stale. For an org that is refused the budget has no labels."""
        caller_day = None if forces_read else self.cached(caller, is_report=True)
        if forces_read:
            self.unknown_orgs.forget(caller.org)
        try:
            caller_day = caller_day or await self.load(caller, is_report=True)
        except UnknownOrg:
            settings = self.refresher.reader.resolve_settings()
            period = find_span(settings.period, self._clock.now(), settings.zone)
            return BudgetState(find_budget_scope(caller, settings), period, settings, {}, dict), None
        _, refresh = self._get_or_add(caller)
        if forces_read:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                    await self.refresher.wait(refresh)  # a read that began earlier may return old values
                    refresh.expire()
                    await self.refresher.refresh_now(refresh)
        elif refresh.spend_read_at + self._totals_seconds <= self._clock.monotonic() and not refresh.budget.is_stale:
            # A new total may have been made since then.
            self.refresher.refresh_soon(refresh, is_report=True)
        self.refresher.end_override_if_over(refresh, self._clock.now())
        return refresh.budget, refresh.override

    def subscribe(self, on_spent_elsewhere: Callable[[Counter], None]) -> None:
        """Call `on_spent_elsewhere` with each counter of `notify_spent_elsewhere`."""
        self._on_spent_elsewhere.append(on_spent_elsewhere)

    def note_spend_elsewhere(self, counter: Counter) -> None:
        """A total is higher than the known spend, since another process added to the counter: read it for a report."""
        refresh = self._refresh_states.get((counter.scope, counter.period_or_lease))
        if refresh is not None:
            self.refresher.refresh_soon(refresh, is_report=True)
        self.notify_spent_elsewhere(counter)

    def notify_spent_elsewhere(self, counter: Counter) -> None:
        """Notify the subscribers alone, of spend that the trackers know already."""
        for on_spent_elsewhere in self._on_spent_elsewhere:
            on_spent_elsewhere(counter)

    def is_known(self, caller: Caller) -> bool:
        """Whether this process has served the caller, or reported on it."""
        return (caller.org, caller.app) in self._caller_days

    def begin_submission(self, sums: Mapping[Counter, UsageCounts]) -> _SubmittedSpend:
        return _SubmittedSpend(
            self,
            [
                (counter, tracker, counts.pico)
                for counter, counts in sums.items()
                for tracker in self._find_trackers(counter)
            ],
        )

    def mark_spend_changed(self, counter: Counter) -> None:
        """Note it in the snapshot."""
        refresh = self._refresh_states.get((counter.scope, counter.period_or_lease))
        if refresh is not None and refresh.has_spend:
            self.snapshot.mark_changed(refresh)

    # Notifications of the flusher (FlushListener).

    def on_sending(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.add_sent(pico)

    def on_not_stored(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.remove_sent(pico)

    def on_acknowledged(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.add_acknowledged(pico)
        self.mark_spend_changed(counter)

    def _find_trackers(self, counter: Counter) -> tuple[SpendTracker, ...]:
        refresh = self._refresh_states.get((counter.scope, counter.period_or_lease))
        return () if refresh is None else refresh.budget.find_trackers(counter.label)

    # Loading a caller for the first time in a period.

    def _start_loading(self, caller: Caller) -> None:
        self._loads.start((caller.org, caller.app), lambda: self._load(caller))

    async def _load(self, caller: Caller) -> None:
        try:
            settings, is_registered = await self.refresher.reader.read_settings(Scope(caller.org, caller.app))
            if is_registered:
                self.unknown_orgs.forget(caller.org)
            if is_registered or self._may_serve_unregistered(caller.org):
                self._add(caller, settings, is_read=True, is_registered=is_registered)
        except Exception as failure:  # whatever the failure, the call needs a budget
            log_read_failure(_log, f"the settings of org {caller.org}", "the last known ones apply", failure)
            await self._reread_snapshot_if_new(caller)
            self._add_offline(caller)

    async def _reread_snapshot_if_new(self, caller: Caller) -> None:
        """Read the snapshots of other workers, if this process has not read the settings of the caller."""
        if self._reread_snapshot is not None and (caller.org, caller.app) not in self._caller_days:
            await self._reread_snapshot()

    def _add_offline(self, caller: Caller) -> None:
        """Add the caller by the settings of its last period, else those of the snapshot, else the defaults; but nothing
        that this process has not read itself where `on_store_down: refuse` is set."""
        last = self._caller_days.get((caller.org, caller.app))
        if last is not None:
            self._add(caller, last[0].budget.settings, is_read=False, is_registered=False)
        elif not self._refuses_unread and not self.unknown_orgs.is_refused_by_snapshot(caller.org):
            snapshot_settings = self.refresher.reader.resolve_snapshot_settings(Scope(caller.org, caller.app))
            settings = snapshot_settings or self.refresher.reader.resolve_settings()
            self._add(caller, settings, is_read=False, is_registered=False)
            if snapshot_settings is None:
                self.unknown_orgs.note_served_offline(caller.org)
            else:
                budget = self._caller_days[caller.org, caller.app][0].budget
                budget.is_stale = True
                _log.warning(
                    "budget of %s is restored from the snapshot because the store does not answer; "
                    "it applies until the store can be read",
                    budget.scope.key,
                )

    def _add(self, caller: Caller, settings: EffectiveSettings, *, is_read: bool, is_registered: bool) -> None:
        now = self._clock.now()
        settings, period = self._freeze_calendar(caller.org, settings, now, is_registered)
        scope = find_budget_scope(caller, settings)
        refresh = self._refresh_states.get((scope.key, period.key))
        if refresh is None:
            refresh = self._add_budget(scope, period, settings, is_registered)
        elif refresh.budget.span != period or refresh.budget.settings.calendar != settings.calendar:
            refresh.budget.change_calendar(period, settings)
            refresh.expire()
        refresh.budget.apply_app_labels(self.app_labels.last_read(scope))
        caller_day = CallerDay(caller, refresh.budget, find_span(Period.DAY, now, settings.zone))
        if not is_read:
            caller_day.valid_until = self._clock.monotonic() + STORE_RETRY_SECONDS
        self._caller_days[caller.org, caller.app] = caller_day, refresh

    def _freeze_calendar(
        self, org: str, settings: EffectiveSettings, now: float, is_registered: bool
    ) -> tuple[EffectiveSettings, PeriodSpan]:
        """All apps of a registered org use one calendar until its period is over."""
        frozen = self._frozen_calendars.get(org)
        if frozen is not None and frozen[1].covers(now):
            return settings.with_calendar_of(frozen[0]), frozen[1]
        period = find_span(settings.period, now, settings.zone)
        if is_registered:
            self._frozen_calendars[org] = settings, period
        return settings, period

    def _forget_org(self, org: str) -> None:
        """Remove the org's callers: they were added by the default calendar, and the org has its own."""
        self._frozen_calendars.pop(org, None)
        for key in [key for key in self._caller_days if key[0] == org]:
            del self._caller_days[key]

    def _may_serve_unregistered(self, org: str) -> bool:
        """Whether an org that is not in the store is served. If not, its callers are removed."""
        is_served = self.unknown_orgs.note_unregistered(org)
        if not is_served:
            self._forget_org(org)
        return is_served

    def _on_app_labels(self, scope: Scope, app_labels: AppLabels) -> None:
        """Apply app labels that a call has just read, without waiting for the budget's next refresh."""
        found = self._caller_days.get((scope.org, scope.app))
        if found is not None and found[1].budget.scope == scope:
            found[1].budget.apply_app_labels(app_labels)

    def _add_budget(
        self, scope: Scope, period: PeriodSpan, settings: EffectiveSettings, is_registered: bool
    ) -> RefreshState:
        self._evict()

        def sum_by_label(pico_by_counter: Mapping[Counter, int]) -> dict[str, int]:
            sums: dict[str, int] = {}
            for counter, pico in pico_by_counter.items():
                if counter.scope == scope.key and counter.period_or_lease == period.key:
                    sums[counter.label] = sums.get(counter.label, 0) + pico
            return sums

        def read_unflushed() -> dict[str, tuple[int, int]]:
            in_doubt = sum_by_label(self._flusher.possibly_stored_by_counter())
            unflushed = sum_by_label(self._flusher.unflushed_by_counter())
            return {label: (pico, in_doubt.get(label, 0)) for label, pico in unflushed.items()}

        budget = BudgetState(
            scope,
            period,
            settings,
            self.labels,
            read_unflushed,
            lambda: self.refresher.refresh_soon(refresh),
            self.decision_counters,
        )
        refresh = self._refresh_states[scope.key, period.key] = RefreshState(budget, is_registered)
        self.refresher.restore(refresh)
        return refresh

    def _evict(self) -> None:
        """Remove budgets whose period is over, and the oldest idle ones if there are too many. A budget with calls in
        flight stays, or their end would be lost."""
        moment, now = self._clock.monotonic(), self._clock.now()
        is_full = len(self._refresh_states) >= MAX_BUDGETS
        if moment < self._swept_at + RETENTION_SECONDS and not is_full:
            return
        self._swept_at = moment
        idle = [key for key, refresh in self._refresh_states.items() if refresh.budget.is_idle]
        expired = [key for key in idle if self._refresh_states[key].budget.span.end + RETENTION_SECONDS < now]
        for key in expired or (idle[: MAX_BUDGETS // 10] if is_full else []):
            del self._refresh_states[key]
        remaining = {id(refresh) for refresh in self._refresh_states.values()}
        for name in [name for name, found in self._caller_days.items() if id(found[1]) not in remaining]:
            del self._caller_days[name]
        self._frozen_calendars = {org: found for org, found in self._frozen_calendars.items() if found[1].covers(now)}
