"""Which shares of a quota are spent, to the pico-dollar. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def crossed_thresholds(spent_pico: int, quota_pico: int, thresholds: Iterable[int]) -> tuple[int, ...]:
    """The percentages that are reached, from the lowest up. Of a quota of nothing all of it is spent: 100 percent."""
    return tuple(pct for pct in sorted(set(thresholds)) if _is_reached(spent_pico, quota_pico, pct))


def next_threshold_pico(spent_pico: int, quota_pico: int, thresholds: Iterable[int]) -> int | None:
    """The spend at which the next threshold is reached, or None if there is none."""
    if quota_pico <= 0:
        return None
    return min((at for pct in thresholds if (at := _threshold_pico(quota_pico, pct)) > spent_pico), default=None)


def _is_reached(spent_pico: int, quota_pico: int, pct: int) -> bool:
    return spent_pico >= _threshold_pico(quota_pico, pct) if quota_pico > 0 else pct <= 100


def _threshold_pico(quota_pico: int, pct: int) -> int:
    """The least whole number of pico-dollars that is this share or more."""
    return -(-pct * quota_pico // 100)
