"""Validate and write the settings of an org or app. All mistakes of a body are reported at once.

    body -> validated -> one transaction: the item, if its version is still the one that was read, and the
                         org's entry in the registry

A write replaces all settings and leaves other attributes of the item alone, credentials above all. Concurrent
writers are serialised by the version. A change of timezone, period or quota_scope takes effect with the org's next
period.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias

from price_keeper.budgets import effective_settings
from price_keeper.budgets.app_label_cache import read_label_names
from price_keeper.budgets.effective_settings import (
    MAX_QUOTA_MICROS,
    PERIODS,
    QUOTA_SCOPES,
    find_change_time,
    format_value,
    resolve_settings,
)
from price_keeper.clock import Clock
from price_keeper.config.config_problems import did_you_mean, escape_line, join_names
from price_keeper.config.config_reader import RuleViolation
from price_keeper.config.config_sections import PSEUDO_LABELS, DefaultsConfig
from price_keeper.domain import AMOUNT_FORMS, MAX_NAME_LENGTH, MICRO_PER_USD, Scope, parse_micros
from price_keeper.errors import ConfigError
from price_keeper.org_calendar import find_span
from price_keeper.rates.rate_limit_settings import validate_rate_limits
from price_keeper.stores import schema
from price_keeper.stores.audit_log import Actor, select_attributes
from price_keeper.stores.conflict_retry import retry_on_conflict, transact_with_retry
from price_keeper.stores.contract import (
    AttributeMissing,
    Condition,
    ConditionCheck,
    Item,
    ItemMissing,
    Key,
    Store,
    Update,
    Value,
    Write,
    equals,
)

MAX_ORDERING_LABELS = 32
# before a new period begins: the time in which every sidecar reads a change that takes effect then
CHANGE_LEAD_SECONDS = 150.0

_ValueReader = Callable[[Any], Value]


class InvalidSettings(ConfigError):
    """The settings were refused, and nothing was written. `mistakes` say where in the body each one is."""

    def __init__(self, mistakes: Sequence[RuleViolation]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__([format_mistake(*mistake) for mistake in mistakes])


def format_mistake(path: tuple[str, ...], complaint: str) -> str:
    return escape_line(
        f"{'.'.join(part[: effective_settings.MAX_SHOWN_CHARACTERS] for part in path)}: {complaint}"
        if path
        else complaint
    )


@dataclass(frozen=True, slots=True)
class SettingsWrite:
    """The result of a write."""

    item: Item  # as it is in the store now
    is_new: bool
    takes_effect_at: float | None = None  # when a change of zone, period or quota_scope takes effect


class SettingsChange(NamedTuple):
    """One item before and after the write. `org` is the org's item, for an app."""

    before: Item | None
    after: Item
    org: Item | None = None


# Writes that belong into the transaction of a change. The function may raise to prevent the change.
SettingsCompanions: TypeAlias = "Callable[[SettingsChange], Sequence[Write]]"


def _no_settings_companions(_: SettingsChange) -> Sequence[Write]:
    return ()


def audit_settings(actor: Actor, action: str, scope: Scope, clock: Clock) -> SettingsCompanions:
    """Writes the audit record of a change: the settings before and after it, without the credentials on the same
    item."""
    names = ORG_SETTINGS if scope.app is None else APP_SETTINGS

    def build_companions(change: SettingsChange) -> Sequence[Write]:
        return [
            actor.build_record(
                action,
                scope,
                select_attributes(change.before, names),
                select_attributes(change.after, names),
                clock.now(),
            )
        ]

    return build_companions


# Validation.


def _read_name(value: Any) -> str:
    is_text = isinstance(value, str) and value.isprintable() and value.strip() == value
    if not is_text or not 0 < len(value) <= MAX_NAME_LENGTH:
        raise ValueError(f"expected 1 to {MAX_NAME_LENGTH} printable characters, found {format_value(value)}")
    return str(value)


def _read_thresholds(value: Any) -> Value:
    return list(effective_settings.read_percents(value))


