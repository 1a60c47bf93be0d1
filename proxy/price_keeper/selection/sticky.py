"""The active label of a scope in a period: it moves down the chain, once for the whole fleet, and never back. Pure.

Manual overrides stand in the same item, in attributes of their own (`overrides`).
"""

from __future__ import annotations

from price_keeper.budgets.effective_settings import EffectiveSettings
from price_keeper.domain import Scope
from price_keeper.org_calendar import PeriodSpan
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    Condition,
    Item,
    Update,
    all_of,
    any_of,
    below,
    equals,
)

LABEL_ATTRIBUTE, INDEX_ATTRIBUTE, VERSION_ATTRIBUTE = "active_model_label", "active_model_index", "ordering_version"
ACTIVE_LABEL_RETENTION_SECONDS = 2 * 86_400  # after the end of the period, as in a zone further west it goes on


def find_active_index(item: Item | None, settings: EffectiveSettings) -> int:
    """Where the active label stands in the ordering of today, which may have changed since it was written."""
    label = None if item is None else item.get(LABEL_ATTRIBUTE)
    return settings.ordering.index(label) if isinstance(label, str) and label in settings.ordering else 0


def has_newer_ordering(item: Item | None, settings: EffectiveSettings) -> bool:
    """Whether somebody knows of an ordering that we do not know of yet."""
    version = None if item is None else item.get(VERSION_ATTRIBUTE)
    return isinstance(version, int) and version > settings.version


def build_move(
    index: int, index_before: int, scope: Scope, span: PeriodSpan, settings: EffectiveSettings, now: float
) -> Update:
    """Of any number of instances that write it, those who know the newest ordering and are furthest in it win."""
    return Update(
        schema.sticky_state_key(scope, span.key),
        set={
            LABEL_ATTRIBUTE: settings.ordering[index],
            INDEX_ATTRIBUTE: index,
            VERSION_ATTRIBUTE: settings.version,
            "reason": "QUOTA_EXCEEDED",
            "previous_model_label": settings.ordering[index_before],
            "activated_at_epoch": int(now),
            EXPIRY_ATTRIBUTE: span.end + ACTIVE_LABEL_RETENTION_SECONDS,
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
