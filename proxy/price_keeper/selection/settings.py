"""How the settings of an org or an app are checked, every mistake at once, and written.

    body -> checked -> one transaction: the item, if its version is still the one that was read, and the org's line
                       in the registry

A writer takes the place of all settings and leaves what is not a setting alone, credentials before all. Of writers at
once each reads what the one before it wrote. A change of zone, period or quota_scope waits for the org's next period.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias

from price_keeper.audit import Actor, select_attributes
from price_keeper.calendar_days import find_span
from price_keeper.clock import Clock
from price_keeper.config.keys import DefaultsConfig
from price_keeper.config.prices import PSEUDO_LABELS
from price_keeper.config.problems import did_you_mean, join_names, escape_line
from price_keeper.config.reader import RuleViolation
from price_keeper.errors import ConfigError
from price_keeper.limits.settings import validate_rate_limits as limits_checked
from price_keeper.model import Scope
from price_keeper.selection import plan as may_be
from price_keeper.selection.own_labels import read_label_names
from price_keeper.selection.plan import MAX_QUOTA_MICROS, PERIODS, QUOTA_SCOPES, resolve_settings, format_value, find_change_time
from price_keeper.stores import schema
from price_keeper.stores.again import transact_with_retry, retry_on_conflict
from price_keeper.stores.contract import (
    ConditionCheck,
    Condition,
    Item,
    ItemMissing,
    Key,
    AttributeMissing,
    Store,
    Update,
    Value,
    Write,
    equals,
)

MOST_LABELS = 32  # in an ordering
LONGEST_NAME = 128
TURN_LEAD_SECONDS = 150.0  # before a turn, in which every sidecar reads that it will come

_Read = Callable[[Any], Value]


class SettingsRefused(ConfigError):
    """Nothing was written. `mistakes` say where in the body each one is."""

    def __init__(self, mistakes: Sequence[RuleViolation]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__([told(*mistake) for mistake in mistakes])


def told(path: tuple[str, ...], complaint: str) -> str:
    return escape_line(f"{'.'.join(part[: may_be.MAX_SHOWN_CHARACTERS] for part in path)}: {complaint}" if path else complaint)


@dataclass(frozen=True, slots=True)
class Written:
    item: Item  # as it stands in the store now
    is_new: bool
    turns_at: float | None = None  # when a change of zone, period or quota_scope takes effect


class Change(NamedTuple):
    """Of one item, from what stood there to what will. `org` is what stands above an app."""

    before: Item | None
    after: Item
    org: Item | None = None


# What is written together with a change, or not at all. It may raise what keeps the change from being made.
Beside: TypeAlias = "Callable[[Change], Sequence[Write]]"


def _nothing(_: Change) -> Sequence[Write]:
    return ()


def audited(actor: Actor, action: str, scope: Scope, clock: Clock) -> Beside:
    """The record of the change: the settings before and after it, without the credentials on the same item."""
    names = ORG_SETTINGS if scope.app is None else APP_SETTINGS

    def beside(change: Change) -> Sequence[Write]:
        return [actor.build_record(action, scope, select_attributes(change.before, names), select_attributes(change.after, names), clock.now())]

    return beside


# What a body may say.


def _name(value: Any) -> str:
    is_text = isinstance(value, str) and value.isprintable() and value.strip() == value
    if not is_text or not 0 < len(value) <= LONGEST_NAME:
        raise ValueError(f"expected 1 to {LONGEST_NAME} printable characters, found {format_value(value)}")
    return str(value)


def _thresholds(value: Any) -> Value:
    return list(may_be.read_percents(value))


_EITHERS: Mapping[str, _Read] = {
    "sticky_fallback_enabled": may_be.read_bool,
    "tight_mode_threshold_pct": may_be.make_percent_reader(100),
    "refresh_interval_normal_secs": may_be.read_seconds,
    "refresh_interval_tight_secs": may_be.read_seconds,
    "enforcement": may_be.make_choice_reader(may_be.ENFORCEMENTS),
    "alert_thresholds_pct": _thresholds,
}
_ORGS: Mapping[str, _Read] = {
    "org_name": _name,
    "timezone": lambda value: may_be.read_zone(value).key,
    "quota_scope": may_be.make_choice_reader(QUOTA_SCOPES),
    "period": may_be.make_choice_reader(PERIODS),
    "agg_shard_count": may_be.read_shard_count,
    "limits": limits_checked,
    **_EITHERS,
}
_APPS: Mapping[str, _Read] = {"app_name": _name, "limits": limits_checked, **_EITHERS}
_BUDGET = ("model_ordering", "quotas")
ORG_SETTINGS = ("org_name", "timezone", "quota_scope", "period", *_BUDGET, *_EITHERS, "limits", "agg_shard_count")
APP_SETTINGS = ("app_name", *_BUDGET, *_EITHERS, "limits")
_REQUIRED_OF_ORG = ("org_name", "timezone", "quota_scope", *_BUDGET)
_TURNING = ("settled", "settled_until_epoch")

_BAD: Final = object()  # stands for a value whose mistake has been told


def checked_org(body: Any, labels: Sequence[str], before: Item | None, defaults: DefaultsConfig) -> dict[str, Value]:
    """The settings to be written, or SettingsRefused. `labels` are those of the configuration and pseudo-labels."""
    checking = _Checking(labels)
    found = checking.settings(body, _ORGS, ORG_SETTINGS, _REQUIRED_OF_ORG)
    checking.every_quota(found.get("model_ordering"), found.get("quotas"))
    fixed = _shards(before, defaults)
    if found.get("agg_shard_count", fixed) not in (fixed, _BAD) and before is not None:
        checking.add("agg_shard_count", f"fixed at {fixed} when the org was made")
    checking.done()
    return {"period": "day", "agg_shard_count": fixed, **found}


def checked_app(body: Any, labels: Sequence[str], org: Item, own: Sequence[str] = ()) -> dict[str, Value]:
    """`own` are the labels of the app's own, which have quotas where each app has a budget to itself."""
    is_shared = org.get("quota_scope") == "ORG"
    checking = _Checking(labels if is_shared else (*labels, *own), own if is_shared else ())
    found = checking.settings(body, _APPS, APP_SETTINGS, ("app_name",))
    if not found.keys().isdisjoint(_BUDGET):
        ordering, quotas = (found.get(name, org.get(name)) for name in _BUDGET)
        whose = "" if "model_ordering" in found else ", which is the org's,"
        checking.every_quota(ordering, {} if quotas is None else quotas, whose)
    checking.done()
    return found


