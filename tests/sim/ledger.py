"""The truth of limits: what was let through of each, held at any time, and told; and the bound that it has to keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from price_keeper.rates.bucket_client import Grant
from price_keeper.rates.rate_lease_manager import ALONE, RateDecision, RateLeaseManager
from price_keeper.rates.token_bucket import MILLI

from tests.support.rate_limit_fleet import RecordingBucketClient

# One second's refill, and the difference between processes' ideas of the store's time, in whole seconds.
SECONDS_BEYOND = 1.0 + 1.2
NEVER = 1e18


@dataclass
class Ledger:
    """Of one caller's limit by one name."""

    capacity: float
    rate: float  # a second
    let_through: float = 0.0
    lowest: float = NEVER  # of what was let through and is held, less what the rate allows
    beyond: float = -NEVER  # over the bound, at most

    def clock_is_set(self, seconds: float) -> None:
        """Ahead, where all go by one clock: so much refills at once, as far as there is room."""
        self.let_through -= min(self.capacity, self.rate * max(0.0, seconds))

    def passes(self, amount: float, held: float, now: float) -> None:
        """Whatever was held just before this moment is a beginning to measure from."""
        at = self.let_through - self.rate * now
        self.lowest = min(self.lowest, at + held)
        self.let_through += amount
        self.beyond = max(self.beyond, at + amount - self.lowest - self.capacity - SECONDS_BEYOND * self.rate)


@dataclass
class Share:
    """One life's, of one limit: what it took and let through, and what questions under way may bring."""

    taken: float = 0.0
    let_through: float = 0.0
    under_way: float = 0.0

    @property
    def held(self) -> float:
        return max(0.0, self.taken - self.let_through + self.under_way)


@dataclass
class Limits:
    """Of all callers that are limited by one pair of buckets; `used` is what calls were settled with."""

    now: Any
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    shares: dict[tuple[int, str], Share] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)
    is_exact: bool = True  # the books can be compared to the last thousandth
    admitted: int = 0
    refused: int = 0
    alone: int = 0

    def share(self, life: int, name: str) -> Share:
        return self.shares.setdefault((life, name), Share())

    def forget(self, life: int) -> None:
        """What it held is lost with it."""
        for key in [key for key in self.shares if key[0] == life]:
            del self.shares[key]

    def clock_is_set(self, seconds: float) -> None:
        for ledger in self.ledgers.values():
            ledger.clock_is_set(seconds)

    def passes(self, life: int, name: str, amount: float) -> None:
        held = sum(share.held for (_, each), share in self.shares.items() if each == name)
        self.share(life, name).let_through += amount
        self.ledgers[name].passes(amount, held, self.now())


class LedgerBucketClient(RecordingBucketClient):
    """The same, with the books of a whole fleet in which sidecars have several lives."""

    books: Limits
    life: int

    async def acquire(self, buckets: Any, costs: Any, used: Any = None) -> Grant:
        grant = await super().acquire(buckets, costs, used)
        self._count("taken", grant.taken, 1)
        return grant

    def _count(self, what: str, amounts: Mapping[str, int], sign: int) -> None:
        for name, amount in amounts.items():
            share = self.books.share(self.life, name)
            setattr(share, what, getattr(share, what) + sign * amount / MILLI)


class LedgerLeaseManager(RateLeaseManager):
    """What it lets through stands in the books. What is used beyond its estimate was never let through: it is owed."""

    books: Limits
    life: int

    def try_admit(self, name: str, buckets: Any, costs: Any) -> RateDecision | None:
        admission = super().try_admit(name, buckets, costs)
        if admission is not None:
            self._passes(admission)
        return admission

    async def _admit_after_top_up(self, holder: Any, costs: Any) -> RateDecision | None:
        admission = await super()._admit_after_top_up(holder, costs)
        if admission is not None:
            self._passes(admission)
        return admission

    async def _admit_exactly(self, name: str, buckets: Any, costs: Any, serves_offline: bool) -> RateDecision:
        admission = await super()._admit_exactly(name, buckets, costs, serves_offline)
        if admission.holder is None:  # it was not told as let through alone
            self._passes(admission)
        return admission

    def _admit_offline(self, holder: Any, costs: Any, serves_offline: bool) -> RateDecision:
        admission = super()._admit_offline(holder, costs, serves_offline)
        self._passes(admission)
        return admission

    def settle(self, admission: RateDecision, actual: Any) -> None:
        super().settle(admission, actual)
        for place, name in enumerate(admission.names):
            cost = admission.costs[place]
            real = cost if actual is None else actual.get(name, cost)
            self.books.used[name] += real
            if admission.decided_by != ALONE:
                self.books.share(self.life, name).let_through -= (cost - real) / MILLI
                self.books.ledgers[name].let_through -= max(0, cost - real) / MILLI

    def _passes(self, admission: RateDecision) -> None:
        if not admission.is_admitted:
            self.books.refused += 1
            return
        self.books.admitted += 1
        if admission.decided_by == ALONE:
            self.books.alone += 1
            return
        for place, name in enumerate(admission.names):
            self.books.passes(self.life, name, admission.costs[place] / MILLI)
