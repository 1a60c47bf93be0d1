"""All budget states of this process, by scope and period, and for each caller the budget that its calls are charged
to.

`cached` answers for known callers without waiting, and starts refreshes in the background. `load` reads the store
once for all concurrent callers and waits for at most LOAD_TIMEOUT_SECONDS; then the last known settings hold, those
of the snapshot, or the defaults, unless `on_store_down: refuse` is set. The number of budgets is bounded; a budget
with calls in flight is never evicted.

`CallerDay` is a caller's app and org on one day: the counters that its calls are charged to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.budgets.active_label import Override
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
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter
from price_keeper.ledger.recorder import Recorder
from price_keeper.org_calendar import Period, PeriodSpan, find_span
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.usage.inference_profiles import AppProfiles

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


MAX_BUDGETS: Final = 20_000
LOAD_TIMEOUT_SECONDS = 2.0  # for the store, of a call of a scope that is not known
RETENTION_SECONDS: Final = 3600  # of a standing whose period is over: its last calls end, and are flushed

_log = logging.getLogger("price_keeper.selection")

_CallerKey = tuple[str, "str | None"]  # of an org and an app


class BudgetRegistry:
    def __init__(
        self,
        config: Config,
        store: Store,
        recorder: Recorder,
        clock: Clock,
        tasks: Tasks,
        alerts: AlertRaiser | None = None,
        snapshot: BudgetSnapshot | None = None,
    ) -> None:
        """`notes` may be those of a process before this one."""
        self.labels = config.labels
        self.snapshot = snapshot or BudgetSnapshot(clock.now)
        self._refuses_unread = config.on_store_down == "refuse"
        self.unknown_orgs = UnknownOrgs(config.unknown_org, clock, self.snapshot)
        self._recorder = recorder
        self._clock = clock
        self._tasks = tasks
        self.app_labels = AppLabelCache(config.labels, store, clock, tasks, self._on_app_labels)
        self.refresher = BudgetRefresher(
            config,
            store,
            recorder,
            clock,
            tasks,
            alerts,
            self._forget_org,
            self._may_serve_unregistered,
            self.app_labels,
            self.snapshot,
        )
        self._caller_days: dict[_CallerKey, tuple[CallerDay, RefreshState]] = {}
        self._refresh_states: dict[tuple[str, str], RefreshState] = {}  # by scope and period
        self._frozen_calendars: dict[
            str, tuple[EffectiveSettings, PeriodSpan]
        ] = {}  # by org: what it cannot change before its period is over
        self._loading: dict[_CallerKey, asyncio.Event] = {}
        self._swept_at = -NEVER
        self.decision_counters = DecisionCounters()
        self.on_spent_elsewhere: Callable[[Counter], None] = lambda _: None
        self.reread_snapshot: Callable[[], Awaitable[None]] | None = None  # what other workers have noted since
        recorder.sender.flush_listener = self

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
        """Those of another configuration, in the place of those there were."""
        self.labels = labels
        for refresh in self._refresh_states.values():
            refresh.budget.apply_config(labels)
        self.app_labels.apply_config(labels)

    def find_using_labels(self, labels: Collection[str]) -> dict[str, list[BudgetState]]:
        """Those in force whose chain has one of them, by label."""
        found: dict[str, list[BudgetState]] = {}
        for budget in self._iterate_current():
            for label in budget.settings.ordering:  # which is short, however many labels there are
                if label in labels:
                    found.setdefault(label, []).append(budget)
        return found

    # For the calls.

    def cached(self, caller: Caller) -> CallerDay | None:
        """Without asking anybody; None if somebody has to be asked first."""
        found = self._caller_days.get((caller.org, caller.app))
        if found is None:
            return None
        caller_day, refresh = found
        now, moment = self._clock.now(), self._clock.monotonic()
        if not caller_day.start <= now < caller_day.end:
            return None
        if moment >= refresh.stale_at and not refresh.is_refresh_slow:
            return None
        if now >= refresh.override_ends_at:
            self.refresher.end_override(refresh)
        if moment >= caller_day.valid_until:
            self._start_loading(caller)
        if moment >= refresh.due_at:
            self.refresher.refresh(refresh)
        return caller_day

    async def load(self, caller: Caller) -> CallerDay:
        """Asks the store, and waits for a while. What is known holds until it answers, and where nothing is, the
        defaults, or Busy is raised where that is wanted. Raises UnknownOrg where nobody has registered the org."""
        name = (caller.org, caller.app)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                for _ in range(2):  # the first look may find that somebody else pays
                    self.unknown_orgs.check(caller.org)
                    if not self._is_loaded_from_store(name):
                        await self._start_loading(caller).wait()
                    await self._refresh_if_stale(name)
        if not self._is_loaded(name):
            await self._reread_snapshot(caller)
        caller_day, refresh = self._get_or_add(caller)
        refresh.is_refresh_slow = refresh.refresh_done is not None
        return caller_day

    async def _refresh_if_stale(self, name: _CallerKey) -> None:
        found = self._caller_days.get(name)
        if found is None:  # whoever waited with us may have been made to meet it again, or room was made
            return
        refresh = found[1]
        if self._clock.monotonic() >= refresh.stale_at and not (
            refresh.refresh_done is not None and refresh.is_refresh_slow
        ):
            await self.refresher.refresh(refresh).wait()

    def _get_or_add(self, caller: Caller) -> tuple[CallerDay, RefreshState]:
        """If it is not there, or is there no more, one for the time being that goes by what was known before."""
        name = (caller.org, caller.app)
        if not self._is_loaded(name):
            self._add_offline(caller)
        if name not in self._caller_days:
            if self.unknown_orgs.is_refused(caller.org):
                raise self.unknown_orgs.build_refusal(caller.org)
            raise Busy("what its budget is cannot be told while the store is away", retry_after=STORE_RETRY_SECONDS)
        return self._caller_days[name]

    def _is_loaded(self, name: _CallerKey) -> bool:
        found = self._caller_days.get(name)
        return found is not None and found[0].start <= self._clock.now() < found[0].end

    def _is_loaded_from_store(self, name: _CallerKey) -> bool:
        """And not by the defaults alone, which hold until the store can be asked again."""
        return self._is_loaded(name) and self._clock.monotonic() < self._caller_days[name][0].valid_until

    # For people.

    async def read_status(self, caller: Caller, *, forces_read: bool) -> tuple[BudgetState, Override | None]:
        """How the caller's scope stands, and the override that is in force. `is_forced` looks at the store now; if it
        does not answer soon, the standing is stale, and says so. Of an org that is refused, no label serves."""
        caller_day = None if forces_read else self.cached(caller)
        if forces_read:
            self.unknown_orgs.forget(caller.org)
        try:
            caller_day = caller_day or await self.load(caller)
        except UnknownOrg:
            settings = self.refresher.reader.resolve_settings()
            period = find_span(settings.period, self._clock.now(), settings.zone)
            return BudgetState(find_budget_scope(caller, settings), period, settings, {}, dict), None
        _, refresh = self._get_or_add(caller)
        if forces_read:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                    if refresh.refresh_done is not None:  # one that began before now may have read what is old
                        await refresh.refresh_done.wait()
                    refresh.expire()
                    await self.refresher.refresh(refresh).wait()
        return refresh.budget, refresh.override

    def note_spend_elsewhere(self, counter: Counter) -> None:
        """Somebody wrote to it without this process's recorder, so what is known of it is too low."""
        refresh = self._refresh_states.get((counter.scope, counter.period))
        if refresh is not None:
            self.refresher.refresh_soon(refresh)
        self.on_spent_elsewhere(counter)

    # What the recorder tells.

    def on_sending(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.add_sent(pico)

    def on_not_stored(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.remove_sent(pico)

    def on_acknowledged(self, counter: Counter, pico: int) -> None:
        for tracker in self._find_trackers(counter):
            tracker.add_acknowledged(pico)
        refresh = self._refresh_states.get((counter.scope, counter.period))
        if refresh is not None and refresh.has_spend:
            self.snapshot.mark_changed(refresh)

    def _find_trackers(self, counter: Counter) -> tuple[SpendTracker, ...]:
        refresh = self._refresh_states.get((counter.scope, counter.period))
        return () if refresh is None else refresh.budget.find_trackers(counter.label)

    # Meeting somebody for the first time in a period.

    def _start_loading(self, caller: Caller) -> asyncio.Event:
        name = (caller.org, caller.app)
        done = self._loading.get(name)
        if done is None:
            done = self._loading[name] = asyncio.Event()
            self._tasks.spawn(self._load(caller, done))
        return done

    async def _load(self, caller: Caller, done: asyncio.Event) -> None:
        name = (caller.org, caller.app)
        try:
            settings, is_registered = await self.refresher.reader.read_settings(Scope(caller.org, caller.app))
            if is_registered:
                self.unknown_orgs.forget(caller.org)
            if is_registered or self._may_serve_unregistered(caller.org):
                self._add(caller, settings, is_read=True, is_registered=is_registered)
        except Exception as failure:  # of whatever kind: the call must find somebody who pays
            _log.warning(
                "the settings of %s cannot be read; those known before hold: %s", caller.org, type(failure).__name__
            )
            await self._reread_snapshot(caller)
            self._add_offline(caller)
        finally:
            del self._loading[name]
            done.set()

    async def _reread_snapshot(self, caller: Caller) -> None:
        """It may be new to this process alone."""
        is_new = (caller.org, caller.app) not in self._caller_days
        if (
            self.reread_snapshot is not None
            and is_new
            and not self.snapshot.has_settings(Scope(caller.org, caller.app))
        ):
            await self.reread_snapshot()

    def _add_offline(self, caller: Caller) -> None:
        """By what held in the period before, or by what is noted, or else by the defaults; unless nobody is to be
        served by anything but what this process has read."""
        last = self._caller_days.get((caller.org, caller.app))
        if last is not None:
            self._add(caller, last[0].budget.settings, is_read=False, is_registered=False)
        elif not self._refuses_unread and not self.unknown_orgs.is_refused(caller.org):
            snapshot_settings = self.refresher.reader.resolve_snapshot_settings(Scope(caller.org, caller.app))
            settings = snapshot_settings or self.refresher.reader.resolve_settings()
            self._add(caller, settings, is_read=False, is_registered=False)
            if snapshot_settings is None:
                self.unknown_orgs.note_served_offline(caller.org)
            else:
                budget = self._caller_days[caller.org, caller.app][0].budget
                budget.is_stale = True
                _log.warning("%s goes by what was noted when the store was last read", budget.scope.key)

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
        if len(self._caller_days) >= MAX_BUDGETS and (caller.org, caller.app) not in self._caller_days:
            del self._caller_days[next(iter(self._caller_days))]
        self._caller_days[caller.org, caller.app] = caller_day, refresh

    def _freeze_calendar(
        self, org: str, settings: EffectiveSettings, now: float, is_registered: bool
    ) -> tuple[EffectiveSettings, PeriodSpan]:
        """All apps of an org that somebody put go by one calendar, until its period is over."""
        frozen = self._frozen_calendars.get(org)
        if frozen is not None and frozen[1].covers(now):
            return settings.with_calendar_of(frozen[0]), frozen[1]
        period = find_span(settings.period, now, settings.zone)
        if is_registered:
            self._frozen_calendars[org] = settings, period
        return settings, period

    def _forget_org(self, org: str) -> None:
        """It was taken to have the defaults, and has a calendar of its own."""
        self._frozen_calendars.pop(org, None)
        for name in [name for name in self._caller_days if name[0] == org]:
            del self._caller_days[name]

    def _may_serve_unregistered(self, org: str) -> bool:
        """Whether an org that is not in the store is served. If not, nobody pays for it any more."""
        is_served = self.unknown_orgs.note_unregistered(org)
        if not is_served:
            self._forget_org(org)
        return is_served

    def _on_app_labels(self, scope: Scope, app_labels: AppProfiles) -> None:
        """A call named one of them, so they were read before the next look."""
        found = self._caller_days.get((scope.org, scope.app))
        if found is not None and found[1].budget.scope == scope:
            found[1].budget.apply_app_labels(app_labels)

    def _add_budget(
        self, scope: Scope, period: PeriodSpan, settings: EffectiveSettings, is_registered: bool
    ) -> RefreshState:
        self._evict()

        def sum_by_label(found: Mapping[Counter, int]) -> dict[str, int]:
            sums: dict[str, int] = {}
            for counter, pico in found.items():
                if counter.scope == scope.key and counter.period == period.key:
                    sums[counter.label] = sums.get(counter.label, 0) + pico
            return sums

        def read_unflushed() -> dict[str, tuple[int, int]]:
            in_doubt = sum_by_label(self._recorder.possibly_stored_by_counter())
            found = sum_by_label(self._recorder.unflushed_by_counter())
            return {label: (pico, in_doubt.get(label, 0)) for label, pico in found.items()}

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
        """What is over goes, and what nobody calls for where there is too much. What still has calls under way stays,
        or their end would be lost."""
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
        self._caller_days = {name: found for name, found in self._caller_days.items() if id(found[1]) in remaining}
        self._frozen_calendars = {org: found for org, found in self._frozen_calendars.items() if found[1].covers(now)}
