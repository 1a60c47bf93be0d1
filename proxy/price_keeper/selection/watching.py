"""Looks at the store for a standing as often as it is needed, and once for all who wait for it.

Whatever goes wrong with a look, what is known stays in force and is marked stale, and the next look comes soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from price_keeper import telemetry as metrics
from price_keeper.alerts.raising import AlertRaiser
from price_keeper.alerts.thresholds import crossed_thresholds
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.errors import ConditionFailed, StoreError
from price_keeper.recording.recorder import Recorder
from price_keeper.selection import own_labels as own
from price_keeper.selection import sticky
from price_keeper.selection.alertness import MIN_REFRESH_SECONDS
from price_keeper.selection.looks import Looks
from price_keeper.selection.notes import Notes
from price_keeper.selection.overrides import override_of
from price_keeper.selection.own_labels import OwnLabels
from price_keeper.selection.plan import EffectiveSettings
from price_keeper.selection.spent import NEVER
from price_keeper.selection.standing import BudgetState
from price_keeper.selection.watch import RefreshState
from price_keeper.stores.contract import Item, Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import MetricsRegistry

ASK_AGAIN_SECONDS = 3.0  # while the store is away
SETTINGS_SECONDS = 60.0  # so that a change of quotas, or an override, is seen soon
GRACE = 0.1  # of the interval: whoever calls that long after it is over waits, as what is known is old

_log = logging.getLogger("price_keeper.selection")


class Watching:
    """`on_new_calendar` hears of an org whose days turn out to be others than was thought,
    `on_unregistered` of one that nobody has registered."""

    def __init__(
        self,
        config: Config,
        store: Store,
        recorder: Recorder,
        clock: Clock,
        tasks: Tasks,
        alerts: AlertRaiser | None,
        on_new_calendar: Callable[[str], None],
        on_unregistered: Callable[[str], object],
        own_labels: OwnLabels,
        notes: Notes,
    ) -> None:
        self.looks = Looks(config, store, recorder, clock, notes)
        self.notes = notes
        self._aggregator_seconds = config.aggregator.interval_secs
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._tasks = tasks
        self._alerts = alerts
        self._on_new_calendar = on_new_calendar
        self._on_unregistered = on_unregistered
        self._own_labels = own_labels
        self.looked = self.failures = self.moves = 0

    def add_to(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(
            metrics.BUDGET_LOOKS,
            lambda: [({"failed": "false"}, self.looked - self.failures), ({"failed": "true"}, self.failures)],
        )
        telemetry.add(metrics.BUDGET_MOVES, lambda: self.moves)

    def alarmed(self, watch: RefreshState) -> None:
        """More was spent than anybody thought."""
        watch.due_at = watch.spend_due_at = min(watch.spend_due_at, watch.spend_read_at + MIN_REFRESH_SECONDS)
        wait = watch.due_at - self._clock.monotonic()
        if wait <= 0 and watch.looking is None:
            self.look(watch)
        else:  # perhaps nobody calls any more, and the alerts are due all the same
            self._tasks.spawn(self._look_after(wait, watch))

    async def _look_after(self, wait: float, watch: RefreshState) -> None:
        await self._clock.sleep(wait)
        if watch.looking is not None:  # it may have begun before money was due, and read the settings alone
            await watch.looking.wait()
        if self._clock.monotonic() >= watch.due_at:
            self.look(watch)

    def override_is_over(self, watch: RefreshState) -> None:
        """By its own time, whether or not the store can be asked."""
        watch.override, watch.override_ends_at, watch.due_at = None, NEVER, -NEVER
        watch.budget.apply_settings(watch.budget.settings, watch.sticky_index)

    def recall(self, watch: RefreshState) -> None:
        """What was noted of it, until it is looked at."""
        standing = watch.budget
        stood = self.notes.stood(standing.scope, standing.span.key)
        if stood is None:
            return
        for label in stood.spent.keys() & standing.settings.quotas.keys():
            standing.get_tracker(label).restore(*stood.spent[label], is_own=stood.is_ours)
        self._take_settings(watch, standing.settings, watch.is_registered, stood.state)
        watch.has_spend = True

    def look(self, watch: RefreshState) -> asyncio.Event:
        if watch.refresh_done is None:
            watch.refresh_done, watch.is_refresh_slow = asyncio.Event(), False
            self._tasks.spawn(self._look(watch, watch.refresh_done))
        return watch.refresh_done

    async def _look(self, watch: RefreshState, over: asyncio.Event) -> None:
        self.looked += 1
        watch.due_at = self._clock.monotonic() + ASK_AGAIN_SECONDS
        has_money = False
        try:
            has_money = await self._read(watch)
            watch.budget.is_stale = False
        except Exception as failure:  # of whatever kind: the next call must find a standing
            self._failed(watch, failure)
        finally:
            watch.refresh_done = None
            over.set()
        if has_money:
            await self._raise_alerts(watch.budget)

    def _failed(self, watch: RefreshState, failure: Exception) -> None:
        self.failures += 1
        standing = watch.budget
        if not standing.is_stale:
            what = str(failure) if isinstance(failure, StoreError) else type(failure).__name__
            _log.warning("%s cannot be looked up, and what is known holds: %s", standing.scope.key, what)
        standing.is_stale = True
        watch.stale_at = NEVER  # nobody is to wait for a store that is away

    async def _read(self, watch: RefreshState) -> bool:
        """Whether money was looked at, and not only the settings."""
        standing, moment, state = watch.budget, self._clock.monotonic(), watch.sticky_item
        is_old, has_money = moment >= watch.spend_stale_at, moment >= watch.spend_due_at
        plan, is_settled, item, app = await self.looks.settings_and_sticky(standing)
        if not is_settled:
            self._on_unregistered(standing.scope.org)
        await self._take_own_labels(standing, app, moment)
        has_new_labels = plan.quotas.keys() != standing.settings.quotas.keys()
        self._take_settings(watch, plan, is_settled, item)
        if has_money or has_new_labels or is_old:
            has_money = True
            is_soon = moment - watch.spend_read_at < self._aggregator_seconds
            is_near = is_old or has_new_labels or is_soon or standing.is_stale or standing.is_nearly_spent
            calendar = standing.settings.calendar
            await (self.looks.read_shards if is_near else self.looks.read_totals)(standing)
            if standing.settings.calendar != calendar:  # and perhaps over more shards than were read
                return False
            self._took_money(watch, moment)
            await self._move(watch, item)
        if watch.has_spend:
            self.notes.stands(watch, is_soon=watch.sticky_item != state)
        watch.stale_at = watch.spend_stale_at = watch.spend_due_at + watch.grace_seconds
        watch.due_at = min(watch.spend_due_at, moment + SETTINGS_SECONDS)
        if standing.app_labels.by_name:  # their prices are money, so no call goes by older ones
            watch.stale_at, watch.due_at = min(watch.stale_at, moment + own.SECONDS), min(watch.due_at, moment + own.SOON_SECONDS)
        if standing.is_tight:
            self._recorder.hurry()
        return has_money

    def _took_money(self, watch: RefreshState, moment: float) -> None:
        wait = watch.budget.schedule_refresh(moment)
        watch.spend_read_at, watch.spend_due_at, watch.has_spend = moment, moment + wait, True
        watch.grace_seconds = max(MIN_REFRESH_SECONDS, wait * GRACE)

    def _take_settings(self, watch: RefreshState, plan: EffectiveSettings, is_settled: bool, item: Item | None) -> None:
        standing = watch.budget
        self._warn(watch, plan)
        self._take_override(watch, item)
        watch.sticky_item = item
        watch.sticky_index = sticky.index_of(item, plan) if plan.is_sticky else 0
        active, override = watch.sticky_index, watch.override
        if override is not None and override.label in plan.ordering:
            active = plan.ordering.index(override.label)  # for as long as it is in force
        if is_settled and not watch.is_registered and plan.calendar != standing.settings.calendar:
            self._on_new_calendar(standing.scope.org)
        watch.is_registered |= is_settled
        standing.apply_settings(plan, active)

    async def _take_own_labels(self, standing: BudgetState, app: Item | None, moment: float) -> None:
        if standing.scope.app is not None:  # or apps whose own labels have one name share a standing
            await self._own_labels.read(standing.scope, app, moment)
            standing.apply_app_labels(self._own_labels.so_far(standing.scope))

    def _take_override(self, watch: RefreshState, item: Item | None) -> None:
        override = override_of(item, self._clock.now())
        if override != watch.override:
            scope, period = watch.budget.scope.key, watch.budget.span.key
            label, who, why = ("none", "", "") if override is None else (override.label, override.who, override.reason)
            _log.warning("override changed: scope=%s period=%s label=%s who=%r why=%r", scope, period, label, who, why)
        watch.override = override
        watch.override_ends_at = NEVER if override is None else override.until

    def _warn(self, watch: RefreshState, plan: EffectiveSettings) -> None:
        if plan.problems != watch.warned_problems:
            watch.warned_problems = plan.problems
            for problem in plan.problems:
                _log.warning("%s: settings that cannot be used: %s", watch.budget.scope.key, problem)

    async def _move(self, watch: RefreshState, item: Item | None) -> None:
        """Whoever finds the active label spent says so for all; who comes too late follows."""
        standing, plan = watch.budget, watch.budget.settings
        before = sticky.index_of(item, plan)
        index = None if sticky.is_newer(item, plan) else standing.find_next_active(before)
        if index is None:
            return
        write = sticky.moved_to(index, before, standing.scope, standing.span, plan, self._clock.now())
        try:
            item = await self._store.update(write)
        except ConditionFailed as failure:
            item = failure.item
        else:
            self.moves += 1
            _log.warning(
                "active label moved on: scope=%s period=%s label=%s before=%s",
                standing.scope.key,
                standing.span.key,
                plan.ordering[index],
                plan.ordering[before],
            )
        self._take_settings(watch, plan, watch.is_registered, item)

    async def _raise_alerts(self, standing: BudgetState) -> None:
        if self._alerts is None:
            return
        for label, quota in standing.settings.quotas.items():
            known = standing.get_tracker(label).spent
            for pct in crossed_thresholds(known, quota, standing.settings.thresholds):
                await self._alerts.raise_alert(standing.scope, label, standing.span, pct, known, quota)
