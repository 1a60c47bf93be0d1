"""How soon somebody has to look at the store again, for what a fleet spends meanwhile. Pure.

A look is due after a tenth of the time in which the present rate would use up what is left, and when what is spent here
has grown by as much as goes with a tenth of what is left: so a scope that suddenly spends more is not blind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from price_keeper.selection.plan import EffectiveSettings
from price_keeper.selection.spent import NEVER, SpendTracker

REFRESH_SHARE = 10  # of what is left, or of the time until it is gone, before somebody looks again
MIN_REFRESH_SECONDS = 1.0  # between two looks
SHARE_SAMPLE_SECONDS = 60.0  # over which it is told what share of a fleet's spend is ours
MIN_FLEET_SHARE = 0.001  # of what a fleet spends, that one sidecar is taken to spend


class _ShareSample(NamedTuple):
    """What was spent by then, by all and by us, and which share of it was ours in the while before."""

    at: float
    spent: int
    own_spent: int
    share: float


class RefreshSchedule:
    def __init__(self) -> None:
        self._refreshed_at = -NEVER
        self._rates: dict[str, tuple[int, float]] = {}  # at the last look, by label, and the rate until then
        self._share_samples: dict[str, _ShareSample] = {}

    def plan_next(self, plan: EffectiveSettings, trackers: Mapping[str, SpendTracker], now: float) -> float:
        """Sets the alarms, and says in how many seconds to look again at the latest."""
        elapsed, self._refreshed_at = max(now - self._refreshed_at, MIN_REFRESH_SECONDS), now
        wait = plan.normal_secs
        for label, quota in plan.quotas.items():
            tracker = trackers[label]
            rate, share = self._update_rate(label, tracker, elapsed), self._update_share(label, tracker, now)
            remaining, tight_at = quota - tracker.spent, -(-quota * plan.tight_pct // 100)
            if tracker.spent >= tight_at:
                wait = min(wait, plan.tight_secs)
            if remaining <= 0:
                tracker.threshold = NEVER
                continue
            early_threshold = tracker.spent + int(remaining * share) // REFRESH_SHARE + 1
            tracker.threshold = min(at for at in (tight_at, early_threshold, quota) if at > tracker.spent)
            if rate:
                wait = min(wait, remaining / rate / REFRESH_SHARE)
        return max(MIN_REFRESH_SECONDS, wait)

    def _update_rate(self, label: str, tracker: SpendTracker, elapsed: float) -> float:
        """At which more comes to be spent, by the second. A look that sees nothing new is no proof that nothing is
        spent: what was known before fades by half."""
        last_spent, last_rate = self._rates.get(label, (tracker.spent, 0.0))
        rate = max(max(0, tracker.spent - last_spent) / elapsed, last_rate / 2)
        self._rates[label] = tracker.spent, rate
        return rate

    def _update_share(self, label: str, tracker: SpendTracker, now: float) -> float:
        """How much of what a fleet spends is ours: when we come to spend faster, it is likely that all do. It is told
        over a while, as what others spend is seen only when they have flushed it."""
        sample = self._share_samples.get(label)
        if sample is None:
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, 1.0)
        growth = tracker.spent - sample.spent
        if growth > 0 and now - sample.at >= SHARE_SAMPLE_SECONDS:
            share = min(1.0, max(MIN_FLEET_SHARE, (tracker.own_spent - sample.own_spent) / growth))
            sample = self._share_samples[label] = _ShareSample(now, tracker.spent, tracker.own_spent, share)
        return sample.share
