"""The settings of an org or an app, and what they come to, as a person and as a program reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from proxy.audit import plain
from proxy.calendar_days import span
from proxy.config.keys import Defaults
from proxy.model import PICO_PER_MICRO
from proxy.reporting import money
from proxy.selection.plan import THRESHOLDS, Plan, plan_of, turns_at
from proxy.selection.settings import APP_SETTINGS, ORG_SETTINGS
from proxy.stores.contract import Item

_WAITING = {"timezone": "time zone", "quota_scope": "quota_scope", "period": "period"}
_OF_THE_BUDGET = ("model_ordering", "quotas", "enforcement", "sticky_fallback_enabled")


@dataclass(frozen=True, slots=True)
class Shown:
    """An org, or an app of it with its own item."""

    org: str
    org_item: Item
    defaults: Defaults
    now: float
    app: str | None = None
    app_item: Item | None = None

    @property
    def plan(self) -> Plan:
        return plan_of(self.org_item, self.app_item, self.defaults, THRESHOLDS, self.now)

    @property
    def own(self) -> Item:
        return self.org_item if self.app is None else self.app_item or {}

    @property
    def name(self) -> str:
        return str(self.own.get("org_name" if self.app is None else "app_name") or self.app or self.org)

    @property
    def title(self) -> str:
        ids = self.org if self.app is None else f"{self.org} / {self.app}"
        return f"{self.name} ({ids})"

    @property
    def turns_at(self) -> float | None:
        return turns_at(self.org_item, self.now)

    def record(self) -> dict[str, Any]:
        """For programs. Credentials' hashes stand on the same item, and never here."""
        names = ORG_SETTINGS if self.app is None else APP_SETTINGS
        turn = self.turns_at
        return {
            "org": self.org,
            **({} if self.app is None else {"app": self.app}),
            "settings": {name: plain(self.own[name]) for name in names if name in self.own},
            "in_force": _in_force(self.plan),
            "turns_at": None if turn is None else utc(turn),
            "created_at": _stamp(self.own, "created_at_epoch"),
            "updated_at": _stamp(self.own, "updated_at_epoch"),
            "passed_over": list(self.plan.passed_over),
        }

    def lines(self) -> list[str]:
        plan = self.plan
        period = span(plan.period, self.now, plan.zone)
        rows = [
            ("time zone", plan.zone.key, ""),
            ("quotas apply to", "the org as a whole" if plan.quota_scope == "ORG" else "each app", ""),
            ("period", f"{plan.period.value}, this one until {local(period.end, plan.zone)}", ""),
            ("enforcement", plan.enforcement, "enforcement"),
            ("ordering", " > ".join(plan.ordering) or "none, so there is no budget", "model_ordering"),
            *(("quota of", f"{name}: {money.shown(quota)}", "quotas") for name, quota in plan.quotas.items()),
            ("fallback", _fallback(plan), "sticky_fallback_enabled"),
            ("tight from", f"{plan.tight_pct} % of a quota", "tight_mode_threshold_pct"),
            ("spend is read", f"at least every {plan.normal_secs:g} s", "refresh_interval_normal_secs"),
            ("and when tight", f"every {plan.tight_secs:g} s", "refresh_interval_tight_secs"),
            ("alerts at", ", ".join(f"{pct} %" for pct in plan.thresholds) or "none", "alert_thresholds_pct"),
            ("shards", str(plan.shards), ""),
        ]
        told = [f"  {head:16}{text}{self._whence(attribute)}" for head, text, attribute in rows]
        return [self.title, *told, *self._notes()]

    def _whence(self, attribute: str) -> str:
        """Of an app: whether a setting is its own."""
        if self.app is None or not attribute:
            return ""
        applies = attribute not in _OF_THE_BUDGET or self.plan.quota_scope == "APP"
        return "" if applies and attribute in self.own else "  (the org's)"

    def _notes(self) -> list[str]:
        notes = [f"Warning: {line}" for line in self.plan.passed_over]
        if self.app is not None and self.plan.quota_scope == "ORG" and set(_OF_THE_BUDGET) & self.own.keys():
            notes.append("Quotas apply to the org as a whole: this app's own ordering, quotas and enforcement wait.")
        turn = self.turns_at
        if turn is not None:
            coming = ", ".join(
                f"{title} {plain(self.org_item.get(name))}"
                for name, title in _WAITING.items()
                if self.org_item.get(name) != _settled(self.org_item).get(name)
            )
            notes.append(f"From {local(turn, self.plan.zone)} on: {coming}.")
        return ["", *notes] if notes else []


def _settled(org: Item) -> Mapping[str, Any]:
    settled = org.get("settled")
    return settled if isinstance(settled, Mapping) else {}


def _fallback(plan: Plan) -> str:
    return "sticky, until the period ends" if plan.is_sticky else "for each call anew"


def _in_force(plan: Plan) -> dict[str, Any]:
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


def utc(at_epoch: float) -> str:
    return datetime.fromtimestamp(at_epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def local(at_epoch: float, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_epoch, zone).strftime("%Y-%m-%d %H:%M %Z")