def read_quota(amount: Any) -> int:
    """The micro-USD of a quota as it is written: with a unit, or as a whole number of micro-USD. Raises ValueError."""
    try:
        micros = parse_micros(amount) if isinstance(amount, str) else amount
    except ValueError:
        micros = None
    if micros is None or not effective_settings.is_whole(micros, 0, MAX_QUOTA_MICROS):
        expected = f"expected an amount from 0 to {MAX_QUOTA_MICROS // MICRO_PER_USD} USD, such as {AMOUNT_FORMS}"
        raise ValueError(f"{expected}; found {format_value(amount)}")
    return int(micros)


_COMMON_READERS: Mapping[str, _ValueReader] = {
    "sticky_fallback_enabled": effective_settings.read_bool,
    "tight_mode_threshold_pct": effective_settings.make_percent_reader(100),
    "refresh_interval_normal_secs": effective_settings.read_seconds,
    "refresh_interval_tight_secs": effective_settings.read_seconds,
    "enforcement": effective_settings.make_choice_reader(effective_settings.ENFORCEMENTS),
    "alert_thresholds_pct": _read_thresholds,
}
_ORG_READERS: Mapping[str, _ValueReader] = {
    "org_name": _read_name,
    "timezone": lambda value: effective_settings.read_zone(value).key,
    "quota_scope": effective_settings.make_choice_reader(QUOTA_SCOPES),
    "period": effective_settings.make_choice_reader(PERIODS),
    "agg_shard_count": effective_settings.read_shard_count,
    "limits": validate_rate_limits,
    **_COMMON_READERS,
}
_APP_READERS: Mapping[str, _ValueReader] = {"app_name": _read_name, "limits": validate_rate_limits, **_COMMON_READERS}
_BUDGET_SETTINGS = ("model_ordering", "quotas")
ORG_SETTINGS = (
    "org_name",
    "timezone",
    "quota_scope",
    "period",
    *_BUDGET_SETTINGS,
    *_COMMON_READERS,
    "limits",
    "agg_shard_count",
)
APP_SETTINGS = ("app_name", *_BUDGET_SETTINGS, *_COMMON_READERS, "limits")
_REQUIRED_ORG_SETTINGS = ("org_name", "timezone", "quota_scope", *_BUDGET_SETTINGS)
_PENDING_CHANGE = ("settled", "settled_until_epoch")

_INVALID: Final = object()  # stands for a value whose mistake has been recorded


def validate_org(body: Any, labels: Sequence[str], before: Item | None, defaults: DefaultsConfig) -> dict[str, Value]:
    """The settings to be written. `labels` are those of the configuration, and pseudo-labels. Raises
    InvalidSettings."""
    validator = _Validator(labels)
    found = validator.validate(body, _ORG_READERS, ORG_SETTINGS, _REQUIRED_ORG_SETTINGS)
    shard_count = _find_shard_count(before, defaults)
    if found.get("agg_shard_count", shard_count) not in (shard_count, _INVALID) and before is not None:
        validator.add_mistake("agg_shard_count", f"fixed at {shard_count} when the org was made")
    validator.raise_mistakes()
    return {"period": "day", "agg_shard_count": shard_count, **found}


def validate_app(body: Any, labels: Sequence[str], org: Item, app_labels: Sequence[str] = ()) -> dict[str, Value]:
    """The app's settings to be written. `app_labels` are those that the app defined itself; they may have quotas only
    where each app has its own budget. Raises InvalidSettings."""
    is_shared = org.get("quota_scope") == "ORG"
    validator = _Validator(labels if is_shared else (*labels, *app_labels), app_labels if is_shared else ())
    found = validator.validate(body, _APP_READERS, APP_SETTINGS, ("app_name",))
    validator.raise_mistakes()
    return found


def _find_shard_count(before: Item | None, defaults: DefaultsConfig) -> int:
    if before is None:
        return defaults.agg_shard_count
    return (
        effective_settings.SettingsItem(before, "", []).read("agg_shard_count", effective_settings.read_shard_count)
        or defaults.agg_shard_count
    )


