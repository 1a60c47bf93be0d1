"""Limiters with clocks that disagree, on one store whose answers get lost, against the exact bucket.

`Ledger` stands in the store: it works out from each item before and after what was refilled and taken, with fractions
and knowing nothing of how the write came to be, and holds every writer to it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from price_keeper.clock import SystemClock
from price_keeper.errors import StoreError
from price_keeper.rates.bucket_client import BucketClient
from price_keeper.rates.bucket_writes import TAKE_ONLY_WINDOW_MS
from price_keeper.rates.token_bucket import RateBucket, RateLimit
from price_keeper.stores.contract import Key, Store, Update, Write

from tests.support.bucket_harness import (
    ANSWER_LOST,
    CONFLICT,
    NOT_SENT,
    OUTCOME_UNKNOWN,
    THROTTLED,
    ScriptedFaultStore,
    StoreTimeStub,
    bucket,
)
from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.engines import Engines
from tests.support.memory_store import MemoryStore

SKEWS = (-2_000, 0, 900, 2_000)
SPREAD_MS = max(SKEWS) - min(SKEWS)

VERSIONS = [
    (RateLimit("rpm", 20_000, 10_000, 700), RateLimit("tpm", 900_000, 333_333, 1_000)),
    (RateLimit("rpm", 8_000, 5_000, 900), RateLimit("tpm", 900_000, 333_333, 1_000)),
    (RateLimit("rpm", 30_000, 10_000, 700), RateLimit("rph", 50_000, 7, 3)),
]
ORG = (RateLimit("rpm", 30_000, 15_000, 1_100), RateLimit("tpm", 500_000, 100_000, 3_000))


class Step:
    """What one call of a limiter did to the store: for each item and limit, how much its writes took."""

    def __init__(self, is_adjusting: bool = False) -> None:
        self.is_adjusting = is_adjusting
        self.taken: dict[tuple[str, str], int] = {}
        self.writes = 0


STEP: ContextVar[Step] = ContextVar("STEP")


class Ledger(MemoryStore):
    """Checks each write when it is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self._adjusted: set[Key] = set()  # since they were last filled up

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        before = {write.key: dict(self.items.get(write.key) or {}) for write in writes}
        was_done = token in self._done
        await super().transact(writes, token=token)
        if was_done:
            return
        step = STEP.get()
        step.writes += 1
        for write in writes:
            self._check(step, write, before[write.key], dict(self.items[write.key]))
            (self._adjusted.discard if _fills_up(write) else self._adjusted.add)(write.key)

    def _check(self, step: Step, write: Write, before: dict[str, Any], after: dict[str, Any]) -> None:
        assert after["rf"] >= before.get("rf", 0), "refill went back"
        assert after["v"] >= before.get("v", 0), "settings went back"
        for name in [key.removesuffix("_tk") for key in after if key.endswith("_tk")]:
            taken, rest = _taken(name, write, before, after)
            # A bucket that was full when it was read gains nothing for the time before what was taken from it since.
            may_lose_refill = write.key in self._adjusted and _fills_up(write) and after[f"{name}_rem"] == 0
            assert rest == 0 or may_lose_refill, "a part of a token came or went"
            assert after[f"{name}_tk"] <= after[f"{name}_cp"], "above the brim"
            assert 0 <= after[f"{name}_rem"] < after[f"{name}_rp"]
            if step.is_adjusting:
                continue  # it may give back, and it may owe
            assert taken >= 0
            if not may_lose_refill:
                assert taken == 0 or after[f"{name}_tk"] >= 0, "an acquire owes"
                step.taken[write.key.pk, name] = taken


def _fills_up(write: Write) -> bool:
    return not isinstance(write, Update) or "rf" in write.set


def _taken(name: str, write: Write, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int]:
    """How much less the bucket holds than the exact one without any take would; whole and in parts."""
    tokens, rem, period, capacity = (after[f"{name}_{each}"] for each in ("tk", "rem", "rp", "cp"))
    if f"{name}_tk" not in before:
        return int(capacity - tokens), 0
    full = before[f"{name}_tk"] * period
    if before[f"{name}_rp"] == period:
        full += before[f"{name}_rem"]
    full += (after["rf"] - before["rf"]) * after[f"{name}_ra"]
    if isinstance(write, Update) and "rf" in write.set:
        full = min(full, capacity * period)
    taken, rest = divmod(full - (tokens * period + rem), period)
    return int(taken), int(rest)


