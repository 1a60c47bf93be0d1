"""Refresh budget states from the store: settings, active label, override, spend. Concurrent callers share one read.

A failed read never changes a budget: the last known values hold, the budget is marked stale, and the read is repeated
soon. `BudgetRefresher` decides what to read and applies it, advances the active label, and raises alerts.
`BudgetReader` does the reading; each of its methods raises StoreError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from decimal import Decimal
from typing import Final, cast

from price_keeper.alerts.alert import crossed_thresholds
from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.budgets import active_label, app_label_cache
from price_keeper.budgets.active_label import Override, parse_override
from price_keeper.budgets.app_label_cache import AppLabelCache
from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.budgets.budget_state import MIN_REFRESH_SECONDS, NEVER, BudgetState, RefreshState
from price_keeper.budgets.effective_settings import EffectiveSettings, resolve_settings
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed
from price_keeper.ledger.aggregator import AS_OF_ATTRIBUTE, build_shard_keys, build_total_key, sum_items
from price_keeper.ledger.counter_writes import COST_ATTRIBUTE, to_pico
from price_keeper.ledger.flusher import Flusher
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.single_flight import SingleFlight
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.logs import log_read_failure, store_reads
from price_keeper.telemetry.metrics import MetricsRegistry

STORE_RETRY_SECONDS = 3.0  # while the store does not answer
SETTINGS_REFRESH_SECONDS = 60.0  # so that a change of quotas, or an override, takes effect soon
# of the refresh interval: a call this long after its end waits for the read, as the known spend is old
GRACE_SHARE = 0.1
CLOCK_MARGIN_SECONDS: Final = 5.0  # by which the clocks of a fleet may differ

_log = logging.getLogger("price_keeper.selection")


class BudgetRefresher:
    """Keeps budget states up to date, with at most one read of each at a time. `on_new_calendar` is called with an org
    whose calendar differs from the one in use, `on_unregistered` with an org that is not registered."""

    def __init__(
        self,
        config: Config,
        store: Store,
        flusher: Flusher,
        clock: Clock,
        tasks: Tasks,
        alerts: AlertRaiser | None,
        on_new_calendar: Callable[[str], None],
        on_unregistered: Callable[[str], object],
        app_labels: AppLabelCache,
        snapshot: BudgetSnapshot,
    ) -> None:
        self.reader = BudgetReader(config, store, flusher, clock, snapshot)
        self.snapshot = snapshot
        self._aggregator_seconds = config.aggregator.interval_secs
        self._store = store
        self._flusher = flusher
        self._clock = clock
        self._tasks = tasks
        self._alerts = alerts
        self._on_new_calendar = on_new_calendar
        self._on_unregistered = on_unregistered
        self._reads = SingleFlight[RefreshState, None]()
        self._app_labels = app_labels
        self.refreshes = self.failures = self.active_label_moves = 0

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(
            metrics.BUDGET_LOOKS,
            lambda: [({"failed": "false"}, self.refreshes - self.failures), ({"failed": "true"}, self.failures)],
        )
        telemetry.add(metrics.BUDGET_MOVES, lambda: self.active_label_moves)

    def refresh_soon(self, refresh: RefreshState, *, is_report: bool = False) -> None:
        """More was spent than expected: read as soon as MIN_REFRESH_SECONDS allow."""
        refresh.due_at = refresh.spend_due_at = min(refresh.spend_due_at, refresh.spend_read_at + MIN_REFRESH_SECONDS)
        wait = refresh.due_at - self._clock.monotonic()
        if wait <= 0 and refresh not in self._reads:
            self.refresh(refresh, is_report=is_report)
        else:  # a later call may never come, and alerts are due all the same
            self._tasks.spawn(self._refresh_after(wait, refresh, is_report))

    async def _refresh_after(self, wait: float, refresh: RefreshState, is_report: bool) -> None:
        await self._clock.sleep(wait)
        await self.wait(refresh)  # a read may have begun before spend was due, and read settings only
        if self._clock.monotonic() >= refresh.due_at:
            self.refresh(refresh, is_report=is_report)

    def end_override_if_over(self, refresh: RefreshState, now: float) -> None:
        """End the override when its time is over. Call it before each use of the budget: no read may come to say so."""
        if now < refresh.override_ends_at:
            return
        self._log_override(refresh, None)
        refresh.override, refresh.override_ends_at, refresh.due_at = None, NEVER, -NEVER
        refresh.budget.apply_settings(refresh.budget.settings, refresh.sticky_index)

    def restore(self, refresh: RefreshState) -> None:
        """Apply the snapshot's record of the budget, which holds until the first read."""
        budget = refresh.budget
        record = self.snapshot.find_budget(budget.scope, budget.span.key)
        if record is None:
            return
        for label in record.spent.keys() & budget.settings.quotas.keys():
            budget.get_tracker(label).restore(*record.spent[label], is_own=record.is_own)
        self._apply_settings(refresh, budget.settings, refresh.is_registered, record.sticky_item)
        refresh.has_spend = True

    def is_reading(self, refresh: RefreshState) -> bool:
        return refresh in self._reads

    def refresh(self, refresh: RefreshState, *, is_report: bool = False) -> None:
        """Start a read in the background, unless one is in progress. `is_report`: for a report, not for a call."""
        if refresh not in self._reads:
            refresh.is_refresh_slow = False
            self._reads.start(refresh, lambda: self._refresh(refresh, is_report))

    async def refresh_now(self, refresh: RefreshState, *, is_report: bool = False) -> None:
        """Return when a read that is in progress, or a new one, has ended."""
        self.refresh(refresh, is_report=is_report)
        await self.wait(refresh)

    async def wait(self, refresh: RefreshState) -> None:
        """Return when the read in progress has ended; at once if there is none."""
        await self._reads.wait(refresh)

    async def _refresh(self, refresh: RefreshState, is_report: bool) -> None:
        self.refreshes += 1
        refresh.due_at = self._clock.monotonic() + STORE_RETRY_SECONDS
        try:
            has_spend = await self._read_store(refresh, is_report)
        except Exception as failure:  # whatever the failure, the next call needs a budget
            self._on_failure(refresh, failure)
            return
        refresh.budget.is_stale = False
        store_reads.end("settings and budgets are read from the store again")
        if has_spend:  # callers do not wait for alerts
            self._tasks.spawn(self._raise_alerts(refresh.budget))

    def _on_failure(self, refresh: RefreshState, failure: Exception) -> None:
        self.failures += 1
        budget = refresh.budget
        if not budget.is_stale:
            log_read_failure(_log, f"the budget of {budget.scope.key}", "the last known values apply", failure)
        budget.is_stale = True
        refresh.stale_at = refresh.report_stale_at = NEVER  # neither waits for a store that does not answer

    async def _read_store(self, refresh: RefreshState, is_report: bool) -> bool:
        """Whether spend was read, and not only the settings. After a report's read, a call still waits for one of its
        own if what it would have decided by was too old."""
        budget, moment, sticky_before = refresh.budget, self._clock.monotonic(), refresh.sticky_item
        is_stale, has_spend = moment >= refresh.spend_stale_at, moment >= refresh.spend_due_at
        refresh.sticky_read_at = moment
        settings, is_registered, item, app = await self.reader.read_settings_and_sticky(budget)
        if not is_registered:
            self._on_unregistered(budget.scope.org)
        await self._refresh_app_labels(budget, app, moment)
        has_new_labels = settings.quotas.keys() != budget.settings.quotas.keys()
        self._apply_settings(refresh, settings, is_registered, item)
        if has_spend or has_new_labels or (is_stale and not is_report):
            has_spend = True
            reads_shards = has_new_labels or moment - refresh.spend_read_at < self._aggregator_seconds
            if not is_report:
                reads_shards = reads_shards or is_stale or budget.is_stale or budget.is_nearly_spent
            calendar = budget.settings.calendar
            await self._read_spend(budget, reads_shards, is_report)
            # the calendar changed during the read; there may be more shards than were read
            if budget.settings.calendar != calendar:
                return False
            self._schedule_next(refresh, moment)
            await self._move_active_label(refresh, item)
        if refresh.has_spend:
            self.snapshot.mark_changed(refresh, is_urgent=refresh.sticky_item != sticky_before)
        refresh.report_stale_at = refresh.spend_due_at + refresh.grace_seconds
        if not (is_report and is_stale):
            refresh.spend_stale_at = refresh.report_stale_at
        refresh.stale_at = refresh.spend_stale_at
        refresh.due_at = min(refresh.spend_due_at, moment + SETTINGS_REFRESH_SECONDS)
        if budget.app_labels.by_name:  # their prices decide what calls cost, so no call uses outdated ones
            refresh.stale_at, refresh.due_at = (
                min(refresh.stale_at, moment + app_label_cache.STALE_SECONDS),
                min(refresh.due_at, moment + app_label_cache.REFRESH_SECONDS),
            )
        if budget.is_tight:
            self._flusher.request_flush()
        return has_spend

    async def _read_spend(self, budget: BudgetState, reads_shards: bool, is_report: bool) -> None:
        """Read shards, or totals where they are enough. For a report they are, whatever their age, unless a quota is
        nearly spent: whether it is spent depends on the rest. What is spent by totals is certainly spent."""
        reads_shards = reads_shards or (is_report and budget.is_tight)
        if not reads_shards:
            has_known_age = await self.reader.read_totals(budget)
            reads_shards = budget.is_tight if is_report else not has_known_age
        if reads_shards:
            await self.reader.read_shards(budget)

    def _schedule_next(self, refresh: RefreshState, moment: float) -> None:
        wait = refresh.budget.schedule_refresh(moment)
        refresh.spend_read_at, refresh.spend_due_at, refresh.has_spend = moment, moment + wait, True
        refresh.grace_seconds = max(MIN_REFRESH_SECONDS, wait * GRACE_SHARE)

    def _apply_settings(
        self, refresh: RefreshState, settings: EffectiveSettings, is_registered: bool, item: Item | None
    ) -> None:
        budget = refresh.budget
        self._warn_of_problems(refresh, settings)
        self._apply_override(refresh, item)
        refresh.sticky_item = item
        refresh.sticky_index = active_label.find_active_index(item, settings) if settings.is_sticky else 0
        active, override = refresh.sticky_index, refresh.override
        if override is not None and override.label in settings.ordering:
            active = settings.ordering.index(override.label)  # while the override is in force
        if is_registered and not refresh.is_registered and settings.calendar != budget.settings.calendar:
            self._on_new_calendar(budget.scope.org)
        refresh.is_registered |= is_registered
        budget.apply_settings(settings, active)

    def apply_sticky_item(self, refresh: RefreshState, item: Item | None) -> None:
        """Apply the item of the sticky state as it was read alone."""
        if item != refresh.sticky_item:
            self._apply_settings(refresh, refresh.budget.settings, refresh.is_registered, item)
            if refresh.has_spend:
                self.snapshot.mark_changed(refresh, is_urgent=True)

    async def _refresh_app_labels(self, budget: BudgetState, app: Item | None, moment: float) -> None:
        if budget.scope.app is not None:  # apps that share a budget may use one name for different labels
            await self._app_labels.refresh(budget.scope, app, moment)
            budget.apply_app_labels(self._app_labels.last_read(budget.scope))

    def _apply_override(self, refresh: RefreshState, item: Item | None) -> None:
        override = parse_override(item, self._clock.now())
        if override != refresh.override and refresh.has_spend:  # what the first read finds is no change
            self._log_override(refresh, override)
        refresh.override = override
        refresh.override_ends_at = NEVER if override is None else override.until

    def _log_override(self, refresh: RefreshState, override: Override | None) -> None:
        scope, period = refresh.budget.scope.key, refresh.budget.span.key
        if override is not None:
            label, who, why = override.label, override.who, override.reason
            _log.info("override set: scope=%s period=%s label=%s who=%r why=%r", scope, period, label, who, why)
        elif self._clock.now() >= refresh.override_ends_at:
            _log.info("override expired: scope=%s period=%s; the quotas decide again", scope, period)
        else:
            _log.info("override cleared: scope=%s period=%s; the quotas decide again", scope, period)

    def _warn_of_problems(self, refresh: RefreshState, settings: EffectiveSettings) -> None:
        if settings.problems != refresh.warned_problems:
            refresh.warned_problems = settings.problems
            for problem in settings.problems:
                _log.warning(
                    "a setting of %s is unusable: %s; correct it with `price-keeper app put` or `org put`",
                    refresh.budget.scope.key,
                    problem,
                )

    async def _move_active_label(self, refresh: RefreshState, item: Item | None) -> None:
        """Advance the active label for the whole fleet if its quota is spent. One process wins the conditional write;
        the others adopt the item that it wrote."""
        budget, settings = refresh.budget, refresh.budget.settings
        index_before = active_label.find_active_index(item, settings)
        index = None if active_label.has_newer_ordering(item, settings) else budget.find_next_active(index_before)
        if index is None:
            return
        write = active_label.build_move(index, index_before, budget.scope, budget.span, settings, self._clock.now())
        try:
            item = await self._store.update(write)
        except ConditionFailed as failure:
            item = failure.item
        else:
            self.active_label_moves += 1
            _log.info(
                "active label advanced: scope=%s period=%s label=%s before=%s; the quota before it is spent",
                budget.scope.key,
                budget.span.key,
                settings.ordering[index],
                settings.ordering[index_before],
            )
        self._apply_settings(refresh, settings, refresh.is_registered, item)

    async def _raise_alerts(self, budget: BudgetState) -> None:
        if self._alerts is None:
            return
        for label, quota in budget.settings.quotas.items():
            spent = budget.get_tracker(label).spent
            for pct in crossed_thresholds(spent, quota, budget.settings.thresholds):
                await self._alerts.raise_alert(budget.scope, label, budget.span, pct, spent, quota)


