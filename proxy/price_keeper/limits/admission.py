"""What became of a call that limits were asked for, and how many there were of each kind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from price_keeper.limits.alone import OfflineLimiter
from price_keeper.rates.rate_lease import Costs, RateLease
from price_keeper.rates.token_bucket import RateBucket

Buckets = Sequence[RateBucket]
Amounts = Mapping[str, int]

LOCAL, WAITED, EXACT, ALONE, REFUSED = "local", "waited", "exact", "alone", "refused"


@dataclass(slots=True)
class RateLimitCounts:
    """Calls by how they were decided, and what the store was asked."""

    local: int = 0
    waited: int = 0
    exact: int = 0
    alone: int = 0
    refused_locally: int = 0
    refused_by_store: int = 0
    refused_alone: int = 0
    given_back: int = 0
    failed: int = 0  # questions that the store did not answer, or was too busy for
    top_ups: Counter[str] = field(default_factory=Counter)  # by path


class LeaseHolder:
    """A caller, and the question that is under way for it."""

    __slots__ = ("buckets", "is_evicted", "lease", "offline_limiter", "store_away_until", "top_up", "unsettled")

    def __init__(self, buckets: Buckets, lease: RateLease) -> None:
        self.buckets = buckets
        self.lease = lease
        self.offline_limiter: OfflineLimiter | None = None
        self.top_up: asyncio.Event | None = None
        self.store_away_until = 0.0
        self.unsettled = 0  # calls that wait, or are not settled
        self.is_evicted = False  # what comes back goes to the store


class RateDecision:
    """One that was let in is to be settled, once. `wait_ms` None: waiting does not help."""

    __slots__ = ("buckets", "costs", "decided_by", "holder", "is_admitted", "names", "wait_ms")

    def __init__(
        self,
        decided_by: str,
        buckets: Buckets,
        names: tuple[str, ...],
        costs: Costs,
        holder: LeaseHolder | None,
        wait_ms: int | None = 0,
    ) -> None:
        self.decided_by = decided_by
        self.is_admitted = decided_by is not REFUSED
        self.buckets = buckets
        self.names = names
        self.costs = costs
        self.holder = holder
        self.wait_ms = wait_ms


def order_costs(names: tuple[str, ...], amounts: Amounts) -> Costs:
    if len(names) == 2:  # nearly always, and so three times as fast
        return amounts.get(names[0], 0), amounts.get(names[1], 0)
    return tuple(amounts.get(name, 0) for name in names)


def actual_usage(admission: RateDecision, actual: Amounts | None) -> Costs:
    """What is not named is as estimated; None: nobody knows, so all of it is."""
    names, costs = admission.names, admission.costs
    if actual is None:
        return costs
    if len(names) == 2:
        return actual.get(names[0], costs[0]), actual.get(names[1], costs[1])
    return tuple(actual.get(name, cost) for name, cost in zip(names, costs, strict=True))
