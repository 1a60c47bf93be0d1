"""Which labels may serve a request: a function of what was requested, the fallback chain, spend and quotas. Pure.

    requested                                      may serve
    a label of the chain                           it and those after it, but none before the active label
    a label with a quota outside the chain         that label alone
    any label, if the scope has no chain           that label, without a budget
    anything else                                  none

The first of these labels serves whose request format fits and whose quota is not spent; a label of the chain without a
quota is unlimited. A caller who asks for a
cheaper label gets it and is never moved up. The active label advances when it is spent, and goes back by an
override alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum


class Mode(Enum):
    """How much of its quota the serving label has used."""

    __hash__ = object.__hash__  # members are singletons, and the hash of Enum is slow in a lookup of every call

    NORMAL = "NORMAL"
    TIGHT = "TIGHT"
    EXCEEDED = "EXCEEDED"


def find_candidates(requested: str, ordering: Sequence[str], quotas: Mapping[str, int], active: int) -> Sequence[str]:
    """The labels that may serve, first choice first; empty if the scope may not use the requested label."""
    if requested in ordering:
        return ordering[max(active, ordering.index(requested)) :]
    return (requested,) if requested in quotas or not ordering else ()


def advance_active_index(
    active: int, ordering: Sequence[str], spent: Callable[[str], int], quotas: Mapping[str, int]
) -> int:
    """The index of the first label from `active` on that has quota left, or no quota; the last label if none has."""
    for index in range(active, len(ordering)):
        quota = quotas.get(ordering[index])
        if quota is None or spent(ordering[index]) < quota:
            return index
    return max(active, len(ordering) - 1)


def compute_quota_percent(spent: int, quota: int) -> int:
    """Whole percent, rounded down, so that 100 means spent. A quota of zero is spent."""
    return spent * 100 // quota if quota else 100


def compute_mode(spent: int, quota: int, tight_pct: int) -> Mode:
    if spent >= quota:
        return Mode.EXCEEDED
    return Mode.TIGHT if spent * 100 >= quota * tight_pct else Mode.NORMAL
