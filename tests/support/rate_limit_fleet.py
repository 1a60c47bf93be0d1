"""Fleets of sidecars on one limit in simulated time: real leases and limiters, on a store that is busy as DynamoDB is.

Time passes when all processes are idle, straight to the next thing that is due; so a run of minutes takes seconds.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from price_keeper.errors import (
    Busy,
    CancellationReason,
    ReasonCode,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
)
from price_keeper.rates.bucket_client import BucketClient, Grant
from price_keeper.rates.rate_lease_manager import SWEEP_SECONDS, RateDecision, RateLeaseManager
from price_keeper.rates.token_bucket import MILLI, RateBucket, RateLimit
from price_keeper.stores.contract import Item, Key, Store, Write
from price_keeper.tasks import Tasks

from tests.support.memory_store import MemoryStore

RPM, TPM = "rpm", "tpm"
TOKENS = 1000  # of a call, on average
LATENCY = 0.005, 0.010  # seconds of one request to the store, in which a transaction holds its items
MAX_TRANSACTIONS = 500.0  # a second on one item
RESENT, FIRST_WAIT, LONGEST_WAIT = 6, 0.1, 1.0  # by the DynamoDB engine: see `proxy/price_keeper/stores/dynamodb.py`
WALL = 1_795_003_200.0


class _InstantSelector(selectors.DefaultSelector):
    """Instead of waiting, time passes."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is due")
        self.now += max(0.0, timeout)
        return []


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.leaping = _InstantSelector()
        super().__init__(self.leaping)

    def time(self) -> float:
        return self.leaping.now


class LoopClock:
    """The loop's simulated time as the product's clock."""

    def __init__(self, loop: LeapingLoop) -> None:
        self._time = loop.leaping

    def now(self) -> float:
        return WALL + self._time.now

    def monotonic(self) -> float:
        return self._time.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class BusyStore:
    """A transaction that meets another one on an item fails, and costs as much as any; and so many a second are too
    many. The engine resends as the DynamoDB one does."""

    def __init__(self, clock: LoopClock, chance: random.Random) -> None:
        self.memory = MemoryStore()
        self._clock, self._chance = clock, chance
        self._locked_keys: set[Key] = set()
        self._allowed: dict[Key, tuple[float, float]] = {}
        self.transactions = self.items = self.conflicts = self.throttled = self.reads = 0

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self.reads += 1
        await asyncio.sleep(self._chance.uniform(*LATENCY))
        return self.memory.items.get(key)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self.reads += len(keys)
        await asyncio.sleep(self._chance.uniform(*LATENCY))
        return [self.memory.items.get(key) for key in keys]

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        for attempt in range(RESENT):
            if attempt:
                await asyncio.sleep(self._chance.uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))))
            try:
                return await self._try_transaction(writes, token)
            except TransactionFailed as failure:
                if any(reason.code is ReasonCode.CONDITION_FAILED for reason in failure.reasons):
                    raise
                trouble: TransactionFailed | StoreThrottled = failure
            except StoreThrottled as failure:
                trouble = failure
        raise trouble

    async def _try_transaction(self, writes: Sequence[Write], token: str | None) -> None:
        self.transactions += 1
        self.items += len(writes)
        keys = [write.key for write in writes]
        met = [CancellationReason(ReasonCode.CONFLICT if key in self._locked_keys else ReasonCode.NONE) for key in keys]
        is_in_the_way = any(reason.code is ReasonCode.CONFLICT for reason in met)
        self.conflicts += is_in_the_way
        is_too_much = [self._is_allowed(key) for key in keys].count(False) > 0
        self.throttled += is_too_much
        if not is_in_the_way and not is_too_much:
            self._locked_keys.update(keys)
        await asyncio.sleep(self._chance.uniform(*LATENCY))
        if is_in_the_way:
            raise TransactionFailed(met)
        if is_too_much:
            raise StoreThrottled("too many transactions on an item")
        self._locked_keys.difference_update(keys)
        try:
            await self.memory.transact(writes, token=token)
        except TransactionFailed as failure:
            each = zip(failure.reasons, keys, strict=True)
            raise TransactionFailed(
                [CancellationReason(reason.code, self.memory.items.get(key)) for reason, key in each]
            ) from None

    def _is_allowed(self, key: Key) -> bool:
        now = self._clock.monotonic()
        since, left = self._allowed.get(key, (now, MAX_TRANSACTIONS))
        left = min(MAX_TRANSACTIONS, left + (now - since) * MAX_TRANSACTIONS)
        self._allowed[key] = now, left - (left >= 1)
        return left >= 1


