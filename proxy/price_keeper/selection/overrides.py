"""The label that a person puts in force for a scope, for the rest of its period at most, up or down the ordering.

It stands on the item of the scope's sticky state, in attributes of its own that no fallback writes. Its version grows
with every change, so that whoever keeps one in memory can tell which of two is the later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias, cast

from price_keeper.audit import Actor
from price_keeper.calendar_days import PeriodSpan
from price_keeper.clock import Clock, SystemClock
from price_keeper.config.problems import did_you_mean, join_names
from price_keeper.errors import ConfigError
from price_keeper.model import Scope, is_label
from price_keeper.selection.plan import is_number, format_value
from price_keeper.stores import schema
from price_keeper.stores.again import transact_with_retry, retry_on_conflict
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Condition, Item, AttributeMissing, Store, Update, Value, Write, all_of, equals

LONGEST_REASON = 200
LONGEST_WHO = 128
KEPT_SECONDS = 3600  # after the end of its period
_WRITTEN = ("override_label", "override_reason", "override_who", "override_until_epoch")
_VERSION = "override_version"


@dataclass(frozen=True, slots=True)
class Override:
    label: str
    reason: str
    who: str
    until: float
    version: int


def override_of(item: Item | None, now: float) -> Override | None:
    """The one in force, of an item of sticky state. Without a usable label and end there is none."""
    if item is None:
        return None
    label, until = item.get("override_label"), item.get("override_until_epoch")
    if not isinstance(label, str) or not is_label(label) or not is_number(until) or cast(int, until) <= now:
        return None
    reason, who = (str(item.get(f"override_{name}", "")) for name in ("reason", "who"))
    return Override(label, reason, who, float(cast(int, until)), version_of(item))


def version_of(item: Item | None) -> int:
    """Also of an item whose override was cleared or is over."""
    version = (item or {}).get("override_version", 0)
    return int(cast(int, version)) if is_number(version) else 0


# What is written together with a change, from the override before to the one after it, or not at all.
Beside: TypeAlias = "Callable[[Override | None, Override | None], Sequence[Write]]"


def _nothing(_: Override | None, __: Override | None) -> Sequence[Write]:
    return ()


def audited(actor: Actor, action: str, scope: Scope, clock: Clock) -> Beside:
    def beside(before: Override | None, after: Override | None) -> Sequence[Write]:
        return [actor.build_record(action, scope, _told(before), _told(after), clock.now())]

    return beside


def _told(override: Override | None) -> Item | None:
    if override is None:
        return None
    until = datetime.fromtimestamp(override.until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = {"label": override.label, "reason": override.reason, "who": override.who}
    return {**told, "until": until, "version": override.version}


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
    beside: Beside = _nothing,
) -> Override:
    """Until the end of the period at most, and if nothing is said. Raises ConfigError with every mistake."""
    now = clock.now()
    ends = span.end if until is None else math.ceil(min(until, span.end))
    _check(label, reason, who, ends, now, ordering)
    written: dict[str, Value] = dict(zip(_WRITTEN, (label, reason, who, ends), strict=True))
    key = schema.sticky_state_key(scope, span.key)

    async def once() -> Override:
        before = await store.get(key, consistent=True)
        # Kept until some time after the period, and no shorter than somebody else wants it kept.
        kept = max(span.end + KEPT_SECONDS, _expiry(before))
        override = Override(label, reason, who, float(ends), version_of(before) + 1)
        change = Update(key, set={**written, EXPIRY_ATTRIBUTE: kept, _VERSION: override.version}, condition=_unchanged(before))
        await transact_with_retry(store, clock, [change, *beside(override_of(before, now), override)])
        return override

    return await retry_on_conflict(clock, once)


async def clear_override(
    store: Store, scope: Scope, span: PeriodSpan, clock: Clock | None = None, beside: Beside = _nothing
) -> bool:
    """Whether there was one to clear."""
    clock = clock or SystemClock()
    key, now = schema.sticky_state_key(scope, span.key), clock.now()

    async def once() -> bool:
        before = await store.get(key, consistent=True)
        if before is None or "override_label" not in before:
            return False
        gone = Update(key, set={_VERSION: version_of(before) + 1}, remove=_WRITTEN, condition=_unchanged(before))
        await transact_with_retry(store, clock, [gone, *beside(override_of(before, now), None)])
        return True

    return await retry_on_conflict(clock, once)


def _expiry(item: Item | None) -> int:
    expiry = (item or {}).get(EXPIRY_ATTRIBUTE)
    return int(cast(int, expiry)) if is_number(expiry) else 0


def _unchanged(before: Item | None) -> Condition:
    """As far as an override is concerned; a fallback meanwhile moves nothing but the expiry."""
    return all_of(*(_same(before, name) for name in (_VERSION, EXPIRY_ATTRIBUTE)))


def _same(before: Item | None, name: str) -> Condition:
    value = (before or {}).get(name)
    # One that was written by hand as a list or a mapping cannot be compared; the store says so.
    return AttributeMissing(name) if value is None else equals(name, value)  # type: ignore[arg-type]


def _check(label: str, reason: str, who: str, ends: float, now: float, ordering: Sequence[str]) -> None:
    mistakes = []
    if label not in ordering:
        hint = did_you_mean(label, ordering) or f"there are {join_names(ordering) or 'none'}"
        mistakes.append(f"label: {format_value(label)} is not in the ordering; {hint}")
    for name, text, longest in (("reason", reason, LONGEST_REASON), ("who", who, LONGEST_WHO)):
        if not text.isprintable() or not text.strip() or len(text) > longest:
            mistakes.append(f"{name}: expected 1 to {longest} printable characters, found {format_value(text)}")
    if ends <= now:
        mistakes.append("until: over already; expected a time to come")
    if mistakes:
        raise ConfigError(mistakes)
