"""The label that a person puts in force for a scope, for the rest of its period at most, up or down the ordering.

It stands on the item of the scope's sticky state, in attributes of its own that no fallback writes. Its version grows
with every change, so that whoever keeps one in memory can tell which of two is the later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from proxy.calendar_days import Span
from proxy.clock import Clock
from proxy.config.problems import did_you_mean, listed
from proxy.errors import ConditionFailed, ConfigError
from proxy.model import Scope, is_label
from proxy.selection.plan import is_number, shown
from proxy.stores import schema
from proxy.stores.contract import EXPIRY, Exists, Item, Missing, Store, Update, Value, above, any_of, at_most

LONGEST_REASON = 200
LONGEST_WHO = 128
KEPT_SECONDS = 3600  # after the end of its period
_ATTEMPTS = 3
_WRITTEN = ("override_label", "override_reason", "override_who", "override_until_epoch")


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


async def set_override(
    store: Store,
    clock: Clock,
    scope: Scope,
    span: Span,
    label: str,
    reason: str,
    who: str,
    until: float | None = None,
    *,
    ordering: Sequence[str],
) -> Override:
    """Until the end of the period at most, and if nothing is said. Raises ConfigError with every mistake."""
    now = clock.now()
    ends = span.end if until is None else math.ceil(min(until, span.end))
    _check(label, reason, who, ends, now, ordering)
    written: dict[str, Value] = dict(zip(_WRITTEN, (label, reason, who, ends), strict=True))
    item = await _changed(store, scope, span, written)
    return Override(label, reason, who, float(ends), version_of(item))


async def clear_override(store: Store, scope: Scope, span: Span) -> bool:
    """Whether there was one to clear."""
    key = schema.sticky_state(scope, span.key)
    gone = Update(key, remove=_WRITTEN, add={"override_version": 1}, condition=Exists("override_label"))
    try:
        await store.update(gone)
    except ConditionFailed:
        return False
    return True


async def _changed(store: Store, scope: Scope, span: Span, written: dict[str, Value]) -> Item:
    """The item is kept until some time after the period, and no shorter than somebody else wants it kept."""
    key, expiry = schema.sticky_state(scope, span.key), span.end + KEPT_SECONDS
    grown = {"override_version": 1}
    is_sooner = any_of(Missing(EXPIRY), at_most(EXPIRY, expiry))
    for _ in range(_ATTEMPTS):  # between the two somebody may raise the expiry, or the item may go
        try:
            return await store.update(Update(key, set={**written, EXPIRY: expiry}, add=grown, condition=is_sooner))
        except ConditionFailed:
            pass
        try:
            return await store.update(Update(key, set=written, add=grown, condition=above(EXPIRY, expiry)))
        except ConditionFailed as failure:
            last = failure
    raise last


def _check(label: str, reason: str, who: str, ends: float, now: float, ordering: Sequence[str]) -> None:
    mistakes = []
    if label not in ordering:
        hint = did_you_mean(label, ordering) or f"there are {listed(ordering) or 'none'}"
        mistakes.append(f"label: {shown(label)} is not in the ordering; {hint}")
    for name, text, longest in (("reason", reason, LONGEST_REASON), ("who", who, LONGEST_WHO)):
        if not text.isprintable() or not text.strip() or len(text) > longest:
            mistakes.append(f"{name}: expected 1 to {longest} printable characters, found {shown(text)}")
    if ends <= now:
        mistakes.append("until: over already; expected a time to come")
    if mistakes:
        raise ConfigError(mistakes)