class BudgetReader:
    """Reads settings, sticky state and spend. Each coroutine raises StoreError."""

    def __init__(self, config: Config, store: Store, flusher: Flusher, clock: Clock, snapshot: BudgetSnapshot) -> None:
        self._defaults = config.defaults
        self._thresholds = config.alerts.thresholds_pct
        self._store = store
        self._flusher = flusher
        self._clock = clock
        self._snapshot = snapshot

    def resolve_settings(self, org: Item | None = None, app: Item | None = None) -> EffectiveSettings:
        return resolve_settings(org, app, self._defaults, self._thresholds, self._clock.now())

    def resolve_snapshot_settings(self, scope: Scope) -> EffectiveSettings | None:
        """The settings that were read last, from the snapshot; None if it has none. Of an app that was never read only
        the org's calendar is known, unless the org has one budget for all apps."""
        org, app = self._snapshot.find_settings(Scope(scope.org)), self._snapshot.find_settings(scope)
        if org is None:
            return None
        settings = self.resolve_settings(org, None if scope.app is None else app)
        return (
            self.resolve_settings().with_calendar_of(settings)
            if app is None and settings.quota_scope == "APP"
            else settings
        )

    async def read_settings(self, scope: Scope) -> tuple[EffectiveSettings, bool]:
        """The settings, and whether the org is registered. If it is not found, it is read consistently before that is
        believed: a call may be refused for it."""
        org, *app = await self._store.get_many(_build_settings_keys(scope))
        if org is None:
            org, *app = await self._read_consistently(scope)
        return self.resolve_settings(org, *app), org is not None

    async def read_settings_and_sticky(
        self, budget: BudgetState
    ) -> tuple[EffectiveSettings, bool, Item | None, Item | None]:
        """Like `read_settings`, with the item of the sticky state, and the app's item if the scope is an app."""
        sticky_key = schema.sticky_state_key(budget.scope, budget.span.key)
        item, org, *app = await self._read_consistently(budget.scope, sticky_key)
        return self.resolve_settings(org, *app), org is not None, item, app[0] if app else None

    async def _read_consistently(self, scope: Scope, *first: Key) -> list[Item | None]:
        """The items of `first`, and then those of `_build_settings_keys`, which go into the snapshot."""
        read_number = self._snapshot.start_read()
        items = await self._store.get_many([*first, *_build_settings_keys(scope)], consistent=True)
        org, *app = items[len(first) :]
        self._snapshot.record_settings(Scope(scope.org), org, read_number)
        if app:
            self._snapshot.record_settings(scope, app[0], read_number)
        return items

    async def read_shards(self, budget: BudgetState) -> None:
        """Read all that was flushed: exact, unless a flush of this process is in progress or in doubt."""
        counters = _build_counters(budget)
        keys = [key for counter in counters for key in build_shard_keys(counter)]
        async with self._flusher.without_flush() as is_quiet:
            began = self._clock.monotonic()
            marks = [budget.get_tracker(counter.label).flush_mark for counter in counters]
            items = await self._store.get_many(keys, consistent=True)
            for number, counter in enumerate(counters):
                shards = items[number * counter.shards : (number + 1) * counter.shards]
                pico = to_pico(sum_items(item for item in shards if item is not None)[COST_ATTRIBUTE])
                tracker = budget.get_tracker(counter.label)
                # Usage that is submitted does not wait for readers.
                if is_quiet and marks[number] is not None and tracker.flush_mark == marks[number]:
                    tracker.apply_exact_sum(pico, began)
                else:
                    tracker.apply_lower_bound(pico)

    async def read_totals(self, budget: BudgetState) -> bool:
        """Read the totals: a lower bound, some seconds old. False if a total's time is in the future: some clock is
        wrong, and its age is unknown."""
        counters, has_known_age = _build_counters(budget), True
        for counter, item in zip(
            counters, await self._store.get_many(list(map(build_total_key, counters))), strict=True
        ):
            if item is None or AS_OF_ATTRIBUTE not in item:
                continue
            if float(cast(Decimal, item[AS_OF_ATTRIBUTE])) > self._clock.now() + CLOCK_MARGIN_SECONDS:
                has_known_age = False
            budget.get_tracker(counter.label).apply_lower_bound(to_pico(sum_items([item])[COST_ATTRIBUTE]))
        return has_known_age


def _build_settings_keys(scope: Scope) -> list[Key]:
    org = schema.org_config_key(scope.org)
    return [org] if scope.app is None else [org, schema.app_config_key(scope.org, scope.app)]


def _build_counters(budget: BudgetState) -> list[Counter]:
    return [
        Counter(budget.scope.key, label, budget.span.key, budget.settings.shards) for label in budget.settings.quotas
    ]