class _Validator:
    """Validates a body and collects every mistake."""

    def __init__(self, labels: Sequence[str], without_quotas: Sequence[str] = ()) -> None:
        self._labels = (*dict.fromkeys(labels),)
        self._without_quotas = without_quotas
        self._mistakes: list[RuleViolation] = []

    def add_mistake(self, name: str, complaint: str, *below: str) -> Any:
        self._mistakes.append(((name, *below), complaint))
        return _INVALID

    def raise_mistakes(self) -> None:
        if self._mistakes:
            raise InvalidSettings(self._mistakes)

    def validate(
        self, body: Any, reads: Mapping[str, _ValueReader], allowed: Sequence[str], required: Sequence[str]
    ) -> dict[str, Any]:
        """The values that were given and are not null; _INVALID stands for a value with a mistake."""
        if not isinstance(body, Mapping):
            raise InvalidSettings([((), f"expected a mapping of settings, found {format_value(body)}")])
        given = {str(name): value for name, value in body.items() if value is not None}
        for name in (name for name in given if name not in allowed):
            hint = did_you_mean(name, allowed) or f"allowed are {join_names(allowed)}"
            self.add_mistake(name, f"unknown setting; {hint}")
        for name in required:
            if name not in given:
                self.add_mistake(name, "required, but missing")
        validators = {"model_ordering": self._validate_ordering, "quotas": self._validate_quotas}
        return {
            name: validators[name](given[name])
            if name in validators
            else self._validate_value(name, reads[name], given[name])
            for name in allowed
            if name in given
        } | self._check_tight_interval(given)

    def _validate_value(self, name: str, read: _ValueReader, value: Any) -> Any:
        try:
            is_decimal = isinstance(value, float) and math.isfinite(value)  # as JSON has it; stores keep no floats
            return read(Decimal(repr(value)) if is_decimal else value)
        except ValueError as failure:
            return self.add_mistake(name, str(failure))

    def _check_tight_interval(self, given: Mapping[str, Any]) -> dict[str, Any]:
        normal, tight = (given.get(f"refresh_interval_{name}_secs") for name in ("normal", "tight"))
        numbers = (int, float, Decimal)
        if isinstance(normal, numbers) and isinstance(tight, numbers) and tight > normal:
            complaint = f"more than refresh_interval_normal_secs, which is {normal}"
            return {"refresh_interval_tight_secs": self.add_mistake("refresh_interval_tight_secs", complaint)}
        return {}

    def _validate_ordering(self, value: Any) -> Any:
        if not isinstance(value, list) or not 0 < len(value) <= MAX_ORDERING_LABELS:
            found = f"{len(value)} of them" if isinstance(value, list) else format_value(value)
            return self.add_mistake(
                "model_ordering", f"expected a list of 1 to {MAX_ORDERING_LABELS} labels, found {found}"
            )
        mistakes_before = len(self._mistakes)
        for index, label in enumerate(value):
            complaint = self._find_label_complaint(label)
            if complaint is None and label in PSEUDO_LABELS:
                complaint = f"no model, but what counts {PSEUDO_LABELS[label]}: give it a quota, and leave it out here"
            elif complaint is None and label in value[:index]:
                complaint = f'"{label}" is there already'
            if complaint is not None:
                self.add_mistake("model_ordering", complaint, str(index))
        return value if len(self._mistakes) == mistakes_before else _INVALID

    def _validate_quotas(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return self.add_mistake("quotas", f"expected a mapping of labels to amounts, found {format_value(value)}")
        return {label: self._validate_quota(label, amount) for label, amount in value.items()}

    def _validate_quota(self, label: Any, amount: Any) -> Any:
        """Micro-USD, however the amount was written."""
        if (complaint := self._find_label_complaint(label)) is not None:
            return self.add_mistake("quotas", complaint, str(label))
        try:
            return read_quota(amount)
        except ValueError as failure:
            return self.add_mistake("quotas", str(failure), str(label))

    def _find_label_complaint(self, label: Any) -> str | None:
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
    companions: SettingsCompanions = _no_settings_companions,
) -> SettingsWrite:
    """Write the settings of an org. Idempotent, so it may be repeated if its outcome is unknown. Raises
    InvalidSettings, and what the store raises."""
    key = schema.org_config_key(org)

    async def attempt() -> SettingsWrite:
        before, now = await store.get(key, consistent=True), clock.now()
        settings = validate_org(body, labels, before, defaults)
        settings |= _build_pending_change(before, settings, defaults, now)
        entry = Update(schema.org_entry_key(org), set={"org_name": settings["org_name"]})
        update, item = _build_update(key, before, settings, (*ORG_SETTINGS, *_PENDING_CHANGE), now)
        await transact_with_retry(store, clock, [update, entry, *companions(SettingsChange(before, item))])
        return SettingsWrite(item, before is None, find_change_time(item, now))

    return await retry_on_conflict(clock, attempt)


