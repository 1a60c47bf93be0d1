"""The settings of an org or an app, and what they come to, as a program reads them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from price_keeper.audit import to_json_value
from price_keeper.config.keys import DefaultsConfig
from price_keeper.model import PICO_PER_MICRO
from price_keeper.selection.plan import DEFAULT_ALERT_THRESHOLDS, EffectiveSettings, resolve_settings, find_change_time
from price_keeper.selection.settings import APP_SETTINGS, ORG_SETTINGS
from price_keeper.stores.contract import Item


@dataclass(frozen=True, slots=True)
class Shown:
    """An org, or an app of it with its own item."""

    org: str
    org_item: Item
    defaults: DefaultsConfig
    now: float
    app: str | None = None
    app_item: Item | None = None

    @property
    def plan(self) -> EffectiveSettings:
        return resolve_settings(self.org_item, self.app_item, self.defaults, DEFAULT_ALERT_THRESHOLDS, self.now)

    @property
    def own(self) -> Item:
        return self.org_item if self.app is None else self.app_item or {}

    @property
    def turns_at(self) -> float | None:
        return find_change_time(self.org_item, self.now)

    def record(self) -> dict[str, Any]:
        """For programs. Credentials' hashes stand on the same item, and never here."""
        names = ORG_SETTINGS if self.app is None else APP_SETTINGS
        turn = self.turns_at
        return {
            "org": self.org,
            **({} if self.app is None else {"app": self.app}),
            "settings": {name: to_json_value(self.own[name]) for name in names if name in self.own},
            "in_force": _in_force(self.plan),
            "turns_at": None if turn is None else utc(turn),
            "created_at": _stamp(self.own, "created_at_epoch"),
            "updated_at": _stamp(self.own, "updated_at_epoch"),
            "passed_over": list(self.plan.problems),
        }


def _in_force(plan: EffectiveSettings) -> dict[str, Any]:
    return {
        "timezone": plan.zone.key,
        "quota_scope": plan.quota_scope,
        "period": plan.period.value,
        "model_ordering": list(plan.ordering),
        "quotas": {label: pico // PICO_PER_MICRO for label, pico in plan.quotas.items()},
        "sticky_fallback_enabled": plan.is_sticky,
        "enforcement": plan.enforcement,
        "tight_mode_threshold_pct": plan.tight_pct,
        "refresh_interval_normal_secs": plan.normal_secs,
        "refresh_interval_tight_secs": plan.tight_secs,
        "alert_thresholds_pct": list(plan.thresholds),
        "agg_shard_count": plan.shards,
        "version": plan.version,
    }


def _stamp(item: Item, name: str) -> str | None:
    value = item.get(name)
    return utc(float(value)) if isinstance(value, (int, Decimal)) else None


@lru_cache(maxsize=64)  # the ends of periods are the same for nearly everybody
def utc(at_epoch: float) -> str:
    return datetime.fromtimestamp(at_epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
