"""What is asked of the store for a scope: its settings, its sticky state, and what is spent of its quotas."""

from __future__ import annotations

from decimal import Decimal
from typing import Final, cast

from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.model import Scope
from price_keeper.recording.aggregator import STAMP, shard_keys, summed, total_key
from price_keeper.recording.entries import Counter
from price_keeper.recording.flush import COST, pico_of
from price_keeper.recording.recorder import Recorder
from price_keeper.selection.notes import Notes
from price_keeper.selection.plan import EffectiveSettings, resolve_settings
from price_keeper.selection.standing import BudgetState
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Key, Store

MARGIN_SECONDS: Final = 5.0  # by which the clocks of a fleet may differ


class Looks:
    """Each raises StoreError."""

    def __init__(self, config: Config, store: Store, recorder: Recorder, clock: Clock, notes: Notes) -> None:
        self._defaults = config.defaults
        self._thresholds = config.alerts.thresholds_pct
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._notes = notes

    def plan_of(self, org: Item | None = None, app: Item | None = None) -> EffectiveSettings:
        return resolve_settings(org, app, self._defaults, self._thresholds, self._clock.now())

    def noted_plan(self, scope: Scope) -> EffectiveSettings | None:
        """By what was read last; None where nothing was. Of an app that was never met only the org's calendar is known,
        unless the org has one budget for all."""
        org, app = self._notes.settings_of(Scope(scope.org)), self._notes.settings_of(scope)
        if org is None:
            return None
        plan = self.plan_of(org, None if scope.app is None else app)
        return self.plan_of().with_calendar_of(plan) if app is None and plan.quota_scope == "APP" else plan

    async def plan(self, scope: Scope) -> tuple[EffectiveSettings, bool]:
        """And whether anybody ever put the org. That nobody has is read consistently: a call may be refused for it."""
        org, *app = await self._store.get_many(_settings(scope))
        if org is None:
            org, *app = await self._store.get_many(_settings(scope), consistent=True)
        return self.plan_of(org, *app), org is not None

    async def settings_and_sticky(self, standing: BudgetState) -> tuple[EffectiveSettings, bool, Item | None, Item | None]:
        """As `plan`, with the item of the sticky state and the app's own, if the scope is an app."""
        keys = [schema.sticky_state_key(standing.scope, standing.span.key), *_settings(standing.scope)]
        item, org, *app = await self._store.get_many(keys, consistent=True)
        self._notes.settings(Scope(standing.scope.org), org)
        if app:
            self._notes.settings(standing.scope, *app)
        return self.plan_of(org, *app), org is not None, item, app[0] if app else None

    async def read_shards(self, standing: BudgetState) -> None:
        """All that was flushed: exact, unless something of ours is under way or of unknown outcome."""
        counters = _counters(standing)
        keys = [key for counter in counters for key in shard_keys(counter)]
        async with self._recorder.quiet() as is_quiet:
            began = self._clock.monotonic()
            found = await self._store.get_many(keys, consistent=True)
            for number, counter in enumerate(counters):
                shards = found[number * counter.shards : (number + 1) * counter.shards]
                pico = pico_of(summed(item for item in shards if item is not None)[COST])
                spent = standing.get_tracker(counter.label)
                if is_quiet and spent.is_flush_certain:
                    spent.apply_exact_sum(pico, began)
                else:
                    spent.apply_lower_bound(pico)

    async def read_totals(self, standing: BudgetState) -> None:
        """A lower bound, some seconds old. `read_shards` takes its place where a total tells that somebody's clock is
        wrong: nobody knows how old it is."""
        counters = _counters(standing)
        for counter, item in zip(counters, await self._store.get_many(list(map(total_key, counters))), strict=True):
            if item is None or STAMP not in item:
                continue
            if float(cast(Decimal, item[STAMP])) > self._clock.now() + MARGIN_SECONDS:
                await self.read_shards(standing)
                return
            standing.get_tracker(counter.label).apply_lower_bound(pico_of(summed([item])[COST]))


def _settings(scope: Scope) -> list[Key]:
    org = schema.org_config_key(scope.org)
    return [org] if scope.app is None else [org, schema.app_config_key(scope.org, scope.app)]


def _counters(standing: BudgetState) -> list[Counter]:
    return [
        Counter(standing.scope.key, label, standing.span.key, standing.settings.shards) for label in standing.settings.quotas
    ]
