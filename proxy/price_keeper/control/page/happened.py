"""What happened in a scope's period, as the store knows it: the active label moved on, thresholds were reached."""

from __future__ import annotations

from typing import Any, cast

from price_keeper.budgets import active_label
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.budgets.effective_settings import is_number
from price_keeper.reports.settings_report import format_utc
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Store

MAX_ALERTS = 99  # looked for at once, with the sticky state in one read


async def load_events(store: Store, budget: BudgetState) -> list[dict[str, Any]]:
    """The newest first. Of several moves the store keeps the last one alone. Raises StoreError."""
    scope, period, settings = budget.scope, budget.span.key, budget.settings
    thresholds = [(label, pct) for label in settings.quotas for pct in settings.thresholds][:MAX_ALERTS]
    keys = [schema.sticky_state_key(scope, period)]
    keys += [schema.alert_marker_key(scope, label, period, pct) for label, pct in thresholds]
    sticky_item, *markers = await store.get_many(keys)
    moves = (
        [_add_time(sticky_item, "activated_at_epoch", {"kind": "moved", **_format_move(sticky_item)})]
        if sticky_item and active_label.LABEL_ATTRIBUTE in sticky_item
        else []
    )
    alerts = [
        _add_time(marker, "raised_at_epoch", {"kind": "threshold", "label": label, "threshold_pct": pct})
        for (label, pct), marker in zip(thresholds, markers, strict=True)
        if marker is not None
    ]
    return sorted([*moves, *alerts], key=lambda each: each["at"] or "", reverse=True)


def _format_move(item: Item) -> dict[str, Any]:
    return {"label": str(item[active_label.LABEL_ATTRIBUTE]), "before": str(item.get("previous_model_label", ""))}


def _add_time(item: Item, name: str, event: dict[str, Any]) -> dict[str, Any]:
    at = item.get(name)
    return {"at": format_utc(float(cast(int, at))) if is_number(at) else None, **event}
