"""How soon somebody has to look at the store again, for what a fleet spends meanwhile. Pure.

A look is due after a tenth of the time in which the present rate would use up what is left, and when what is spent here
has grown by as much as goes with a tenth of what is left: so a scope that suddenly spends more is not blind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from price_keeper.selection.plan import Plan
from price_keeper.selection.spent import NEVER, SpendTracker

LOOK_SHARE = 10  # of what is left, or of the time until it is gone, before somebody looks again
LEAST_SECONDS = 1.0  # between two looks
SHARE_SECONDS = 60.0  # over which it is told what share of a fleet's spend is ours
LEAST_SHARE = 0.001  # of what a fleet spends, that one sidecar is taken to spend


class _Seen(NamedTuple):
    """What was spent by then, by all and by us, and which share of it was ours in the while before."""

    at: float
    known: int
    own: int
    share: float


class Alertness:
    def __init__(self) -> None:
        self._looked_at = -NEVER
        self._known: dict[str, tuple[int, float]] = {}  # at the last look, by label, and the rate until then
        self._seen: dict[str, _Seen] = {}

    def looked(self, plan: Plan, spents: Mapping[str, SpendTracker], now: float) -> float:
        """Sets the alarms, and says in how many seconds to look again at the latest."""
        elapsed, self._looked_at = max(now - self._looked_at, LEAST_SECONDS), now
        wait = plan.normal_secs
        for label, quota in plan.quotas.items():
            spent = spents[label]
            rate, share = self._rate(label, spent, elapsed), self._share(label, spent, now)
            left, tight_at = quota - spent.spent, -(-quota * plan.tight_pct // 100)
            if spent.spent >= tight_at:
                wait = min(wait, plan.tight_secs)
            if left <= 0:
                spent.threshold = NEVER
                continue
            soon = spent.spent + int(left * share) // LOOK_SHARE + 1
            spent.threshold = min(at for at in (tight_at, soon, quota) if at > spent.spent)
            if rate:
                wait = min(wait, left / rate / LOOK_SHARE)
        return max(LEAST_SECONDS, wait)

    def _rate(self, label: str, spent: SpendTracker, elapsed: float) -> float:
        """At which more comes to be spent, by the second. A look that sees nothing new is no proof that nothing is
        spent: what was known before fades by half."""
        known, before = self._known.get(label, (spent.spent, 0.0))
        rate = max(max(0, spent.spent - known) / elapsed, before / 2)
        self._known[label] = spent.spent, rate
        return rate

    def _share(self, label: str, spent: SpendTracker, now: float) -> float:
        """How much of what a fleet spends is ours: when we come to spend faster, it is likely that all do. It is told
        over a while, as what others spend is seen only when they have flushed it."""
        seen = self._seen.get(label)
        if seen is None:
            seen = self._seen[label] = _Seen(now, spent.spent, spent.own_spent, 1.0)
        grown = spent.spent - seen.known
        if grown > 0 and now - seen.at >= SHARE_SECONDS:
            share = min(1.0, max(LEAST_SHARE, (spent.own_spent - seen.own) / grown))
            seen = self._seen[label] = _Seen(now, spent.spent, spent.own_spent, share)
        return seen.share
