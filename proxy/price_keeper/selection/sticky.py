"""The active label of a scope in a period: it moves down the chain, once for the whole fleet, and never back. Pure.

Manual overrides stand in the same item, in attributes of their own (`overrides`).
"""

from __future__ import annotations

from price_keeper.calendar_days import PeriodSpan
from price_keeper.model import Scope
from price_keeper.selection.plan import EffectiveSettings
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    Condition,
    Item,
    AttributeMissing,
    Update,
    all_of,
    any_of,
    below,
    equals,
)

LABEL, INDEX, VERSION = "active_model_label", "active_model_index", "ordering_version"
KEPT_SECONDS = 2 * 86_400  # after the end of the period, as in a zone further west it goes on


def index_of(item: Item | None, plan: EffectiveSettings) -> int:
    """Where the active label stands in the ordering of today, which may have changed since it was written."""
    label = None if item is None else item.get(LABEL)
    return plan.ordering.index(label) if isinstance(label, str) and label in plan.ordering else 0


def is_newer(item: Item | None, plan: EffectiveSettings) -> bool:
    """Whether somebody knows of an ordering that we do not know of yet."""
    version = None if item is None else item.get(VERSION)
    return isinstance(version, int) and version > plan.version


def moved_to(index: int, before: int, scope: Scope, span: PeriodSpan, plan: EffectiveSettings, now: float) -> Update:
    """Of any number of instances that write it, those who know the newest ordering and are furthest in it win."""
    return Update(
        schema.sticky_state_key(scope, span.key),
        set={
            LABEL: plan.ordering[index],
            INDEX: index,
            VERSION: plan.version,
            "reason": "QUOTA_EXCEEDED",
            "previous_model_label": plan.ordering[before],
            "activated_at_epoch": int(now),
            EXPIRY_ATTRIBUTE: span.end + KEPT_SECONDS,
        },
        condition=_is_further(index, plan.version),
    )


def _is_further(index: int, version: int) -> Condition:
    written_by_hand = all_of(AttributeMissing(VERSION), below(INDEX, index))
    return any_of(
        AttributeMissing(LABEL), all_of(equals(VERSION, version), below(INDEX, index)), below(VERSION, version), written_by_hand
    )