@dataclass
class Event:
    at: int
    taken: dict[str, int]
    back: dict[str, int] = field(default_factory=dict)


AMOUNTS = st.fixed_dictionaries(
    {"rpm": st.integers(0, 12_000)},
    optional={"tpm": st.integers(0, 300_000), "rph": st.integers(0, 20_000)},
)
FAULTS = st.lists(
    st.sampled_from([None, None, ANSWER_LOST, OUTCOME_UNKNOWN, CONFLICT, THROTTLED, NOT_SENT]), max_size=6
)
WHO = st.integers(0, len(SKEWS) - 1)
CALLS = st.one_of(
    st.tuples(st.just("acquire"), WHO, AMOUNTS, FAULTS),
    st.tuples(st.just("acquire"), WHO, AMOUNTS, st.just([])),
    st.tuples(st.just("lease"), WHO, AMOUNTS, st.just([])),
    st.tuples(st.just("lease"), WHO, AMOUNTS, FAULTS),
    st.tuples(st.just("back"), WHO, st.just({}), FAULTS),
    st.tuples(st.just("more"), WHO, AMOUNTS, FAULTS),
    st.tuples(st.just("newer settings"), WHO, st.just({}), st.just([])),
    st.tuples(st.just("settle"), WHO, st.just({}), FAULTS),
)
PAUSES = st.one_of(st.integers(0, 50), st.integers(0, 1_500), st.integers(0, 60_000))
SCRIPTS = st.lists(st.tuples(PAUSES, st.lists(CALLS, min_size=1, max_size=4)), min_size=1, max_size=12)