class BusyStoreLink:
    """One sidecar's way to the store."""

    def __init__(self, store: BusyStore) -> None:
        self._store = store
        self.is_away = False
        self.lost_answers = 0  # of the next transactions, which are carried out

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        self._check_available()
        return await self._store.get(key, consistent=consistent)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        self._check_available()
        return await self._store.get_many(keys, consistent=consistent)

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        self._check_available()
        await self._store.transact(writes, token=token)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("the answer is lost", maybe_applied=True)

    def _check_available(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


@dataclass
class RateLedger:
    """What was let through of one limit, and held at any time: the truth that the bound is checked against."""

    capacity: float
    rate: float  # a second
    let_through: float = 0.0
    taken: float = 0.0  # from the bucket, less what was given back
    under_way: float = 0.0  # what questions that are not answered may have taken
    lowest: float = 0.0
    lowest_held: float = 0.0
    over_capacity: float = 0.0  # over capacity and refill
    over_bound: float = -1e18  # over the bound
    max_held: float = 0.0
    is_overdrawn: bool = False  # more was let through than was ever taken

    def record(self, amount: float, now: float) -> None:
        """Whatever was held just before this moment is a beginning to measure from."""
        at, held = self.let_through - self.rate * now, self.held
        self.max_held = max(self.max_held, held)
        self.lowest = min(self.lowest, at)
        self.lowest_held = min(self.lowest_held, at + held)
        self.let_through += amount
        at += amount
        self.over_capacity = max(self.over_capacity, at - self.lowest - self.capacity)
        self.over_bound = max(self.over_bound, at - self.lowest_held - self.capacity - self.rate)
        self.is_overdrawn |= self.let_through > self.taken + self.under_way + 1e-6

    @property
    def held(self) -> float:
        return self.taken - self.let_through + self.under_way


class RecordingBucketClient(BucketClient):
    """A limiter whose grants stand in the ledgers."""

    ledgers: Mapping[str, RateLedger]

    async def lease(self, buckets: Any, wants: Any, needs: Any, used: Any, share: Any = (1, 2)) -> Grant:
        self._count("under_way", wants, 1)
        try:
            grant = await super().lease(buckets, wants, needs, used, share)
        finally:
            self._count("under_way", wants, -1)
        self._count("taken", grant.taken, 1)
        return grant

    async def adjust(self, buckets: Any, taken: Any, used: Any) -> None:
        self._count("taken", taken, 1)
        await super().adjust(buckets, taken, used)

    def _count(self, what: str, amounts: Mapping[str, int], sign: int) -> None:
        for name, ledger in self.ledgers.items():
            setattr(ledger, what, getattr(ledger, what) + sign * amounts.get(name, 0) / MILLI)


@dataclass(frozen=True)
class FleetSetup:
    sidecars: int
    load: float  # of the limit
    share: float = 20.0  # requests a second of the limit, for each sidecar
    burst: float = 5.0  # seconds of the rate, that the capacity is
    seconds: float = 60.0  # after the warm-up
    warm_up: float = 30.0
    starts: float = 5.0  # seconds in which all sidecars start, one after the other
    demands: tuple[float, ...] = ()  # of the first sidecars, in fair shares; the others' is the load
    token_load: float = 0.5  # of the limit of tokens, at a load of 1
    has_late_usage: bool = False  # what a call uses is known some time after it began, and less than was estimated
    retries: bool = False  # a refused caller calls again, after the stated wait
    seed: int = 1


@dataclass
class FleetOutcome:
    setup: FleetSetup
    calls: int = 0
    admitted: int = 0
    waited: int = 0
    refused: int = 0
    busy: int = 0  # the store did not answer in time
    retried: int = 0
    admitted_on_retry: int = 0
    admitted_by_sidecar: list[int] = field(default_factory=list)
    transactions: int = 0
    items: int = 0
    reads: int = 0
    conflicts: int = 0
    horizon: float = 0.0
    ledger: RateLedger = field(default_factory=lambda: RateLedger(0, 0))

    @property
    def utilisation(self) -> float:
        return self.admitted / (self.setup.share * self.setup.sidecars * self.setup.seconds)

    @property
    def bound(self) -> float:
        """Requests over capacity and refill that may be let through, whenever one begins to count."""
        return self.ledger.rate + self.ledger.max_held

    @property
    def fairness(self) -> tuple[float, float]:
        """The least and the most of a sidecar that wants what most want, in parts of the mean."""
        rest = self.admitted_by_sidecar[len(self.setup.demands) :]
        mean = sum(rest) / len(rest)
        return min(rest) / mean, max(rest) / mean


class RateLimitedSidecar:
    def __init__(self, fleet: RateLimitedFleet, number: int) -> None:
        self.fleet, self.number = fleet, number
        self.link = BusyStoreLink(fleet.store)
        chance = fleet.chance
        limiter = RecordingBucketClient(cast(Store, self.link), fleet.now_ms, fleet.clock, chance.uniform)
        limiter.ledgers = fleet.ledgers
        self.client = limiter
        self.lease_manager = RateLeaseManager(limiter, fleet.clock, fleet.tasks, chance.random)
        setup = fleet.setup
        wants = setup.demands[number] if number < len(setup.demands) else setup.load
        self.rate = wants * setup.share
        self.admitted = 0
        self.is_dead = self.is_paused = False
        self.starts = 0  # of its arrivals: those of a former turn do not count

    def start(self) -> None:
        self.starts += 1
        if self.rate > 0:
            self._next(self.starts)

    def _next(self, turn: int) -> None:
        loop = self.fleet.loop
        loop.call_at(loop.time() + self.fleet.chance.expovariate(self.rate), self._arrive, turn)

    def _arrive(self, turn: int) -> None:
        if self.is_dead or turn != self.starts:
            return
        self._next(turn)
        if not self.is_paused:
            self.call(is_retry=False)

    def call(self, *, is_retry: bool) -> None:
        if self.is_dead:
            return
        fleet = self.fleet
        costs = {RPM: MILLI, TPM: round(fleet.chance.uniform(0.2, 1.8) * TOKENS * MILLI)}
        fleet.outcome.calls += not is_retry
        admission = self.lease_manager.try_admit("app", fleet.buckets, costs)
        if admission is None:
            fleet.outcome.waited += not is_retry
            fleet.tasks.spawn(self._wait_for_admission(costs, is_retry))
        else:
            self._on_admission(admission, costs, is_retry)

    async def _wait_for_admission(self, costs: Mapping[str, int], is_retry: bool) -> None:
        try:
            admission = await self.lease_manager._admit_via_store("app", self.fleet.buckets, costs, False)
        except Busy:
            self.fleet.outcome.busy += 1
            return
        if not self.is_dead:
            self._on_admission(admission, costs, is_retry)

    def _on_admission(self, admission: RateDecision, costs: Mapping[str, int], is_retry: bool) -> None:
        fleet = self.fleet
        fleet.outcome.retried += is_retry
        if not admission.is_admitted:
            fleet.outcome.refused += 1
            if fleet.setup.retries and not is_retry and admission.wait_ms is not None:
                fleet.loop.call_later(admission.wait_ms / 1000, self._retry)
            return
        fleet.outcome.admitted_on_retry += is_retry
        fleet.outcome.admitted += 1
        self.admitted += 1
        now = fleet.loop.time()
        if not fleet.setup.has_late_usage:
            fleet.record_call(costs, now)
            self.lease_manager.settle(admission, None)
            return
        actual_usage = {RPM: MILLI, TPM: round(fleet.chance.random() * costs[TPM])}
        fleet.record_call(actual_usage, now)  # what is not used is held, until that is known
        fleet.loop.call_later(fleet.chance.uniform(0.1, 2.0), self.lease_manager.settle, admission, actual_usage)

    def _retry(self) -> None:
        self.call(is_retry=True)

    async def sweep(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(SWEEP_SECONDS * self.fleet.chance.uniform(0.9, 1.1))
            if not self.is_paused and not self.is_dead:
                await self.lease_manager.sweep()

    @property
    def held(self) -> int:
        """Requests."""
        return self.lease_manager.held_by_limit()[RPM] // MILLI


class RateLimitedFleet:
    def __init__(self, setup: FleetSetup, loop: LeapingLoop, tasks: Tasks) -> None:
        self.setup, self.loop, self.tasks = setup, loop, tasks
        self.clock = LoopClock(loop)
        self.chance = random.Random(setup.seed)
        self.store = BusyStore(self.clock, self.chance)
        self.rate = setup.share * setup.sidecars
        tokens = self.rate * TOKENS / setup.token_load
        self.ledgers = {RPM: self._ledger(self.rate), TPM: self._ledger(tokens)}
        self.buckets = [self._bucket("app", self.rate, tokens), self._bucket("org", 3 * self.rate, 3 * tokens)]
        self.outcome = FleetOutcome(setup)
        self.actual_usage: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self.sidecars = [RateLimitedSidecar(self, number) for number in range(setup.sidecars)]

    def _ledger(self, rate: float) -> RateLedger:
        now = self.loop.time()
        return RateLedger(rate * self.setup.burst, rate, lowest=-rate * now, lowest_held=-rate * now)

    def _bucket(self, name: str, rate: float, tokens: float) -> RateBucket:
        each = ((RPM, rate), (TPM, tokens))
        limits = [
            RateLimit(limit, round(a * self.setup.burst * MILLI), round(a * 60 * MILLI), 60_000) for limit, a in each
        ]
        return RateBucket(Key("rate-buckets", f"SCOPE#{name}", "BUCKET#RATE"), tuple(limits), 1)

    def now_ms(self) -> int:
        return round(self.clock.now() * 1000)

    def record_call(self, costs: Mapping[str, int], now: float) -> None:
        self.actual_usage.update(costs)
        for name, ledger in self.ledgers.items():
            ledger.record(costs[name] / MILLI, now)

    def start(self) -> None:
        for number, sidecar in enumerate(self.sidecars):
            self.loop.call_later(self.setup.starts * number / len(self.sidecars), sidecar.start)
            self.tasks.spawn(sidecar.sweep())

    async def warm_up(self) -> None:
        self.start()
        await asyncio.sleep(self.setup.warm_up)
        self.reset_counts()

    def reset_counts(self) -> None:
        """What was counted until now."""
        self.outcome = FleetOutcome(self.setup)
        self._before = Counter(self._store_counts())
        for sidecar in self.sidecars:
            sidecar.admitted = 0

    def _store_counts(self) -> dict[str, int]:
        return {name: getattr(self.store, name) for name in ("transactions", "items", "reads", "conflicts")}

    def collect_outcome(self) -> FleetOutcome:
        outcome = self.outcome
        for name, number in self._store_counts().items():
            setattr(outcome, name, number - self._before[name])
        outcome.admitted_by_sidecar = [sidecar.admitted for sidecar in self.sidecars]
        horizons = [
            holder.lease.horizon for member in self.sidecars for holder in member.lease_manager._holders.values()
        ]
        outcome.horizon = sum(horizons) / max(1, len(horizons))
        outcome.ledger = self.ledgers[RPM]
        return outcome


async def _measure(setup: FleetSetup, loop: LeapingLoop) -> FleetOutcome:
    async with Tasks(LoopClock(loop)) as tasks:
        fleet = RateLimitedFleet(setup, loop, tasks)
        await fleet.warm_up()
        await asyncio.sleep(setup.seconds)
        return fleet.collect_outcome()


def run_leaping(work: Any) -> Any:
    """The result of `work(loop)`, all that is still under way after it left alone."""
    loop = LeapingLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(cast("Coroutine[Any, Any, Any]", work(loop)))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        asyncio.set_event_loop(None)
        loop.close()


def measure(setup: FleetSetup) -> FleetOutcome:
    outcome: FleetOutcome = run_leaping(lambda loop: _measure(setup, loop))
    return outcome
