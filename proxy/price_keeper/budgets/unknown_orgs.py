"""Calls whose org is not registered: they are refused, or metered without a budget (`unknown_org`).

The decision is made when a caller's settings are loaded, so cached callers pay nothing for it. For a refused org
the store is read at most once in RECHECK_SECONDS, so an org that is registered is served soon.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

from cachetools import LRUCache

from price_keeper.budgets.budget_snapshot import BudgetSnapshot
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import UnknownOrg
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry

RECHECK_SECONDS: Final = 3.0
UNREGISTERED: Final = "unregistered"  # why an org was served without a budget, a value of the metric's label `why`
STORE_AWAY: Final = "store_away"
MAX_ORGS: Final = 10_000  # remembered; the one whose calls are longest ago makes room

_log = logging.getLogger("price_keeper.selection")


class UnknownOrgs:
    """Decides whether calls of unregistered orgs are served, logs each such org once, and counts them."""

    def __init__(self, policy: Literal["refuse", "meter"], clock: Clock, snapshot: BudgetSnapshot) -> None:
        self._refuses = policy == "refuse"
        self._clock = clock
        self._snapshot = snapshot
        # On the monotonic clock. An org is logged when it is added, so entries do not expire.
        self._checked_at = LRUCache[str, float](MAX_ORGS)
        self._served_offline = LRUCache[str, bool](MAX_ORGS)  # orgs that were served although nothing was known of them
        self._served = {UNREGISTERED: 0, STORE_AWAY: 0}

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(
            metrics.UNKNOWN_ORGS_SERVED, lambda: [({"why": why}, count) for why, count in self._served.items()]
        )

    def note_unregistered(self, org: str) -> bool:
        """Note that the org is not in the store. Returns whether its calls are served all the same."""
        is_new = org not in self._checked_at
        self._checked_at[org] = self._clock.monotonic()
        self._served_offline.pop(org, None)
        if is_new:
            self._served[UNREGISTERED] += not self._refuses
            effect = "calls are refused" if self._refuses else "calls are served and metered without a budget"
            _log.warning(
                "org %s is not registered; its %s (unknown_org: %s). Register it: price-keeper org put %s FILE",
                org,
                effect,
                "refuse" if self._refuses else "meter",
                org,
            )
        return not self._refuses

    def forget(self, org: str) -> None:
        """The org has been registered, or may have been: the next call reads the store."""
        self._checked_at.pop(org, None)
        self._served_offline.pop(org, None)

    def note_served_offline(self, org: str) -> None:
        """The store does not answer, the snapshot does not have the org, and `on_store_down: serve` lets its calls
        through."""
        if org not in self._served_offline:
            self._served_offline[org] = True
            self._served[STORE_AWAY] += 1
            _log.warning(
                "org %s is not in the budget snapshot and the store is away; its calls are served without a budget "
                "(on_store_down: serve) until the store answers",
                org,
            )

    def is_refused_by_snapshot(self, org: str) -> bool:
        """Whether the last answer of the store, however old, was that the org is not registered."""
        return self._refuses and self._snapshot.find_settings(Scope(org)) == {}

    def raise_if_just_refused(self, org: str) -> None:
        """Raises UnknownOrg if the store reported the org as unregistered within RECHECK_SECONDS."""
        checked_at = self._checked_at.get(org)
        if self._refuses and checked_at is not None and self._clock.monotonic() < checked_at + RECHECK_SECONDS:
            raise self.build_refusal(org)

    def build_refusal(self, org: str) -> UnknownOrg:
        return UnknownOrg(
            f"the org {org} is not registered, so it has no budget: register it with "
            f"`price-keeper org put {org} FILE`, or set unknown_org: meter to serve it without one"
        )