class World:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = StoreTimeStub()
        self.stores = [ScriptedFaultStore(store) for _ in SKEWS]
        clock = ManualClock()
        self.limiters = [
            BucketClient(store, self.now.with_skew(skew), clock, lambda low, high: 0.0)
            for store, skew in zip(self.stores, SKEWS, strict=True)
        ]
        self.org = bucket(*ORG)
        self.app = bucket(*VERSIONS[0], org=self.org.scope.removeprefix("ORG#"), app="a")
        self.versions = [1] * len(SKEWS)
        self.held: list[Counter[str]] = [Counter() for _ in SKEWS]
        self.told: Counter[str] = Counter()
        self.events: list[Event] = []

    def buckets(self, who: int) -> list[RateBucket]:
        version = self.versions[who]
        return [RateBucket(self.app.key, VERSIONS[version - 1], version), self.org]

    async def call(self, what: str, who: int, amounts: dict[str, int], faults: list[Any]) -> None:
        limiter, buckets, step = self.limiters[who], self.buckets(who), Step(what in ("back", "more", "settle"))
        STEP.set(step)
        self.stores[who].faults = list(faults)
        match what:
            case "newer settings":
                self.versions[who] = min(self.versions[who] + 1, len(VERSIONS))
            case "settle":
                await _tried(limiter.flush_pending())
            case "more":
                self.told.update(amounts)
                await limiter.adjust(buckets, amounts, amounts)
            case "back":
                back, self.held[who] = dict(self.held[who]), Counter()
                self.events.append(Event(self.now.ms, {}, back))
                self.told.subtract({"rpm": 5})
                await limiter.adjust(buckets, {name: -amount for name, amount in back.items()}, {"rpm": -5})
            case "acquire":
                await self._granted(step, who, limiter.acquire(buckets, amounts), amounts, amounts)
            case "lease":
                needs = {name: amount // 4 for name, amount in amounts.items()}
                used = {"rpm": 11}
                await self._granted(step, who, limiter.lease(buckets, amounts, needs, used), needs, used)

    async def _granted(self, step: Step, who: int, asked: Any, needs: dict[str, int], used: dict[str, int]) -> None:
        try:
            grant = await asked
        except StoreError:
            return
        assert step.writes == (0 if grant.is_refused or not isinstance(self.store, Ledger) else 1)
        if grant.is_refused:
            assert grant.wait_ms is None or grant.wait_ms > 0
            return
        assert all(grant.taken[name] >= need for name, need in needs.items())
        for (_, name), taken in step.taken.items():
            if grant.writes <= 3:
                assert taken == grant.taken.get(name, 0), "what was taken is what is missing, to the thousandth"
            assert taken >= grant.taken.get(name, 0)
        self.events.append(Event(self.now.ms, dict(grant.taken)))
        self.held[who].update(grant.taken)
        self.told.update(used)

    async def settled(self) -> None:
        STEP.set(Step(is_adjusting=True))
        for store, limiter in zip(self.stores, self.limiters, strict=True):
            store.faults = []
            await limiter.flush_pending(is_last=True)
            assert (limiter.pending, limiter.dropped) == (0, 0)

    async def check(self) -> None:
        org = await self.store.get(self.org.key, consistent=True) or {}
        for limit in ORG:
            assert org.get(f"{limit.name}_tc", 0) == self.told[limit.name], "told once, all of it"
            _bounded(self.events, limit)


async def _tried(work: Any) -> None:
    with suppress(StoreError):
        await work


async def _play(store: Store, script: Any) -> None:
    world = World(store)
    for pause, calls in script:
        world.now.ms += pause
        calls = list({call[1]: call for call in calls}.values())  # one call of each limiter at once
        await asyncio.gather(*(asyncio.create_task(world.call(*call)) for call in calls))
    await world.settled()
    await world.check()


# An adjustment that brings a new limit into the item fills the bucket up, and gives back in the same write.
GIVES_BACK_WHILE_FILLING_UP = [
    (0, [("newer settings", 0, {}, [])]),
    (0, [("acquire", 0, {"rpm": 1, "rph": 1}, [])]),
    (0, [("newer settings", 0, {}, []), ("acquire", 1, {"rpm": 0}, [])]),
    (0, [("acquire", 1, {"rpm": 0}, []), ("back", 0, {}, [])]),
]


@settings(max_examples=tries(150), suppress_health_check=list(HealthCheck))
@given(SCRIPTS)
@example(GIVES_BACK_WHILE_FILLING_UP)
def test_bucket_is_exact_despite_lost_answers_and_clock_skew(script: Any) -> None:
    asyncio.run(_play(Ledger(), script))


@pytest.mark.parametrize(("engine", "examples"), [("sqlite", 30), ("ministack", 15)])
def test_engine_neither_loses_nor_repeats_adjustments(engines: Engines, engine: str, examples: int) -> None:
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        stack = AsyncExitStack()
        store = runner.run(stack.enter_async_context(engines.open(engine, Path(folder))))

        @settings(max_examples=tries(examples), suppress_health_check=list(HealthCheck))
        @given(SCRIPTS)
        def plays(script: Any) -> None:
            runner.run(_play(store, script))

        try:
            plays()
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("engine", ["sqlite", "ministack"])
async def test_bucket_is_used_to_last_token_by_concurrent_processes(
    engine: str, engines: Engines, tmp_path: Path
) -> None:
    """Many at once, by several processes' ways to the store, and one limit that is never refilled."""
    org, now, clock = (
        bucket(RateLimit("rpm", 40_000, 0, 1), RateLimit("tpm", 10**9, 5, 3)),
        StoreTimeStub(),
        SystemClock(),
    )
    async with engines.open(engine, tmp_path) as one, engines.open(engine, tmp_path) as other:
        limiters = [BucketClient(store, now, clock) for store in (one, other) * 3]

        async def until_refused_for_good(limiter: BucketClient, app: RateBucket) -> int:
            granted = 0
            while (
                not (grant := await limiter.acquire([app, org], {"rpm": 1_000, "tpm": 7})).is_refused or grant.wait_ms
            ):
                granted += not grant.is_refused
                now.ms += 50
            return granted

        apps = [bucket(RateLimit("rpm", 10**9, 1, 1)) for _ in limiters]
        pairs = list(zip(limiters, apps, strict=True)) * 3
        granted = await asyncio.gather(*(until_refused_for_good(*pair) for pair in pairs))
        items = await one.get_many([org.key, *(app.key for app in apps)], consistent=True)
    assert sum(granted) == 40
    assert [item["rpm_tc"] if item else 0 for item in items[1:]] == [
        1_000 * sum(granted[place :: len(apps)]) for place in range(len(apps))
    ]
    assert items[0] is not None
    assert (items[0]["rpm_tk"], items[0]["rpm_tc"], items[0]["tpm_tc"]) == (0, 40_000, 280)


def _bounded(events: list[Event], limit: RateLimit) -> None:
    """Over any time: what fits, what comes in, a second's refill; clock skew adds its size."""
    for first in range(len(events)):
        taken = back = 0
        for event in events[first:]:
            taken += event.taken.get(limit.name, 0)
            back += event.back.get(limit.name, 0)
            time = event.at - events[first].at + TAKE_ONLY_WINDOW_MS + SPREAD_MS
            assert taken <= limit.capacity + time * limit.amount // limit.period_ms + 1 + back