async def put_app(
    store: Store,
    clock: Clock,
    org: str,
    app: str,
    body: Any,
    labels: Sequence[str],
    companions: SettingsCompanions = _no_settings_companions,
) -> SettingsWrite:
    """Like `put_org`, for an app. The transaction fails if the org's settings, against which the app's are checked,
    changed meanwhile."""
    org_key, key = schema.org_config_key(org), schema.app_config_key(org, app)

    async def attempt() -> SettingsWrite:
        org_item, before = await store.get_many([org_key, key], consistent=True)
        if org_item is None:
            raise InvalidSettings([((), f"there is no org {org}: put it first")])
        app_labels = await read_label_names(store, Scope(org, app), before)
        settings = validate_app(body, labels, org_item, app_labels)
        update, item = _build_update(key, before, settings, APP_SETTINGS, clock.now())
        await transact_with_retry(
            store,
            clock,
            [
                update,
                ConditionCheck(org_key, _build_unchanged(org_item)),
                *companions(SettingsChange(before, item, org_item)),
            ],
        )
        return SettingsWrite(item, before is None)

    return await retry_on_conflict(clock, attempt)


def _build_update(
    key: Key, before: Item | None, settings: Mapping[str, Value], owned: Sequence[str], now: float
) -> tuple[Update, Item]:
    """The write, and the item as it is after it."""
    version = (before or {}).get("version")
    last_version = version if effective_settings.is_whole(version, 0, 10**15) and isinstance(version, int) else 0
    stamps: dict[str, Value] = {"version": last_version + 1, "updated_at_epoch": int(now)}
    created: dict[str, Value] = {"created_at_epoch": int(now)}
    removed = tuple(name for name in owned if name not in settings)
    update = Update(
        key, set={**settings, **stamps}, set_if_missing=created, remove=removed, condition=_build_unchanged(before)
    )
    remaining = {name: value for name, value in (before or {}).items() if name not in removed}
    return update, {**created, **remaining, **settings, **stamps}


def _build_unchanged(before: Item | None) -> Condition:
    if before is None:
        return ItemMissing()
    version = before.get("version")
    # A value written by hand as a list or a mapping cannot be compared; the store refuses it.
    return AttributeMissing("version") if version is None else equals("version", version)  # type: ignore[arg-type]


def _build_pending_change(
    before: Item | None, settings: Mapping[str, Value], defaults: DefaultsConfig, now: float
) -> dict[str, Value]:
    """The calendar that holds until the next period begins, if the new settings have another one."""
    if before is None:
        return {}
    current = resolve_settings(before, None, defaults, (), now)
    settled: dict[str, Value] = {
        "timezone": current.zone.key,
        "quota_scope": current.quota_scope,
        "period": current.period.value,
    }
    pending_at = find_change_time(before, now)
    _check_pending_change(before, settings, settled, pending_at, now)
    if all(settings[name] == value for name, value in settled.items()):
        return {}
    until = (
        pending_at if pending_at is not None else find_span(current.period, now + CHANGE_LEAD_SECONDS, current.zone).end
    )
    return {"settled": settled, "settled_until_epoch": int(until)}


def _check_pending_change(
    before: Item, settings: Mapping[str, Value], settled: Mapping[str, Value], pending_at: float | None, now: float
) -> None:
    """Refuse another change shortly before one takes effect: some sidecars might read it only after the period has
    begun, and use the earlier one for the whole period."""
    if pending_at is None or now + CHANGE_LEAD_SECONDS <= pending_at:
        return
    changed = [name for name in settled if settings[name] != before.get(name, settled[name])]
    wait = f"the change made before takes effect in {pending_at - now:.0f} seconds; change this again after it"
    if changed:
        raise InvalidSettings([((name,), wait) for name in changed])
