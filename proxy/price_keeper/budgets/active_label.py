"""The active label of a scope in a period: automatic fallback, and manual override. Both are kept in one item.

Fallback moves the active label down the chain, once for the whole fleet, and never back; the conditional write of
`build_move` makes sure of that. An override puts another label in force until the end of the period at most. It has
attributes of its own, which fallback never writes, and a version that grows with each change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias, cast

from price_keeper.budgets.effective_settings import EffectiveSettings, format_value, is_number
from price_keeper.clock import Clock, SystemClock
from price_keeper.config.config_problems import did_you_mean, join_names
from price_keeper.domain import Scope, is_label
from price_keeper.errors import ConfigError
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores import schema
from price_keeper.stores.audit_log import Actor
from price_keeper.stores.conflict_retry import retry_on_conflict, transact_with_retry
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    Condition,
    Item,
    Store,
    Update,
    Value,
    Write,
    all_of,
    any_of,
    below,
    equals,
)

LABEL_ATTRIBUTE, INDEX_ATTRIBUTE, VERSION_ATTRIBUTE = "active_model_label", "active_model_index", "ordering_version"
RETENTION_SECONDS = 3600  # after the end of the period
MAX_REASON_LENGTH = 200
MAX_WHO_LENGTH = 128
_OVERRIDE_ATTRIBUTES = ("override_label", "override_reason", "override_who", "override_until_epoch")
_OVERRIDE_VERSION = "override_version"


def find_active_index(item: Item | None, settings: EffectiveSettings) -> int:
    """The index of the active label in the current ordering, which may have changed since the item was written."""
    label = None if item is None else item.get(LABEL_ATTRIBUTE)
    return settings.ordering.index(label) if isinstance(label, str) and label in settings.ordering else 0


def has_newer_ordering(item: Item | None, settings: EffectiveSettings) -> bool:
    """Whether the item was written with a newer ordering than these settings have."""
    version = None if item is None else item.get(VERSION_ATTRIBUTE)
    return isinstance(version, int) and version > settings.version


def build_move(
    index: int, index_before: int, scope: Scope, span: PeriodSpan, settings: EffectiveSettings, now: float
) -> Update:
    """The conditional write that advances the active label. Of all instances that write it, the one with the newest
    ordering and the highest index in it wins."""
    return Update(
        schema.sticky_state_key(scope, span.key),
        set={
            LABEL_ATTRIBUTE: settings.ordering[index],
            INDEX_ATTRIBUTE: index,
            VERSION_ATTRIBUTE: settings.version,
            "reason": "QUOTA_EXCEEDED",
            "previous_model_label": settings.ordering[index_before],
            "activated_at_epoch": int(now),
            EXPIRY_ATTRIBUTE: span.end + RETENTION_SECONDS,
        },
        condition=_build_forward_condition(index, settings.version),
    )


def _build_forward_condition(index: int, version: int) -> Condition:
    has_no_version = all_of(AttributeMissing(VERSION_ATTRIBUTE), below(INDEX_ATTRIBUTE, index))
    return any_of(
        AttributeMissing(LABEL_ATTRIBUTE),
        all_of(equals(VERSION_ATTRIBUTE, version), below(INDEX_ATTRIBUTE, index)),
        below(VERSION_ATTRIBUTE, version),
        has_no_version,
    )


@dataclass(frozen=True, slots=True)
class Override:
    """A label that an operator put in force, with the reason and the end."""

    label: str
    reason: str
    who: str
    until: float
    version: int


def parse_override(item: Item | None, now: float) -> Override | None:
    """The override in force, of an item of sticky state. Without a usable label and end there is none."""
    if item is None:
        return None
    label, until = item.get("override_label"), item.get("override_until_epoch")
    if not isinstance(label, str) or not is_label(label) or not is_number(until) or cast(int, until) <= now:
        return None
    reason, who = (str(item.get(f"override_{name}", "")) for name in ("reason", "who"))
    return Override(label, reason, who, float(cast(int, until)), parse_override_version(item))


def parse_override_version(item: Item | None) -> int:
    """The version of the last change of the override, also if it was cleared or is over."""
    version = (item or {}).get("override_version", 0)
    return int(cast(int, version)) if is_number(version) else 0


# Writes that belong into the transaction of a change, made from the override before and after it.
OverrideCompanions: TypeAlias = "Callable[[Override | None, Override | None], Sequence[Write]]"


def _no_override_companions(_: Override | None, __: Override | None) -> Sequence[Write]:
    return ()


def audit_override(actor: Actor, action: str, scope: Scope, clock: Clock) -> OverrideCompanions:
    """Writes the audit record of a change."""

    def build_companions(before: Override | None, after: Override | None) -> Sequence[Write]:
        return [actor.build_record(action, scope, _describe_override(before), _describe_override(after), clock.now())]

    return build_companions


def _describe_override(override: Override | None) -> Item | None:
    if override is None:
        return None
    until = datetime.fromtimestamp(override.until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = {"label": override.label, "reason": override.reason, "who": override.who}
    return {**fields, "until": until, "version": override.version}


async def set_override(
    store: Store,
    clock: Clock,
    scope: Scope,
    span: PeriodSpan,
    label: str,
    reason: str,
    who: str,
    until: float | None = None,
    *,
    ordering: Sequence[str],
    companions: OverrideCompanions = _no_override_companions,
) -> Override:
    """Put a label in force until `until`, or until the end of the period at most, which is also the default. Raises
    ConfigError with every mistake."""
    now = clock.now()
    ends = span.end if until is None else math.ceil(min(until, span.end))
    _check_override(label, reason, who, ends, now, ordering)
    values: dict[str, Value] = dict(zip(_OVERRIDE_ATTRIBUTES, (label, reason, who, ends), strict=True))
    key = schema.sticky_state_key(scope, span.key)

    async def attempt() -> Override:
        before = await store.get(key, consistent=True)
        # The item is retained for some time after the period, and no shorter than another writer has asked for.
        kept = max(span.end + RETENTION_SECONDS, _read_expiry(before))
        override = Override(label, reason, who, float(ends), parse_override_version(before) + 1)
        change = Update(
            key,
            set={**values, EXPIRY_ATTRIBUTE: kept, _OVERRIDE_VERSION: override.version},
            condition=_build_override_unchanged(before),
        )
        await transact_with_retry(store, clock, [change, *companions(parse_override(before, now), override)])
        return override

    return await retry_on_conflict(clock, attempt)


async def clear_override(
    store: Store,
    scope: Scope,
    span: PeriodSpan,
    clock: Clock | None = None,
    companions: OverrideCompanions = _no_override_companions,
) -> bool:
    """Clear the override; returns whether there was one."""
    clock = clock or SystemClock()
    key, now = schema.sticky_state_key(scope, span.key), clock.now()

    async def attempt() -> bool:
        before = await store.get(key, consistent=True)
        if before is None or "override_label" not in before:
            return False
        change = Update(
            key,
            set={_OVERRIDE_VERSION: parse_override_version(before) + 1},
            remove=_OVERRIDE_ATTRIBUTES,
            condition=_build_override_unchanged(before),
        )
        await transact_with_retry(store, clock, [change, *companions(parse_override(before, now), None)])
        return True

    return await retry_on_conflict(clock, attempt)


def _read_expiry(item: Item | None) -> int:
    expiry = (item or {}).get(EXPIRY_ATTRIBUTE)
    return int(cast(int, expiry)) if is_number(expiry) else 0


def _build_override_unchanged(before: Item | None) -> Condition:
    """The override is as it was read. A fallback in between changes no attribute of this condition but the expiry."""
    return all_of(*(_build_same(before, name) for name in (_OVERRIDE_VERSION, EXPIRY_ATTRIBUTE)))


def _build_same(before: Item | None, name: str) -> Condition:
    value = (before or {}).get(name)
    # A value written by hand as a list or a mapping cannot be compared; the store refuses it.
    return AttributeMissing(name) if value is None else equals(name, value)  # type: ignore[arg-type]


def _check_override(label: str, reason: str, who: str, ends: float, now: float, ordering: Sequence[str]) -> None:
    mistakes = []
    if label not in ordering:
        hint = did_you_mean(label, ordering) or f"there are {join_names(ordering) or 'none'}"
        mistakes.append(f"label: {format_value(label)} is not in the ordering; {hint}")
    for name, text, longest in (("reason", reason, MAX_REASON_LENGTH), ("who", who, MAX_WHO_LENGTH)):
        if not text.isprintable() or not text.strip() or len(text) > longest:
            mistakes.append(f"{name}: expected 1 to {longest} printable characters, found {format_value(text)}")
    if ends <= now:
        mistakes.append("until: over already; expected a time to come")
    if mistakes:
        raise ConfigError(mistakes)
