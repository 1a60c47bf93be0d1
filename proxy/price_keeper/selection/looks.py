"""What is asked of the store for a scope: its settings, its sticky state, and what is spent of its quotas."""

from __future__ import annotations

from decimal import Decimal
from typing import Final, cast

from price_keeper.budgets.budget_state import BudgetState
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.domain import Scope
from price_keeper.recording.aggregator import AS_OF_ATTRIBUTE, build_shard_keys, build_total_key, sum_items
from price_keeper.recording.entries import Counter
from price_keeper.recording.flush import COST_ATTRIBUTE, to_pico
from price_keeper.recording.recorder import Recorder
from price_keeper.selection.notes import BudgetSnapshot
from price_keeper.selection.plan import EffectiveSettings, resolve_settings
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Store

CLOCK_MARGIN_SECONDS: Final = 5.0  # by which the clocks of a fleet may differ


class BudgetReader:
    """Each raises StoreError."""

    def __init__(
        self, config: Config, store: Store, recorder: Recorder, clock: Clock, snapshot: BudgetSnapshot
    ) -> None:
        self._defaults = config.defaults
        self._thresholds = config.alerts.thresholds_pct
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._snapshot = snapshot

    def resolve_settings(self, org: Item | None = None, app: Item | None = None) -> EffectiveSettings:
        return resolve_settings(org, app, self._defaults, self._thresholds, self._clock.now())

    def resolve_snapshot_settings(self, scope: Scope) -> EffectiveSettings | None:
        """By what was read last; None where nothing was. Of an app that was never met only the org's calendar is known,
        unless the org has one budget for all."""
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
        """And whether anybody ever put the org. That nobody has is read consistently: a call may be refused for it."""
        org, *app = await self._store.get_many(_build_settings_keys(scope))
        if org is None:
            org, *app = await self._store.get_many(_build_settings_keys(scope), consistent=True)
        return self.resolve_settings(org, *app), org is not None

    async def read_settings_and_sticky(
        self, budget: BudgetState
    ) -> tuple[EffectiveSettings, bool, Item | None, Item | None]:
        """As `plan`, with the item of the sticky state and the app's own, if the scope is an app."""
        keys = [schema.sticky_state_key(budget.scope, budget.span.key), *_build_settings_keys(budget.scope)]
        item, org, *app = await self._store.get_many(keys, consistent=True)
        self._snapshot.record_settings(Scope(budget.scope.org), org)
        if app:
            self._snapshot.record_settings(budget.scope, *app)
        return self.resolve_settings(org, *app), org is not None, item, app[0] if app else None

    async def read_shards(self, budget: BudgetState) -> None:
        """All that was flushed: exact, unless something of ours is under way or of unknown outcome."""
        counters = _build_counters(budget)
        keys = [key for counter in counters for key in build_shard_keys(counter)]
        async with self._recorder.without_flush() as is_quiet:
            began = self._clock.monotonic()
            found = await self._store.get_many(keys, consistent=True)
            for number, counter in enumerate(counters):
                shards = found[number * counter.shards : (number + 1) * counter.shards]
                pico = to_pico(sum_items(item for item in shards if item is not None)[COST_ATTRIBUTE])
                tracker = budget.get_tracker(counter.label)
                if is_quiet and tracker.is_flush_certain:
                    tracker.apply_exact_sum(pico, began)
                else:
                    tracker.apply_lower_bound(pico)

    async def read_totals(self, budget: BudgetState) -> None:
        """A lower bound, some seconds old. `read_shards` takes its place where a total tells that somebody's clock is
        wrong: nobody knows how old it is."""
        counters = _build_counters(budget)
        for counter, item in zip(
            counters, await self._store.get_many(list(map(build_total_key, counters))), strict=True
        ):
            if item is None or AS_OF_ATTRIBUTE not in item:
                continue
            if float(cast(Decimal, item[AS_OF_ATTRIBUTE])) > self._clock.now() + CLOCK_MARGIN_SECONDS:
                await self.read_shards(budget)
                return
            budget.get_tracker(counter.label).apply_lower_bound(to_pico(sum_items([item])[COST_ATTRIBUTE]))


def _build_settings_keys(scope: Scope) -> list[Key]:
    org = schema.org_config_key(scope.org)
    return [org] if scope.app is None else [org, schema.app_config_key(scope.org, scope.app)]


def _build_counters(budget: BudgetState) -> list[Counter]:
    return [
        Counter(budget.scope.key, label, budget.span.key, budget.settings.shards) for label in budget.settings.quotas
    ]
