"""The own and effective settings of an org or app, as the control API returns them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from price_keeper.auth.client_secrets import SECRET_HASH
from price_keeper.budgets.effective_settings import (
    DEFAULT_ALERT_THRESHOLDS,
    EffectiveSettings,
    find_change_time,
    resolve_settings,
)
from price_keeper.budgets.org_settings import APP_SETTINGS, ORG_SETTINGS
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.stores.audit_log import to_json_value
from price_keeper.stores.contract import Item


@dataclass(frozen=True, slots=True)
class SettingsReport:
    """The settings of an org, or of an app with its own item."""

    org: str
    org_item: Item
    defaults: DefaultsConfig
    now: float
    app: str | None = None
    app_item: Item | None = None

    @property
    def effective(self) -> EffectiveSettings:
        return resolve_settings(self.org_item, self.app_item, self.defaults, DEFAULT_ALERT_THRESHOLDS, self.now)

    @property
    def own_item(self) -> Item:
        return self.org_item if self.app is None else self.app_item or {}

    @property
    def changes_at(self) -> float | None:
        return find_change_time(self.org_item, self.now)

    def to_record(self) -> dict[str, Any]:
        """The JSON record. It never includes the hashes of credentials, which are on the same item."""
        names = ORG_SETTINGS if self.app is None else APP_SETTINGS
        changes_at = self.changes_at
        return {
            "org": self.org,
            **({} if self.app is None else {"app": self.app}),
            "settings": {name: to_json_value(self.own_item[name]) for name in names if name in self.own_item},
            "in_force": _build_in_force(self.effective),
            "turns_at": None if changes_at is None else format_utc(changes_at),
            "created_at": _format_stamp(self.own_item, "created_at_epoch"),
            "updated_at": _format_stamp(self.own_item, "updated_at_epoch"),
            "passed_over": list(self.effective.problems),
            "has_credentials": SECRET_HASH in self.own_item,
        }


def _build_in_force(settings: EffectiveSettings) -> dict[str, Any]:
    return {
        "timezone": settings.zone.key,
        "quota_scope": settings.quota_scope,
        "period": settings.period.value,
        "model_ordering": list(settings.ordering),
        "quotas": {label: pico // PICO_PER_MICRO for label, pico in settings.quotas.items()},
        "sticky_fallback_enabled": settings.is_sticky,
        "enforcement": settings.enforcement,
        "tight_mode_threshold_pct": settings.tight_pct,
        "refresh_interval_normal_secs": settings.normal_secs,
        "refresh_interval_tight_secs": settings.tight_secs,
        "alert_thresholds_pct": list(settings.thresholds),
        "agg_shard_count": settings.shards,
        "version": settings.version,
    }


def _format_stamp(item: Item, name: str) -> str | None:
    value = item.get(name)
    return format_utc(float(value)) if isinstance(value, (int, Decimal)) else None


@lru_cache(maxsize=64)  # nearly all orgs share the same period ends
def format_utc(at_epoch: float) -> str:
    return datetime.fromtimestamp(at_epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