def _shards(before: Item | None, defaults: DefaultsConfig) -> int:
    if before is None:
        return defaults.agg_shard_count
    return may_be.SettingsItem(before, "", []).read("agg_shard_count", may_be.read_shard_count) or defaults.agg_shard_count


class _Checking:
    """Goes over a body and gathers every mistake."""

    def __init__(self, labels: Sequence[str], without_quotas: Sequence[str] = ()) -> None:
        self._labels = (*dict.fromkeys(labels),)
        self._without_quotas = without_quotas
        self._mistakes: list[RuleViolation] = []

    def add(self, name: str, complaint: str, *below: str) -> Any:
        self._mistakes.append(((name, *below), complaint))
        return _BAD

    def done(self) -> None:
        if self._mistakes:
            raise SettingsRefused(self._mistakes)

    def settings(
        self, body: Any, reads: Mapping[str, _Read], allowed: Sequence[str], required: Sequence[str]
    ) -> dict[str, Any]:
        """What was given and not left empty; _BAD in the place of what cannot be taken."""
        if not isinstance(body, Mapping):
            raise SettingsRefused([((), f"expected a mapping of settings, found {format_value(body)}")])
        given = {str(name): value for name, value in body.items() if value is not None}
        for name in (name for name in given if name not in allowed):
            hint = did_you_mean(name, allowed) or f"allowed are {join_names(allowed)}"
            self.add(name, f"unknown setting; {hint}")
        for name in required:
            if name not in given:
                self.add(name, "required, but missing")
        own = {"model_ordering": self._ordering, "quotas": self._quotas}
        return {
            name: own[name](given[name]) if name in own else self._leaf(name, reads[name], given[name])
            for name in allowed
            if name in given
        } | self._tight_is_no_slower(given)

    def every_quota(self, ordering: Any, quotas: Any, whose: str = "") -> None:
        if isinstance(ordering, list) and isinstance(quotas, Mapping):
            lacking = [label for label in ordering if label not in quotas]
            if lacking:
                self.add("quotas", f"each label of the ordering{whose} has one; missing: {join_names(lacking)}")

    def _leaf(self, name: str, read: _Read, value: Any) -> Any:
        try:
            is_decimal = isinstance(value, float) and math.isfinite(value)  # as JSON has it; a store keeps no float
            return read(Decimal(repr(value)) if is_decimal else value)
        except ValueError as failure:
            return self.add(name, str(failure))

    def _tight_is_no_slower(self, given: Mapping[str, Any]) -> dict[str, Any]:
        normal, tight = (given.get(f"refresh_interval_{name}_secs") for name in ("normal", "tight"))
        numbers = (int, float, Decimal)
        if isinstance(normal, numbers) and isinstance(tight, numbers) and tight > normal:
            complaint = f"more than refresh_interval_normal_secs, which is {normal}"
            return {"refresh_interval_tight_secs": self.add("refresh_interval_tight_secs", complaint)}
        return {}

    def _ordering(self, value: Any) -> Any:
        if not isinstance(value, list) or not 0 < len(value) <= MOST_LABELS:
            found = f"{len(value)} of them" if isinstance(value, list) else format_value(value)
            return self.add("model_ordering", f"expected a list of 1 to {MOST_LABELS} labels, found {found}")
        before = len(self._mistakes)
        for index, label in enumerate(value):
            complaint = self._about(label)
            if complaint is None and label in PSEUDO_LABELS:
                complaint = f"no model, but what counts {PSEUDO_LABELS[label]}: give it a quota, and leave it out here"
            elif complaint is None and label in value[:index]:
                complaint = f'"{label}" is there already'
            if complaint is not None:
                self.add("model_ordering", complaint, str(index))
        return value if len(self._mistakes) == before else _BAD

    def _quotas(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return self.add("quotas", f"expected a mapping of labels to micro-USD, found {format_value(value)}")
        for label, micros in value.items():
            if (complaint := self._about(label)) is not None:
                self.add("quotas", complaint, str(label))
            elif not may_be.is_whole(micros, 0, MAX_QUOTA_MICROS):
                complaint = f"expected whole micro-USD (a dollar is 1000000) from 0 to {MAX_QUOTA_MICROS}"
                self.add("quotas", f"{complaint}, found {format_value(micros)}", str(label))
        return dict(value)

    def _about(self, label: Any) -> str | None:
        if label in self._labels:
            return None
        if label in self._without_quotas:
            why = "and all apps share one budget (quota_scope: ORG)"
            return f"{format_value(label)} is a label of the app's own, {why}"
        hint = did_you_mean(str(label), self._labels) or f"there are {join_names(self._labels)}"
        return f"there is no label {format_value(label)} in the configuration; {hint}"


# Writing.


async def put_org(
    store: Store,
    clock: Clock,
    org: str,
    body: Any,
    labels: Sequence[str],
    defaults: DefaultsConfig,
    beside: Beside = _nothing,
) -> Written:
    """Raises SettingsRefused, or what a store may raise. Safe to do again when it is not known whether it was done."""
    key = schema.org_config_key(org)

    async def once() -> Written:
        before, now = await store.get(key, consistent=True), clock.now()
        settings = checked_org(body, labels, before, defaults)
        settings |= _turn(before, settings, defaults, now)
        entry = Update(schema.org_entry_key(org), set={"org_name": settings["org_name"]})
        update, item = _update(key, before, settings, (*ORG_SETTINGS, *_TURNING), now)
        await transact_with_retry(store, clock, [update, entry, *beside(Change(before, item))])
        return Written(item, before is None, find_change_time(item, now))

    return await retry_on_conflict(clock, once)


async def put_app(
    store: Store, clock: Clock, org: str, app: str, body: Any, labels: Sequence[str], beside: Beside = _nothing
) -> Written:
    """As put_org. The org's settings, against which the app's are checked, stay as they are until these are written."""
    org_key, key = schema.org_config_key(org), schema.app_config_key(org, app)

    async def once() -> Written:
        above, before = await store.get_many([org_key, key], consistent=True)
        if above is None:
            raise SettingsRefused([((), f"there is no org {org}: put it first")])
        own = await read_label_names(store, Scope(org, app), before)
        settings = checked_app(body, labels, above, own)
        update, item = _update(key, before, settings, APP_SETTINGS, clock.now())
        await transact_with_retry(
            store, clock, [update, ConditionCheck(org_key, _unchanged(above)), *beside(Change(before, item, above))]
        )
        return Written(item, before is None)

    return await retry_on_conflict(clock, once)


def _update(
    key: Key, before: Item | None, settings: Mapping[str, Value], owned: Sequence[str], now: float
) -> tuple[Update, Item]:
    """The write, and the item as it stands after it."""
    version = (before or {}).get("version")
    kept = version if may_be.is_whole(version, 0, 10**15) and isinstance(version, int) else 0
    stamps: dict[str, Value] = {"version": kept + 1, "updated_at_epoch": int(now)}
    created: dict[str, Value] = {"created_at_epoch": int(now)}
    gone = tuple(name for name in owned if name not in settings)
    update = Update(key, set={**settings, **stamps}, set_if_missing=created, remove=gone, condition=_unchanged(before))
    left = {name: value for name, value in (before or {}).items() if name not in gone}
    return update, {**created, **left, **settings, **stamps}


def _unchanged(before: Item | None) -> Condition:
    if before is None:
        return ItemMissing()
    version = before.get("version")
    # One that was written by hand as a list or a mapping cannot be compared; the store says so.
    return AttributeMissing("version") if version is None else equals("version", version)  # type: ignore[arg-type]


def _turn(before: Item | None, settings: Mapping[str, Value], defaults: DefaultsConfig, now: float) -> dict[str, Value]:
    """What holds until the next period begins, where that is not what is wanted."""
    if before is None:
        return {}
    holds = resolve_settings(before, None, defaults, (), now)
    settled: dict[str, Value] = {
        "timezone": holds.zone.key,
        "quota_scope": holds.quota_scope,
        "period": holds.period.value,
    }
    waiting = find_change_time(before, now)
    _refuse_if_too_late(before, settings, settled, waiting, now)
    if all(settings[name] == value for name, value in settled.items()):
        return {}
    until = waiting if waiting is not None else find_span(holds.period, now + TURN_LEAD_SECONDS, holds.zone).end
    return {"settled": settled, "settled_until_epoch": int(until)}


def _refuse_if_too_late(
    before: Item, settings: Mapping[str, Value], settled: Mapping[str, Value], waiting: float | None, now: float
) -> None:
    """Some sidecars might read another change only after the turn, and for a whole period go by the one before it."""
    if waiting is None or now + TURN_LEAD_SECONDS <= waiting:
        return
    changed = [name for name in settled if settings[name] != before.get(name, settled[name])]
    wait = f"the change made before takes effect in {waiting - now:.0f} seconds; change this again after it"
    if changed:
        raise SettingsRefused([((name,), wait) for name in changed])
